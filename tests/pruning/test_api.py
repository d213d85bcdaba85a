"""Operations on model files and configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("yaml")

from sparseflow.pruning.api import open_layered_model
from tests.pruning.small import QUICK


@pytest.mark.parametrize("lists", ["own", "absent"])
def test_untrained_model_has_the_classes_of_its_lists(lists: str, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    for name, text in (
        ("classInd", "1 A\n2 B\n"),
        ("trainlist01", "A/a.mp4 1\n"),
        ("testlist01", "B/b.mp4\n"),
    ):
        (tmp_path / "own" / f"{name}.txt").write_text(text)
    config = QUICK | {"data": {"kind": "ucf101", "lists": str(tmp_path / lists)}}
    expected = {"own": 2, "absent": 101}[lists]
    assert open_layered_model(None, config).model.config.num_classes == expected

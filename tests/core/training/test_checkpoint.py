"""Checkpoints."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from sparseflow.core.training import checkpoint
from sparseflow.errors import FileFormatError, InputError

OF = {"steps": 3, "net": {"width": 8}}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path, OF) is None
    state = {"fingerprint": OF, "step": 2, "net": {"a": torch.arange(3.0)}, "limits": {"x": 1}}
    checkpoint.save(tmp_path, state)
    found = checkpoint.load(tmp_path, OF)
    assert found is not None and found["step"] == 2 and found["limits"] == {"x": 1}
    torch.testing.assert_close(found["net"], state["net"])
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.CHECKPOINT_FILE]


def test_another_training_is_told_by_what_differs(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"fingerprint": OF, "step": 2})
    with pytest.raises(InputError, match=r"net\.width, seed"):
        checkpoint.load(tmp_path, OF | {"net": {"width": 16}, "seed": 1})


class Evil:
    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04", pickle.dumps({"fingerprint": OF}), pickle.dumps(Evil())]
)
def test_what_is_no_checkpoint_is_refused_and_nothing_in_it_runs(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / checkpoint.CHECKPOINT_FILE).write_bytes(content)
    with pytest.raises(FileFormatError, match="remove it"):
        checkpoint.load(tmp_path, OF)
    assert capsys.readouterr().out == ""


def test_a_torn_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"fingerprint": OF, "net": torch.zeros(100)})
    path = tmp_path / checkpoint.CHECKPOINT_FILE
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(FileFormatError, match="remove it"):
        checkpoint.load(tmp_path, OF)
    torch.save([1, 2], path)
    with pytest.raises(FileFormatError, match="remove it"):
        checkpoint.load(tmp_path, OF)

"""How many cells of a pattern fit."""

from __future__ import annotations

import logging

import pytest

from sparseflow.tuning.model import dataset as module
from sparseflow.tuning.model.dataset import CellLimits
from tests.tuning.synthetic_labels import made_up


def test_shrink_halves_largest_then_ignores(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_MIN_CELLS", 8)
    data = made_up()
    limits = CellLimits(data, 64)
    sizes = {digest: len(data.get_cells(digest, 64).coords) for digest in ("0", "1")}
    largest = max(sizes, key=sizes.__getitem__)
    with caplog.at_level(logging.WARNING):
        assert limits.shrink(["0", "1"])
    assert limits.limits == {largest: sizes[largest] // 2}
    assert f"the pattern of m{largest} does not fit into memory" in caplog.text
    result = limits.get_cells(largest)
    assert result is not None and len(result.coords) <= sizes[largest] // 2
    with caplog.at_level(logging.WARNING):
        while limits.shrink(["0", "1"]):
            pass
    assert limits.limits == {"0": 0, "1": 0} and limits.get_cells("0") is None
    assert "it is ignored" in caplog.text
    assert not limits.shrink([])


def test_restore_sets_limits() -> None:
    limits = CellLimits(made_up(), 64)
    limits.restore({"0": 16, "1": 0})
    cells = limits.get_cells("0")
    assert cells is not None and len(cells.coords) <= 16
    assert limits.get_cells("1") is None

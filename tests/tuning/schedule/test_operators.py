"""The operators and their axes."""

from __future__ import annotations

import re

import pytest

from sparseflow.errors import InputError
from sparseflow.tuning.schedule.operators import OPERATORS, SDDMM, SPMM, SPMV, get_operator


def test_get_operator_by_name() -> None:
    assert [get_operator(name) for name in ("spmm", "spmv", "sddmm")] == [SPMM, SPMV, SDDMM]
    assert all(item.name == name for name, item in OPERATORS.items())


def test_get_operator_unknown_raises() -> None:
    with pytest.raises(InputError):
        get_operator("conv")


@pytest.mark.parametrize("item", OPERATORS.values(), ids=lambda operator: operator.name)
def test_axes_are_consistent(item) -> None:
    assert len(set(item.axes)) == len(item.axes) == len(item.sparse_axes) + len(item.dense_axes)
    assert set(item.output_axes) <= set(item.axes)
    assert len(item.tensors) == 1 + item.sparse_output
    if item.sparse_output:
        assert item.output_axes == item.sparse_axes


def test_extents_have_axis_order() -> None:
    assert list(SPMM.extents({"j": 3, "k": 2, "i": 1}).items()) == [("i", 1), ("k", 2), ("j", 3)]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"i": 1, "k": 2}, ""),
        ({"i": 1, "k": 2, "j": 3, "l": 4}, ""),
        ({}, ""),
        ({"i": 1, "k": 0, "j": 3}, "0"),
    ],
)
def test_extents_invalid_shape_raises(shape: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message) or None):
        SPMM.extents(shape)

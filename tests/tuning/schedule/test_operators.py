"""The operators and their axes."""

from __future__ import annotations

import re

import pytest

from sparseflow.errors import InputError
from sparseflow.tuning.schedule.operators import OPERATORS, SDDMM, SPMM, SPMV, get_operator


def test_every_operator_is_found_by_its_name() -> None:
    assert [get_operator(name) for name in ("spmm", "spmv", "sddmm")] == [SPMM, SPMV, SDDMM]
    assert all(item.name == name for name, item in OPERATORS.items())


def test_an_unknown_operator_is_refused_with_those_there_are() -> None:
    with pytest.raises(InputError):
        get_operator("conv")


@pytest.mark.parametrize("item", OPERATORS.values(), ids=lambda item_value: item_value.name)
def test_axes_fit_together(item) -> None:
    assert len(set(item.axes)) == len(item.axes) == len(item.sparse_axes) + len(item.dense_axes)
    assert set(item.output_axes) <= set(item.axes)
    assert len(item.tensors) == 1 + item.sparse_output
    if item.sparse_output:
        assert item.output_axes == item.sparse_axes


def test_extents_are_in_the_order_of_the_axes() -> None:
    assert list(SPMM.extents({"j": 3, "k": 2, "i": 1}).items()) == [("i", 1), ("k", 2), ("j", 3)]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"i": 1, "k": 2}, "give the extent of each"),
        ({"i": 1, "k": 2, "j": 3, "l": 4}, "give the extent of each"),
        ({}, "extents of nothing"),
        ({"i": 1, "k": 0, "j": 3}, "axis k (=0) must be at least 1"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(shape: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        SPMM.extents(shape)

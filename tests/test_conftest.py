"""The poison must reach every dtype that kernels write, or tests that rely on it prove nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_floats_are_nan(dtype: torch.dtype) -> None:
    for tensor in (
        torch.empty(3, 4, dtype=dtype),
        torch.empty_like(torch.ones(5, dtype=dtype)),
        torch.ones(1, dtype=dtype).new_empty(7),
        torch.empty_strided((2, 3), (3, 1), dtype=dtype),
    ):
        assert tensor.isnan().all()


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
)
def test_integers_are_garbage(dtype: torch.dtype) -> None:
    assert (torch.empty(9, dtype=dtype) != 0).all()


@pytest.mark.usefixtures("poisoned_empty")
def test_numpy_is_poisoned_too() -> None:
    assert np.isnan(np.empty((2, 3), np.float32)).all()
    assert (np.empty(4, np.int64) != 0).all()
    assert np.empty(4, np.bool_).all()


def test_nothing_is_poisoned_without_the_fixture() -> None:
    assert "lambda" not in repr(torch.empty)

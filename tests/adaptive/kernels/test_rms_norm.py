"""RMS norm kernel against the reference, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernel needs triton")

from sparseflow.adaptive.kernels.rms_norm.reference import rms_norm as reference
from sparseflow.adaptive.kernels.rms_norm.triton import MAX_WIDTH, fits, rms_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest relative error: another summation order may round the quotient and its product differently."""

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def check(x: Tensor, *, seed: int = 0, eps: float = 1e-5) -> None:
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(x.shape[-1], generator=g).to(x)
    output, expected = rms_norm(x, weight, eps), reference(x, weight, eps)
    assert output.dtype == expected.dtype and output.shape == x.shape
    torch.testing.assert_close(output, expected, rtol=TOLERANCE[x.dtype], atol=0.0)


def make_random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (1, 1, 16), (2, 3, 33), (5, 100)])
def test_rms_norm_matches_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(make_random(*shape, dtype=dtype))


def test_rms_norm_with_any_strides_and_scales_matches() -> None:
    check(make_random(4, 6, 32)[:, ::2])
    check(make_random(32, 4).T)
    check(1e4 * make_random(3, 16))
    check(torch.zeros(3, 16, device=DEVICE))
    check(make_random(0, 16))


def test_fits_rejects_unsupported_inputs() -> None:
    x = make_random(2, 8)
    assert fits(x, x[0]) and fits(x.half(), x[0].half())
    assert not fits(x.double(), x[0].double()) and not fits(x, x[0].half())
    assert not fits(x.expand(2, 2, 8)[:1, :1, :1].expand(1, 1, MAX_WIDTH + 1), x[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_rms_norm_at_real_sizes_matches(dtype: torch.dtype) -> None:
    check(make_random(8, 1, 2048, dtype=dtype))
    check(make_random(1, 700, 4096, dtype=dtype))

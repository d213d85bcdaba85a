"""Rotary kernel against the reference, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernel needs triton")

from sparseflow.adaptive.kernels.rotary.reference import rotate as reference
from sparseflow.adaptive.kernels.rotary.triton import DTYPES, fits, rotate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-15, torch.float32: 5e-7, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest error relative to the summands: both products and their sum are rounded."""

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def make_inputs(
    batch: int, heads: int, key_heads: int, tokens: int, width: int, dtype: torch.dtype, *, positions: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(tokens)
    query, key = (
        torch.randn(batch, tokens, count, width, generator=g).transpose(1, 2) for count in (heads, key_heads)
    )
    angles = torch.randn(positions, tokens, width // 2, generator=g).repeat(1, 1, 2)
    tensors = [tensor.to(DEVICE, dtype) for tensor in (query, key, angles.cos(), angles.sin())]
    return tensors[0], tensors[1], tensors[2], tensors[3]


def check(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> None:
    assert fits(query, key, cosine, sine)
    wide = [tensor.double() for tensor in (query, key, cosine, sine)]
    for output, expected, x in zip(rotate(query, key, cosine, sine), reference(*wide), wide[:2], strict=True):
        assert output.dtype == query.dtype and output.shape == expected.shape
        # Magnitude of the summands; their sum may be much smaller than their rounding errors.
        other = x.abs().roll(x.shape[-1] // 2, -1)
        size = x.abs() * wide[2].abs()[:, None] + other * wide[3].abs()[:, None]
        assert bool(((output.double() - expected).abs() <= TOLERANCE[query.dtype] * size).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 2), (2, 4, 2, 3, 8), (1, 3, 5, 4, 20)])
def test_rotate_matches_reference(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    check(*make_inputs(*shape, dtype))


def test_rotate_with_row_positions_and_strides_matches() -> None:
    check(*make_inputs(3, 4, 2, 5, 8, torch.float32, positions=3))
    query, key, cosine, sine = make_inputs(1, 4, 2, 6, 8, torch.float32)
    check(query[:, :, ::2], key[:, :, ::2].contiguous(), cosine[:, ::2], sine[:, ::2])
    check(query[:, :, :0], key[:, :, :0], cosine[:, :0], sine[:, :0])


def test_fits_rejects_unsupported_inputs() -> None:
    query, key, cosine, sine = make_inputs(2, 4, 2, 3, 8, torch.float32)
    assert fits(query, key, cosine, sine)
    assert not fits(query, key, cosine[..., :4], sine[..., :4])
    assert not fits(query, key.half(), cosine, sine)
    assert not fits(query, key, cosine[:, :1], sine[:, :1])
    assert not fits(query[0], key[0], cosine, sine)
    assert not fits(query.expand(2, 4, 3, 8)[..., ::2], key[..., ::2], cosine[..., ::2], sine[..., ::2])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate_at_real_sizes_matches(dtype: torch.dtype) -> None:
    check(*make_inputs(8, 16, 16, 1, 128, dtype, positions=8))
    check(*make_inputs(1, 32, 8, 700, 128, dtype))

"""Expert kernels against the float64 reference, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels of experts need triton")

from sparseflow.adaptive.kernels.experts import triton as kernels
from sparseflow.adaptive.kernels.experts.reference import experts as reference
from sparseflow.adaptive.kernels.experts.triton import MAX_TOKENS, experts, fits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest error relative to the largest output, from rounding of the result and of float32 sums."""

pytestmark = [
    pytest.mark.usefixtures("poisoned_empty"),
    # Triton's interpreter turns its one-element arrays into loop bounds this way; numpy below 2.4 allows it.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


def make_inputs(
    n: int, k: int, e: int, d: int, f: int, dtype: torch.dtype, *, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x, gate_up, down = (torch.randn(*shape, generator=g) for shape in ((n, d), (e, 2 * f, d), (e, d, f)))
    expert_ids = (
        torch.stack([torch.randperm(e, generator=g)[:k] for _ in range(n)]) if n else torch.zeros(0, k)
    )
    weights = torch.rand(n, k, generator=g)
    tensors = [tensor.to(DEVICE, dtype) for tensor in (x, weights, gate_up / d**0.5, down / f**0.5)]
    return tensors[0], expert_ids.long().to(DEVICE), tensors[1], tensors[2], tensors[3]


def check(x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> None:
    output = experts(x, expert_ids, weights, gate_up, down)
    expected = reference(x.double(), expert_ids, weights.double(), gate_up.double(), down.double())
    assert output.dtype == x.dtype and output.shape == x.shape
    limit = TOLERANCE[x.dtype] * max(float(expected.abs().max()), 1e-30)
    torch.testing.assert_close(output.double(), expected, rtol=0.0, atol=limit)


SHAPES = [(1, 1, 1, 1, 1), (1, 3, 5, 16, 8), (3, 2, 4, 33, 13), (2, 4, 4, 40, 70), (5, 2, 3, 17, 16)]
"""Tokens, top-k, experts, d, f; small, because the interpreter is slow."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_experts_match_float64_reference(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    check(*make_inputs(*shape, dtype))


def test_experts_with_rows_wider_than_tile_match(monkeypatch: pytest.MonkeyPatch) -> None:
    # More columns than a tile, in both kernels.
    monkeypatch.setattr(kernels, "TILE", 64)
    check(*make_inputs(1, 2, 3, 37, 50, torch.float32))


def test_experts_with_weights_of_other_dtype_match() -> None:
    x, expert_ids, weights, gate_up, down = make_inputs(3, 2, 4, 16, 16, torch.float16)
    check(x, expert_ids, weights.float(), gate_up, down)


def test_experts_with_any_strides_match() -> None:
    x, expert_ids, weights, gate_up, down = make_inputs(3, 2, 4, 24, 16, torch.float32)
    wide = torch.zeros(4, 40, 30, device=DEVICE)
    wide[:, 4:36, :24] = gate_up
    view = wide[:, 4:36, :24]
    assert not view.is_contiguous() and fits(x, view, down)
    check(x, expert_ids, weights, view, down)
    check(torch.stack([x, x], 2)[..., 0], expert_ids.T.contiguous().T, weights, gate_up, down)


def test_token_is_independent_of_others() -> None:
    x, expert_ids, weights, gate_up, down = make_inputs(3, 2, 4, 17, 9, torch.float32)
    batched = experts(x, expert_ids, weights, gate_up, down)
    for index in range(3):
        row_slice = slice(index, index + 1)
        assert torch.equal(
            experts(x[row_slice], expert_ids[row_slice], weights[row_slice], gate_up, down),
            batched[row_slice],
        )


def test_experts_without_tokens_return_empty() -> None:
    x, expert_ids, weights, gate_up, down = make_inputs(0, 2, 4, 16, 8, torch.float32)
    assert experts(x, expert_ids, weights, gate_up, down).shape == (0, 16)
    assert reference(x, expert_ids, weights, gate_up, down).shape == (0, 16)


def test_fits_rejects_unsupported_inputs() -> None:
    x, _, _, gate_up, down = make_inputs(2, 1, 2, 16, 8, torch.float32)
    assert fits(x, gate_up, down)
    assert not fits(torch.zeros(MAX_TOKENS + 1, 16), gate_up, down)
    assert not fits(x.half(), gate_up, down)
    assert not fits(x, gate_up.transpose(1, 2), down)
    assert not fits(x, gate_up[:, :-2], down)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("n", [1, 8, MAX_TOKENS])
def test_experts_at_real_sizes_match(dtype: torch.dtype, n: int) -> None:
    check(*make_inputs(n, 8, 64, 2048, 1024, dtype))

"""Routing kernel against the reference, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernel needs triton")

from sparseflow.adaptive.kernels.routing.reference import top_experts as reference
from sparseflow.adaptive.kernels.routing.triton import MAX_EXPERTS, fits, top_experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def make_logits(n: int, experts: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, experts, generator=torch.Generator().manual_seed(n + experts)).to(DEVICE, dtype)


def check(logits: Tensor, k: int) -> None:
    for normalized in (False, True):
        weights, expert_ids = top_experts(logits, k, normalized=normalized)
        expected, target = reference(logits, k, normalized=normalized)
        assert expert_ids.dtype == torch.int64 and torch.equal(expert_ids, target)
        assert weights.dtype == logits.dtype
        torch.testing.assert_close(weights, expected, rtol=TOLERANCE[logits.dtype], atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("n", "experts", "k"), [(1, 1, 1), (1, 8, 3), (3, 5, 5), (20, 16, 8), (2, 130, 6)])
def test_top_experts_match_reference(n: int, experts: int, k: int, dtype: torch.dtype) -> None:
    check(make_logits(n, experts, dtype), k)


def test_top_experts_with_ties_strides_and_extremes_match() -> None:
    check(torch.zeros(3, 7, device=DEVICE), 4)
    check(make_logits(6, 8)[::2], 2)
    check(1e4 * make_logits(4, 8), 2)
    check(make_logits(0, 8), 2)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")  # NumPy's, in the interpreter
@pytest.mark.parametrize("experts", [5, 8])
def test_top_experts_with_nan_return_valid_indices(experts: int) -> None:
    logits = make_logits(4, experts)
    logits[0], logits[1, 2], logits[2, 1] = float("nan"), float("nan"), float("inf")
    weights, expert_ids = top_experts(logits, 3, normalized=False)
    assert bool(((expert_ids >= 0) & (expert_ids < experts)).all())
    assert bool(weights[:2].isnan().any(1).all()) and torch.equal(
        expert_ids[3], reference(logits, 3, normalized=False)[1][3]
    )


def test_fits_rejects_unsupported_inputs() -> None:
    logits = make_logits(2, 8)
    assert fits(logits, 8) and fits(logits.half(), 1)
    assert not fits(logits, 9) and not fits(logits, 0) and not fits(logits.double(), 2)
    assert not fits(make_logits(2, MAX_EXPERTS + 1), 2) and not fits(logits.T, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_top_experts_at_real_sizes_match(dtype: torch.dtype) -> None:
    for n, experts, k in ((1, 64, 8), (2000, 64, 8), (33, 128, 8), (5, 8, 2)):
        logits = make_logits(n, experts, torch.float32).to(dtype)
        weights, expert_ids = top_experts(logits, k, normalized=False)
        expected, _ = reference(logits, k, normalized=False)
        # In 16 bits many experts tie, so only the weights are compared.
        torch.testing.assert_close(weights, expected, rtol=TOLERANCE[dtype], atol=1e-7)
        assert all(len(set(row)) == k for row in expert_ids.tolist())

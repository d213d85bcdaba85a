"""Dense experts against the float64 reference, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernel needs triton")

from sparseflow.adaptive.kernels.experts import dense
from sparseflow.adaptive.kernels.experts.dense import experts, is_profitable
from sparseflow.adaptive.kernels.experts.reference import experts as reference
from tests.adaptive.kernels.test_experts import SHAPES, make_inputs

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Largest error relative to the largest output; intermediate results are rounded as well."""

pytestmark = [
    pytest.mark.usefixtures("poisoned_empty"),
    # Triton's interpreter turns its one-element arrays into loop bounds this way; numpy below 2.4 allows it.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


def check(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    x, expert_ids, weights, gate_up, down = make_inputs(*shape, dtype)
    output = experts(x, expert_ids, weights, gate_up, down)
    expected = reference(x.double(), expert_ids, weights.double(), gate_up.double(), down.double())
    assert output.dtype == dtype and output.shape == x.shape
    limit = TOLERANCE[dtype] * max(float(expected.abs().max()), 1e-30)
    torch.testing.assert_close(output.double(), expected, rtol=0.0, atol=limit)


DISTINCT = [(n, min(k, e), e, d, f) for n, k, e, d, f in SHAPES]


@pytest.mark.parametrize("shape", DISTINCT)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_dense_experts_match_float64_reference(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    check(shape, dtype)


def test_dense_experts_wider_than_tile_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "TILE", 16)
    check((3, 2, 3, 8, 50), torch.float32)


def test_unselected_expert_may_overflow() -> None:
    x, expert_ids, weights, gate_up, down = make_inputs(2, 1, 3, 8, 4, torch.float32)
    expert_ids = torch.zeros_like(expert_ids)
    gate_up[2] = float("inf")
    output = experts(x, expert_ids, weights, gate_up, down)
    torch.testing.assert_close(output, reference(x, expert_ids, weights, gate_up, down), rtol=1e-5, atol=1e-6)


def test_is_profitable_for_small_experts_only() -> None:
    small, large = torch.empty(16, 96, 160), torch.empty(64, 2048, 2048, device="meta")
    assert is_profitable(3600, 8, small) and not is_profitable(2_000_000, 8, small)
    assert not is_profitable(432, 8, large) and is_profitable(10**4, 64, torch.empty(64, 8, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_dense_experts_at_real_sizes_match(dtype: torch.dtype) -> None:
    check((300, 8, 16, 160, 48), dtype)
    check((20, 4, 60, 512, 256), dtype)

"""Fused attention against a product and neurons in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the packed kernels need triton")

from sparseflow.errors import InputError
from sparseflow.spiking.backends.attention import AttentionShape
from sparseflow.spiking.backends.packed.attention import run_attention
from sparseflow.spiking.backends.reference import run_neuron_reference
from sparseflow.spiking.backends.spec import NeuronSpec
from tests.spiking.backends.neurons import LIF, NEURONS
from tests.spiking.backends.packed.cases import DEVICE, seeded

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def _factors(
    rows: int, inner: int, other: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = seeded(rows + columns)

    def make(*size: int) -> torch.Tensor:
        return (torch.rand(3, 2, 2, *size, generator=generator) < 0.2).float().to(DEVICE)

    return make(rows, inner), make(inner, other), make(other, columns)


@pytest.mark.parametrize("spec", NEURONS.values(), ids=NEURONS)
@pytest.mark.parametrize(
    ("sizes", "rows_are_tokens"),
    [
        ((70, 8, 65, 8), True),
        ((8, 65, 8, 70), False),
        ((16, 16, 16, 16), True),
        ((16, 16, 16, 16), False),
        ((5, 33, 64, 7), True),
    ],
)
def test_matches_products_and_neurons(
    spec: NeuronSpec, sizes: tuple[int, int, int, int], rows_are_tokens: bool
) -> None:
    factors = _factors(*sizes)
    shape = AttentionShape.from_factors(*factors, rows_are_tokens=rows_are_tokens)
    first, second, third = (x.double() for x in factors)
    v, membrane = None, None
    for _ in range(2):  # from rest, then from the last membrane
        spikes, v = run_attention(*factors, spec, rows_are_tokens=rows_are_tokens, scale=0.25, v=v)
        expected, membrane = run_neuron_reference(spec, 0.25 * (first @ second @ third), membrane)
        assert torch.equal(shape.to_product(spikes).double(), expected) and expected.any()
        torch.testing.assert_close(shape.to_product(v).double(), membrane, rtol=1e-6, atol=1e-6)


def test_takes_any_strides_and_dtype() -> None:
    spec, factors = LIF, _factors(20, 8, 20, 8)
    expected = run_attention(*factors, spec, rows_are_tokens=True)
    q, k, x = (x.half().transpose(2, 3).contiguous().transpose(2, 3) for x in factors)
    spikes, v = run_attention(q, k, x, spec, rows_are_tokens=True, dtype=torch.float16)
    assert spikes.dtype == torch.float16 and torch.equal(spikes.float(), expected[0])
    assert torch.equal(v, expected[1])


def test_large_heads_and_inexact_sums_are_not_supported() -> None:
    with pytest.raises(InputError, match="a head has more than 128 channels"):
        run_attention(*_factors(150, 130, 150, 130), LIF, rows_are_tokens=True)
    shape = AttentionShape.from_factors(*_factors(70, 8, 65, 8), rows_are_tokens=True)
    assert shape.get_unsupported_reason((1, 1, 31)) is None
    assert shape.get_unsupported_reason((1, 1, 32)) == "sums over 65 tokens are not exact in float16"

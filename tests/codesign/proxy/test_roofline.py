"""The analytic model of latency, and its coefficients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparseflow.codesign.proxy import Grid, Roofline
from sparseflow.codesign.proxy.roofline import fit_roofline
from sparseflow.codesign.proxy.work import Work
from sparseflow.errors import InputError
from tests.codesign.proxy.made_up import GPU, node

ROW = torch.tensor([1])


def made(count: int = 120) -> tuple[Work, torch.Tensor]:
    """Latencies of a roofline that is known."""
    layers = [each.node() for each in Grid(precisions=("float32", "bfloat16")).draw(count, 3)]
    work = Work.pairs(layers, [GPU] * count)
    return work, torch.maximum(work.compute_ms / 0.6, work.memory_ms / 0.75) + 0.02


def test_it_is_the_longer_of_operations_and_bytes() -> None:
    layer = node("mlp")
    work = Work.pairs([layer], [GPU])
    wanted = max(float(layer.flops) / 4e14, float(layer.bytes) / 2e12) * 1e3
    assert Roofline.ideal().latency_ms(work, torch.tensor([0])).item() == pytest.approx(wanted)


def test_gradients_go_to_what_binds() -> None:
    layer = node("mlp")
    flops = torch.tensor(float(layer.flops), dtype=torch.float64, requires_grad=True)
    moved = torch.tensor(float(layer.bytes), dtype=torch.float64, requires_grad=True)
    work = Work.pairs([replace(layer, flops=flops, bytes=moved)], [GPU])
    assert work.compute_ms.item() != work.memory_ms.item()
    Roofline.ideal().latency_ms(work, torch.tensor([0])).sum().backward()
    assert flops.grad is not None and moved.grad is not None
    bound = bool(work.compute_ms > work.memory_ms)
    assert flops.grad.item() == pytest.approx(1e3 / 4e14 if bound else 0.0)
    assert moved.grad.item() == pytest.approx(0.0 if bound else 1e3 / 2e12)


def test_coefficients_are_found_again() -> None:
    work, latency = made()
    found = fit_roofline(work, latency)
    error = (found.latency_ms(work, ROW) / latency - 1.0).abs()
    assert float(error.median()) < 0.01 and float(error.max()) < 0.15
    # Attention and perceptrons in bfloat16 meet both bounds.
    for kind in (1, 2):
        compute, memory, overhead = found.values[1, kind, 2].tolist()
        assert (compute, memory, overhead) == pytest.approx((0.6, 0.75, 0.02), rel=0.05)


def test_what_was_not_measured_is_ideal_or_alike() -> None:
    work, latency = made()
    found = fit_roofline(work, latency)
    assert found.fitted[1].sum() == 8 and not found.fitted[0].any()
    assert torch.equal(found.values[0], Roofline.ideal().values[0])
    # In float16 nothing was measured: it is taken for the mean of the other two.
    pair = found.values[1, 2, [1, 2]]
    assert torch.allclose(found.values[1, 2, 3], pair.log().mean(0).exp())
    alike = found.alike()
    assert torch.allclose(alike.values[0, 2, 2], found.values[1, 2, 2])
    assert torch.equal(alike.values[1], found.values[1])
    assert torch.equal(Roofline.ideal().alike().values, Roofline.ideal().values)


def test_lengths_must_agree() -> None:
    work, latency = made(8)
    with pytest.raises(InputError, match="7 latencies of 8 layers"):
        fit_roofline(work, latency[:-1])
    with pytest.raises(InputError, match="1 layers and 2 devices"):
        Work.pairs([node()], [GPU, GPU])

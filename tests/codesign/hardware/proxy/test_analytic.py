"""The analytic model of latency, and its coefficients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparseflow.codesign.hardware.proxy import Grid, Roofline
from sparseflow.codesign.hardware.proxy.analytic import (
    _DEFAULT_POWER,
    analytic_memory_mb,
    analytic_power_w,
    default_power,
    default_workspace,
    fit_power,
    fit_roofline,
    fit_workspace,
)
from sparseflow.codesign.hardware.proxy.fitting import _column
from sparseflow.codesign.hardware.proxy.inputs import Work
from sparseflow.errors import InputError
from tests.codesign.hardware.proxy.made_up import GPU, node, points

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


def test_roofline_coefficients_are_found_again() -> None:
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
    with pytest.raises(InputError, match="7"):
        fit_roofline(work, latency[:-1])
    with pytest.raises(InputError, match="1"):
        Work.pairs([node()], [GPU, GPU])


ROW = torch.tensor([1])


def test_what_libraries_take_beside_layers_is_found() -> None:
    layers = [point.layer for point in points(80)]
    work = Work.pairs(layers, [GPU] * len(layers))
    held = torch.tensor([layer.memory_bytes / 1e6 for layer in layers], dtype=torch.float64)
    measured = held + torch.where(work.precision == 2, 33.0, 1.0)
    measured[::3] = float("nan")
    found = fit_workspace(work, measured)
    assert torch.allclose(found[1, :, 2], torch.tensor(33.0).double())
    assert torch.allclose(found[1, :, 1], torch.tensor(1.0).double())
    # In float16 nothing was measured: it is taken for the mean.
    assert torch.allclose(found[1, :, 3], torch.tensor(17.0).double())
    told, there = analytic_memory_mb(work, found, ROW), torch.isfinite(measured)
    assert torch.allclose(told[there], measured[there])


def test_without_measurements_there_is_none() -> None:
    layers = [point.layer for point in points(10)]
    work = Work.pairs(layers, [GPU] * 10)
    found = fit_workspace(work, torch.full((10,), float("nan"), dtype=torch.float64))
    assert torch.equal(found, default_workspace().repeat(2, 1, 1))
    # Layers that take less than was thought have no workspace below nothing.
    assert torch.equal(fit_workspace(work, work.memory_bytes / 2e6), found)


ROW = torch.tensor([1])


def test_it_lies_between_idle_and_full_load() -> None:
    work = Work.pairs([node("mlp")], [GPU])
    row = torch.tensor([0])
    slow = analytic_power_w(work, torch.tensor([1e6]).double(), default_power(), row)
    fast = analytic_power_w(work, torch.tensor([1e-6]).double(), default_power(), row)
    assert slow.item() == pytest.approx(60.0 + 0.2 * 440.0, rel=1e-3) and fast.item() == 500.0


def test_power_coefficients_are_found_again() -> None:
    measured = points(80)
    work = Work.pairs([point.layer for point in measured], [point.device for point in measured])
    latency, power = _column(measured, "lat_ms"), _column(measured, "power_w")
    there = torch.isfinite(power)
    values = fit_power(work, latency, power)
    found = analytic_power_w(work, latency, values, ROW)
    assert float((found / power - 1.0)[there].abs().median()) < 0.02
    assert bool((values >= 0.0).all()) and values[0].tolist() == pytest.approx(_DEFAULT_POWER)


def test_a_few_points_fit_nothing() -> None:
    measured = points(20)
    work = Work.pairs([point.layer for point in measured], [point.device for point in measured])
    values = fit_power(work, _column(measured, "lat_ms"), _column(measured, "power_w"))
    assert torch.equal(values, default_power().repeat(2, 1))

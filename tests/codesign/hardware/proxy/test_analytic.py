"""Tests of `codesign.hardware.proxy.analytic`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparseflow.codesign.hardware.proxy import LatencyRoofline, LayerGrid
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
from sparseflow.codesign.hardware.proxy.fitting import _to_column
from sparseflow.codesign.hardware.proxy.inputs import ProxyInputs
from sparseflow.errors import InputError
from tests.codesign.hardware.proxy.made_up import GPU, node, points

ROW = torch.tensor([1])


def make_layers(count: int = 120) -> tuple[ProxyInputs, torch.Tensor]:
    """Latencies of a roofline that is known."""
    layers = [item.to_node() for item in LayerGrid(precisions=("float32", "bfloat16")).sample(count, 3)]
    work = ProxyInputs.from_pairs(layers, [GPU] * count)
    return work, torch.maximum(work.compute_ms / 0.6, work.memory_ms / 0.75) + 0.02


def test_latency_is_maximum_of_compute_and_memory() -> None:
    layer = node("mlp")
    work = ProxyInputs.from_pairs([layer], [GPU])
    expected = max(float(layer.flops) / 4e14, float(layer.bytes) / 2e12) * 1e3
    assert LatencyRoofline.ideal().latency_ms(work, torch.tensor([0])).item() == pytest.approx(expected)


def test_latency_gradient_goes_to_binding_term() -> None:
    layer = node("mlp")
    flops = torch.tensor(float(layer.flops), dtype=torch.float64, requires_grad=True)
    moved = torch.tensor(float(layer.bytes), dtype=torch.float64, requires_grad=True)
    work = ProxyInputs.from_pairs([replace(layer, flops=flops, bytes=moved)], [GPU])
    assert work.compute_ms.item() != work.memory_ms.item()
    LatencyRoofline.ideal().latency_ms(work, torch.tensor([0])).sum().backward()
    assert flops.grad is not None and moved.grad is not None
    bound = bool(work.compute_ms > work.memory_ms)
    assert flops.grad.item() == pytest.approx(1e3 / 4e14 if bound else 0.0)
    assert moved.grad.item() == pytest.approx(0.0 if bound else 1e3 / 2e12)


def test_fit_roofline_recovers_coefficients() -> None:
    work, latency = make_layers()
    roofline = fit_roofline(work, latency)
    error = (roofline.latency_ms(work, ROW) / latency - 1.0).abs()
    assert float(error.median()) < 0.01 and float(error.max()) < 0.15
    # Attention and perceptrons in bfloat16 meet both bounds.
    for kind in (1, 2):
        compute, memory, overhead = roofline.values[1, kind, 2].tolist()
        assert (compute, memory, overhead) == pytest.approx((0.6, 0.75, 0.02), rel=0.05)


def test_fit_roofline_fills_missing_coefficients() -> None:
    work, latency = make_layers()
    roofline = fit_roofline(work, latency)
    assert roofline.fitted[1].sum() == 8 and not roofline.fitted[0].any()
    assert torch.equal(roofline.values[0], LatencyRoofline.ideal().values[0])
    # In float16 nothing was measured: it is taken for the mean of the other two.
    pair = roofline.values[1, 2, [1, 2]]
    assert torch.allclose(roofline.values[1, 2, 3], pair.log().mean(0).exp())


def test_wrong_lengths_are_refused() -> None:
    work, latency = make_layers(8)
    with pytest.raises(InputError, match="7"):
        fit_roofline(work, latency[:-1])
    with pytest.raises(InputError, match="1"):
        ProxyInputs.from_pairs([node()], [GPU, GPU])


ROW = torch.tensor([1])


def test_fit_workspace_recovers_workspace() -> None:
    layers = [point.layer for point in points(80)]
    work = ProxyInputs.from_pairs(layers, [GPU] * len(layers))
    contents = torch.tensor([layer.memory_bytes / 1e6 for layer in layers], dtype=torch.float64)
    measured = contents + torch.where(work.precision == 2, 33.0, 1.0)
    measured[::3] = float("nan")
    workspace = fit_workspace(work, measured)
    assert torch.allclose(workspace[1, :, 2], torch.tensor(33.0).double())
    assert torch.allclose(workspace[1, :, 1], torch.tensor(1.0).double())
    # In float16 nothing was measured: it is taken for the mean.
    assert torch.allclose(workspace[1, :, 3], torch.tensor(17.0).double())
    record, present = analytic_memory_mb(work, workspace, ROW), torch.isfinite(measured)
    assert torch.allclose(record[present], measured[present])


def test_fit_workspace_without_measurements_is_zero() -> None:
    layers = [point.layer for point in points(10)]
    work = ProxyInputs.from_pairs(layers, [GPU] * 10)
    workspace = fit_workspace(work, torch.full((10,), float("nan"), dtype=torch.float64))
    assert torch.equal(workspace, default_workspace().repeat(2, 1, 1))
    # Layers that take less than was thought have no workspace below nothing.
    assert torch.equal(fit_workspace(work, work.memory_bytes / 2e6), workspace)


ROW = torch.tensor([1])


def test_power_is_between_idle_and_tdp() -> None:
    work = ProxyInputs.from_pairs([node("mlp")], [GPU])
    row = torch.tensor([0])
    slow = analytic_power_w(work, torch.tensor([1e6]).double(), default_power(), row)
    fast = analytic_power_w(work, torch.tensor([1e-6]).double(), default_power(), row)
    assert slow.item() == pytest.approx(60.0 + 0.2 * 440.0, rel=1e-3) and fast.item() == 500.0


def test_fit_power_recovers_coefficients() -> None:
    measured = points(80)
    work = ProxyInputs.from_pairs([point.layer for point in measured], [point.device for point in measured])
    latency, power = _to_column(measured, "lat_ms"), _to_column(measured, "power_w")
    present = torch.isfinite(power)
    values = fit_power(work, latency, power)
    result = analytic_power_w(work, latency, values, ROW)
    assert float((result / power - 1.0)[present].abs().median()) < 0.02
    assert bool((values >= 0.0).all()) and values[0].tolist() == pytest.approx(_DEFAULT_POWER)


def test_fit_power_of_few_points_keeps_defaults() -> None:
    measured = points(20)
    work = ProxyInputs.from_pairs([point.layer for point in measured], [point.device for point in measured])
    values = fit_power(work, _to_column(measured, "lat_ms"), _to_column(measured, "power_w"))
    assert torch.equal(values, default_power().repeat(2, 1))

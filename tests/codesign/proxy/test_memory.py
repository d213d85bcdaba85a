"""The analytic model of memory."""

from __future__ import annotations

import torch

from sparseflow.codesign.proxy.memory import analytic_memory_mb, default_workspace, fit_workspace
from sparseflow.codesign.proxy.work import Work
from tests.codesign.proxy.made_up import GPU, points

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

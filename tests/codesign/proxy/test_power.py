"""The analytic model of power."""

from __future__ import annotations

import pytest
import torch

from sparseflow.codesign.proxy.fit import _column
from sparseflow.codesign.proxy.power import DEFAULT, analytic_power_w, default_power, fit_power
from sparseflow.codesign.proxy.work import Work
from tests.codesign.proxy.made_up import GPU, node, points

ROW = torch.tensor([1])


def test_it_lies_between_idle_and_full_load() -> None:
    work = Work.pairs([node("mlp")], [GPU])
    row = torch.tensor([0])
    slow = analytic_power_w(work, torch.tensor([1e6]).double(), default_power(), row)
    fast = analytic_power_w(work, torch.tensor([1e-6]).double(), default_power(), row)
    assert slow.item() == pytest.approx(60.0 + 0.2 * 440.0, rel=1e-3) and fast.item() == 500.0


def test_coefficients_are_found_again() -> None:
    measured = points(80)
    work = Work.pairs([point.layer for point in measured], [point.device for point in measured])
    latency, power = _column(measured, "lat_ms"), _column(measured, "power_w")
    there = torch.isfinite(power)
    values = fit_power(work, latency, power)
    found = analytic_power_w(work, latency, values, ROW)
    assert float((found / power - 1.0)[there].abs().median()) < 0.02
    assert bool((values >= 0.0).all()) and values[0].tolist() == pytest.approx(DEFAULT)


def test_a_few_points_fit_nothing() -> None:
    measured = points(20)
    work = Work.pairs([point.layer for point in measured], [point.device for point in measured])
    values = fit_power(work, _column(measured, "lat_ms"), _column(measured, "power_w"))
    assert torch.equal(values, default_power().repeat(2, 1))

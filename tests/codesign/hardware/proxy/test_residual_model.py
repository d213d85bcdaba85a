"""Tests of `codesign.hardware.proxy.residual_model`."""

from __future__ import annotations

import pytest
import torch

from sparseflow.codesign.hardware.proxy import FEATURES, LayerProxyModel

COUNT = len(FEATURES)


def data(count: int = 120, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Features, of which all but six never change, and what depends on two of them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.zeros(count, COUNT, dtype=torch.float64)
    x[:, :6] = torch.rand(count, 6, generator=generator, dtype=torch.float64) * 4.0
    y = torch.full((count, 3), float("nan"), dtype=torch.float64)
    y[:, 0] = 0.5 * torch.sin(x[:, 0]) + 0.2 * x[:, 1]
    return x, y


def test_unfitted_model_predicts_zero() -> None:
    x, _ = data(5)
    assert torch.equal(LayerProxyModel()(x), torch.zeros(5, 3, dtype=torch.float64))


def test_fit_learns_ratio() -> None:
    model, (x, y) = LayerProxyModel(), data(200)
    model.fit(x, y)
    new, expected = data(100, seed=1)
    inside = ((new >= x.min(0).values) & (new <= x.max(0).values)).all(-1)
    result = model(new)[inside, 0]
    assert float((result - expected[inside, 0]).abs().median()) < 0.05
    # Memory and power were not measured, so nothing is said about them.
    assert torch.equal(model(new)[:, 1:], torch.zeros(100, 2, dtype=torch.float64))


def test_fit_to_noise_is_shrunk() -> None:
    model, (x, y) = LayerProxyModel(), data()
    noise = torch.randn(len(x), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    y[:, 0] = 0.3 * noise
    model.fit(x, y)
    new, _ = data(100, seed=1)
    assert float(model(new)[:, 0].abs().mean()) < 0.1


def test_correction_decays_outside_training_range() -> None:
    model, (x, y) = LayerProxyModel(), data()
    model.fit(x, y)
    assert float(model(x)[:, 0].abs().mean()) > 0.1
    for column, far in ((0, 14.0), (1, -10.0), (COUNT - 1, 1.0)):
        excess = x.clone()
        excess[:, column] = far
        assert float(model(excess).abs().max()) < 1e-3
    # It fades on the way there, and never grows.
    steps = x[:1].repeat(50, 1)
    steps[:, 0] = torch.linspace(4.0, 12.0, 50)
    record = model(steps)[:, 0].abs()
    assert bool((record.diff() <= 1e-12).all())


def test_correction_is_bounded() -> None:
    model, (x, y) = LayerProxyModel(), data()
    model.fit(x, y)
    generator = torch.Generator().manual_seed(3)
    anything = torch.randn(500, COUNT, generator=generator, dtype=torch.float64) * 10.0
    maximum = float(y[:, 0].abs().max())
    assert float(model(anything)[:, 0].abs().max()) <= 1.25 * maximum + 1e-9
    assert bool(torch.isfinite(model(anything)).all())


def test_fit_is_deterministic_for_a_seed() -> None:
    x, y = data(40)
    state = torch.random.get_rng_state()
    rows = []
    for seed in (1, 1, 2):
        model = LayerProxyModel(members=2, hidden=8)
        model.fit(x, y, decays=(1.0,), steps=20, seed=seed)
        rows.append(model(x))
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], rows[2])
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("grouped", [False, True])
def test_members_hold_out_whole_groups(grouped: bool) -> None:
    model = LayerProxyModel(members=3)
    groups = [index // 2 for index in range(12)] if grouped else list(range(12))
    left_out = model._assign_held_out(groups, torch.Generator().manual_seed(0))
    assert left_out.sum(0).tolist() == [1] * 12
    if grouped:
        assert torch.equal(left_out[:, 0::2], left_out[:, 1::2])
    assert left_out.sum(1).tolist() == [4, 4, 4]

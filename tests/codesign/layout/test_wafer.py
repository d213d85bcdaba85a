"""Tests of `codesign.layout.wafer`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sparseflow.codesign.layout.sites import Wafer, build_site_grid
from sparseflow.codesign.layout.wafer import LayoutWeights, WaferLayout, refine_layout
from sparseflow.errors import InputError

WAFER = Wafer(radius_mm=60.0, margin_mm=1.0)
SIZES = np.array([[12.0, 16.0], [9.0, 12.0], [18.0, 24.0], [6.0, 8.0]])
HALF = [10.0, 7.5, 15.0, 5.0]
NAMES = ("boundary", "overlap", "comm", "therm")


def layout(positions: Any, **settings: Any) -> WaferLayout:
    return WaferLayout(WAFER, SIZES, sigma_mm=20.0, positions_mm=positions, **settings).double()


def random_places(seed: int = 0, reach: float = 55.0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-reach, reach, (4, 2))


def work(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (
        1e6 * torch.rand(4, 4, generator=g, dtype=torch.float64),
        300 * torch.rand(4, generator=g, dtype=torch.float64),
    )


def plain(positions: np.ndarray, traffic: Tensor, tdp: Tensor, w: list[float]) -> dict[str, float]:
    """The terms, one chip and one pair at a time."""
    unit = 2 * max(HALF) + 1.0
    result: dict[str, float] = dict.fromkeys(NAMES, 0.0)
    for i in range(4):
        over = max(0.0, math.hypot(*positions[i]) + HALF[i] + 1.0 - 60.0)
        result["boundary"] += w[i] * over**2 / unit**2
        for j in range(4):
            distances = math.dist(positions[i], positions[j])
            both = w[i] * w[j]
            if i < j:
                result["overlap"] += both * max(0.0, HALF[i] + HALF[j] + 1.0 - distances) ** 2 / unit**2
            if i != j:
                result["comm"] += both * traffic[i, j].item() * distances / (traffic.sum().item() * 60.0)
                warm = tdp[i].item() * tdp[j].item() * math.exp(-distances / 20.0)
                result["therm"] += both * warm / tdp.sum().item() ** 2
    return result


@pytest.mark.parametrize("w", [[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.5, 0.25]])
def test_terms_match_formulas(w: list[float]) -> None:
    traffic, tdp = work()
    positions = np.array([[0.0, 0.0], [40.0, 30.0], [50.0, 20.0], [8.0, 3.0]])
    weights = LayoutWeights(boundary=2.0, overlap=3.0, comm=5.0, therm=7.0)
    loss, stats = layout(positions, weights=weights)(
        traffic, tdp, present=torch.tensor(w, dtype=torch.float64)
    )
    expected = plain(positions, traffic, tdp, w)
    assert tuple(stats) == NAMES and not any(value.requires_grad for value in stats.values())
    for name, value in stats.items():
        assert value.item() == pytest.approx(expected[name], rel=1e-6, abs=1e-12)
    assert expected["boundary"] > 0.0 and expected["overlap"] > 0.0
    weighted = sum(getattr(weights, name) * expected[name] for name in NAMES)
    assert loss.item() == pytest.approx(weighted, rel=1e-6)


def test_loss_gradients_reach_all_arguments() -> None:
    model = layout(random_places(3))
    traffic, tdp = work(1)
    # Totals that stay what they are: by default they are those of each call, without a gradient.
    model._traffic_total, model._tdp_total = 1e6, 300.0
    inputs = [
        model.positions_mm.detach().clone(), traffic, tdp, torch.tensor([0.9, 0.4, 1.0, 0.1]).double(),
    ]  # fmt: skip

    def loss(positions: Tensor, traffic: Tensor, tdp: Tensor, present: Tensor) -> Tensor:
        parameters, arguments = {"positions_mm": positions}, {"present": present}
        return torch.func.functional_call(model, parameters, (traffic, tdp), arguments)[0]

    for value in inputs:
        value.requires_grad_()
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-6, rtol=1e-4)
    model(traffic, tdp)[0].backward()
    assert model.positions_mm.grad is not None and model.positions_mm.grad.abs().sum() > 0


def test_empty_slot_has_no_effect() -> None:
    traffic, tdp = work()
    positions = random_places(5)
    present = torch.tensor([1.0, 1.0, 0.0, 1.0]).double()
    moved = positions.copy()
    moved[2] = [500.0, 0.0]
    first, second = (layout(p, traffic_total_bytes=1e6, tdp_total_w=100.0) for p in (positions, moved))
    assert first(traffic, tdp, present=present)[0].item() == second(traffic, tdp, present=present)[0].item()
    assert second.find_violations(present=present) == first.find_violations(present=present)
    assert "chip 2 is" in second.find_violations()[0]


def test_gradients_of_equal_positions_are_finite() -> None:
    model = layout(np.zeros((4, 2)))
    loss, _ = model(*work())
    loss.backward()
    assert model.positions_mm.grad is not None and torch.isfinite(model.positions_mm.grad).all()


def test_loss_without_traffic_and_power() -> None:
    loss, stats = layout(random_places())(torch.zeros(4, 4).double(), torch.zeros(4).double())
    assert torch.isfinite(loss) and stats["comm"] == 0.0 and stats["therm"] == 0.0


def test_fixed_totals_scale_the_loss() -> None:
    traffic, tdp = work()
    full, fixed = layout(random_places()), layout(random_places(), traffic_total_bytes=1e6, tdp_total_w=1.0)
    once, repeated = (full(factor * traffic, tdp)[1]["comm"] for factor in (1, 2))
    assert once.item() == pytest.approx(repeated.item())
    once, repeated = (fixed(factor * traffic, tdp)[1]["comm"] for factor in (1, 2))
    assert 2 * once.item() == pytest.approx(repeated.item())


def test_is_legal_matches_boundary_and_overlap() -> None:
    good = [[0.0, 0.0], [18.6, 0.0], [-26.1, 0.0], [0.0, 16.1]]
    assert layout(good).is_legal() and layout(good).find_violations() == ()
    _, stats = layout(good)(*work())
    assert stats["boundary"] == 0.0 and stats["overlap"] == 0.0
    # By a tenth of a millimetre.
    close = layout([[0.0, 0.0], [18.4, 0.0], [-26.1, 0.0], [0.0, 16.1]])
    assert close.find_violations() == ("chips 0 and 1 are 0.1 mm too close",)
    assert close(*work())[1]["overlap"] > 0.0
    over = layout([[0.0, 0.0], [51.6, 0.0], [-26.1, 0.0], [0.0, 16.1]])
    assert over.find_violations() == ("chip 1 is 0.1 mm beyond the edge",)
    assert over(*work())[1]["boundary"] > 0.0
    # A micrometer is rounding.
    assert layout([[0.0, 0.0], [18.4995, 0.0], [-26.1, 0.0], [0.0, 16.1]]).is_legal()
    lost = layout(good)
    with torch.no_grad():
        lost.positions_mm[0, 0] = math.nan
    assert lost.find_violations() == ("a position is not finite",)


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_initial_spiral_is_legal(count: int) -> None:
    assert WaferLayout(Wafer(), [10.0] * count, sigma_mm=20.0).is_legal()


def test_state_dict_round_trip() -> None:
    first, second = layout(random_places(1)), layout(random_places(2))
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(second.positions_mm, first.positions_mm)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sigma_mm": 0.0}, r"`sigma_mm` \(=0\.0\)"),
        ({"traffic_total_bytes": -1.0}, r"`traffic_total_bytes`"),
        ({"tdp_total_w": math.inf}, r"`tdp_total_w`"),
        ({"positions_mm": np.zeros((3, 2))}, r"positions_mm"),
        ({"positions_mm": np.full((4, 2), math.nan)}, r"`positions_mm` must be finite"),
        ({"sizes_mm": [-1.0] * 4}, r"chip 0 has the size -1 mm"),
    ],
)
def test_invalid_arguments_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        WaferLayout(WAFER, **{"sizes_mm": SIZES, "sigma_mm": 20.0, **settings})
    with pytest.raises(InputError, match=r"`overlap` \(=-1\.0\)"):
        LayoutWeights(overlap=-1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"traffic_bytes": torch.zeros(3, 3)},
            r"`traffic_bytes` has shape \(3, 3\).*\(4, 4\)",
        ),
        ({"tdp_w": torch.zeros(4, 1)}, r"`tdp_w`"),
        ({"present": torch.ones(5)}, r"`present`"),
    ],
)
def test_wrong_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    traffic, tdp = work()
    with pytest.raises(InputError, match=message):
        layout(random_places())(**{"traffic_bytes": traffic, "tdp_w": tdp, **change})


REFINED_WAFER = Wafer(radius_mm=70.0)


def on_sites(chips: int = 5, **settings: Any) -> WaferLayout:
    sizes = np.random.default_rng(1).uniform(8.0, 16.0, (chips, 2))
    sites = build_site_grid(REFINED_WAFER, sizes)
    positions = sites.positions_mm[np.random.default_rng(2).permutation(len(sites))[:chips]]
    return WaferLayout(REFINED_WAFER, sizes, sigma_mm=20.0, positions_mm=positions, **settings)


def make_work(chips: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.rand(chips, chips, generator=g), torch.rand(chips, generator=g)


def test_refine_layout_lowers_the_cost_and_stays_legal() -> None:
    layout = on_sites()
    before = layout.positions_mm.detach().clone()
    result = refine_layout(layout, *make_work(), steps=80)
    assert result.was_legal and result.improved and layout.is_legal()
    assert result.after is not None and result.after < result.before
    assert not torch.equal(layout.positions_mm, before)
    _, stats = layout(*make_work())
    assert (stats["comm"] + stats["therm"]).item() == pytest.approx(result.after, rel=1e-6)
    assert stats["boundary"] < 1e-6 and stats["overlap"] < 1e-6
    assert layout.positions_mm.grad is None


def test_refine_layout_follows_the_weights() -> None:
    layout = on_sites(weights=LayoutWeights(comm=0.0, therm=1.0))
    therm = layout(*make_work())[1]["therm"]
    assert refine_layout(layout, *make_work(), steps=60).improved
    assert layout(*make_work())[1]["therm"] < therm


def test_refine_layout_without_improvement_changes_nothing() -> None:
    layout = on_sites(weights=LayoutWeights(comm=0.0, therm=0.0))
    before = layout.positions_mm.detach().clone()
    result = refine_layout(layout, *make_work(), steps=5)
    assert not result.improved and result.before == result.after == 0.0
    torch.testing.assert_close(layout.positions_mm.detach(), before, rtol=0, atol=0)


def test_refine_layout_from_an_illegal_layout() -> None:
    layout = WaferLayout(
        REFINED_WAFER, [12.0] * 4, sigma_mm=20.0, positions_mm=[[0, 0], [9, 1], [-1, 9], [68, 3]]
    )
    result = refine_layout(layout, *make_work(4), steps=200)
    assert not result.was_legal and result.improved and result.after is not None
    assert layout.is_legal()
    # Nine large chips do not fit, wherever they are.
    full = WaferLayout(REFINED_WAFER, [45.0] * 9, sigma_mm=20.0)
    before = full.positions_mm.detach().clone()
    lost = refine_layout(full, *make_work(9), steps=5)
    assert (lost.after, lost.improved, lost.was_legal) == (None, False, False)
    torch.testing.assert_close(full.positions_mm.detach(), before, rtol=0, atol=0)


def test_refine_layout_ignores_empty_slots() -> None:
    layout = on_sites()
    with torch.no_grad():
        layout.positions_mm[0] = 1000.0
    present = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0], requires_grad=True)
    result = refine_layout(layout, *make_work(), present=present, steps=40)
    assert result.was_legal and layout.is_legal(present=present)
    assert present.grad is None


def test_refine_layout_keeps_existing_gradients() -> None:
    layout = on_sites()
    layout(*make_work())[0].backward()
    gradient = layout.positions_mm.grad
    assert gradient is not None
    saved = gradient.clone()
    refine_layout(layout, *make_work(), steps=3)
    assert layout.positions_mm.grad is gradient
    torch.testing.assert_close(gradient, saved)


@pytest.mark.parametrize("settings", [{"steps": 0}, {"step_mm": 0.0}, {"step_mm": float("nan")}])
def test_refine_layout_with_wrong_arguments_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(settings))):
        refine_layout(on_sites(), *make_work(), **settings)

"""The layout that can be differentiated: its terms, its gradients, empty slots and what is legal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sparseflow.codesign.layout.sites import Wafer, build_site_grid
from sparseflow.codesign.layout.wafer import LayoutWeights, WaferLayout
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
def test_terms_are_the_formulas(w: list[float]) -> None:
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


def test_gradients_flow_into_all_that_is_handed_in() -> None:
    model = layout(random_places(3))
    traffic, tdp = work(1)
    # Totals that stay what they are: by default they are those of each call, without a gradient.
    model._traffic_total, model._tdp_total = 1e6, 300.0
    inputs = [
        model.positions_mm.detach().clone(), traffic, tdp, torch.tensor([0.9, 0.4, 1.0, 0.1]).double(),
        torch.tensor(HALF).double(),
    ]  # fmt: skip

    def loss(positions: Tensor, traffic: Tensor, tdp: Tensor, present: Tensor, half: Tensor) -> Tensor:
        arguments = {"present": present, "half_mm": half}
        result = torch.func.functional_call(model, {"positions_mm": positions}, (traffic, tdp), arguments)
        return result[0]

    for value in inputs:
        value.requires_grad_()
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-6, rtol=1e-4)
    model(traffic, tdp)[0].backward()
    assert model.positions_mm.grad is not None and model.positions_mm.grad.abs().sum() > 0


def test_an_empty_slot_is_as_if_it_were_not_there() -> None:
    traffic, tdp = work()
    positions = random_places(5)
    present = torch.tensor([1.0, 1.0, 0.0, 1.0]).double()
    moved = positions.copy()
    moved[2] = [500.0, 0.0]
    first, second = (layout(p, traffic_total_bytes=1e6, tdp_total_w=100.0) for p in (positions, moved))
    assert first(traffic, tdp, present=present)[0].item() == second(traffic, tdp, present=present)[0].item()
    assert second.find_violations(present=present) == first.find_violations(present=present)
    assert "chip 2 is" in second.find_violations()[0]


def test_chips_in_one_place_have_gradients_that_are_numbers() -> None:
    model = layout(np.zeros((4, 2)))
    loss, _ = model(*work())
    loss.backward()
    assert model.positions_mm.grad is not None and torch.isfinite(model.positions_mm.grad).all()


def test_nothing_to_send_and_nothing_warm() -> None:
    loss, stats = layout(random_places())(torch.zeros(4, 4).double(), torch.zeros(4).double())
    assert torch.isfinite(loss) and stats["comm"] == 0.0 and stats["therm"] == 0.0


def test_totals_make_the_loss_see_how_much_there_is() -> None:
    traffic, tdp = work()
    full, fixed = layout(random_places()), layout(random_places(), traffic_total_bytes=1e6, tdp_total_w=1.0)
    once, repeated = (full(factor * traffic, tdp)[1]["comm"] for factor in (1, 2))
    assert once.item() == pytest.approx(repeated.item())
    once, repeated = (fixed(factor * traffic, tdp)[1]["comm"] for factor in (1, 2))
    assert 2 * once.item() == pytest.approx(repeated.item())


def test_legal_is_what_has_neither_boundary_nor_overlap() -> None:
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
    # A micrometre is rounding; larger chips are not.
    assert layout([[0.0, 0.0], [18.4995, 0.0], [-26.1, 0.0], [0.0, 16.1]]).is_legal()
    assert not layout(good).is_legal(half_mm=torch.tensor([12.0, 7.5, 15.0, 5.0]).double())
    lost = layout(good)
    with torch.no_grad():
        lost.positions_mm[0, 0] = math.nan
    assert lost.find_violations() == ("a position is not finite",)


def test_chips_are_placed_on_sites() -> None:
    wafer = Wafer()
    sites = build_site_grid(wafer, SIZES)
    model = WaferLayout(wafer, SIZES, sigma_mm=20.0)
    model.set_assignment(sites, [3, 0, 7, 5])
    expected = torch.tensor(sites.positions_mm[[3, 0, 7, 5]]).float()
    torch.testing.assert_close(model.positions_mm.detach(), expected)
    assert model.is_legal()
    full = np.random.default_rng(0).permutation(len(sites))
    model.set_assignment(sites, full)
    torch.testing.assert_close(
        model.positions_mm.detach(), torch.tensor(sites.positions_mm[full[:4]]).float()
    )
    for wrong in ([0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 99], [0, 1, 2, -1], [0.0, 1.0, 2.0, 3.0]):
        with pytest.raises(InputError, match="`assignment`"):
            model.set_assignment(sites, wrong)


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_the_first_places_are_legal_where_there_is_room(count: int) -> None:
    assert WaferLayout(Wafer(), [10.0] * count, sigma_mm=20.0).is_legal()


def test_a_layout_is_saved_and_loaded() -> None:
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
def test_what_cannot_be_built(settings: dict[str, Any], message: str) -> None:
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
        ({"half_mm": torch.ones(1)}, r"`half_mm`"),
    ],
)
def test_shapes_are_checked(change: dict[str, Any], message: str) -> None:
    traffic, tdp = work()
    with pytest.raises(InputError, match=message):
        layout(random_places())(**{"traffic_bytes": traffic, "tdp_w": tdp, **change})

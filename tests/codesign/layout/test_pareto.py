"""Tests of `codesign.layout.pareto`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sparseflow.codesign.layout.pareto import build_objectives, compute_pareto_front, find_knee
from sparseflow.codesign.layout.qap.problem import compute_cost
from sparseflow.codesign.layout.sites import SiteGrid, Wafer, build_site_grid
from sparseflow.errors import InputError

SIGMA = 25.0


@pytest.fixture(scope="module")
def sites() -> SiteGrid:
    return build_site_grid(Wafer(radius_mm=80.0), [18.0] * 6)


def chips(count: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    traffic = rng.uniform(0.0, 1e6, (count, count)) * (rng.random((count, count)) < 0.5)
    return traffic, rng.choice([20.0, 100.0, 300.0], count)


def plain(sites: SiteGrid, traffic: np.ndarray, tdp: np.ndarray, location: np.ndarray) -> tuple[float, float]:
    comm = therm = 0.0
    for i in range(len(tdp)):
        for j in range(len(tdp)):
            distances = math.dist(sites.positions_mm[location[i]], sites.positions_mm[location[j]])
            comm += (traffic[i, j] + traffic[j, i]) * distances
            therm += tdp[i] * tdp[j] * math.exp(-distances / SIGMA) if i != j else 0.0
    return comm, therm


def test_objectives_match_formulas(sites: SiteGrid) -> None:
    traffic, tdp = chips()
    pairs = build_objectives(sites, traffic, tdp, SIGMA)
    p = np.random.default_rng(1).permutation(len(sites))
    for pair, expected in zip(pairs, plain(sites, traffic, tdp, p[:6]), strict=True):
        assert compute_cost(*pair, p) == pytest.approx(expected)


def test_front_is_undominated(sites: SiteGrid) -> None:
    traffic, tdp = chips()
    front = compute_pareto_front(sites, traffic, tdp, sigma_mm=SIGMA, iterations=300)
    assert len(front.layouts) >= 3
    comm, therm = (
        np.array([getattr(layout, name) for layout in front.layouts]) for name in ("comm", "therm")
    )
    assert (np.diff(comm) > 0).all() and (np.diff(therm) < 0).all()
    for layout in (*front.layouts, front.grid):
        assert len(set(layout.assignment)) == 6 and 0 <= min(layout.assignment) <= max(
            layout.assignment
        ) < len(sites)
        expected = plain(sites, traffic, tdp, layout.assignment)
        assert layout.comm == pytest.approx(expected[0] / front.scales[0])
        assert layout.therm == pytest.approx(expected[1] / front.scales[1])
    assert (front.grid.comm, front.grid.therm) == pytest.approx((1.0, 1.0))
    assert comm[0] < 1.0 and therm[-1] < 1.0
    assert front.best is front.layouts[front.knee]
    repeated = compute_pareto_front(sites, traffic, tdp, sigma_mm=SIGMA, iterations=300)
    assert [layout.assignment.tolist() for layout in repeated.layouts] == [
        layout.assignment.tolist() for layout in front.layouts
    ]


def test_front_ends_are_best_of_each_objective() -> None:
    sites = build_site_grid(Wafer(radius_mm=45.0), [18.0] * 3)
    traffic, tdp = np.array([[0.0, 5.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0]]), np.array([50.0, 10.0, 50.0])
    front = compute_pareto_front(sites, traffic, tdp, sigma_mm=SIGMA, iterations=300, restarts=4)
    all_items = [
        plain(sites, traffic, tdp, np.array([a, b, c]))
        for a in range(len(sites))
        for b in range(len(sites))
        for c in range(len(sites))
        if len({a, b, c}) == 3
    ]
    assert front.layouts[0].comm * front.scales[0] == pytest.approx(min(comm for comm, _ in all_items))
    assert front.layouts[-1].therm * front.scales[1] == pytest.approx(min(therm for _, therm in all_items))


def test_grid_places_chips_in_order_on_central_sites(sites: SiteGrid) -> None:
    traffic, tdp = chips()
    front = compute_pareto_front(sites, traffic, tdp, sigma_mm=SIGMA, iterations=1, weights=[0.5], restarts=1)
    np.testing.assert_array_equal(front.grid.assignment, sites.select_central(6))
    assert front.grid.weight is None


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([(0, 9), (1, 2), (9, 0)], 1),
        ([(0, 9), (1, 8), (3, 1), (9, 0)], 2),
        ([(0, 9), (4.5, 4.5), (9, 0)], 0),
        ([(0, 9), (6, 6), (9, 0)], 0),
        ([(0, 1), (1, 0)], 0),
        ([(3, 3)], 0),
        # Scaled: units do not matter.
        ([(0, 9e6), (1, 2e6), (9, 0)], 1),
    ],
)
def test_find_knee(costs: list[tuple[float, float]], expected: int) -> None:
    assert find_knee(costs) == expected


def test_front_without_traffic_or_other_chips_has_one_layout(sites: SiteGrid) -> None:
    front = compute_pareto_front(sites, [[7.0]], [100.0], sigma_mm=SIGMA)
    assert len(front.layouts) == 1 and (front.best.comm, front.best.therm) == (0.0, 0.0)
    quiet = compute_pareto_front(sites, np.zeros((3, 3)), [10.0, 20.0, 30.0], sigma_mm=SIGMA, iterations=100)
    assert len(quiet.layouts) == 1 and quiet.best.comm == 0.0 and quiet.best.therm < 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"traffic_bytes": np.zeros((2, 3))}, r"\(6,\) and `traffic_bytes` \(2, 3\)"),
        ({"traffic_bytes": np.full((6, 6), -1.0)}, r"traffic_bytes.*-1"),
        ({"tdp_w": [1.0, math.nan, 1, 1, 1, 1]}, r"tdp_w"),
        ({"tdp_w": []}, r"\(0,\)"),
        ({"sigma_mm": 0.0}, r"`sigma_mm` \(=0\.0\)"),
        ({"weights": []}, r"`weights`"),
        ({"weights": [1.5]}, r"`weights` \(=\(1\.5,\)\)"),
        ({"traffic_bytes": np.zeros((99, 99)), "tdp_w": np.ones(99)}, r"99 chips do not fit on \d+ sites"),
        ({"restarts": 0}, r"`restarts`"),
    ],
)
def test_invalid_arguments_are_refused(sites: SiteGrid, change: dict[str, Any], message: str) -> None:
    traffic, tdp = chips()
    with pytest.raises(InputError, match=message):
        compute_pareto_front(sites, **{"traffic_bytes": traffic, "tdp_w": tdp, "sigma_mm": SIGMA, **change})

"""Pareto front of layouts between communication distance and heat.

Chips i at distances d cost

    L_comm  = sum over i, j of (T + Tᵀ)[i, j] · d[i, j]                          T: traffic, bytes
    L_therm = sum over i ≠ j of tdp[i] · tdp[j] · exp(-d[i, j] / sigma)

Both are quadratic assignments of chips to sites, with dummies on empty sites, and so is any weighted sum (a
stack of two). The diagonal of L_therm is omitted because it is constant. Both are relative to the plain grid:
chips in the given order, row by row, on the central sites.

For each weight w the search minimizes (1 - w) · L_comm + w · L_therm, starting from the result of the
previous weight and from random layouts. The layouts of all restarts are candidates for the front.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparseflow.codesign.layout.qap.assignment import assign
from sparseflow.codesign.layout.qap.problem import pad_flow
from sparseflow.codesign.layout.sites import SiteGrid
from sparseflow.core.checks import check_positive
from sparseflow.core.metrics import pareto_front
from sparseflow.errors import InputError

WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

DEFAULT_MOVES = 200
"""Default moves per restart and site: a tenth of those of `assign`, because searches start from neighbors."""

_MIN_WEIGHT = 1e-3
"""Minimum weight of either objective; breaks ties in the other."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteLayout:
    """Chips on sites and their cost.

    Attributes:
        assignment: Site of each chip, int64, [S].
        comm: L_comm relative to the grid.
        therm: L_therm relative to the grid.
        weight: Weight of L_therm for which it was found; None for the grid.
    """

    assignment: np.ndarray
    comm: float
    therm: float
    weight: float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutFront:
    """Layouts that no other layout dominates.

    Attributes:
        layouts: Sorted by ascending L_comm and descending L_therm, without duplicates.
        knee: Index of the layout farthest below the line between the first and the last, with both objectives
            scaled to 0 … 1. 0 for fewer than three layouts, or if none is below the line.
        grid: The plain grid; it costs 1 and 1 (0 without traffic, or with one chip).
        scales: L_comm (bytes · mm) and L_therm (W²) of the grid; 1 where they are 0.
    """

    layouts: tuple[SiteLayout, ...]
    knee: int
    grid: SiteLayout
    scales: tuple[float, float]

    @property
    def best(self) -> SiteLayout:
        """The layout at the knee."""
        return self.layouts[self.knee]


def build_objectives(
    sites: SiteGrid, traffic_bytes: Any, tdp_w: Any, sigma_mm: float
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Build the flow and distance matrices of L_comm and L_therm over all sites.

    Args:
        sites: M sites.
        traffic_bytes: Bytes from each chip to each other, [S, S].
        tdp_w: Power of each chip, W, [S].
        sigma_mm: Thermal interaction length, mm.

    Returns:
        Pairs of flow [M, M] and distance [M, M], float64, of L_comm and of L_therm.

    Raises:
        InputError: Shapes differ, a value is negative or not finite, there are more chips than sites, or
            sigma is not positive.
    """
    tdp, traffic = np.asarray(tdp_w, np.float64), np.asarray(traffic_bytes, np.float64)
    if tdp.ndim != 1 or not len(tdp) or traffic.shape != (len(tdp), len(tdp)):
        raise InputError(
            f"`tdp_w` has shape {tdp.shape} and `traffic_bytes` {traffic.shape}; expected [S] and "
            "[S, S] for S chips"
        )
    for name, values in (("tdp_w", tdp), ("traffic_bytes", traffic)):
        if not (np.isfinite(values) & (values >= 0.0)).all():
            raise InputError(f"`{name}` must be finite and at least 0; its minimum is {np.min(values)}")
    if len(tdp) > len(sites):
        raise InputError(f"{len(tdp)} chips do not fit on {len(sites)} sites; use fewer or smaller chips")
    check_positive(sigma_mm=sigma_mm)
    distances = sites.distances_mm
    warm = np.exp(-distances / sigma_mm)
    np.fill_diagonal(warm, 0.0)
    return (pad_flow(traffic + traffic.T, len(sites)), distances), (
        pad_flow(np.outer(tdp, tdp), len(sites)),
        warm,
    )


def compute_pareto_front(
    sites: SiteGrid,
    traffic_bytes: Any,
    tdp_w: Any,
    *,
    sigma_mm: float,
    weights: Sequence[float] = WEIGHTS,
    method: str = "tabu",
    restarts: int = 2,
    iterations: int | None = None,
    budget_s: float | None = None,
    seed: int = 0,
) -> LayoutFront:
    """Compute the Pareto front between shortest communication and lowest heat.

    Args:
        sites: M sites.
        traffic_bytes: Bytes from each chip to each other, [S, S].
        tdp_w: Power of each chip, W, [S].
        sigma_mm: Thermal interaction length, mm; `ThermalPackage.spread_mm` is a physical one.
        weights: Weights of L_therm from 0 to 1; 0 and 1 are moved inside by a thousandth.
        method: See `assign`.
        restarts: Restarts per weight; the first continues from the previous weight.
        iterations: See `assign`; by default 200 per site.
        budget_s: Time budget of the whole front, s.
        seed: Random seed.

    Raises:
        InputError: See `build_objectives`; or an argument is out of range.
        MissingExtraError: Numba or SciPy is missing.
    """
    if not weights or not all(0.0 <= weight <= 1.0 for weight in weights):
        raise InputError(f"`weights` (={tuple(weights)}) must be one or more numbers from 0 to 1")
    pairs = build_objectives(sites, traffic_bytes, tdp_w, sigma_mm)
    chips = len(np.asarray(tdp_w))
    grid_sites = sites.select_central(chips)
    scales = _layout_cost(pairs[0], grid_sites) or 1.0, _layout_cost(pairs[1], grid_sites) or 1.0
    flow = np.stack([pair[0] / scale for pair, scale in zip(pairs, scales, strict=True)])
    distance = np.stack([pair[1] for pair in pairs])

    def make_layout(assignment: np.ndarray, weight: float | None) -> SiteLayout:
        comm, therm = (
            _layout_cost(pair, assignment) / scale for pair, scale in zip(pairs, scales, strict=True)
        )
        return SiteLayout(assignment=assignment, comm=comm, therm=therm, weight=weight)

    free_sites = np.setdiff1d(np.arange(len(sites)), grid_sites)
    start = np.r_[grid_sites, free_sites]
    moves = DEFAULT_MOVES * len(sites) if iterations is None else iterations
    grid = make_layout(grid_sites, None)
    candidates = [grid]
    for weight in sorted(weights):
        clamped = min(max(weight, _MIN_WEIGHT), 1.0 - _MIN_WEIGHT)
        result = assign(
            flow * np.array([1.0 - clamped, clamped])[:, None, None],
            distance,
            method=method,
            restarts=restarts,
            iterations=moves,
            budget_s=None if budget_s is None else budget_s / len(weights),
            seed=seed,
            start=start,
        )
        start = result.permutation
        candidates += [make_layout(permutation[:chips], weight) for permutation in result.permutations]
    costs = [(candidate.comm, candidate.therm) for candidate in candidates]
    # The tolerance removes mirror images of a layout, which differ by rounding.
    front = pareto_front(costs, tolerance=1e-9)
    return LayoutFront(
        layouts=tuple(candidates[index] for index in front),
        knee=find_knee([costs[index] for index in front]),
        grid=grid,
        scales=scales,
    )


def find_knee(costs: Sequence[tuple[float, float]]) -> int:
    """Index of the point farthest below the line from the first to the last point.

    Args:
        costs: Points with ascending first and descending second coordinate.
    """
    points = np.array(costs, np.float64)
    extent = points.max(0) - points.min(0)
    if len(points) < 3 or not (extent > 0.0).all():
        return 0
    # After scaling the line goes from (0, 1) to (1, 0), and this is proportional to the distance below it.
    below = 1.0 - ((points - points.min(0)) / extent).sum(1)
    return int(below.argmax()) if below.max() > 0.0 else 0


def _layout_cost(pair: tuple[np.ndarray, np.ndarray], assignment: np.ndarray) -> float:
    """Cost of chips on sites; dummies cost nothing."""
    flow, distance = pair
    chips = len(assignment)
    return float((flow[:chips, :chips] * distance[np.ix_(assignment, assignment)]).sum())

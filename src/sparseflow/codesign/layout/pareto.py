"""Layouts between short ways and cool chips: a set of which none is better in both, and its knee.

Chips i at distances d from each other cost

    L_comm  = sum over i, j of (T + Tᵀ)[i, j] · d[i, j]                          T: traffic, bytes
    L_therm = sum over i ≠ j of tdp[i] · tdp[j] · exp(-d[i, j] / sigma)

Both are quadratic assignments of chips to sites, dummies on the sites that stay empty, and so is any weighted
sum of them (a stack of two). i = j is left out of L_therm: it is the same for every layout. Both are divided
by what a plain grid costs: the chips in the order given, row by row, on the sites nearest to the centre.

For each weight w the search minimises (1 - w) · L_comm + w · L_therm, each weight from the layout that the
last one found and from random ones. Every layout that any restart found is a candidate for the front.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparseflow.codesign.layout.qap.assignment import assign
from sparseflow.codesign.layout.qap.problem import padded
from sparseflow.codesign.layout.sites import Sites
from sparseflow.errors import InputError

WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

DEFAULT_MOVES = 200
"""Times the number of sites: moves of a restart by default. A tenth of what `assign` makes, since every
search goes on from a neighbour's."""

_LEAST = 1e-3
"""Weight that either objective keeps: at 0, of layouts that are alike in the other any would do."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Chips on sites, and what it costs.

    Attributes:
        assignment: Site of each chip, int64, [S].
        comm: L_comm, in that of the grid.
        therm: L_therm, likewise.
        weight: The weight of L_therm for which it was found; None for the grid.
    """

    assignment: np.ndarray
    comm: float
    therm: float
    weight: float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Front:
    """Layouts of which none is better than another in both objectives.

    Attributes:
        layouts: By rising L_comm, and so by falling L_therm; no two cost the same.
        knee: Which of them lies farthest below the line between the first and the last, both objectives
            scaled to 0 … 1; so it gives up least of either. The first where there are fewer than three, or
            where none lies below the line.
        grid: The plain grid; it costs 1 and 1 (0 where there is no traffic, or one chip only).
        scales: What L_comm (bytes · mm) and L_therm (W²) of the grid are; 1 where they are 0.
    """

    layouts: tuple[Layout, ...]
    knee: int
    grid: Layout
    scales: tuple[float, float]

    @property
    def best(self) -> Layout:
        """The knee."""
        return self.layouts[self.knee]


def objectives(
    sites: Sites, traffic_bytes: Any, tdp_w: Any, sigma_mm: float
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Flow and distance of L_comm and of L_therm, as quadratic assignments over all sites.

    Args:
        sites: M sites.
        traffic_bytes: From each chip to each, [S, S].
        tdp_w: Power of each chip, W, [S].
        sigma_mm: Distance over which chips warm each other.

    Returns:
        Twice flow [M, M] and distance [M, M], float64; those of L_comm, then those of L_therm.

    Raises:
        InputError: The arrays do not fit each other, hold what is no number or is negative, there are more
            chips than sites, or sigma is not above 0.
    """
    tdp, traffic = np.asarray(tdp_w, np.float64), np.asarray(traffic_bytes, np.float64)
    if tdp.ndim != 1 or not len(tdp) or traffic.shape != (len(tdp), len(tdp)):
        raise InputError(
            f"powers of shape {tdp.shape} and traffic of shape {traffic.shape} do not fit; give [S] and "
            "[S, S] for S chips"
        )
    for name, values in (("powers", tdp), ("traffic", traffic)):
        if not (np.isfinite(values) & (values >= 0.0)).all():
            raise InputError(f"{name} must be finite and 0 or more; the least given is {np.min(values)}")
    if len(tdp) > len(sites):
        raise InputError(
            f"{len(tdp)} chips do not fit on {len(sites)} sites; use fewer chips or smaller ones"
        )
    if not 0.0 < sigma_mm < np.inf:
        raise InputError(f"`sigma_mm` (={sigma_mm}) must be above 0 and finite")
    apart = sites.distances_mm
    warm = np.exp(-apart / sigma_mm)
    np.fill_diagonal(warm, 0.0)
    return (padded(traffic + traffic.T, len(sites)), apart), (padded(np.outer(tdp, tdp), len(sites)), warm)


def pareto_front(
    sites: Sites,
    traffic_bytes: Any,
    tdp_w: Any,
    *,
    sigma_mm: float,
    weights: Sequence[float] = WEIGHTS,
    method: str = "tabu",
    restarts: int = 2,
    iterations: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
) -> Front:
    """The layouts between the shortest ways and the coolest chips.

    Args:
        sites: M sites.
        traffic_bytes: From each chip to each, [S, S].
        tdp_w: Power of each chip, W, [S].
        sigma_mm: Distance over which chips warm each other; `Package.spread_mm` is a physical one.
        weights: Weights of L_therm, each from 0 to 1; 0 and 1 stand for a thousandth off.
        method: As in `assign`.
        restarts: For each weight; the first goes on from what the last weight found.
        iterations: As in `assign`; by default 200 for each site.
        seconds: For the whole front.
        seed: What the searches draw from.

    Raises:
        InputError: The arrays cannot be used (see `objectives`), or an argument is out of range.
        MissingExtraError: Numba or scipy is not installed.
    """
    if not weights or not all(0.0 <= weight <= 1.0 for weight in weights):
        raise InputError(f"`weights` (={tuple(weights)}) must be one or more numbers from 0 to 1")
    pairs = objectives(sites, traffic_bytes, tdp_w, sigma_mm)
    chips = len(np.asarray(tdp_w))
    plain = sites.middle(chips)
    scales = _cost(pairs[0], plain) or 1.0, _cost(pairs[1], plain) or 1.0
    flow = np.stack([pair[0] / scale for pair, scale in zip(pairs, scales, strict=True)])
    distance = np.stack([pair[1] for pair in pairs])

    def layout(assignment: np.ndarray, weight: float | None) -> Layout:
        comm, therm = (_cost(pair, assignment) / scale for pair, scale in zip(pairs, scales, strict=True))
        return Layout(assignment=assignment, comm=comm, therm=therm, weight=weight)

    rest = np.setdiff1d(np.arange(len(sites)), plain)
    start = np.r_[plain, rest]
    moves = DEFAULT_MOVES * len(sites) if iterations is None else iterations
    grid = layout(plain, None)
    found = [grid]
    for weight in sorted(weights):
        kept = min(max(weight, _LEAST), 1.0 - _LEAST)
        tried = assign(
            flow * np.array([1.0 - kept, kept])[:, None, None], distance, method=method, restarts=restarts,
            iterations=moves, seconds=None if seconds is None else seconds / len(weights), seed=seed,
            start=start,
        )  # fmt: skip
        start = tried.permutation
        found += [layout(permutation[:chips], weight) for permutation in tried.permutations]
    layouts = _undominated(found)
    return Front(
        layouts=layouts, knee=knee([(one.comm, one.therm) for one in layouts]), grid=grid, scales=scales
    )


def knee(costs: Sequence[tuple[float, float]]) -> int:
    """Which point of a front lies farthest below the line from its first to its last.

    Args:
        costs: By rising first and falling second.
    """
    points = np.array(costs, np.float64)
    extent = points.max(0) - points.min(0)
    if len(points) < 3 or not (extent > 0.0).all():
        return 0
    # Scaled so, the line goes from (0, 1) to (1, 0), and how far below it a point is grows with this.
    below = 1.0 - ((points - points.min(0)) / extent).sum(1)
    return int(below.argmax()) if below.max() > 0.0 else 0


def _undominated(found: Sequence[Layout]) -> tuple[Layout, ...]:
    """Those than which no other is at least as good in both, by rising L_comm."""
    kept: list[Layout] = []
    for one in sorted(found, key=lambda one: (one.comm, one.therm)):
        # By more than rounding, or mirror images of a layout would stand side by side.
        if not kept or one.therm < kept[-1].therm * (1.0 - 1e-9):
            kept.append(one)
    return tuple(kept)


def _cost(pair: tuple[np.ndarray, np.ndarray], assignment: np.ndarray) -> float:
    """What chips on these sites cost: dummies cost nothing."""
    flow, distance = pair
    chips = len(assignment)
    return float((flow[:chips, :chips] * distance[np.ix_(assignment, assignment)]).sum())

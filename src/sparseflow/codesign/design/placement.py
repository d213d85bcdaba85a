"""Where a decision's chips stand on the wafer: found, scored against a plain grid, and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparseflow.codesign.design.config import WaferSettings
from sparseflow.codesign.hardware.chips import ChipType
from sparseflow.codesign.layout import (
    Front,
    Wafer,
    WaferLayout,
    Weights,
    assign,
    grid_sites,
    pareto_front,
    refine,
)
from sparseflow.codesign.layout.pareto import objectives
from sparseflow.codesign.layout.sites import distances_mm
from sparseflow.core.extras import require

Positions = tuple[tuple[float, float], ...]

_ROOM = 4
"""Sites for each slot that are looked at: those nearest to the centre."""

_PASSES = 200
"""Of a search, for each site."""

_NOTHING = float(np.finfo(np.float64).tiny)
"""A term that costs no more on the plain grid is not there: nothing is sent, or no two chips are warm."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """How sites are searched; see `layout.assign`. None is what the wafer's settings, or the run, say.

    Attributes:
        method: `"auto"`, `"tabu"` or `"annealing"`.
        restarts: How many.
        seconds: For all of them; by default as long as they take.
        seed: What they draw from.
    """

    method: str = "auto"
    restarts: int | None = None
    seconds: float | None = None
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """What there is to place.

    Attributes:
        traffic_bytes: From each slot to each other, for each batch, float64 [S, S].
        sizes_mm: Width and height, [S, 2]; 0 where a slot is empty.
        tdp_w: Watts at full load, [S].
        names: Of what slots hold; None where they are empty.
    """

    traffic_bytes: np.ndarray
    sizes_mm: np.ndarray
    tdp_w: np.ndarray
    names: tuple[str | None, ...]

    @classmethod
    def of(cls, chips: Sequence[ChipType | None], traffic_bytes: np.ndarray | None = None) -> Drawn:
        """What slots hold, None where they are empty, and what they send each other; nothing by default."""
        return cls(
            traffic_bytes=np.zeros((len(chips), len(chips))) if traffic_bytes is None else traffic_bytes,
            sizes_mm=np.array([(0.0, 0.0) if chip is None else chip.size_mm for chip in chips]),
            tdp_w=np.array([0.0 if chip is None else chip.tdp_w for chip in chips]),
            names=tuple(None if chip is None else chip.name for chip in chips),
        )


class Places:
    """Sites of a wafer for slots that may hold any of some chips.

        L_layout = (w_comm L_comm + w_therm L_therm) / (w_comm + w_therm)

    with both terms over what they are on a plain grid (see `layout.pareto`). A term that is 0 there (L_comm
    where nothing is sent, L_therm where there is one chip) is left out, and its weight with it: L_layout is 1
    for the plain grid whatever is placed, and 0 where no place is better than another.

    Args:
        settings: The wafer, and what counts.
        slots: S.
        chips: What slots may hold; sites are made for the largest.
        seed: What searches draw from.

    Raises:
        InputError: There is not room for all slots; says for how many.
    """

    def __init__(
        self, settings: WaferSettings, slots: int, chips: Sequence[ChipType], *, seed: int = 0
    ) -> None:
        self._settings, self._slots, self._seed = settings, slots, seed
        self.wafer = Wafer(radius_mm=settings.radius_mm, margin_mm=settings.margin_mm)
        diagonals = [float(np.hypot(*chip.size_mm)) for chip in chips]
        self._largest = np.array(chips[int(np.argmax(diagonals))].size_mm)
        self.sites = grid_sites(self.wafer, [self._largest] * slots, most=max(_ROOM * slots, slots + 1))

    def grid(self) -> Positions:
        """Slots in order, row by row, on the sites nearest to the centre."""
        return self._positions(self.sites.middle(self._slots))

    def score(self, positions_mm: Sequence[tuple[float, float]], drawn: Drawn) -> float:
        """L_layout.

        Args:
            positions_mm: Of each slot.
            drawn: What there is to place.
        """
        apart = self._distances(np.asarray(positions_mm))
        return sum(
            factor * _cost(flow, each)
            for (flow, factor), each in zip(self._flows(drawn), apart, strict=True)
        )  # fmt: skip

    def loss(self, positions_mm: Sequence[tuple[float, float]], drawn: Drawn, there: Tensor) -> Tensor:
        """L_layout with chips that may be there, a scalar; what is off the wafer or overlaps costs more.

        Args:
            positions_mm: Of each slot.
            drawn: What there is to place.
            there: How likely each slot holds a chip, [S].
        """
        layout = self._layout(positions_mm, drawn)
        traffic, tdp = (torch.from_numpy(each).float() for each in (drawn.traffic_bytes, drawn.tdp_w))
        return layout(traffic, tdp, present=there)[0]

    def best(self, drawn: Drawn, search: Search | None = None) -> Positions:
        """The best places that a search over sites finds, and a refinement from there.

        The plain grid where nothing is better.

        Raises:
            InputError: `search` names no method, or a figure of it is out of range.
        """
        told, grid, how = self._settings, self.grid(), search or Search()
        pairs = objectives(self.sites, drawn.traffic_bytes, drawn.tdp_w, told.sigma_mm)
        flow = np.stack(
            [factor * pair[0] for pair, (_, factor) in zip(pairs, self._flows(drawn), strict=True)]
        )
        count = len(self.sites)
        plain = self.sites.middle(self._slots)
        start = np.concatenate([plain, np.setdiff1d(np.arange(count), plain)])
        found = assign(
            flow, np.stack([pair[1] for pair in pairs]), method=how.method,
            restarts=told.restarts if how.restarts is None else how.restarts, iterations=_PASSES * count,
            seconds=how.seconds, seed=self._seed if how.seed is None else how.seed, start=start,
        )  # fmt: skip
        tried = [grid, self._positions(found.permutation[: self._slots])]
        if told.refine_steps:
            tried.append(self._refined(min(tried, key=lambda each: self.score(each, drawn)), drawn))
        return min(tried, key=lambda each: self.score(each, drawn))

    def _refined(self, positions: Positions, drawn: Drawn) -> Positions:
        layout = self._layout(positions, drawn)
        traffic, tdp = (torch.from_numpy(each).float() for each in (drawn.traffic_bytes, drawn.tdp_w))
        there = torch.tensor([name is not None for name in drawn.names], dtype=torch.float32)
        found = refine(layout, traffic, tdp, present=there, steps=self._settings.refine_steps)
        if not found.improved:
            return positions
        return tuple((float(x), float(y)) for x, y in layout.positions_mm.tolist())

    def _layout(self, positions: Sequence[tuple[float, float]], drawn: Drawn) -> WaferLayout:
        """The layout as one that can be differentiated, its loss L_layout."""
        told, traffic, tdp = self._settings, float(drawn.traffic_bytes.sum()), float(drawn.tdp_w.sum())
        (_, comm), (_, therm) = self._flows(drawn)
        weights = Weights(comm=comm * 2.0 * traffic * self.wafer.radius_mm, therm=therm * tdp**2)
        return WaferLayout(
            self.wafer, np.where(drawn.sizes_mm > 0.0, drawn.sizes_mm, self._largest), positions_mm=positions,
            sigma_mm=told.sigma_mm, weights=weights, traffic_total_bytes=traffic or 1.0,
            tdp_total_w=tdp or 1.0,
        )  # fmt: skip

    def with_room(self, positions_mm: Positions, drawn: Drawn) -> Positions:
        """The same places where chips have room there; else the sites that are nearest to them."""
        layout = self._layout(positions_mm, drawn)
        there = torch.tensor([name is not None for name in drawn.names])
        if layout.legal(present=there):
            return positions_mm
        solve = require("scipy.optimize", "codesign").linear_sum_assignment
        apart = np.asarray(positions_mm)[:, None] - self.sites.positions_mm[None]
        return self._positions(solve((apart**2).sum(-1))[1])

    def front(self, drawn: Drawn) -> Front:
        """Layouts between short ways and cool chips."""
        return pareto_front(
            self.sites, drawn.traffic_bytes, drawn.tdp_w, sigma_mm=self._settings.sigma_mm, restarts=1,
            iterations=_PASSES * len(self.sites), seed=self._seed,
        )  # fmt: skip

    def _flows(self, drawn: Drawn) -> list[tuple[np.ndarray, float]]:
        """Of communication and heat: who should be near to or far from whom, [S, S], and how much it counts.

        What it counts is its share of the weights over what it costs on the plain grid; 0 where that is 0.
        """
        told = self._settings
        flows = (drawn.traffic_bytes + drawn.traffic_bytes.T, np.outer(drawn.tdp_w, drawn.tdp_w))
        plain = self._distances(np.asarray(self.grid()))
        costs = [_cost(flow, apart) for flow, apart in zip(flows, plain, strict=True)]
        weights = [
            weight if cost > _NOTHING else 0.0
            for weight, cost in zip((told.w_comm, told.w_therm), costs, strict=True)
        ]
        whole = sum(weights)
        return [
            (flow, weight / (whole * cost) if weight else 0.0)
            for flow, weight, cost in zip(flows, weights, costs, strict=True)
        ]

    def _distances(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        apart = distances_mm(positions)
        warm = np.exp(-apart / self._settings.sigma_mm)
        np.fill_diagonal(warm, 0.0)
        return apart, warm

    def _positions(self, sites: np.ndarray) -> Positions:
        return tuple((float(x), float(y)) for x, y in self.sites.positions_mm[sites])


def _cost(flow: np.ndarray, apart: np.ndarray) -> float:
    return float((flow * apart).sum())

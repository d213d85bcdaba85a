"""Where a decision's chips stand on the wafer: found, scored against a plain grid, and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflow.codesign.chips import ChipType
from sparseflow.codesign.layout import (
    Front,
    Wafer,
    WaferLayout,
    Weights,
    assign,
    grid_sites,
    pareto_front,
    refine,
    temperatures,
    wafer_picture,
)
from sparseflow.codesign.layout.pareto import objectives
from sparseflow.codesign.layout.sites import distances_mm
from sparseflow.codesign.settings import WaferSettings
from sparseflow.core.extras import require
from sparseflow.core.report import Figure

Positions = tuple[tuple[float, float], ...]

_ROOM = 4
"""Sites for each slot that are looked at: those nearest to the centre."""

_PASSES = 200
"""Of a search, for each site."""


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


class Places:
    """Sites of a wafer for slots that may hold any of some chips.

    L_layout = (w_comm L_comm + w_therm L_therm) / (w_comm + w_therm), both over those of a plain grid.

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
        """L_layout; 1 for the plain grid.

        Args:
            positions_mm: Of each slot.
            drawn: What there is to place.
        """
        terms = [
            _cost(flow, apart) / scale for (flow, scale), apart in zip(
                self._flows(drawn), self._distances(np.asarray(positions_mm)), strict=True
            )
        ]  # fmt: skip
        return self._weighed(terms[0], terms[1])

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

    def best(self, drawn: Drawn) -> Positions:
        """The best places that a search over sites finds, and a refinement from there.

        The plain grid where nothing is better.
        """
        told, grid = self._settings, self.grid()
        pairs = objectives(self.sites, drawn.traffic_bytes, drawn.tdp_w, told.sigma_mm)
        flow = np.stack([
            weight * pair[0] / scale for pair, weight, (_, scale) in zip(
                pairs, (told.w_comm, told.w_therm), self._flows(drawn), strict=True
            )
        ])  # fmt: skip
        count = len(self.sites)
        plain = self.sites.middle(self._slots)
        start = np.concatenate([plain, np.setdiff1d(np.arange(count), plain)])
        found = assign(
            flow, np.stack([pair[1] for pair in pairs]), restarts=told.restarts,
            iterations=_PASSES * count, seed=self._seed, start=start,
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
        whole = (told.w_comm + told.w_therm) or 1.0
        weights = Weights(
            comm=told.w_comm * 2.0 * (traffic or 1.0) * self.wafer.radius_mm / (comm * whole),
            therm=told.w_therm * (tdp or 1.0) ** 2 / (therm * whole),
        )
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

    def picture(
        self, positions_mm: Sequence[tuple[float, float]], drawn: Drawn, power_w: np.ndarray
    ) -> Figure:
        """The wafer from above.

        Args:
            positions_mm: Of each slot.
            drawn: What is placed.
            power_w: Watts of each slot, on average, [S].
        """
        held = [slot for slot, name in enumerate(drawn.names) if name is not None]
        places, sizes = np.asarray(positions_mm)[held], drawn.sizes_mm[held]
        return wafer_picture(
            self.wafer, places, sizes, names=[f"{slot}: {drawn.names[slot]}" for slot in held],
            traffic_bytes=drawn.traffic_bytes[np.ix_(held, held)],
            heat=temperatures(self.wafer, places, sizes, power_w[held]), title="The wafer",
            caption="Links are as wide as their traffic; colours are steady-state temperatures at the power "
            "that the plan draws.",
        )  # fmt: skip

    def _flows(self, drawn: Drawn) -> list[tuple[np.ndarray, float]]:
        """Who should be near to whom, [S, S], and what that costs on the plain grid."""
        flows = (drawn.traffic_bytes + drawn.traffic_bytes.T, np.outer(drawn.tdp_w, drawn.tdp_w))
        plain = self._distances(np.asarray(self.grid()))
        return [(flow, _cost(flow, apart) or 1.0) for flow, apart in zip(flows, plain, strict=True)]

    def _distances(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        apart = distances_mm(positions)
        warm = np.exp(-apart / self._settings.sigma_mm)
        np.fill_diagonal(warm, 0.0)
        return apart, warm

    def _weighed(self, comm: Any, therm: Any) -> Any:
        told = self._settings
        return (told.w_comm * comm + told.w_therm * therm) / ((told.w_comm + told.w_therm) or 1.0)

    def _positions(self, sites: np.ndarray) -> Positions:
        return tuple((float(x), float(y)) for x, y in self.sites.positions_mm[sites])


def _cost(flow: np.ndarray, apart: np.ndarray) -> float:
    return float((flow * apart).sum())

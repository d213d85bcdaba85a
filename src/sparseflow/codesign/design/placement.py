"""Placement of a decision's chips on the wafer, scored against a plain grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparseflow.codesign.design.config import WaferConfig
from sparseflow.codesign.hardware.chips import ChipType
from sparseflow.codesign.layout.pareto import LayoutFront, build_objectives, compute_pareto_front
from sparseflow.codesign.layout.qap.assignment import assign
from sparseflow.codesign.layout.sites import Wafer, build_site_grid, pairwise_distances_mm
from sparseflow.codesign.layout.wafer import LayoutWeights, WaferLayout, refine_layout
from sparseflow.core.extras import require

Positions = tuple[tuple[float, float], ...]

_SITES_PER_SLOT = 4
"""Number of central sites per slot to search."""

_ITERATIONS_PER_SITE = 200
"""Iterations of a search per site."""

_MIN_GRID_COST = float(np.finfo(np.float64).tiny)
"""Terms that cost no more on the plain grid are omitted (no traffic, or a single chip)."""


@dataclass(frozen=True, kw_only=True)
class PlacementSearch:
    """Settings of the site search; see `layout.assign`. None selects the value of the config.

    Attributes:
        method: `"auto"`, `"tabu"` or `"annealing"`.
        restarts: Number of restarts.
        budget_s: Time budget of all restarts, s; none by default.
        seed: Random seed.
    """

    method: str = "auto"
    restarts: int | None = None
    budget_s: float | None = None
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacementProblem:
    """Chips to place and their traffic.

    Attributes:
        traffic_bytes: Bytes from each slot to each other per batch, float64 [S, S].
        sizes_mm: Width and height, mm, [S, 2]; 0 for an empty slot.
        tdp_w: Power at full load, W, [S].
        names: Chip type of each slot; None for an empty slot.
    """

    traffic_bytes: np.ndarray
    sizes_mm: np.ndarray
    tdp_w: np.ndarray
    names: tuple[str | None, ...]

    @classmethod
    def from_chips(
        cls, chips: Sequence[ChipType | None], traffic_bytes: np.ndarray | None = None
    ) -> PlacementProblem:
        """Build the problem of these chips and their traffic (none by default)."""
        return cls(
            traffic_bytes=np.zeros((len(chips), len(chips))) if traffic_bytes is None else traffic_bytes,
            sizes_mm=np.array([(0.0, 0.0) if chip is None else chip.size_mm for chip in chips]),
            tdp_w=np.array([0.0 if chip is None else chip.tdp_w for chip in chips]),
            names=tuple(None if chip is None else chip.name for chip in chips),
        )

    @property
    def occupancy(self) -> Tensor:
        """1 for slots with a chip and 0 for empty slots, float32 [S]."""
        return torch.tensor([float(name is not None) for name in self.names])

    def to_tensors(self) -> tuple[Tensor, Tensor]:
        """Traffic and power, float32."""
        return torch.from_numpy(self.traffic_bytes).float(), torch.from_numpy(self.tdp_w).float()


class ChipPlacer:
    """Places chips of given types on the sites of a wafer.

        L_layout = (w_comm L_comm + w_therm L_therm) / (w_comm + w_therm)

    Both terms are relative to the plain grid (see `layout.pareto`). A term that is 0 there (L_comm without
    traffic, L_therm with one chip) is omitted together with its weight: L_layout is 1 for the plain grid, and
    0 if all placements are equivalent.

    Args:
        config: Wafer and weights.
        num_slots: Number of slots, S.
        chips: Available chip types; sites fit the largest.
        seed: Random seed of searches.

    Raises:
        InputError: The slots do not fit on the wafer.
    """

    def __init__(
        self, config: WaferConfig, num_slots: int, chips: Sequence[ChipType], *, seed: int = 0
    ) -> None:
        self._config, self._num_slots, self._seed = config, num_slots, seed
        self.wafer = Wafer(radius_mm=config.radius_mm, margin_mm=config.margin_mm)
        diagonals = [float(np.hypot(*chip.size_mm)) for chip in chips]
        self._largest = np.array(chips[int(np.argmax(diagonals))].size_mm)
        self.site_grid = build_site_grid(
            self.wafer, [self._largest] * num_slots, max_sites=max(_SITES_PER_SLOT * num_slots, num_slots + 1)
        )

    def grid_positions(self) -> Positions:
        """Positions of the plain grid: slots in order, row by row, on the central sites."""
        return self._site_positions(self.site_grid.select_central(self._num_slots))

    def compute_loss(self, positions_mm: Sequence[tuple[float, float]], problem: PlacementProblem) -> float:
        """Compute L_layout.

        Args:
            positions_mm: Position of each slot, mm.
            problem: Chips and traffic.
        """
        distances = self._distance_matrices(np.asarray(positions_mm))
        return sum(
            factor * float((flow * distance).sum())
            for (flow, factor), distance in zip(self._weighted_flows(problem), distances, strict=True)
        )  # fmt: skip

    def differentiable_loss(
        self, positions_mm: Sequence[tuple[float, float]], problem: PlacementProblem, occupancy: Tensor
    ) -> Tensor:
        """Compute L_layout with uncertain chips, plus penalties for boundary and overlap; a scalar.

        Args:
            positions_mm: Position of each slot, mm.
            problem: Chips and traffic.
            occupancy: Probability that each slot contains a chip, [S].
        """
        return self._make_layout(positions_mm, problem)(*problem.to_tensors(), present=occupancy)[0]

    def optimize(self, problem: PlacementProblem, search: PlacementSearch | None = None) -> Positions:
        """Search sites, refine the result, and return the best positions, at worst the plain grid.

        Raises:
            InputError: `search` contains an unknown method or a value out of range.
        """
        config, grid, options = self._config, self.grid_positions(), search or PlacementSearch()
        pairs = build_objectives(self.site_grid, problem.traffic_bytes, problem.tdp_w, config.sigma_mm)
        flow = np.stack(
            [factor * pair[0] for pair, (_, factor) in zip(pairs, self._weighted_flows(problem), strict=True)]
        )
        count = len(self.site_grid)
        grid_indices = self.site_grid.select_central(self._num_slots)
        start = np.concatenate([grid_indices, np.setdiff1d(np.arange(count), grid_indices)])
        result = assign(
            flow,
            np.stack([pair[1] for pair in pairs]),
            method=options.method,
            restarts=config.restarts if options.restarts is None else options.restarts,
            iterations=_ITERATIONS_PER_SITE * count,
            budget_s=options.budget_s,
            seed=self._seed if options.seed is None else options.seed,
            start=start,
        )

        def loss(positions: Positions) -> float:
            return self.compute_loss(positions, problem)

        best = min(grid, self._site_positions(result.permutation[: self._num_slots]), key=loss)
        return min(best, self._refine(best, problem), key=loss) if config.refine_steps else best

    def _refine(self, positions: Positions, problem: PlacementProblem) -> Positions:
        layout = self._make_layout(positions, problem)
        result = refine_layout(
            layout, *problem.to_tensors(), present=problem.occupancy, steps=self._config.refine_steps
        )
        return tuple((x, y) for x, y in layout.positions_mm.tolist()) if result.improved else positions

    def _make_layout(
        self, positions: Sequence[tuple[float, float]], problem: PlacementProblem
    ) -> WaferLayout:
        """Create a differentiable layout whose loss is L_layout."""
        config, traffic, tdp = self._config, float(problem.traffic_bytes.sum()), float(problem.tdp_w.sum())
        (_, comm), (_, therm) = self._weighted_flows(problem)
        weights = LayoutWeights(comm=comm * 2.0 * traffic * self.wafer.radius_mm, therm=therm * tdp**2)
        return WaferLayout(
            self.wafer,
            np.where(problem.sizes_mm > 0.0, problem.sizes_mm, self._largest),
            positions_mm=positions,
            sigma_mm=config.sigma_mm,
            weights=weights,
            traffic_total_bytes=traffic or 1.0,
            tdp_total_w=tdp or 1.0,
        )

    def legalize(self, positions_mm: Positions, problem: PlacementProblem) -> Positions:
        """Keep the positions if all chips fit there; otherwise move them to the closest sites."""
        layout = self._make_layout(positions_mm, problem)
        if layout.is_legal(present=problem.occupancy):
            return positions_mm
        solve = require("scipy.optimize", "codesign").linear_sum_assignment
        offsets = np.asarray(positions_mm)[:, None] - self.site_grid.positions_mm[None]
        return self._site_positions(solve((offsets**2).sum(-1))[1])

    def compute_front(self, problem: PlacementProblem) -> LayoutFront:
        """Compute the Pareto front between communication and heat."""
        return compute_pareto_front(
            self.site_grid, problem.traffic_bytes, problem.tdp_w, sigma_mm=self._config.sigma_mm, restarts=1,
            iterations=_ITERATIONS_PER_SITE * len(self.site_grid), seed=self._seed,
        )  # fmt: skip

    def _weighted_flows(self, problem: PlacementProblem) -> list[tuple[np.ndarray, float]]:
        """Flows of communication and heat, [S, S], with factor weight / cost on the plain grid; 0 if that
        cost is 0.
        """
        config = self._config
        flows = (problem.traffic_bytes + problem.traffic_bytes.T, np.outer(problem.tdp_w, problem.tdp_w))
        grid_distances = self._distance_matrices(np.asarray(self.grid_positions()))
        costs = [float((flow * distance).sum()) for flow, distance in zip(flows, grid_distances, strict=True)]
        weights = [
            weight if cost > _MIN_GRID_COST else 0.0
            for weight, cost in zip((config.w_comm, config.w_therm), costs, strict=True)
        ]
        total_weight = sum(weights)
        return [
            (flow, weight / (total_weight * cost) if weight else 0.0)
            for flow, weight, cost in zip(flows, weights, costs, strict=True)
        ]

    def _distance_matrices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        distances = pairwise_distances_mm(positions)
        coupling = np.exp(-distances / self._config.sigma_mm)
        np.fill_diagonal(coupling, 0.0)
        return distances, coupling

    def _site_positions(self, sites: np.ndarray) -> Positions:
        return tuple((float(x), float(y)) for x, y in self.site_grid.positions_mm[sites])

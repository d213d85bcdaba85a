"""Search for splits that pay off: candidates, slots and sizes, each evaluated with the full plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from pydantic import with_config

from sparseflow.codesign.partition.objective import (
    HwStats,
    LayerCosts,
    ObjectiveWeights,
    PartCosts,
    evaluate_plan,
    is_feasible,
)
from sparseflow.codesign.workload.layers import to_float
from sparseflow.codesign.workload.segments import SegmentGraph, build_chain
from sparseflow.codesign.workload.splits import LayerSplit
from sparseflow.core.checks import check_at_least, check_non_negative
from sparseflow.core.config import StrictModel
from sparseflow.core.layers import LayerNode
from sparseflow.errors import InputError

LayerSplits = Mapping[int, tuple[LayerSplit, PartCosts]]
UnitOrders = Callable[[int], Sequence[int]]
PartCostFunction = Callable[[LayerNode, Sequence[int], Sequence[int]], PartCosts]
"""Computes the cost of the parts of a layer from their sizes and slots."""

_MIN_RELATIVE_DECREASE = 1e-12
"""Relative decrease of the objective that counts as an improvement."""


@with_config(StrictModel.model_config)
@dataclass(frozen=True, kw_only=True)
class PartitionConfig:
    """Criteria for splits and weights of the objective; names are those of the config.

    Attributes:
        w_latency: Weight of `total_latency_ms`.
        w_comm: Weight of `comm_ms`.
        w_balance: Weight of `imbalance_ms`.
        min_split_gain_ratio: Minimum gain of a split, (before - after) / before of the objective.
        flops_ratio_thresh: Layers with this fraction of all FLOPs are candidates.
        traffic_ratio_thresh: Layers with this fraction of all traffic are candidates.
        max_split_layers: Maximum number of split layers.
        max_groups_per_layer: Maximum number of parts per layer.
        max_new_segments: Maximum number of additional parts in total.
        segments: Maximum number of coarse segments.
        max_slots_tried: Number of least busy slots considered for parts.
    """

    w_latency: float = 1.0
    w_comm: float = 0.1
    w_balance: float = 0.1
    min_split_gain_ratio: float = 0.05
    flops_ratio_thresh: float = 0.05
    traffic_ratio_thresh: float = 0.2
    max_split_layers: int = 4
    max_groups_per_layer: int = 4
    max_new_segments: int = 8
    segments: int = 12
    max_slots_tried: int = 5

    def __post_init__(self) -> None:
        check_non_negative(**vars(self))
        check_at_least(2, max_groups_per_layer=self.max_groups_per_layer)
        check_at_least(1, segments=self.segments)


@dataclass(frozen=True, kw_only=True)
class SplitEvaluation:
    """An evaluated split.

    Attributes:
        round: Round of the search, from 1; each starts from the splits accepted before.
        layer: Index of the layer.
        name: Name of the layer.
        sizes: Units of each part.
        slots: Slot of each part.
        segments_moved: Whether segments were moved to make room, which is done for the best split of each
            number of parts.
        objective_before: Objective of the plan without the split.
        objective_after: Objective with the split; None if it is infeasible.
    """

    round: int
    layer: int
    name: str
    sizes: tuple[int, ...]
    slots: tuple[int, ...]
    segments_moved: bool
    objective_before: float
    objective_after: float | None

    @property
    def gain_ratio(self) -> float | None:
        """(before - after) / before; None if the split is infeasible."""
        return (
            None if self.objective_after is None else _gain_ratio(self.objective_before, self.objective_after)
        )


@dataclass(frozen=True, kw_only=True)
class SplitDecision:
    """Decision about the best split of a layer in a round.

    Attributes:
        layer: Index of the layer.
        name: Name of the layer.
        sizes: Units of each part.
        slots: Slot of each part.
        objective_before: Objective of the plan without the split.
        objective_after: Objective with the split, after segments were moved.
        gain_ratio: (before - after) / before.
        accepted: Whether the plan contains the split.
    """

    layer: int
    name: str
    sizes: tuple[int, ...]
    slots: tuple[int, ...]
    objective_before: float
    objective_after: float
    gain_ratio: float
    accepted: bool


@dataclass(frozen=True, kw_only=True)
class PartialPlan:
    """A plan during the search.

    Attributes:
        mapping: Slot of each segment.
        stats: Cost of the plan.
        splits: Layer -> its split and the cost of the parts.
        decisions: Decisions about the best split of each layer in each round.
        evaluations: All evaluated splits, in order.
    """

    mapping: tuple[int, ...]
    stats: HwStats
    splits: LayerSplits = field(default_factory=dict)
    decisions: tuple[SplitDecision, ...] = ()
    evaluations: tuple[SplitEvaluation, ...] = ()


class SplitSearch:
    """Searches plans of one model on given slots.

    Args:
        costs: Cost of each layer on each slot.
        graph: Coarse segments, a chain of all layers.
        weights: Weights of the objective.
        config: Criteria for splits.
        part_costs: Computes the cost of parts.

    Raises:
        InputError: The segments are no chain of the layers.
    """

    def __init__(
        self,
        costs: LayerCosts,
        graph: SegmentGraph,
        weights: ObjectiveWeights,
        config: PartitionConfig,
        part_costs: PartCostFunction,
    ) -> None:
        if (
            build_chain(costs.layers, [(segment.layer_ids or (-1,))[0] for segment in graph.segments])
            != graph
        ):
            raise InputError(
                "the segments and edges are no chain of the layers; models with branches are not supported, "
                "so build the segments with `build_chain`"
            )
        self._costs, self._graph, self._weights = costs, graph, weights
        self._config, self._part_costs = config, part_costs
        self._segment = {layer: segment.id for segment in graph.segments for layer in segment.layer_ids}

    def assign_layers(self, mapping: Sequence[int]) -> tuple[int, ...]:
        """Slot of each layer."""
        return tuple(mapping[self._segment[layer]] for layer in range(len(self._costs.layers)))

    def evaluate(self, mapping: Sequence[int], splits: LayerSplits) -> HwStats | None:
        """Cost of a plan; None if it is infeasible."""
        assignment = self.assign_layers(mapping)
        if not is_feasible(self._costs, assignment, splits):
            return None
        return evaluate_plan(self._costs, assignment, splits, self._weights)

    def improve_mapping(self, mapping: Sequence[int], splits: LayerSplits) -> tuple[tuple[int, ...], HwStats]:
        """Move single segments to other slots while that lowers the objective.

        Segments with a split layer stay, because their parts were sized for their slot.
        """
        current, best = list(mapping), self.evaluate(mapping, splits)
        assert best is not None
        fixed_segments = {self._segment[layer] for layer in splits}
        improved = True
        while improved:
            improved = False
            for segment in range(len(current)):
                for slot in range(self._costs.num_slots):
                    if segment in fixed_segments or slot == current[segment]:
                        continue
                    candidate = [*current[:segment], slot, *current[segment + 1 :]]
                    stats = self.evaluate(candidate, splits)
                    if stats is not None and _is_lower(stats.objective, best.objective):
                        current, best, improved = candidate, stats, True
        return tuple(current), best

    def accept_splits(self, current: PartialPlan, unit_orders: UnitOrders | None) -> PartialPlan:
        """Accept splits one at a time, best first, while the gain suffices."""
        config, decisions, evaluations = self._config, list(current.decisions), list(current.evaluations)
        candidates = self.find_candidates()
        while candidates and len(current.splits) < config.max_split_layers:
            num_added = sum(len(split.slots) - 1 for split, _ in current.splits.values())
            proposals = []
            for layer in candidates:
                best, evaluated = self._find_best_split(
                    layer, current, config.max_new_segments - num_added, unit_orders
                )
                evaluations += evaluated
                if best is not None:
                    proposals.append((best.stats.objective, layer, best))
            if not proposals:
                break
            objective, best_layer, best = min(proposals, key=lambda proposal: proposal[:2])
            before = current.stats.objective
            accepted = _gain_ratio(before, objective) >= config.min_split_gain_ratio and _is_lower(
                objective, before
            )
            for after, layer, plan in proposals:
                split = plan.splits[layer][0]
                item = SplitDecision(
                    layer=layer, name=self._costs.layers[layer].name, sizes=split.sizes, slots=split.slots,
                    objective_before=before, objective_after=after, gain_ratio=_gain_ratio(before, after),
                    accepted=accepted and layer == best_layer,
                )  # fmt: skip
                decisions.append(item)
            if not accepted:
                break
            current = best
            candidates.remove(best_layer)
        return PartialPlan(
            mapping=current.mapping, stats=current.stats, splits=current.splits, decisions=tuple(decisions),
            evaluations=tuple(evaluations),
        )  # fmt: skip

    def find_candidates(self) -> list[int]:
        """Indices of splittable layers with enough of the FLOPs or traffic."""
        layers, config = self._costs.layers, self._config
        work = sum(to_float(layer.flops) for layer in layers)
        traffic = sum(layer.traffic_out_bytes for layer in layers)

        def exceeds_share(value: float, total: float, threshold: float) -> bool:
            # A total of 0 has no shares.
            return total > 0.0 and value >= threshold * total

        return [
            layer.id
            for layer in layers
            if layer.splittable
            and layer.units >= 2
            and (
                exceeds_share(to_float(layer.flops), work, config.flops_ratio_thresh)
                or exceeds_share(layer.traffic_out_bytes, traffic, config.traffic_ratio_thresh)
            )
        ]

    def _find_best_split(
        self, layer: int, current: PartialPlan, max_new_parts: int, unit_orders: UnitOrders | None
    ) -> tuple[PartialPlan | None, list[SplitEvaluation]]:
        """The best plan that also splits this layer (None if infeasible), and all evaluated splits."""
        node, config = self._costs.layers[layer], self._config
        home = self.assign_layers(current.mapping)[layer]
        order = list(range(node.units)) if unit_orders is None else list(unit_orders(layer))
        evaluated: list[SplitEvaluation] = []
        best: dict[int, tuple[HwStats, LayerSplits]] = {}

        def record(split: LayerSplit, stats: HwStats | None, *, moved: bool) -> None:
            evaluated.append(
                SplitEvaluation(
                    round=1 + len(current.splits), layer=layer, name=node.name, sizes=split.sizes,
                    slots=split.slots, segments_moved=moved, objective_before=current.stats.objective,
                    objective_after=None if stats is None else stats.objective,
                )
            )  # fmt: skip

        for slots in self._enumerate_slots(
            home, current, min(config.max_groups_per_layer - 1, max_new_parts, node.units - 1)
        ):
            for sizes in self._compute_sizes(node, slots):
                split = LayerSplit(layer=layer, permutation=tuple(order), sizes=sizes, slots=slots)
                splits = {**current.splits, layer: (split, self._part_costs(node, sizes, slots))}
                stats = self.evaluate(current.mapping, splits)
                record(split, stats, moved=False)
                incumbent = best.get(len(slots))
                if stats is not None and (incumbent is None or stats.objective < incumbent[0].objective):
                    best[len(slots)] = stats, splits
        # The best number of groups is only known after segments have made room for the parts.
        plans = []
        for _, splits in best.values():
            mapping, stats = self.improve_mapping(current.mapping, splits)
            record(splits[layer][0], stats, moved=True)
            plans.append(PartialPlan(mapping=mapping, stats=stats, splits=splits))
        return min(plans, key=lambda plan: plan.stats.objective, default=None), evaluated

    def _enumerate_slots(self, home: int, current: PartialPlan, max_others: int) -> Iterator[tuple[int, ...]]:
        """The home slot with up to `max_others` of the least busy other slots."""
        candidates = [
            slot for slot in range(self._costs.num_slots) if slot != home and self._costs.limit_mb[slot] > 0
        ]
        candidates.sort(key=lambda slot: (current.stats.busy_ms[slot], slot))
        for count in range(1, max_others + 1):
            for other_slots in itertools.combinations(candidates[: self._config.max_slots_tried], count):
                yield (home, *other_slots)

    def _compute_sizes(self, node: LayerNode, slots: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Candidate sizes of the parts: sizes with equal end times, and equal sizes."""
        costs, network = self._costs, self._costs.network
        layer_ms = costs.latency_ms[node.id, list(slots)]
        if not np.isfinite(layer_ms).all() or node.units < len(slots):
            return []
        transfer_ms = np.array(
            [
                network.time_ms(slots[0], slot, node.split_in_bytes)
                + network.time_ms(slot, slots[0], node.split_out_bytes)
                for slot in slots
            ]
        )
        if not np.isfinite(transfer_ms).all():
            return []
        rate = 1.0 / np.maximum(layer_ms, 1e-12)  # layers per ms
        # All parts end at T: sum of (T - transfer_ms) * rate = 1.
        end_ms = (1.0 + float(rate @ transfer_ms)) / float(rate.sum())
        targets = np.maximum((end_ms - transfer_ms) * rate, 0.0) * node.units
        even = np.full(len(slots), node.units / len(slots))
        return list(dict.fromkeys((_round_sizes(targets, node.units), _round_sizes(even, node.units))))


def _round_sizes(targets: np.ndarray, units: int) -> tuple[int, ...]:
    """Round to integers of at least 1 that sum to `units`."""
    targets = targets * (units / targets.sum())  # clipping at 0 increased the sum
    sizes = np.maximum(np.floor(targets), 1.0).astype(int)
    while sizes.sum() != units:
        too_few = sizes.sum() < units
        residual = targets - sizes
        if not too_few:
            residual = np.where(sizes > 1, residual, np.inf)
        sizes[int(residual.argmax() if too_few else residual.argmin())] += 1 if too_few else -1
    return tuple(sizes.tolist())


def _gain_ratio(before: float, after: float) -> float:
    return (before - after) / before if before > 0.0 else 0.0


def _is_lower(after: float, before: float) -> bool:
    return after < before - _MIN_RELATIVE_DECREASE * abs(before)

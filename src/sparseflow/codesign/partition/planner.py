"""PartitionPlanner: maps layers to slots and splits layers over several slots where that pays off.

1. Layers are grouped into coarse segments, the solver maps them to slots, and single segments are moved while
   that lowers the objective. The result is the coarse plan.
2. With fine splits, layers with a large share of FLOPs or traffic are candidates. For each, all numbers of
   groups on the least busy slots are evaluated, with sizes such that all parts end at about the same time.
3. The best split is accepted if the full plan, with segments moved again, gains at least
   `min_split_gain_ratio`; then the remaining candidates are evaluated on top of it. `rewrite_plan` is None if
   no split was accepted.

All evaluated splits are recorded with objective and gain. The log contains the best split of each layer and
round and the result at `log_level`, all others at DEBUG.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sparseflow.codesign.hardware.chips import ChipType
from sparseflow.codesign.hardware.network import Network
from sparseflow.codesign.hardware.proxy import LayerHwProxy
from sparseflow.codesign.mapping.problem import MappingProblem
from sparseflow.codesign.mapping.solver import MappingSolver
from sparseflow.codesign.partition.objective import (
    ROUNDING_MB,
    HwStats,
    LayerCosts,
    ObjectiveWeights,
    PartCosts,
)
from sparseflow.codesign.partition.split_search import (
    PartCostFunction,
    PartialPlan,
    PartitionConfig,
    SplitDecision,
    SplitEvaluation,
    SplitSearch,
    UnitOrders,
)
from sparseflow.codesign.workload.layers import slice_layer
from sparseflow.codesign.workload.segments import SegmentGraph, build_balanced_chain
from sparseflow.codesign.workload.splits import LayerSplit, RewritePlan
from sparseflow.core.layers import LayerNode
from sparseflow.errors import InputError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class PartitionPlan:
    """Result of the planner.

    Attributes:
        segments: Coarse segments, in order.
        mapping: Slot of each segment.
        assignment: Slot of each layer.
        rewrite_plan: Accepted splits; None if there are none.
        hw_stats: Cost of the plan.
        coarse_stats: Cost without splits.
        split_decisions: Decisions about the best split of each layer in each round.
        lower_bound_ms: Lower bound of `total_latency_ms` for mappings of these segments without splits, ms.
        gap: (coarse latency - bound) / coarse latency.
        finished: Whether the solver ended before its time limit.
        weights: Weights of the objective.
        part_costs: Layer -> cost of its parts.
        split_evaluations: All evaluated splits, in order.
    """

    segments: SegmentGraph
    mapping: tuple[int, ...]
    assignment: tuple[int, ...]
    rewrite_plan: RewritePlan | None
    hw_stats: HwStats
    coarse_stats: HwStats
    split_decisions: tuple[SplitDecision, ...]
    lower_bound_ms: float
    gap: float
    finished: bool
    weights: ObjectiveWeights
    part_costs: Mapping[int, PartCosts] = field(default_factory=dict)
    split_evaluations: tuple[SplitEvaluation, ...] = ()

    @property
    def splits(self) -> dict[int, tuple[LayerSplit, PartCosts]]:
        """Layer -> its split and the cost of the parts."""
        splits = () if self.rewrite_plan is None else self.rewrite_plan.splits
        return {split.layer: (split, self.part_costs[split.layer]) for split in splits}


class PartitionPlanner:
    """Plans a model on given chips and their network.

    Args:
        mapping_solver: Maps coarse segments; its mode is that of the plan.
        hw_proxy: Predicts the cost of layers and parts.
        config: Criteria for splits.
    """

    def __init__(
        self, mapping_solver: MappingSolver, hw_proxy: LayerHwProxy, config: PartitionConfig | None = None
    ) -> None:
        self.solver, self.proxy, self.config = mapping_solver, hw_proxy, config or PartitionConfig()
        options = self.config
        self.weights = ObjectiveWeights(
            mode=mapping_solver.goal.mode,
            w_latency=options.w_latency,
            w_comm=options.w_comm,
            w_balance=options.w_balance,
        )

    def compute_costs(
        self, layers: Sequence[LayerNode], chips: Sequence[ChipType | None], network: Network
    ) -> LayerCosts:
        """Predict the cost of each layer on each slot.

        Args:
            layers: All layers, in order.
            chips: Chip of each slot; None for an empty slot.
            network: Network between the slots.

        Raises:
            InputError: The numbers of slots differ, all slots are empty, or the model exceeds the total
                memory.
        """
        occupied = [slot for slot, chip in enumerate(chips) if chip is not None]
        if len(chips) != network.num_slots or not occupied:
            raise InputError(
                f"{len(chips)} slots with {len(occupied)} chips, but the network has {network.num_slots} "
                "slots; expected equal numbers of slots and at least one chip"
            )
        table = self.proxy.predict_table(layers, [chip for chip in chips if chip is not None])
        count = len(layers)
        latency = np.full((count, len(chips)), np.inf)
        power = np.zeros((count, len(chips)))
        latency[:, occupied], power[:, occupied] = table["lat_ms"], table["power_w"]
        costs = LayerCosts(
            layers=tuple(layers), latency_ms=latency, power_w=power,
            memory_mb=np.asarray(table["mem_mb"], np.float64).max(1),
            limit_mb=np.array([0.0 if chip is None else 1e3 * chip.mem_gb for chip in chips]),
            idle_w=np.array([0.0 if chip is None else chip.idle_w for chip in chips]),
            network=network,
        )  # fmt: skip
        required = float(costs.weight_mb.sum() + costs.activation_mb.max())
        available = float(costs.limit_mb.sum())
        if required > available + ROUNDING_MB:
            raise InputError(
                f"the model needs {required:.6g} MB, but all {len(occupied)} chips have {available:.6g} MB: "
                f"{required - available:.6g} MB are missing; use larger or more chips"
            )
        return costs

    def plan(
        self,
        layers: Sequence[LayerNode],
        chips: Sequence[ChipType | None],
        network: Network,
        *,
        use_fine_split: bool = True,
        unit_orders: UnitOrders | None = None,
        log_level: int = logging.INFO,
    ) -> PartitionPlan:
        """Plan a model.

        Args:
            layers: All layers, in order.
            chips: Chip of each slot; None for an empty slot.
            network: Network between the slots.
            use_fine_split: Whether layers may be split.
            unit_orders: Returns the units of a layer in the order in which parts take them, home first; by
                default 0, 1, 2, …
            log_level: Level at which decisions about splits are logged.

        Raises:
            InputError: The model does not fit.
        """
        costs = self.compute_costs(layers, chips, network)

        def part_costs(layer: LayerNode, sizes: Sequence[int], slots: Sequence[int]) -> PartCosts:
            return self.compute_part_costs(layer, sizes, [chips[slot] for slot in slots])

        return self.plan_from_costs(
            costs, part_costs, use_fine_split=use_fine_split, unit_orders=unit_orders, log_level=log_level
        )

    def plan_from_costs(
        self,
        costs: LayerCosts,
        part_costs: PartCostFunction,
        *,
        use_fine_split: bool = True,
        unit_orders: UnitOrders | None = None,
        log_level: int = logging.INFO,
    ) -> PartitionPlan:
        """Plan a model from given costs, such as measured ones.

        Args:
            costs: Cost of each layer on each slot.
            part_costs: Computes the cost of the parts of a layer from their sizes and slots.
            use_fine_split: See `plan`.
            unit_orders: See `plan`.
            log_level: See `plan`.

        Raises:
            InputError: The model does not fit.
        """
        graph = build_balanced_chain(costs.layers, self.config.segments)
        result = self.solver.solve_mapping(build_mapping_problem(costs, graph))
        search = SplitSearch(costs, graph, self.weights, self.config, part_costs)
        mapping, coarse_stats = search.improve_mapping(result.mapping, {})
        partial = PartialPlan(mapping=mapping, stats=coarse_stats)
        if use_fine_split:
            partial = search.accept_splits(partial, unit_orders)
        splits = partial.splits
        rewrite = RewritePlan(splits=tuple(splits[layer][0] for layer in sorted(splits))) if splits else None
        coarse_ms = coarse_stats.total_latency_ms
        # The solver bounds the period plus a small multiple of the serial time, which is at most one period
        # per used slot.
        if self.weights.mode == "balanced":
            used = min(int((costs.limit_mb > 0.0).sum()), len(graph.segments))
            bound = result.lower_bound_ms / (1.0 + self.solver.goal.tie_weight * used)
        else:
            bound = result.lower_bound_ms
        bound = min(bound, coarse_ms)
        plan = PartitionPlan(
            segments=graph,
            mapping=partial.mapping,
            assignment=search.assign_layers(partial.mapping),
            rewrite_plan=rewrite,
            hw_stats=partial.stats,
            coarse_stats=coarse_stats,
            split_decisions=partial.decisions,
            lower_bound_ms=bound,
            gap=(coarse_ms - bound) / coarse_ms if coarse_ms > 0.0 else 0.0,
            finished=result.finished,
            weights=self.weights,
            part_costs={layer: parts for layer, (_, parts) in splits.items()},
            split_evaluations=partial.evaluations,
        )
        if use_fine_split:
            _log_plan(plan, log_level)
        return plan

    def compute_part_costs(
        self, layer: LayerNode, sizes: Sequence[int], chips: Sequence[ChipType | None]
    ) -> PartCosts:
        """Predict the cost of the parts of a layer.

        Args:
            layer: The split layer.
            sizes: Units of each part.
            chips: Chip of each part.
        """
        assert len(sizes) == len(chips) and None not in chips
        parts = [slice_layer(layer, size) for size in sizes]
        prediction = self.proxy.predict_pairs(parts, [chip for chip in chips if chip is not None])
        return PartCosts(
            latency_ms=tuple(prediction["lat_ms"].tolist()),
            power_w=tuple(prediction["power_w"].tolist()),
            memory_mb=tuple(prediction["mem_mb"].tolist()),
        )


def build_mapping_problem(costs: LayerCosts, graph: SegmentGraph) -> MappingProblem:
    """Build the mapping problem of coarse segments."""
    groups = [list(segment.layer_ids) for segment in graph.segments]
    return MappingProblem(
        latency_ms=np.stack([costs.latency_ms[group].sum(0) for group in groups]),
        memory_mb=np.array([costs.weight_mb[group].sum() for group in groups]),
        activation_mb=np.array([costs.activation_mb[group].max() for group in groups]),
        limit_mb=costs.limit_mb,
        src=np.array([edge.src for edge in graph.edges], dtype=np.int64),
        dst=np.array([edge.dst for edge in graph.edges], dtype=np.int64),
        traffic_bytes=np.array([edge.traffic_bytes for edge in graph.edges], dtype=np.float64),
        fixed_ms=costs.network.fixed_ms,
        ms_per_byte=costs.network.ms_per_byte,
    )


def _log_plan(plan: PartitionPlan, level: int) -> None:
    for item in plan.split_evaluations if log.isEnabledFor(logging.DEBUG) else ():
        outcome = "infeasible"
        if item.objective_after is not None and item.gain_ratio is not None:
            outcome = f"objective {item.objective_after:.6g}, gain {100.0 * item.gain_ratio:.2f} %"
        log.debug(
            "round %d: %s into %s on slots %s%s: %s", item.round, item.name, item.sizes, item.slots,
            ", segments moved" if item.segments_moved else "", outcome,
        )  # fmt: skip
    for item in plan.split_decisions:
        log.log(
            level, "%s of %s into %s on slots %s: objective %.6g -> %.6g, gain %.2f %%",
            "split" if item.accepted else "no split", item.name, item.sizes, item.slots,
            item.objective_before, item.objective_after, 100.0 * item.gain_ratio,
        )  # fmt: skip
    if plan.rewrite_plan is None:
        reason = "no split gained enough" if plan.split_decisions else "no split was evaluated"
        if plan.split_evaluations and not plan.split_decisions:
            reason = "no split is feasible"
        log.log(
            level, "rewrite_plan is None: %s; keeping the coarse plan (objective %.6g, %d splits evaluated)",
            reason, plan.coarse_stats.objective, len(plan.split_evaluations),
        )  # fmt: skip
    else:
        log.log(
            level, "%d layers split: objective %.6g, coarse %.6g; %d splits evaluated",
            len(plan.rewrite_plan.splits), plan.hw_stats.objective, plan.coarse_stats.objective,
            len(plan.split_evaluations),
        )  # fmt: skip

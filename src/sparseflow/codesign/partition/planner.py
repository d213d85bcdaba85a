"""PartitionPlanner: which layers run where, and which of them are worth splitting over several slots.

1. Layers are gathered into coarse segments, the solver maps them to slots, and single moves of segments go on
   as long as the objective falls. That is the coarse plan.
2. With fine splits, layers that hold much of the work or of the traffic are candidates. For each, every
   number of groups and the slots that are least taken up are tried; sizes are such that all parts end at the
   same time, as far as whole units allow.
3. The best split is accepted if the whole plan, evaluated anew and with its segments moved again, gains at
   least `min_split_gain_ratio`; then the others are tried on top of it. Where none is left, that is the plan;
   `rewrite_plan` is None where none was accepted.

All that was tried is kept with its objective and gain. The log has the best of each layer in each round at
INFO and everything else at DEBUG.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sparseflow.codesign.hardware.chips import ChipType
from sparseflow.codesign.hardware.network import Network
from sparseflow.codesign.hardware.proxy import LayerHwProxy
from sparseflow.codesign.mapping import MappingSolver, Problem
from sparseflow.codesign.partition.objective import ROUNDING_MB, Costs, HwStats, PartCosts, Weights
from sparseflow.codesign.partition.split_search import (
    Considered,
    Found,
    Orders,
    PartitionConfig,
    PricesParts,
    SplitSearch,
    Tried,
)
from sparseflow.codesign.workload.layers import part_layer
from sparseflow.codesign.workload.segments import SegmentGraph, coarse
from sparseflow.codesign.workload.splits import RewritePlan, Split
from sparseflow.core.layers import LayerNode
from sparseflow.errors import InputError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What was decided.

    Attributes:
        segments: Coarse ones, in order.
        mapping: Slot of each segment.
        homes: Slot of each layer.
        rewrite_plan: What is split; None where nothing is.
        hw_stats: Of the whole plan.
        coarse_stats: Without splits.
        considered: The best split of each layer in each round.
        tried: All splits that were evaluated, in order.
        lower_bound_ms: No mapping of these segments without splits has a lower `total_latency_ms`.
        gap: (coarse latency - bound) / coarse latency.
        finished: Whether the solver ended before its time was up.
        part_costs: Layer -> what its parts cost.
        weights: What counted.
    """

    segments: SegmentGraph
    mapping: tuple[int, ...]
    homes: tuple[int, ...]
    rewrite_plan: RewritePlan | None
    hw_stats: HwStats
    coarse_stats: HwStats
    considered: tuple[Considered, ...]
    lower_bound_ms: float
    gap: float
    finished: bool
    weights: Weights
    part_costs: Mapping[int, PartCosts] = field(default_factory=dict)
    tried: tuple[Tried, ...] = ()

    @property
    def splits(self) -> dict[int, tuple[Split, PartCosts]]:
        """Layer -> its split and what its parts cost."""
        found = () if self.rewrite_plan is None else self.rewrite_plan.splits
        return {split.layer: (split, self.part_costs[split.layer]) for split in found}

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return {
            "segments": [list(segment.layer_ids) for segment in self.segments.segments],
            "mapping": list(self.mapping),
            "rewrite_plan": None if self.rewrite_plan is None else self.rewrite_plan.to_dict(),
            "hw_stats": asdict(self.hw_stats),
            "coarse_stats": asdict(self.coarse_stats),
            "considered": [asdict(each) for each in self.considered],
            "tried": table_of(self.tried),
            "lower_bound_ms": self.lower_bound_ms,
            "gap": self.gap,
            "finished": self.finished,
            "mode": self.weights.mode,
        }


class PartitionPlanner:
    """Plans for a model, some chips and what is between them.

    Args:
        mapping_solver: Maps coarse segments; its mode is the plan's.
        hw_proxy: What layers and parts cost.
        config: When a layer is split.
    """

    def __init__(
        self, mapping_solver: MappingSolver, hw_proxy: LayerHwProxy, config: PartitionConfig | None = None
    ) -> None:
        self.solver, self.proxy, self.config = mapping_solver, hw_proxy, config or PartitionConfig()
        told = self.config
        self.weights = Weights(
            mode=mapping_solver.goal.mode,
            w_latency=told.w_latency,
            w_comm=told.w_comm,
            w_balance=told.w_balance,
        )

    def costs(self, layers: Sequence[LayerNode], chips: Sequence[ChipType | None], network: Network) -> Costs:
        """What layers cost on slots.

        Args:
            layers: In order.
            chips: What each slot holds; None where it is empty.
            network: Between slots.

        Raises:
            InputError: Slots of `chips` and `network` differ, every slot is empty, or the model does not fit
                into all of them together (says by how much).
        """
        there = [slot for slot, chip in enumerate(chips) if chip is not None]
        if len(chips) != network.slots or not there:
            raise InputError(
                f"{len(chips)} slots hold {len(there)} chips, and the network joins {network.slots} slots: "
                "there must be as many slots, and a chip"
            )
        table = self.proxy.table(layers, [chip for chip in chips if chip is not None])
        count = len(layers)
        latency = np.full((count, len(chips)), np.inf)
        power = np.zeros((count, len(chips)))
        latency[:, there], power[:, there] = table["lat_ms"], table["power_w"]
        found = Costs(
            layers=tuple(layers), latency_ms=latency, power_w=power,
            memory_mb=np.asarray(table["mem_mb"], np.float64).max(1),
            limit_mb=np.array([0.0 if chip is None else 1e3 * chip.mem_gb for chip in chips]),
            idle_w=np.array([0.0 if chip is None else chip.idle_w for chip in chips]),
            network=network,
        )  # fmt: skip
        needed, held = float(found.memory_mb.sum()), float(found.limit_mb.sum())
        if needed > held + ROUNDING_MB:
            raise InputError(
                f"the model needs {needed:.6g} MB and all {len(there)} chips hold {held:.6g} MB: "
                f"{needed - held:.6g} MB too little; take larger chips, or more of them"
            )
        return found

    def plan(
        self,
        layers: Sequence[LayerNode],
        chips: Sequence[ChipType | None],
        network: Network,
        *,
        graph: SegmentGraph | None = None,
        use_fine_split: bool = True,
        orders: Orders | None = None,
        start: Sequence[int] | None = None,
    ) -> Plan:
        """Decide.

        Args:
            layers: Of the model, in order.
            chips: What each slot holds; None where it is empty.
            network: Between slots.
            graph: Coarse segments; made of as many as `config` says by default.
            use_fine_split: Whether layers may be split.
            orders: Gives the units of a layer in the order that parts take them, home first; most important
                first is what `LayeredModel`s offer. By default 0, 1, 2, …
            start: A mapping to begin from.

        Raises:
            InputError: The model does not fit (says by how much), or `graph` is of other layers.
        """
        costs = self.costs(layers, chips, network)

        def part_costs(layer: LayerNode, sizes: Sequence[int], slots: Sequence[int]) -> PartCosts:
            return self.part_costs(layer, sizes, [chips[slot] for slot in slots])

        return self.decide(
            costs, part_costs, graph=graph, use_fine_split=use_fine_split, orders=orders, start=start
        )

    def decide(
        self,
        costs: Costs,
        part_costs: PricesParts,
        *,
        graph: SegmentGraph | None = None,
        use_fine_split: bool = True,
        orders: Orders | None = None,
        start: Sequence[int] | None = None,
    ) -> Plan:
        """Decide by costs from elsewhere, such as measured ones.

        Args:
            costs: Of layers on slots.
            part_costs: Gives what parts of a layer cost, from their sizes and slots.
            graph: As in `plan`.
            use_fine_split: As in `plan`.
            orders: As in `plan`.
            start: As in `plan`.

        Raises:
            InputError: The model does not fit (says by how much), or `graph` is of other layers.
        """
        graph = coarse(costs.layers, self.config.segments) if graph is None else graph
        held = [layer for segment in graph.segments for layer in segment.layer_ids]
        if held != list(range(len(costs.layers))):
            raise InputError(
                f"the segments hold {len(held)} layers (the highest is {max(held, default='none')}), and not "
                f"each of 0 to {len(costs.layers) - 1} once and in order: they are of another model"
            )
        solved = self.solver.solve_mapping(problem_of(costs, graph), start=start)
        search = SplitSearch(costs, graph, self.weights, self.config, part_costs)
        mapping, base = search.descend(solved.mapping, {})
        found = Found(mapping=mapping, stats=base)
        if use_fine_split:
            found = search.split(found, orders)
        splits = found.splits
        rewrite = RewritePlan(splits=tuple(splits[layer][0] for layer in sorted(splits))) if splits else None
        coarse_ms = base.total_latency_ms
        # The solver's bound is on the period and a little of the way, which is no more than a period for each
        # slot that is used.
        if self.weights.mode == "balanced":
            used = min(int((costs.limit_mb > 0.0).sum()), len(graph.segments))
            bound = solved.lower_bound_ms / (1.0 + self.solver.goal.tie_weight * used)
        else:
            bound = solved.lower_bound_ms
        bound = min(bound, coarse_ms)
        plan = Plan(
            segments=graph, mapping=found.mapping, homes=search.homes(found.mapping), rewrite_plan=rewrite,
            hw_stats=found.stats, coarse_stats=base, considered=found.considered, lower_bound_ms=bound,
            gap=(coarse_ms - bound) / coarse_ms if coarse_ms > 0.0 else 0.0, finished=solved.finished,
            weights=self.weights, part_costs={layer: parts for layer, (_, parts) in splits.items()},
            tried=found.tried,
        )  # fmt: skip
        if use_fine_split:
            _tell(plan)
        return plan

    def part_costs(
        self, layer: LayerNode, sizes: Sequence[int], chips: Sequence[ChipType | None]
    ) -> PartCosts:
        """What parts cost, each on its own chip.

        Args:
            layer: That is split.
            sizes: Units of each part.
            chips: What each part runs on.
        """
        assert len(sizes) == len(chips) and None not in chips
        parts = [part_layer(layer, size) for size in sizes]
        found = self.proxy.predict_pairs(parts, [chip for chip in chips if chip is not None])
        return PartCosts(
            latency_ms=tuple(found["lat_ms"].tolist()),
            power_w=tuple(found["power_w"].tolist()),
            memory_mb=tuple(found["mem_mb"].tolist()),
        )


def problem_of(costs: Costs, graph: SegmentGraph) -> Problem:
    """What the solver maps: segments in place of layers."""
    groups = [list(segment.layer_ids) for segment in graph.segments]
    return Problem(
        latency_ms=np.stack([costs.latency_ms[group].sum(0) for group in groups]),
        memory_mb=np.array([costs.memory_mb[group].sum() for group in groups]),
        limit_mb=costs.limit_mb,
        src=np.array([edge.src for edge in graph.edges], dtype=np.int64),
        dst=np.array([edge.dst for edge in graph.edges], dtype=np.int64),
        traffic_bytes=np.array([edge.traffic_bytes for edge in graph.edges], dtype=np.float64),
        fixed_ms=costs.network.fixed_ms,
        ms_per_byte=costs.network.ms_per_byte,
    )


def table_of(tried: Sequence[Tried]) -> dict[str, list[Any]]:
    """Splits that were tried, in JSON's types: `columns`, and a row for each."""
    columns = ["round", "layer", "sizes", "slots", "moved", "objective_after", "gain_ratio"]
    return {"columns": columns, "rows": [[getattr(each, name) for name in columns] for each in tried]}


def _tell(plan: Plan) -> None:
    """Log what was decided and why."""
    for each in plan.tried if log.isEnabledFor(logging.DEBUG) else ():
        found = "cannot run, or does not fit"
        if each.objective_after is not None and each.gain_ratio is not None:
            found = f"objective {each.objective_after:.6g}, gain {100.0 * each.gain_ratio:.2f} %"
        log.debug(
            "round %d: %s into %s on slots %s%s: %s", each.round, each.name, each.sizes, each.slots,
            ", segments moved" if each.moved else "", found,
        )  # fmt: skip
    for each in plan.considered:
        log.info(
            "%s of %s into %s on slots %s: objective %.6g -> %.6g, gain %.2f %%",
            "split" if each.accepted else "no split", each.name, each.sizes, each.slots,
            each.objective_before, each.objective_after, 100.0 * each.gain_ratio,
        )  # fmt: skip
    if plan.rewrite_plan is None:
        why = "no split gained enough" if plan.considered else "no split was looked at"
        if plan.tried and not plan.considered:
            why = "no split fits"
        log.info(
            "rewrite_plan is None: %s; the coarse plan stands (objective %.6g, %d splits tried)",
            why, plan.coarse_stats.objective, len(plan.tried),
        )  # fmt: skip
    else:
        log.info(
            "%d layers split: objective %.6g, coarse %.6g; %d splits tried",
            len(plan.rewrite_plan.splits), plan.hw_stats.objective, plan.coarse_stats.objective,
            len(plan.tried),
        )  # fmt: skip

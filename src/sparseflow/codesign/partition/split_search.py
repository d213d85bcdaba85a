"""Looking for splits that pay: candidates, their slots and sizes, and the whole plan evaluated with each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from sparseflow.codesign.partition.objective import Costs, HwStats, PartCosts, Weights, evaluate, feasible
from sparseflow.codesign.workload.layers import number
from sparseflow.codesign.workload.segments import SegmentGraph
from sparseflow.codesign.workload.splits import Split
from sparseflow.core.layers import LayerNode
from sparseflow.errors import InputError

Splits = Mapping[int, tuple[Split, PartCosts]]
Orders = Callable[[int], Sequence[int]]
PricesParts = Callable[[LayerNode, Sequence[int], Sequence[int]], PartCosts]
"""What parts of a layer cost, from their sizes and slots."""

_LEAST = 1e-12
"""Relative; an objective that falls by less has not fallen."""


@dataclass(frozen=True, kw_only=True)
class PartitionConfig:
    """When a layer is split; the names are those of configurations.

    Attributes:
        w_latency: Of `total_latency_ms` in the objective.
        w_comm: Of `comm_ms`.
        w_balance: Of `imbalance_ms`.
        min_split_gain_ratio: What a split must gain at least, (before - after) / before of the objective.
        flops_ratio_thresh: A layer with this share of all operations is a candidate.
        traffic_ratio_thresh: So is one with this share of all traffic between layers.
        max_split_layers: Layers that are split at most.
        max_groups_per_layer: Parts of a layer at most.
        max_new_segments: Parts in all that splits may add.
        segments: Coarse segments at most.
        max_slots_tried: Slots among which those of a split's parts are looked for: the least taken up.
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
        for name, value in asdict(self).items():
            if not np.isfinite(value) or value < 0:
                raise InputError(f"`{name}` (={value}) must be finite and not negative")
        if self.max_groups_per_layer < 2 or self.segments < 1:
            raise InputError(
                f"`max_groups_per_layer` (={self.max_groups_per_layer}) must be at least 2, `segments` "
                f"(={self.segments}) at least 1"
            )


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A split that the whole plan was evaluated with.

    Attributes:
        round: From 1 on; each begins with what was accepted before it.
        layer: Its place among the layers.
        name: What the model calls it.
        sizes: Units of each part.
        slots: Of each part.
        moved: Whether segments were moved again to make room; that is done for the best of each number of
            parts. Where it is False they are where they were.
        objective_before: Of the plan without it.
        objective_after: Of the plan with it; None where it cannot run or does not fit.
    """

    round: int
    layer: int
    name: str
    sizes: tuple[int, ...]
    slots: tuple[int, ...]
    moved: bool
    objective_before: float
    objective_after: float | None

    @property
    def gain_ratio(self) -> float | None:
        """(before - after) / before; None where it cannot run or does not fit."""
        return None if self.objective_after is None else _gain(self.objective_before, self.objective_after)


@dataclass(frozen=True, kw_only=True)
class Considered:
    """The best split of a layer in a round.

    Attributes:
        layer: Its place among the layers.
        name: What the model calls it.
        sizes: Units of each part.
        slots: Of each part.
        objective_before: Of the plan without it.
        objective_after: Of the plan with it, its segments moved again.
        gain_ratio: (before - after) / before.
        accepted: Whether it is in the plan.
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
class Found:
    """A plan on the way.

    Attributes:
        mapping: Slot of each segment.
        stats: What it costs.
        splits: Layer -> its split and what its parts cost.
        considered: What was looked at for it: the best split of each layer in each round.
        tried: All splits that were evaluated for it, in order.
    """

    mapping: tuple[int, ...]
    stats: HwStats
    splits: Splits = field(default_factory=dict)
    considered: tuple[Considered, ...] = ()
    tried: tuple[Tried, ...] = ()


class SplitSearch:
    """Plans of one model on some slots.

    Args:
        costs: Of its layers.
        graph: Its coarse segments.
        weights: What counts.
        config: When a layer is split.
        part_costs: Gives what parts of a layer cost, from their sizes and slots.
    """

    def __init__(
        self,
        costs: Costs,
        graph: SegmentGraph,
        weights: Weights,
        config: PartitionConfig,
        part_costs: PricesParts,
    ) -> None:
        self._costs, self._graph, self._weights = costs, graph, weights
        self._config, self._part_costs = config, part_costs
        self._segment = {layer: each.id for each in graph.segments for layer in each.layer_ids}

    def homes(self, mapping: Sequence[int]) -> tuple[int, ...]:
        """Slot of each layer."""
        return tuple(mapping[self._segment[layer]] for layer in range(len(self._costs.layers)))

    def stats(self, mapping: Sequence[int], splits: Splits) -> HwStats | None:
        """What a plan costs; None where it cannot be."""
        homes = self.homes(mapping)
        if not feasible(self._costs, homes, splits):
            return None
        return evaluate(self._costs, homes, splits, self._weights)

    def descend(self, mapping: Sequence[int], splits: Splits) -> tuple[tuple[int, ...], HwStats]:
        """Move single segments to other slots as long as that lowers the objective.

        Segments that hold a split layer stay: their parts were sized for where they are.
        """
        now, best = list(mapping), self.stats(mapping, splits)
        assert best is not None
        fixed = {self._segment[layer] for layer in splits}
        better = True
        while better:
            better = False
            for segment in range(len(now)):
                for slot in range(self._costs.slots):
                    if segment in fixed or slot == now[segment]:
                        continue
                    tried = [*now[:segment], slot, *now[segment + 1 :]]
                    found = self.stats(tried, splits)
                    if found is not None and _lower(found.objective, best.objective):
                        now, best, better = tried, found, True
        return tuple(now), best

    def split(self, found: Found, orders: Orders | None) -> Found:
        """Accept splits one by one, the best first, as long as one gains enough."""
        config, considered, tried = self._config, list(found.considered), list(found.tried)
        candidates = self.candidates()
        while candidates and len(found.splits) < config.max_split_layers:
            added = sum(len(split.slots) - 1 for split, _ in found.splits.values())
            looked_at = []
            for layer in candidates:
                best, evaluated = self._best(layer, found, config.max_new_segments - added, orders)
                tried += evaluated
                if best is not None:
                    looked_at.append((best.stats.objective, layer, best))
            if not looked_at:
                break
            objective, chosen, best = min(looked_at, key=lambda each: each[:2])
            before = found.stats.objective
            enough = _gain(before, objective) >= config.min_split_gain_ratio and _lower(objective, before)
            for after, layer, plan in looked_at:
                split = plan.splits[layer][0]
                each = Considered(
                    layer=layer, name=self._costs.layers[layer].name, sizes=split.sizes, slots=split.slots,
                    objective_before=before, objective_after=after, gain_ratio=_gain(before, after),
                    accepted=enough and layer == chosen,
                )  # fmt: skip
                considered.append(each)
            if not enough:
                break
            found = best
            candidates.remove(chosen)
        return Found(
            mapping=found.mapping, stats=found.stats, splits=found.splits, considered=tuple(considered),
            tried=tuple(tried),
        )  # fmt: skip

    def candidates(self) -> list[int]:
        """Layers that hold enough of the work or of the traffic, and can be split."""
        layers, config = self._costs.layers, self._config
        work = sum(number(layer.flops) for layer in layers)
        traffic = sum(layer.traffic_out_bytes for layer in layers)

        def holds(part: float, whole: float, least: float) -> bool:
            # Nothing has no share of nothing.
            return whole > 0.0 and part >= least * whole

        return [
            layer.id
            for layer in layers
            if layer.splittable
            and layer.units >= 2
            and (
                holds(number(layer.flops), work, config.flops_ratio_thresh)
                or holds(layer.traffic_out_bytes, traffic, config.traffic_ratio_thresh)
            )
        ]

    def _best(
        self, layer: int, found: Found, room: int, orders: Orders | None
    ) -> tuple[Found | None, list[Tried]]:
        """The best plan that also splits this layer, its segments moved again, and all that was tried for it.

        None in place of the plan where no split of the layer can run.
        """
        node, config = self._costs.layers[layer], self._config
        home = self.homes(found.mapping)[layer]
        order = list(range(node.units)) if orders is None else list(orders(layer))
        evaluated: list[Tried] = []
        best: dict[int, tuple[HwStats, Splits]] = {}

        def note(split: Split, stats: HwStats | None, *, moved: bool) -> None:
            evaluated.append(
                Tried(
                    round=1 + len(found.splits), layer=layer, name=node.name, sizes=split.sizes,
                    slots=split.slots, moved=moved, objective_before=found.stats.objective,
                    objective_after=None if stats is None else stats.objective,
                )
            )  # fmt: skip

        for slots in self._slot_choices(
            home, found, min(config.max_groups_per_layer - 1, room, node.units - 1)
        ):
            for sizes in self._sizes(node, slots):
                split = Split(layer=layer, permutation=tuple(order), sizes=sizes, slots=slots)
                splits = {**found.splits, layer: (split, self._part_costs(node, sizes, slots))}
                stats = self.stats(found.mapping, splits)
                note(split, stats, moved=False)
                so_far = best.get(len(slots))
                if stats is not None and (so_far is None or stats.objective < so_far[0].objective):
                    best[len(slots)] = stats, splits
        # Segments make room for parts: the best number of groups is known only then.
        plans = []
        for _, splits in best.values():
            mapping, stats = self.descend(found.mapping, splits)
            note(splits[layer][0], stats, moved=True)
            plans.append(Found(mapping=mapping, stats=stats, splits=splits))
        return min(plans, key=lambda each: each.stats.objective, default=None), evaluated

    def _slot_choices(self, home: int, found: Found, most: int) -> Iterator[tuple[int, ...]]:
        """Home, and up to `most` others among those that are least taken up."""
        there = [slot for slot in range(self._costs.slots) if slot != home and self._costs.limit_mb[slot] > 0]
        there.sort(key=lambda slot: (found.stats.busy_ms[slot], slot))
        for count in range(1, most + 1):
            for others in itertools.combinations(there[: self._config.max_slots_tried], count):
                yield (home, *others)

    def _sizes(self, node: LayerNode, slots: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Units of each part: such that all end together, and even ones."""
        costs, network = self._costs, self._costs.network
        share = costs.latency_ms[node.id, list(slots)]
        if not np.isfinite(share).all() or node.units < len(slots):
            return []
        way = np.array(
            [
                network.time_ms(slots[0], slot, node.split_in_bytes)
                + network.time_ms(slot, slots[0], node.split_out_bytes)
                for slot in slots
            ]
        )
        if not np.isfinite(way).all():
            return []
        rate = 1.0 / np.maximum(share, 1e-12)  # wholes of the layer in a millisecond
        # All end at T: sum over parts of (T - way) * rate = 1.
        end = (1.0 + float(rate @ way)) / float(rate.sum())
        wished = np.maximum((end - way) * rate, 0.0) * node.units
        even = np.full(len(slots), node.units / len(slots))
        return list(dict.fromkeys((_whole(wished, node.units), _whole(even, node.units))))


def _whole(wished: np.ndarray, units: int) -> tuple[int, ...]:
    """Whole numbers of at least 1 near what is wished, that add up to `units`."""
    wished = wished * (units / wished.sum())  # what was cut off at 0 is more than there is
    found = np.maximum(np.floor(wished), 1.0).astype(int)
    while found.sum() != units:
        short = found.sum() < units
        left = wished - found
        if not short:
            left = np.where(found > 1, left, np.inf)
        found[int(left.argmax() if short else left.argmin())] += 1 if short else -1
    return tuple(found.tolist())


def _gain(before: float, after: float) -> float:
    return (before - after) / before if before > 0.0 else 0.0


def _lower(after: float, before: float) -> bool:
    return after < before - _LEAST * abs(before)

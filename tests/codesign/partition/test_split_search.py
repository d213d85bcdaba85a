"""Tests of `codesign.partition.split_search`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest

from sparseflow.codesign.hardware.chips import LinkType
from sparseflow.codesign.hardware.network import Network
from sparseflow.codesign.partition import split_search as module
from sparseflow.codesign.partition.objective import (
    HwStats,
    LayerCosts,
    Mode,
    ObjectiveWeights,
    PartCosts,
    evaluate_plan,
    is_feasible,
)
from sparseflow.codesign.partition.split_search import (
    PartialPlan,
    PartitionConfig,
    SplitDecision,
    SplitSearch,
    UnitOrders,
)
from sparseflow.codesign.workload.layers import slice_layer
from sparseflow.codesign.workload.segments import SegmentGraph, build_balanced_chain, build_chain
from sparseflow.codesign.workload.splits import LayerSplit
from sparseflow.core.layers import LayerNode
from sparseflow.errors import InputError
from tests.codesign.nodes import chained, made_layers, peak_mb

MODES: tuple[Mode, ...] = ("balanced", "serial")


def wires(slots: int, bandwidth: float, latency_us: float = 0.1) -> Network:
    link = LinkType(name="wire", bandwidth=bandwidth, latency_us=latency_us, pj_per_bit=1.0)
    return Network.all_to_all(link, np.zeros((slots, slots)))


def a_cost(
    layers: Sequence[LayerNode], speeds: Sequence[float], *, bandwidth: float = 1e10, capacity: float = 3.0
) -> LayerCosts:
    """Slots of so many GFLOP/s, 0 for an empty one, that hold `room` times the model in all."""
    speed, work = np.array(speeds), np.array([float(layer.flops) for layer in layers])
    present = speed > 0.0
    latency = np.full((len(layers), len(speed)), np.inf)
    latency[:, present] = work[:, None] / speed[present] / 1e6
    contents = np.array([layer.memory_bytes / 1e6 for layer in layers])
    return LayerCosts(
        layers=tuple(layers),
        latency_ms=latency,
        power_w=np.full(latency.shape, 10.0),
        memory_mb=contents,
        limit_mb=np.where(present, capacity * contents.sum() / present.sum(), 0.0),
        idle_w=np.ones(len(speed)),
        network=wires(len(speed), bandwidth),
    )


def linear(costs: LayerCosts) -> Callable[[LayerNode, Sequence[int], Sequence[int]], PartCosts]:
    """Parts that take their share of the time."""

    def priced(layer: LayerNode, sizes: Sequence[int], slots: Sequence[int]) -> PartCosts:
        parts = [slice_layer(layer, size) for size in sizes]
        full = costs.latency_ms[layer.id]
        return PartCosts(
            latency_ms=tuple(
                float(full[slot]) * size / layer.units for size, slot in zip(sizes, slots, strict=True)
            ),
            power_w=(10.0,) * len(sizes),
            memory_mb=tuple(part.memory_bytes / 1e6 for part in parts),
        )

    return priced


def a_search(
    costs: LayerCosts,
    graph: SegmentGraph | None = None,
    mode: Mode = "balanced",
    **changes: Any,
) -> tuple[SplitSearch, PartitionConfig, ObjectiveWeights]:
    config = PartitionConfig(**changes)
    weights = ObjectiveWeights(
        mode=mode, w_latency=config.w_latency, w_comm=config.w_comm, w_balance=config.w_balance
    )
    graph = build_balanced_chain(costs.layers, config.segments) if graph is None else graph
    return SplitSearch(costs, graph, weights, config, linear(costs)), config, weights


def start_plan(search: SplitSearch, costs: LayerCosts, segments: int, seed: int) -> tuple[int, ...] | None:
    """A mapping that can run, if one is soon found."""
    rng = np.random.default_rng(seed)
    for _ in range(200):
        mapping = tuple(rng.integers(costs.num_slots, size=segments).tolist())
        if search.evaluate(mapping, {}) is not None:
            return mapping
    return None


def an_instance(seed: int) -> tuple[LayerCosts, SegmentGraph]:
    """Slots of all speeds, one in five empty; links from slow to fast; memory from scarce to plenty."""
    rng = np.random.default_rng(seed)
    layers = made_layers(int(rng.integers(1, 5)), seed=seed)
    giant = int(rng.integers(1, len(layers) - 1))
    if seed % 2:
        layers[giant] = replace(layers[giant], flops=20.0 * float(layers[giant].flops))
    speeds = rng.uniform(0.5, 2.0, int(rng.integers(2, 7)))
    speeds[2:] *= rng.random(len(speeds) - 2) < 0.8
    costs = a_cost(
        layers, speeds.tolist(), bandwidth=10 ** rng.uniform(8.0, 11.5), capacity=float(rng.uniform(1.5, 6.0))
    )
    return costs, build_balanced_chain(layers, int(rng.integers(2, 9)))


def held_mb(costs: LayerCosts, assignment: Sequence[int], splits: dict[int, LayerSplit]) -> list[float]:
    """Memory of each slot, from layers alone: all weights and the largest activations."""
    by_slot: list[list[LayerNode]] = [[] for _ in range(costs.num_slots)]
    for index, layer in enumerate(costs.layers):
        if index not in splits:
            by_slot[assignment[index]].append(layer)
            continue
        for slot, size in zip(splits[index].slots, splits[index].sizes, strict=True):
            by_slot[slot].append(slice_layer(layer, size))
    return [peak_mb(items) for items in by_slot]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"w_latency": -1.0}, r"`w_latency` \(=-1.0\)"),
        ({"w_comm": float("nan")}, r"`w_comm` \(=nan\)"),
        ({"w_balance": float("inf")}, r"`w_balance` \(=inf\)"),
        ({"min_split_gain_ratio": -0.01}, "`min_split_gain_ratio`"),
        ({"flops_ratio_thresh": -0.01}, "`flops_ratio_thresh`"),
        ({"traffic_ratio_thresh": float("nan")}, "`traffic_ratio_thresh`"),
        ({"max_split_layers": -1}, "`max_split_layers`"),
        ({"max_new_segments": -1}, "`max_new_segments`"),
        ({"max_groups_per_layer": 1}, r"`max_groups_per_layer` \(=1\)"),
        ({"segments": 0}, r"`segments` \(=0\)"),
    ],
)
def test_invalid_partition_config_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        PartitionConfig(**changes)


def test_partition_config_defaults() -> None:
    config = PartitionConfig()
    assert (config.w_latency, config.w_comm, config.w_balance) == (1.0, 0.1, 0.1)
    assert (config.flops_ratio_thresh, config.traffic_ratio_thresh) == (0.05, 0.2)
    assert (config.min_split_gain_ratio, config.max_split_layers) == (0.05, 4)
    assert (config.max_groups_per_layer, config.max_new_segments) == (4, 8)


@pytest.mark.parametrize("mode", MODES)
def test_improve_mapping_ends_in_local_optimum(mode: Mode) -> None:
    lower = 0
    for seed in range(30):
        costs, graph = an_instance(seed)
        search, _, weights = a_search(costs, graph, mode)
        start = start_plan(search, costs, len(graph.segments), seed)
        if start is None:
            continue
        result, stats = search.improve_mapping(start, {})
        first = search.evaluate(start, {})
        assert first is not None and stats.objective <= first.objective
        lower += stats.objective < first.objective
        assert stats == evaluate_plan(costs, search.assign_layers(result), {}, weights)
        for segment, slot in itertools.product(range(len(result)), range(costs.num_slots)):
            assignment = search.assign_layers([*result[:segment], slot, *result[segment + 1 :]])
            if is_feasible(costs, assignment, {}):
                assert evaluate_plan(costs, assignment, {}, weights).objective >= stats.objective * (1 - 1e-9)
    assert lower > 15


def test_improve_mapping_keeps_segments_with_splits() -> None:
    layers = made_layers(2, seed=0)
    costs = a_cost(layers, [1.0, 5.0, 1.0])
    search, _, _ = a_search(costs, build_chain(layers, [0, 2, 4]))
    split = LayerSplit(
        layer=2, permutation=tuple(range(layers[2].units)), sizes=(1, layers[2].units - 1), slots=(0, 2)
    )
    parts = linear(costs)(layers[2], split.sizes, split.slots)
    result, _ = search.improve_mapping((0, 0, 0), {2: (split, parts)})
    assert result[1] == 0 and result != (0, 0, 0)
    # Without the split it moves, too.
    assert search.improve_mapping((0, 0, 0), {})[0] == (1, 1, 1)


def test_assign_layers_by_segment() -> None:
    layers = made_layers(2, seed=0)
    search, _, _ = a_search(a_cost(layers, [1.0, 1.0]), build_chain(layers, [0, 1, 4]))
    assert search.assign_layers((1, 0, 1)) == (1, 0, 0, 0, 1, 1)


def test_find_candidates_by_share() -> None:
    layers = [
        replace(item, flops=1.0, traffic_out_bytes=1, splittable=True, units=2)
        for item in made_layers(2, seed=0)
    ]
    layers[1] = replace(layers[1], flops=95.0)
    layers[2] = replace(layers[2], traffic_out_bytes=15)
    layers = chained(layers)
    costs = a_cost(layers, [1.0, 1.0])

    def candidates(**thresholds: Any) -> list[int]:
        return a_search(costs, **thresholds)[0].find_candidates()

    # Of 100 operations and 20 bytes.
    assert candidates(flops_ratio_thresh=0.95, traffic_ratio_thresh=0.75) == [1, 2]
    assert candidates(flops_ratio_thresh=0.96, traffic_ratio_thresh=0.75) == [2]
    assert candidates(flops_ratio_thresh=0.95, traffic_ratio_thresh=0.76) == [1]
    assert candidates(flops_ratio_thresh=1.1, traffic_ratio_thresh=1.1) == []
    assert candidates(flops_ratio_thresh=0.01, traffic_ratio_thresh=1.1) == [0, 1, 2, 3, 4, 5]
    layers[1] = replace(layers[1], splittable=False)
    layers[2] = replace(layers[2], units=1)
    costs = a_cost(layers, [1.0, 1.0])
    assert candidates(flops_ratio_thresh=0.0, traffic_ratio_thresh=0.0) == [0, 3, 4, 5]


def test_find_candidates_without_work() -> None:
    layers = [
        replace(item, flops=0.0, traffic_out_bytes=0, splittable=True, units=2)
        for item in made_layers(1, seed=0)
    ]
    assert a_search(a_cost(chained(layers), [1.0, 1.0]))[0].find_candidates() == []


def is_honest(
    search: SplitSearch,
    costs: LayerCosts,
    config: PartitionConfig,
    weights: ObjectiveWeights,
    base: PartialPlan,
    result: PartialPlan,
    orders: UnitOrders,
) -> None:
    """All that a search promises, checked from its result."""
    assignment = search.assign_layers(result.mapping)
    splits = {layer: split for layer, (split, _) in result.splits.items()}
    added = sum(len(split.slots) - 1 for split in splits.values())
    assert len(splits) <= config.max_split_layers and added <= config.max_new_segments
    for layer, split in splits.items():
        node = costs.layers[layer]
        assert split.layer == layer and node.splittable and layer in search.find_candidates()
        assert 2 <= len(split.slots) == len(set(split.slots)) == len(split.sizes)
        assert len(split.slots) <= config.max_groups_per_layer
        assert min(split.sizes) >= 1 and sum(split.sizes) == node.units
        assert sorted(split.permutation) == list(range(node.units))
        assert list(split.permutation) == list(orders(layer))
        assert split.slots[0] == assignment[layer]
        assert result.splits[layer][1] == linear(costs)(node, split.sizes, split.slots)
    for slot, contents in enumerate(held_mb(costs, assignment, splits)):
        assert contents <= costs.limit_mb[slot] * (1 + 1e-12)
    for slot in {*assignment, *(slot for split in splits.values() for slot in split.slots)}:
        assert costs.limit_mb[slot] > 0.0
    assert result.stats == evaluate_plan(costs, assignment, result.splits, weights)
    assert result.stats.objective <= base.stats.objective
    before, accepted = base.stats.objective, []
    for candidates in rounds(result):
        assert len(accepted) == len({candidate.layer for candidate in accepted})
        assert len({candidate.layer for candidate in candidates}) == len(candidates)
        for candidate in candidates:
            assert candidate.objective_before == before
            assert candidate.gain_ratio == pytest.approx(
                (before - candidate.objective_after) / before, abs=1e-12
            )
            assert candidate.name == costs.layers[candidate.layer].name and candidate.layer not in {
                other.layer for other in accepted
            }
        # The best of a round is accepted, if it gains enough.
        best = min(candidates, key=lambda candidate: candidate.objective_after)
        used = [candidate for candidate in candidates if candidate.accepted]
        enough = best.gain_ratio >= config.min_split_gain_ratio and best.gain_ratio > 1e-9
        assert used == ([best] if enough else [])
        for candidate in used:
            split = splits[candidate.layer]
            assert (candidate.sizes, candidate.slots) == (split.sizes, split.slots)
            accepted.append(candidate)
            before = candidate.objective_after
    assert before == result.stats.objective and len(accepted) == len(splits)
    all_is_told(search, result)


def all_is_told(search: SplitSearch, result: PartialPlan) -> None:
    """What was tried, against what was considered, and evaluated once more."""
    assert [evaluation.round for evaluation in result.evaluations] == sorted(
        evaluation.round for evaluation in result.evaluations
    )
    for number, candidates in enumerate(rounds(result), start=1):
        evaluated = [evaluation for evaluation in result.evaluations if evaluation.round == number]
        assert {evaluation.objective_before for evaluation in evaluated} == {candidates[0].objective_before}
        for best in candidates:
            of_layer = [evaluation for evaluation in evaluated if evaluation.layer == best.layer]
            current = [evaluation for evaluation in of_layer if not evaluation.segments_moved]
            moved = [evaluation for evaluation in of_layer if evaluation.segments_moved]
            assert len({(evaluation.sizes, evaluation.slots) for evaluation in current}) == len(current)
            # For each number of parts the best is tried again with segments moved, and the best of these ...
            for count in {
                len(evaluation.slots) for evaluation in current if evaluation.objective_after is not None
            }:
                objective = [
                    evaluation.objective_after for evaluation in current if len(evaluation.slots) == count
                ]
                minimum = min(evaluation for evaluation in objective if evaluation is not None)
                (repeated,) = [evaluation for evaluation in moved if len(evaluation.slots) == count]
                assert repeated.objective_after is not None and repeated.objective_after <= minimum
                assert (repeated.sizes, repeated.slots, minimum) in [
                    (evaluation.sizes, evaluation.slots, evaluation.objective_after) for evaluation in current
                ]
            # ... is what was considered.
            assert best.objective_after == min(evaluation.objective_after or np.inf for evaluation in moved)
            assert (best.sizes, best.slots, best.name) in [
                (evaluation.sizes, evaluation.slots, evaluation.name)
                for evaluation in moved
                if evaluation.objective_after == best.objective_after
            ]
    for evaluation in result.evaluations:
        before, after = evaluation.objective_before, evaluation.objective_after
        if after is None:
            assert evaluation.gain_ratio is None
        else:
            assert evaluation.gain_ratio == pytest.approx((before - after) / before, abs=1e-12)


def test_evaluations_match_recomputed_objective() -> None:
    """All slots and sizes of the first round, and some of them do not fit."""
    layers = one_giant(24)
    costs = a_cost(layers, [1.0, 3.0, 0.7, 1.0], bandwidth=1e9, capacity=20.0)
    capacity = costs.limit_mb.copy()
    capacity[1] = 0.5 * costs.memory_mb[1]
    costs = replace(costs, limit_mb=capacity)
    search, _, weights = a_search(costs, build_chain(layers, [0]))
    base = PartialPlan(mapping=(0,), stats=evaluate_plan(costs, [0] * 3, {}, weights))
    plan = search.accept_splits(base, None)
    current = [evaluation for evaluation in plan.evaluations if not evaluation.segments_moved]
    assert {evaluation.slots for evaluation in current} == {
        (0, *overrides) for count in (1, 2, 3) for overrides in itertools.combinations((1, 2, 3), count)
    }
    lacking = 0
    for evaluation in current:
        split = LayerSplit(
            layer=1, permutation=tuple(range(24)), sizes=evaluation.sizes, slots=evaluation.slots
        )
        splits = {1: (split, linear(costs)(layers[1], evaluation.sizes, evaluation.slots))}
        assert evaluation.objective_before == base.stats.objective and evaluation.name == layers[1].name
        if not is_feasible(costs, [0] * 3, splits):
            lacking += 1
            assert evaluation.objective_after is None and evaluation.gain_ratio is None
        else:
            assert evaluation.objective_after == evaluate_plan(costs, [0] * 3, splits, weights).objective
    assert 0 < lacking < len(current)


@pytest.mark.parametrize("cost", ["fixed_ms", "ms_per_byte"])
def test_unreachable_slots_get_no_part(cost: str) -> None:
    layers = one_giant(24)
    costs = a_cost(layers, [1.0, 3.0, 3.0], bandwidth=1e12, capacity=20.0)
    present = getattr(costs.network, cost).copy()
    present[2, 0] = np.inf
    costs = replace(costs, network=replace(costs.network, **{cost: present}))
    search, _, weights = a_search(costs, build_chain(layers, [0]))
    base = PartialPlan(mapping=(0,), stats=evaluate_plan(costs, [0] * 3, {}, weights))
    result = within(50_000, lambda: search.accept_splits(base, None))
    assert result.splits[1][0].slots == (0, 1)
    assert all(2 not in item.slots for item in result.evaluations)


def rounds(result: PartialPlan) -> list[list[SplitDecision]]:
    """What was considered, by the plan that it was compared with."""
    return [
        list(group)
        for _, group in itertools.groupby(result.decisions, key=lambda item: item.objective_before)
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"min_split_gain_ratio": 0.0},
        {"min_split_gain_ratio": 0.2},
        {"max_split_layers": 1, "max_groups_per_layer": 2},
        {"max_new_segments": 3, "max_groups_per_layer": 3, "min_split_gain_ratio": 0.01},
        {"flops_ratio_thresh": 0.3, "w_balance": 1.0, "w_comm": 0.0},
    ],
)
def test_decisions_are_evaluated_splits(mode: Mode, changes: dict[str, Any]) -> None:
    layers_split = []
    for seed in range(12):
        costs, graph = an_instance(seed)
        search, config, weights = a_search(costs, graph, mode, **changes)
        start = start_plan(search, costs, len(graph.segments), seed)
        if start is None:
            continue
        mapping, stats = search.improve_mapping(start, {})
        base = PartialPlan(mapping=mapping, stats=stats)
        sampled = [
            np.random.default_rng([seed, index]).permutation(layer.units).tolist()
            for index, layer in enumerate(costs.layers)
        ]
        plan = search.accept_splits(base, sampled.__getitem__)
        if seed < 6:
            assert plan == search.accept_splits(base, sampled.__getitem__), "a search keeps no state"
        is_honest(search, costs, config, weights, base, plan, sampled.__getitem__)
        layers_split.append(len(plan.splits))
        if not plan.splits:
            assert (plan.mapping, plan.stats) == (base.mapping, base.stats)
    assert sum(map(bool, layers_split)) > 3


@pytest.mark.parametrize(
    "changes",
    [
        {"max_split_layers": 0},
        {"max_new_segments": 0},
        {"flops_ratio_thresh": 2.0, "traffic_ratio_thresh": 2.0},
    ],
)
def test_zero_limits_evaluate_nothing(changes: dict[str, Any]) -> None:
    costs, graph = an_instance(1)
    search, *_ = a_search(costs, graph, **changes)
    start = start_plan(search, costs, len(graph.segments), 0)
    assert start is not None
    mapping, stats = search.improve_mapping(start, {})
    base = PartialPlan(mapping=mapping, stats=stats)
    assert search.accept_splits(base, None) == base


def one_giant(units: int, *, joins: bool = False) -> list[LayerNode]:
    """Three layers, the second of which does all the work."""
    layers = made_layers(1, seed=0)[:3]
    layers[1] = replace(
        layers[1], flops=1e9, splittable=True, units=units, split_joins=joins, split_in_bytes=4000,
        split_out_bytes=8000, num_heads=units,
    )  # fmt: skip
    return [replace(layer, flops=1e6, splittable=False) if layer.id != 1 else layer for layer in layers]


def compositions(units: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to share out units among parts, each of at least one."""
    return [
        tuple(np.diff([0, *cuts, units]).tolist())
        for cuts in itertools.combinations(range(1, units), parts - 1)
    ]


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("bandwidth", [1e6, 1e8, 1e10])
@pytest.mark.parametrize("speeds", [[1.0, 1.0], [1.0, 3.0, 0.7], [2.0, 0.3, 1.0], [1.0, 2.0, 0.0, 0.5]])
def test_balanced_sizes_are_near_optimum(speeds: list[float], bandwidth: float, joins: bool) -> None:
    layers = one_giant(24, joins=joins)
    costs = a_cost(layers, speeds, bandwidth=bandwidth, capacity=20.0)
    search, _, weights = a_search(
        costs, build_chain(layers, [0]), w_comm=0.0, w_balance=0.0, min_split_gain_ratio=0.0
    )
    base = PartialPlan(mapping=(0,), stats=evaluate_plan(costs, [0] * 3, {}, weights))
    (candidates,) = search.accept_splits(base, None).decisions
    best = np.inf
    present = [slot for slot in range(1, len(speeds)) if speeds[slot] > 0.0]
    for count in range(1, len(present) + 1):
        for overrides in itertools.combinations(present, count):
            for sizes in compositions(24, count + 1):
                split = LayerSplit(layer=1, permutation=tuple(range(24)), sizes=sizes, slots=(0, *overrides))
                parts = linear(costs)(layers[1], sizes, split.slots)
                best = min(best, evaluate_plan(costs, [0] * 3, {1: (split, parts)}, weights).objective)
    unit = float(np.max(costs.latency_ms[1], where=np.isfinite(costs.latency_ms[1]), initial=0.0)) / 24
    assert best <= candidates.objective_after * (1 + 1e-9)
    assert candidates.objective_after <= best + unit


def test_sizes_follow_slot_speed() -> None:
    layers = one_giant(400)
    costs = a_cost(layers, [1.0, 3.0], bandwidth=1e13, capacity=20.0)
    search, _, weights = a_search(costs, build_chain(layers, [0]))
    base = PartialPlan(mapping=(0,), stats=evaluate_plan(costs, [0] * 3, {}, weights))
    plan = search.accept_splits(base, None)
    assert abs(plan.splits[1][0].sizes[0] - 100) <= 1
    assert plan.stats.objective < 0.3 * base.stats.objective


class TooMuch(Exception):
    pass


def within(lines: int, work: Callable[[], Any]) -> Any:
    """What some work gives; an error where it runs more lines of the module than that."""
    ran = 0

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal ran
        ran += event == "line"
        if ran > lines:
            raise TooMuch(f"more than {lines} lines of {module.__name__} ran, last line {frame.f_lineno}")
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        return line if frame.f_code.co_filename == module.__file__ else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        return work()
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("bandwidth", [1e9, 1e6, 1e3, 1.0])
def test_slow_links_get_smaller_parts(bandwidth: float) -> None:
    layers = one_giant(3072)
    costs = a_cost(layers, [1.0, 1.5, 1.0], bandwidth=bandwidth, capacity=20.0)
    search, _, weights = a_search(costs, build_chain(layers, [0]))
    base = PartialPlan(mapping=(0,), stats=evaluate_plan(costs, [0] * 3, {}, weights))
    result = within(50_000, lambda: search.accept_splits(base, None))
    assert len(result.decisions) == 1
    assert bool(result.splits) == (bandwidth >= 1e6)


def test_least_busy_slots_are_tried() -> None:
    layers = one_giant(24)
    costs = a_cost(layers, [1.0] * 6, bandwidth=1e12, capacity=40.0)
    search, _, weights = a_search(costs, build_chain(layers, [0, 1, 2]), max_slots_tried=2)
    candidates: set[int] = set()

    def priced(layer: LayerNode, sizes: Sequence[int], slots: Sequence[int]) -> PartCosts:
        candidates.update(slots)
        return linear(costs)(layer, sizes, slots)

    search = SplitSearch(
        costs, build_chain(layers, [0, 1, 2]), weights, PartitionConfig(max_slots_tried=2), priced
    )
    stats = search.evaluate((4, 0, 1), {})
    assert stats is not None
    search.accept_splits(PartialPlan(mapping=(4, 0, 1), stats=stats), None)
    assert candidates == {0, 2, 3}


@pytest.mark.parametrize(
    ("orders", "match"), [(lambda _: [0] * 24, "`permutation`"), (lambda _: [0, 1], "units")]
)
def test_invalid_unit_order_is_refused(orders: UnitOrders, match: str) -> None:
    layers = one_giant(24)
    costs = a_cost(layers, [1.0, 1.0], capacity=20.0)
    search, _, weights = a_search(costs, build_chain(layers, [0]))
    base = PartialPlan(mapping=(0,), stats=evaluate_plan(costs, [0] * 3, {}, weights))
    with pytest.raises(InputError, match=match):
        search.accept_splits(base, orders)


def test_split_without_memory_is_infeasible() -> None:
    layers = one_giant(24)
    full = a_cost(layers, [1.0, 1.0], bandwidth=1e12, capacity=20.0)
    half = slice_layer(layers[1], 12).memory_bytes / 1e6
    for capacity, fits in ((0.99 * half, False), (1.01 * half, True)):
        costs = replace(full, limit_mb=np.array([full.limit_mb[0], capacity]))
        search, *_ = a_search(costs, build_chain(layers, [0]))
        stats = search.evaluate((0,), {})
        assert stats is not None
        plan = search.accept_splits(PartialPlan(mapping=(0,), stats=stats), None)
        assert bool(plan.splits) is bool(plan.decisions) is fits


def test_several_layers_are_split() -> None:
    layers = made_layers(2, seed=0)
    for giant in (2, 4):
        layers[giant] = replace(layers[giant], flops=1e9)
    costs = a_cost(layers, [1.0, 1.0, 1.0], bandwidth=1e12, capacity=20.0)
    search, *_ = a_search(costs, build_chain(layers, [0]), "serial")
    stats = search.evaluate((0,), {})
    assert stats is not None
    plan = search.accept_splits(PartialPlan(mapping=(0,), stats=stats), None)
    assert set(plan.splits) == {2, 4} and [len(decision) for decision in rounds(plan)] == [2, 1]
    assert [decision.accepted for decision in plan.decisions].count(True) == 2
    # Three alike share both.
    assert plan.stats.serial_ms == pytest.approx(stats.serial_ms / 3, rel=0.05)


def test_search_needs_few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = made_layers(12, seed=0)
    costs = a_cost(layers, np.linspace(0.5, 2.0, 8).tolist(), capacity=20.0)
    search, config, _ = a_search(costs)
    calls = 0

    def counted(*arguments: Any) -> HwStats:
        nonlocal calls
        calls += 1
        return evaluate_plan(*arguments)

    monkeypatch.setattr(module, "evaluate_plan", counted)
    mapping, stats = search.improve_mapping([0] * config.segments, {})
    # A round tries every segment on every other slot.
    a_round = config.segments * (costs.num_slots - 1)
    assert calls <= 25 * a_round
    calls = 0
    search.accept_splits(PartialPlan(mapping=mapping, stats=stats), None)
    slots = 5 + 10 + 10
    assert calls <= (config.max_split_layers + 1) * len(search.find_candidates()) * (2 * slots + 4 * a_round)

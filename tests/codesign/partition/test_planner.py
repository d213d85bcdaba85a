"""Tests of `codesign.partition.planner`."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
pytest.importorskip("scipy")

from sparseflow.codesign.hardware.chips import ChipType, LinkType
from sparseflow.codesign.hardware.network import Network
from sparseflow.codesign.hardware.proxy import LayerHwProxy
from sparseflow.codesign.mapping import MappingSolver, Mode
from sparseflow.codesign.mapping import evaluate_mapping as evaluate_mapping
from sparseflow.codesign.partition import split_search as looking
from sparseflow.codesign.partition.objective import HwStats, LayerCosts, PartCosts, evaluate_plan, is_feasible
from sparseflow.codesign.partition.planner import PartitionPlan, PartitionPlanner, build_mapping_problem
from sparseflow.codesign.partition.split_search import PartitionConfig, SplitSearch
from sparseflow.codesign.workload.layers import slice_layer
from sparseflow.codesign.workload.segments import Edge, SegmentGraph, build_balanced_chain, build_chain
from sparseflow.codesign.workload.splits import check_rewrite_plan, compute_transfer_bytes
from sparseflow.core.layers import LayerNode
from sparseflow.errors import InputError
from tests.codesign.nodes import made_layers, peak_mb

MODES: tuple[Mode, ...] = ("balanced", "serial")
PROXY = LayerHwProxy.analytic()
LOG = "sparseflow.codesign.partition.planner"


def chip(name: str = "chip", **figures: Any) -> ChipType:
    record: dict[str, Any] = {
        "peak_flops": {"float32": 1e10},
        "peak_bw": 1e10,
        "mem_gb": 1.0,
        "area_mm2": 10.0,
        "tdp_w": 10.0,
        "idle_w": 1.0,
    }
    return ChipType(name=name, **(record | figures))


def wires(slots: int, bandwidth: float = 1e9, latency_us: float = 1.0) -> Network:
    link = LinkType(name="wire", bandwidth=bandwidth, latency_us=latency_us, pj_per_bit=1.0)
    return Network.all_to_all(link, np.zeros((slots, slots)))


def a_planner(mode: Mode = "balanced", **changes: Any) -> PartitionPlanner:
    return PartitionPlanner(MappingSolver(mode=mode, time_limit_s=600.0), PROXY, PartitionConfig(**changes))


def with_giant(blocks: int = 2, times: float = 50.0) -> list[LayerNode]:
    """Layers of which one perceptron has by far the most operations and weights."""
    layers = made_layers(blocks, seed=0)
    layers[2] = replace(layers[2], flops=times * float(layers[2].flops))
    return layers


Instance = tuple[list[LayerNode], list[ChipType | None], Network]


def an_instance(seed: int) -> Instance:
    """Some layers, chips of all kinds, some slots empty, links from slow to fast; in half of them a giant."""
    rng = np.random.default_rng(seed)
    layers = made_layers(int(rng.integers(1, 4)), seed=seed)
    if seed % 2:
        index = int(rng.integers(1, len(layers) - 1))
        layers[index] = replace(layers[index], flops=30.0 * float(layers[index].flops))
    needed = sum(layer.memory_bytes for layer in layers) / 1e9
    slots = int(rng.integers(2, 6))
    chips: list[ChipType | None] = [
        chip(f"chip-{slot}", peak_flops={"float32": 10 ** rng.uniform(9.0, 11.0)},
             peak_bw=10 ** rng.uniform(9.0, 11.0), mem_gb=needed * rng.uniform(0.5, 3.0),
             idle_w=rng.uniform(0.0, 5.0))
        for slot in range(slots)
    ]  # fmt: skip
    if slots > 3:
        chips[int(rng.integers(slots))] = None
    return layers, chips, wires(slots, 10 ** rng.uniform(8.0, 12.0), rng.uniform(0.0, 2.0))


def held_mb(layers: Sequence[LayerNode], plan: PartitionPlan, slots: int) -> list[float]:
    """Memory of each slot, from layers alone: all weights and the largest activations."""
    splits = {} if plan.rewrite_plan is None else {split.layer: split for split in plan.rewrite_plan.splits}
    by_slot: list[list[LayerNode]] = [[] for _ in range(slots)]
    for layer, home in zip(layers, plan.assignment, strict=True):
        if layer.id not in splits:
            by_slot[home].append(layer)
            continue
        for slot, size in zip(splits[layer.id].slots, splits[layer.id].sizes, strict=True):
            by_slot[slot].append(slice_layer(layer, size))
    return [peak_mb(items) for items in by_slot]


def best_of_all(planner: PartitionPlanner, plan: PartitionPlan, instance: Instance) -> float:
    """The lowest latency of any mapping of a plan's segments that can run."""
    costs = planner.compute_costs(*instance)
    index = {layer: segment.id for segment in plan.segments.segments for layer in segment.layer_ids}
    best = np.inf
    for mapping in itertools.product(range(costs.num_slots), repeat=len(plan.segments.segments)):
        assignment = [mapping[index[layer]] for layer in range(len(costs.layers))]
        if is_feasible(costs, assignment, {}):
            best = min(best, evaluate_plan(costs, assignment, {}, planner.weights).total_latency_ms)
    return best


def test_compute_costs_uses_proxy() -> None:
    layers = made_layers(2, seed=3)
    chips = [chip("a", idle_w=0.5), None, chip("b", peak_bw=2e9, mem_gb=2.5), None]
    costs = a_planner().compute_costs(layers, chips, wires(4))
    assert costs.limit_mb.tolist() == [1000.0, 0.0, 2500.0, 0.0] and costs.idle_w.tolist() == [
        0.5,
        0.0,
        1.0,
        0.0,
    ]
    for slot, item in enumerate(chips):
        for index, layer in enumerate(layers):
            if item is None:
                assert np.isinf(costs.latency_ms[index, slot])
                continue
            record = {name: float(value) for name, value in PROXY.predict_layer(layer, item).items()}
            assert (
                costs.latency_ms[index, slot] == record["lat_ms"]
                and costs.power_w[index, slot] == record["power_w"]
            )
            assert costs.memory_mb[index] == record["mem_mb"] == layer.memory_bytes / 1e6


def test_compute_part_costs_uses_proxy() -> None:
    layer = made_layers(1, seed=0)[2]
    chips = [chip("a"), chip("b", peak_flops={"float32": 1e9})]
    sizes = (5, layer.units - 5)
    part_costs = a_planner().compute_part_costs(layer, sizes, chips)
    for index, (size, item) in enumerate(zip(sizes, chips, strict=True)):
        record = {
            name: float(value) for name, value in PROXY.predict_layer(slice_layer(layer, size), item).items()
        }
        assert (
            part_costs.latency_ms[index],
            part_costs.power_w[index],
            part_costs.memory_mb[index],
        ) == tuple(record[name] for name in ("lat_ms", "power_w", "mem_mb"))


@pytest.mark.parametrize(
    ("chips", "slots", "match"),
    [
        ([chip()] * 2, 3, "2 slots with 2 chips, but the network has 3 slots"),
        ([None, None], 2, "2 slots with 0 chips"),
        ([], 0, "0 slots with 0 chips"),
    ],
)
def test_wrong_number_of_chips_is_refused(chips: list[ChipType | None], slots: int, match: str) -> None:
    with pytest.raises(InputError, match=match):
        a_planner().plan(made_layers(1, seed=0), chips, wires(slots))


@pytest.mark.parametrize("seed", range(6))
def test_mapping_problem_sums_layer_costs(seed: int) -> None:
    layers, chips, network = an_instance(seed)
    chips = [item or chip() for item in chips]
    planner = a_planner()
    costs = planner.compute_costs(layers, chips, network)
    graph = build_balanced_chain(layers, 5)
    problem = build_mapping_problem(costs, graph)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        mapping = rng.integers(network.num_slots, size=len(graph.segments))
        assignment = [0] * len(layers)
        for segment, slot in zip(graph.segments, mapping.tolist(), strict=True):
            for layer in segment.layer_ids:
                assignment[layer] = slot
        result, record = (
            evaluate_plan(costs, assignment, {}, planner.weights),
            evaluate_mapping(problem, mapping),
        )
        for name in ("serial_ms", "period_ms", "comm_ms"):
            assert getattr(result, name) == pytest.approx(getattr(record, name)), name
        np.testing.assert_allclose(result.busy_ms, record.busy_ms)
        np.testing.assert_allclose(result.memory_mb, record.memory_mb, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_plans_are_consistent(mode: Mode) -> None:
    split = none = 0
    for seed in range(25):
        layers, chips, network = instance = an_instance(seed)
        planner = a_planner(mode, segments=6)
        sampled = [
            np.random.default_rng([seed, index]).permutation(decision.units).tolist()
            for index, decision in enumerate(layers)
        ]
        try:
            plan = planner.plan(*instance, unit_orders=sampled.__getitem__)
        except InputError as error:
            assert "MB" in str(error)
            continue
        costs = planner.compute_costs(*instance)
        rewrite = plan.rewrite_plan
        split, none = split + (rewrite is not None), none + (rewrite is None)
        assert plan.hw_stats == evaluate_plan(costs, plan.assignment, plan.splits, planner.weights)
        assert plan.hw_stats.objective <= plan.coarse_stats.objective
        assert plan.hw_stats.comm_bytes == sum(
            compute_transfer_bytes(layers, plan.assignment, rewrite).values()
        )
        assert plan.weights == planner.weights and plan.weights.mode == mode
        assert [id for decision in plan.segments.segments for id in decision.layer_ids] == list(
            range(len(layers))
        )
        for segment, slot in zip(plan.segments.segments, plan.mapping, strict=True):
            assert {plan.assignment[layer] for layer in segment.layer_ids} == {slot}
        for slot, contents in enumerate(held_mb(layers, plan, network.num_slots)):
            current = chips[slot]
            assert contents <= (0.0 if current is None else 1e3 * current.mem_gb * (1 + 1e-12))
        assert rewrite is None or rewrite.splits
        for decision in () if rewrite is None else rewrite.splits:
            assert list(decision.permutation) == sampled[decision.layer]
            assert len(decision.slots) <= planner.config.max_groups_per_layer
        if rewrite is not None:
            check_rewrite_plan(layers, rewrite, plan.assignment)
            assert len(rewrite.splits) <= planner.config.max_split_layers
            assert (
                sum(len(decision.slots) - 1 for decision in rewrite.splits) <= planner.config.max_new_segments
            )
            # The whole gain is at least what the accepted ones say, one on top of the other.
            gains = [1.0 - decision.gain_ratio for decision in plan.split_decisions if decision.accepted]
            assert all(decision <= 1.0 - planner.config.min_split_gain_ratio for decision in gains)
            assert plan.hw_stats.objective == pytest.approx(plan.coarse_stats.objective * np.prod(gains))
        coarse_plan = planner.plan(*instance, use_fine_split=False)
        assert coarse_plan.hw_stats == coarse_plan.coarse_stats == plan.coarse_stats
        assert coarse_plan.rewrite_plan is None and not coarse_plan.split_decisions
    assert min(split, none) >= 3


@pytest.mark.parametrize("mode", MODES)
def test_bound_is_below_every_mapping(mode: Mode) -> None:
    below = 0
    for seed in range(20):
        instance = an_instance(seed)
        planner = a_planner(mode, segments=5)
        try:
            plan = planner.plan(*instance, use_fine_split=False)
        except InputError:
            continue
        latency = plan.coarse_stats.total_latency_ms
        assert 0.0 < plan.lower_bound_ms <= latency
        assert plan.gap == pytest.approx((latency - plan.lower_bound_ms) / latency, abs=1e-12)
        assert 0.0 <= plan.gap < 1.0
        best = best_of_all(planner, plan, instance)
        assert plan.lower_bound_ms <= best * (1 + 1e-9), f"{seed}: {plan.lower_bound_ms} > {best}"
        below += plan.gap > 1e-9
    assert below > 0 or mode == "serial"


def test_bound_of_one_segment_is_tight() -> None:
    layers = made_layers(2, seed=0)
    plan = a_planner(segments=1).plan(layers, [chip()] * 4, wires(4), use_fine_split=False)
    assert plan.lower_bound_ms == pytest.approx(plan.coarse_stats.period_ms, rel=1e-9)
    assert plan.gap == pytest.approx(0.0, abs=1e-9)


def test_slow_links_split_nothing_and_log_reason(caplog: pytest.LogCaptureFixture) -> None:
    layers = with_giant()
    with caplog.at_level(logging.INFO, logger=LOG):
        plan = a_planner().plan(layers, [chip()] * 3, wires(3, 1e6, 100.0))
    assert plan.rewrite_plan is None and plan.splits == {} and plan.hw_stats == plan.coarse_stats
    assert plan.split_decisions and not any(decision.accepted for decision in plan.split_decisions)
    assert all(decision.gain_ratio < 0.05 for decision in plan.split_decisions)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(plan.split_decisions) + 1
    for line, decision in zip(lines, plan.split_decisions, strict=False):
        assert line.startswith(f"no split of {decision.name} into {decision.sizes} on slots {decision.slots}")
        before, after = decision.objective_before, decision.objective_after
        assert f"objective {before:.6g} -> {after:.6g}, gain {100.0 * decision.gain_ratio:.2f} %" in line
    assert "rewrite_plan is None: no split gained enough" in lines[-1]
    assert f"{plan.coarse_stats.objective:.6g}" in lines[-1]


@pytest.mark.parametrize("mode", MODES)
def test_fast_links_split_large_layer(mode: Mode, caplog: pytest.LogCaptureFixture) -> None:
    layers = with_giant()
    with caplog.at_level(logging.INFO, logger=LOG):
        plan = a_planner(mode).plan(layers, [chip()] * 4, wires(4, 1e12, 0.0))
    assert plan.rewrite_plan is not None
    (giant,) = [split for split in plan.rewrite_plan.splits if split.layer == 2]
    assert len(giant.slots) >= 3
    assert plan.hw_stats.objective < 0.5 * plan.coarse_stats.objective
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(plan.split_decisions) + 1
    accepted = [line for line in lines if line.startswith("split of ")]
    assert len(accepted) == len(plan.rewrite_plan.splits)
    assert any(
        f"split of {layers[2].name} into {giant.sizes} on slots {giant.slots}" in line for line in accepted
    )
    assert f"{len(plan.rewrite_plan.splits)} layers split" in lines[-1] and "None" not in lines[-1]
    assert f"{plan.hw_stats.objective:.6g}" in lines[-1] and f"{plan.coarse_stats.objective:.6g}" in lines[-1]


@pytest.mark.parametrize("bandwidth", [1e6, 1e12])
def test_log_contains_all_evaluated_splits(bandwidth: float, caplog: pytest.LogCaptureFixture) -> None:
    layers = with_giant()
    with caplog.at_level(logging.DEBUG, logger=LOG):
        plan = a_planner().plan(layers, [chip()] * 3, wires(3, bandwidth))
    lines = [evaluation.getMessage() for evaluation in caplog.records if evaluation.levelno == logging.DEBUG]
    assert len(lines) == len(plan.split_evaluations) > 3 * len(plan.split_decisions)
    for line, evaluation in zip(lines, plan.split_evaluations, strict=True):
        moved = ", segments moved" if evaluation.segments_moved else ""
        assert (
            f"round {evaluation.round}: {evaluation.name} into {evaluation.sizes} on slots "
            f"{evaluation.slots}{moved}: " in line
        )
        assert evaluation.objective_after is not None and evaluation.gain_ratio is not None
        assert (
            f"objective {evaluation.objective_after:.6g}, gain {100.0 * evaluation.gain_ratio:.2f} %" in line
        )
    last = caplog.records[-1].getMessage()
    assert f"{len(plan.split_evaluations)} splits evaluated" in last


def test_log_without_feasible_split(caplog: pytest.LogCaptureFixture) -> None:
    # There is room for the model, and for none of the states that a part is sent and sends back.
    layers = sized(100, 100, 100, 100)
    chips = [chip(mem_gb=0.4), chip(mem_gb=1e-6)]
    with caplog.at_level(logging.DEBUG, logger=LOG):
        plan = a_planner().plan(layers, chips, wires(2, 1e12, 0.0))
    assert plan.rewrite_plan is None and plan.split_decisions == () and plan.split_evaluations
    assert all(evaluation.objective_after is None for evaluation in plan.split_evaluations)
    assert "infeasible" in caplog.text
    assert "rewrite_plan is None: no split is feasible" in caplog.text


def test_log_without_candidates(caplog: pytest.LogCaptureFixture) -> None:
    layers = made_layers(2, seed=0, splittable=False)
    with caplog.at_level(logging.INFO, logger=LOG):
        plan = a_planner().plan(layers, [chip()] * 3, wires(3, 1e12, 0.0))
    assert plan.rewrite_plan is None and plan.split_decisions == ()
    assert "rewrite_plan is None: no split was evaluated" in caplog.text


def test_coarse_plan_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=LOG):
        plan = a_planner().plan(with_giant(), [chip()] * 3, wires(3, 1e12), use_fine_split=False)
    assert plan.rewrite_plan is None and not caplog.records


def test_one_chip_splits_nothing() -> None:
    plan = a_planner().plan(with_giant(), [None, chip(), None], wires(3))
    assert set(plan.assignment) == {1} and plan.rewrite_plan is None and plan.hw_stats.comm_bytes == 0
    assert plan.gap == pytest.approx(0.0, abs=1e-9)
    assert plan.hw_stats.serial_ms == pytest.approx(plan.hw_stats.period_ms)


def sized(*megabytes: float) -> list[LayerNode]:
    """Layers with so much memory for weights and little else."""
    subset = made_layers(len(megabytes), seed=0)
    return [
        replace(
            subset[index], memory_bytes=round(1e6 * mb), weight_bytes=round(1e6 * mb), flops=1e6, bytes=1e6
        )
        for index, mb in enumerate(megabytes)
    ]


def test_model_without_room_is_refused() -> None:
    planner = a_planner()
    with pytest.raises(InputError, match=r"2000(\.0)? MB: 100(\.0)?"):
        planner.plan(sized(600, 900, 600), [chip(), None, chip()], wires(3))
    with pytest.raises(InputError, match="1200"):
        planner.plan(sized(100, 1200, 100), [chip()] * 3, wires(3))
    # Two of them never go together.
    with pytest.raises(InputError, match=r"3 segments of 1800 MB.* 1000 MB"):
        planner.plan(sized(600, 600, 600), [chip()] * 2, wires(2))


def test_missing_memory_of_small_models_is_stated() -> None:
    # 300 kB, and there are 299: one kB is too little, not 0.0 MB.
    with pytest.raises(InputError) as caught:
        a_planner().plan(sized(0.1, 0.2), [chip(mem_gb=0.000299)], wires(1))
    lacking = re.search(r"(\S+) MB are missing", str(caught.value))
    assert lacking is not None and float(lacking[1]) == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize("count", [1, 2])
def test_plan_may_use_all_memory(count: int) -> None:
    # 0.1 + 0.2 is a little more than 0.3.
    layers = sized(0.1, 0.2) if count == 1 else sized(0.1, 0.2, 0.7)
    plan = a_planner().plan(layers, [chip(mem_gb=0.0003), chip(mem_gb=0.0009)][:count], wires(count))
    assert plan.assignment == ((0, 0) if count == 1 else (0, 0, 1))


@pytest.mark.parametrize("use_fine_split", [False, True])
def test_activations_of_layers_on_one_chip_count_once(use_fine_split: bool) -> None:
    # 4 layers with 100 MB of weights and 500 MB of activations each need 900 MB on one chip, not 2400 MB.
    layers = [replace(layer, weight_bytes=10**8, memory_bytes=6 * 10**8) for layer in made_layers(1, seed=0)]
    plan = a_planner().plan(layers, [chip(mem_gb=0.9)], wires(1), use_fine_split=use_fine_split)
    assert plan.assignment == (0,) * 4 and plan.hw_stats.memory_mb == pytest.approx((900.0,))
    proxy_mb = float(PROXY.predict_segment(layers, chip())["mem_mb"])
    assert proxy_mb == plan.hw_stats.memory_mb[0] == build_chain(layers, [0]).segments[0].memory_bytes / 1e6
    with pytest.raises(InputError, match=r"the model needs 900 MB, but all 1 chips have 899 MB: 1 MB"):
        a_planner().plan(layers, [chip(mem_gb=0.899)], wires(1))


def test_precision_without_rate_is_refused() -> None:
    layers = [replace(layer, precision="bfloat16") for layer in made_layers(1, seed=0)]
    with pytest.raises(
        InputError, match="b has no FLOP/s for bfloat16, only for float32; add it to `peak_flops`"
    ):
        a_planner().plan(layers, [chip("a", peak_flops={"bfloat16": 1e10}), chip("b")], wires(2))


def test_layers_with_branches_are_refused() -> None:
    layers = made_layers(2, seed=0)
    costs, planner = a_planner().compute_costs(layers, [chip()] * 2, wires(2)), a_planner()
    chain = build_chain(layers, [0, 2, 4])
    skip = replace(chain, edges=(*chain.edges, Edge(src=0, dst=2, traffic_bytes=10**9)))
    assert SplitSearch(costs, chain, planner.weights, planner.config, no_parts).evaluate((0, 1, 0), {})
    for graph in (skip, replace(chain, edges=chain.edges[:1]), SegmentGraph(segments=(), edges=())):
        with pytest.raises(InputError, match=r"no chain of the layers|`first_layers`"):
            SplitSearch(costs, graph, planner.weights, planner.config, no_parts)


def test_fractions_of_bytes_are_tolerated() -> None:
    # Each layer's memory is a whole number of bytes and a little less than a thousandth of one.
    full = np.arange(1000, 1010)
    layers = [
        replace(layer, weight_bytes=int(size))
        for layer, size in zip(made_layers(4, seed=0), full, strict=True)
    ]
    costs = LayerCosts(
        layers=tuple(layers), latency_ms=np.ones((len(layers), 1)), power_w=np.ones((len(layers), 1)),
        memory_mb=(full + 0.0009) / 1e6, limit_mb=np.array([full.sum() / 1e6]), idle_w=np.zeros(1),
        network=wires(1),
    )  # fmt: skip
    planner = a_planner()
    assert planner.plan_from_costs(costs, no_parts, use_fine_split=False).assignment == (0,) * len(layers)
    short = replace(costs, limit_mb=np.array([(full.sum() - 1) / 1e6]))
    with pytest.raises(InputError, match="1e-06"):
        planner.plan_from_costs(short, no_parts, use_fine_split=False)


def no_parts(layer: LayerNode, sizes: Sequence[int], slots: Sequence[int]) -> PartCosts:
    raise AssertionError("a coarse plan has no parts")


def test_plan_keeps_empty_slots_empty() -> None:
    layers = with_giant()
    chips = [None, chip("a"), None, chip("b"), chip("c"), None]
    plan = a_planner().plan(layers, chips, wires(6, 1e12, 0.0))
    used = set(plan.assignment) | {slot for split, _ in plan.splits.values() for slot in split.slots}
    assert plan.rewrite_plan is not None and used <= {1, 3, 4}
    assert all(plan.hw_stats.busy_ms[slot] == plan.hw_stats.memory_mb[slot] == 0.0 for slot in (0, 2, 5))


def test_plan_limits_number_of_segments() -> None:
    layers = made_layers(3, seed=1)
    for segments, expected in ((12, 8), (4, 4)):
        plan = a_planner(segments=segments).plan(layers, [chip()] * 3, wires(3))
        assert len(plan.mapping) == len(plan.segments.segments) == expected


def test_default_unit_order() -> None:
    plan = a_planner().plan(with_giant(), [chip()] * 3, wires(3, 1e12, 0.0))
    assert plan.rewrite_plan is not None
    for split in plan.rewrite_plan.splits:
        assert split.permutation == tuple(range(len(split.permutation)))


def test_invalid_unit_order_is_refused() -> None:
    with pytest.raises(InputError):
        a_planner().plan(with_giant(), [chip()] * 3, wires(3, 1e12), unit_orders=lambda _: [0, 0])


def test_plan_of_gated_layers() -> None:
    layers = with_giant()
    soft = [
        replace(
            layer, flops=torch.tensor(layer.flops, requires_grad=True), bytes=torch.tensor(float(layer.bytes))
        )
        for layer in layers
    ]
    network = wires(3, 1e12, 0.0)
    result, expected = (a_planner().plan(layer, [chip()] * 3, network) for layer in (soft, layers))
    assert result.rewrite_plan == expected.rewrite_plan and result.mapping == expected.mapping
    assert result.hw_stats.objective == pytest.approx(expected.hw_stats.objective, rel=1e-6)


def test_plan_is_deterministic() -> None:
    instance = an_instance(1)
    assert asdict(a_planner().plan(*instance)) == asdict(a_planner().plan(*instance))


def test_coarse_plan_needs_few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def counted(*arguments: Any) -> HwStats:
        nonlocal calls
        calls += 1
        return evaluate_plan(*arguments)

    monkeypatch.setattr(looking, "evaluate_plan", counted)
    chips = [chip(f"chip-{index}", peak_flops={"float32": 1e10 * (1 + index)}) for index in range(8)]
    plan = a_planner().plan(made_layers(12, seed=0), chips, wires(8), use_fine_split=False)
    # One to begin with, and rounds of each of 12 segments on each of 7 other slots.
    assert len(plan.mapping) == 12 and calls <= 1 + 8 * 12 * 7

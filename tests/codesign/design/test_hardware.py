"""Tests of `codesign.design.hardware`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sparseflow.codesign.design.decision import CostReference, HardwareDecision, summarize_cost
from sparseflow.codesign.design.hardware import Hardware
from sparseflow.codesign.design.placement import PlacementSearch
from sparseflow.codesign.hardware.chips import ChipLibrary, parse_library, read_library
from sparseflow.codesign.hardware.proxy import DeviceSpec, LayerHwProxy
from sparseflow.codesign.workload.layers import to_float
from sparseflow.codesign.workload.splits import (
    LayerSplit,
    RewritePlan,
    check_rewrite_plan,
    compute_transfer_bytes,
)
from sparseflow.core.layers import LayerNode
from sparseflow.errors import FileFormatError, InputError
from tests.codesign.toys import Listed, chain, hardware, quick, wrong_with

CHEAP_LINKS = {"hardware": {"link": "ucie"}}
SERIAL = {"mapping": {"mode": "serial"}}
REST = ("lambda_E", "lambda_area", "lambda_chip", "lambda_layout")
"""All that counts but latency."""


def library(*mem_gb: float) -> ChipLibrary:
    """Chips that differ in memory, and the shipped links."""
    chips = [
        {
            "name": f"m{index}", "peak_flops": {"float32": 2e13}, "peak_bw": 4e11, "mem_gb": size,
            "area_mm2": 50.0, "tdp_w": 20.0,
        }
        for index, size in enumerate(mem_gb)
    ]  # fmt: skip
    links = [link.model_dump() for link in read_library().links]
    return parse_library({"chips": chips, "links": links})


def decided(
    hw: Hardware, layers: Sequence[LayerNode], chips: Any, assignment: Any, plan: Any = None
) -> HardwareDecision:
    return HardwareDecision(
        chips=tuple(chips), segments=tuple((layer.name,) for layer in layers), mapping=tuple(assignment),
        positions_mm=hw.placer.grid_positions(), rewrite_plan=plan,
    )  # fmt: skip


def halves(layers: Sequence[LayerNode], index: int, slots: tuple[int, ...] = (0, 1)) -> RewritePlan:
    units = layers[index].units
    sizes = (units // 2, units - units // 2)
    split = LayerSplit(layer=index, permutation=tuple(range(units)), sizes=sizes, slots=slots)
    return RewritePlan(splits=(split,))


def objective(hw: Hardware, layers: Sequence[LayerNode], decision: HardwareDecision) -> float:
    return hw.evaluate_cost(layers, decision).objective


def test_initial_decision_sets_reference() -> None:
    hw, layers = hardware(loss={"lambda_T": 2.0, "lambda_area": 0.5}), chain()
    first = hw.initial_decision(layers)
    assert first.chips == ("npu-m",) * 3 and first.positions_mm == hw.placer.grid_positions()
    assert (
        first.rewrite_plan is None
        and first.assign_layers(layers) == hw.make_plan(layers, first, use_fine_split=False).assignment
    )
    priced = hw.evaluate_cost(layers, first)
    assert hw.reference == CostReference(
        latency_ms=priced.stats.total_latency_ms, energy_mj=priced.stats.energy_mj, area_mm2=240.0
    )
    # Everything is 1 at first, but for the lambdas.
    assert priced.layout == pytest.approx(1.0)
    assert priced.objective == pytest.approx(2.0 + 1.0 + 0.5 + 0.1 + 0.1)
    assert (priced.chips, priced.area_mm2) == (3, 240.0)


def test_objective_is_weighted_sum() -> None:
    hw, layers = hardware(), chain(seed=1)
    hw.initial_decision(layers)
    decision = decided(hw, layers, ("npu-s", None, "memory-m"), (0, 0, 2, 2, 0, 2))
    priced, record, zero = hw.evaluate_cost(layers, decision), hw.lambdas, hw.reference
    assert zero is not None and (priced.area_mm2, priced.chips) == (145.0, 2)
    assert priced.objective == pytest.approx(
        record.lambda_T * priced.stats.total_latency_ms / zero.latency_ms
        + record.lambda_E * priced.stats.energy_mj / zero.energy_mj
        + record.lambda_area * 145.0 / 240.0
        + record.lambda_chip * 2 / 3
        + record.lambda_layout
        * hw.placer.compute_loss(decision.positions_mm, hw.make_placement_problem(layers, decision))
    )
    assert summarize_cost(priced)["energy_delay_mj_ms"] == priced.energy_delay
    assert priced.energy_delay == priced.stats.energy_mj * priced.stats.total_latency_ms


@pytest.mark.parametrize("name", ["lambda_T", "lambda_E", "lambda_area", "lambda_chip", "lambda_layout"])
def test_each_lambda_weights_its_term(name: str) -> None:
    names = ("lambda_T", "lambda_E", "lambda_mem", "lambda_area", "lambda_chip", "lambda_layout")
    hw, layers = hardware(loss=dict.fromkeys(names, 0.0) | {name: 3.0}), chain()
    assert objective(hw, layers, hw.initial_decision(layers)) == pytest.approx(3.0)


def test_evaluate_cost_of_infeasible_decision_is_refused() -> None:
    hw, layers = hardware(), chain()
    hw.initial_decision(layers)
    with pytest.raises(InputError):
        hw.evaluate_cost(layers, decided(hw, layers, ("npu-m", None, "npu-m"), (0, 0, 1, 1, 2, 2)))
    fat = [replace(layer, memory_bytes=400 * 10**6, weight_bytes=400 * 10**6) for layer in layers]
    first = decided(hw, layers, ("npu-s", "npu-m", "npu-m"), (0, 0, 0, 1, 1, 1))  # npu-s holds 1 GB
    assert hw.evaluate_cost(layers, first).chips == 3
    with pytest.raises(InputError):
        hw.evaluate_cost(fat, first)


def test_evaluate_cost_with_part_on_empty_slot_is_refused() -> None:
    hw, layers = hardware(), chain()
    hw.initial_decision(layers)
    decision = decided(hw, layers, ("npu-m", None, "npu-m"), (0,) * 6, halves(layers, 2))
    with pytest.raises(InputError):
        hw.evaluate_cost(layers, decision)


def test_evaluate_cost_ignores_splits_of_other_units() -> None:
    hw, layers = hardware(), chain()
    hw.initial_decision(layers)
    plain = decided(hw, layers, ("npu-m",) * 3, (0,) * 6)
    split = decided(hw, layers, ("npu-m",) * 3, (0,) * 6, halves(layers, 2))
    assert objective(hw, layers, split) != objective(hw, layers, plain)
    fewer = [*layers[:2], replace(layers[2], units=layers[2].units - 1), *layers[3:]]
    assert hw.evaluate_cost(fewer, split) == hw.evaluate_cost(fewer, plain)


@pytest.mark.parametrize("index", [0, 2])
def test_placement_traffic_equals_transfer_bytes(index: int) -> None:
    hw, layers = hardware(), chain(seed=1)
    assignment, plan = (0, 0, 0, 1, 1, 2), halves(layers, index, (0, 2))
    problem = hw.make_placement_problem(
        layers, decided(hw, layers, ("npu-m", "npu-s", "npu-m"), assignment, plan)
    )
    expected = np.zeros((3, 3))
    for pair, size in compute_transfer_bytes(layers, assignment, plan).items():
        expected[pair] = size
    np.testing.assert_array_equal(problem.traffic_bytes, expected)
    assert problem.names == ("npu-m", "npu-s", "npu-m") and problem.tdp_w.tolist() == [22.0, 6.0, 22.0]
    assert problem.sizes_mm.tolist() == [[10.0, 8.0], [5.0, 5.0], [10.0, 8.0]]


def test_select_better_returns_lower_objective() -> None:
    hw, layers = hardware(), chain()
    first = hw.initial_decision(layers)
    worse = replace(first, chips=("memory-m",) * 3)
    assert objective(hw, layers, worse) > objective(hw, layers, first)
    assert hw.select_better(layers, first, worse) is first and hw.select_better(layers, worse, first) is first
    assert hw.select_better(layers, first, None) is first
    duplicate = replace(first, positions_mm=tuple(reversed(first.positions_mm)))
    if objective(hw, layers, duplicate) == objective(hw, layers, first):
        assert hw.select_better(layers, first, duplicate) is first
    nowhere = replace(first, chips=(None,) * 3)
    assert hw.select_better(layers, first, nowhere) is first


def test_select_better_prefers_feasible() -> None:
    hw, layers = hardware(), chain()
    first = hw.initial_decision(layers)
    removed = replace(first, chips=("npu-m", None, None), mapping=(1,) * len(first.mapping))
    with pytest.raises(InputError):
        hw.evaluate_cost(layers, removed)
    assert hw.select_better(layers, removed, first) is first
    assert hw.select_better(layers, removed, replace(removed, chips=(None, None, "npu-m"))) is removed


@pytest.mark.parametrize("changes", [CHEAP_LINKS, SERIAL])
@pytest.mark.parametrize("use_fine_split", [False, True])
def test_refine_never_raises_objective(changes: Any, use_fine_split: bool) -> None:
    hw, layers = hardware(**changes), chain(seed=2)
    first = hw.initial_decision(layers)
    record: list[tuple[str, float]] = []
    polished = hw.refine(
        layers, first, use_fine_split=use_fine_split, progress=lambda *single: record.append(single)
    )
    assert objective(hw, layers, polished) <= objective(hw, layers, first)
    assert polished == hw.refine(
        layers, first, use_fine_split=use_fine_split
    )  # the same arguments give the same
    decision = hw.refine(layers, polished, use_fine_split=use_fine_split)
    assert objective(hw, layers, decision) <= objective(hw, layers, polished)
    assert use_fine_split or polished.rewrite_plan is None
    assert record and all(0.0 <= share <= 1.0 for _, share in record)
    # Some slot of three gives way: area, and what it draws while it waits, are saved.
    assert objective(hw, layers, polished) < objective(hw, layers, first)


def test_refine_returns_decision_of_current_layers() -> None:
    # Nothing that could be decided lowers the objective, and of the layers one is gone, one has fewer units.
    hw = hardware(hardware={"slots": 2, "chips": ["npu-m"]}, loss=dict.fromkeys(REST, 0.0))
    layers = chain()
    first = hw.initial_decision(layers)
    home = first.assign_layers(layers)[2]
    split = replace(first, rewrite_plan=halves(layers, 2, (home, 1 - home)))
    remaining = [*layers[:2], replace(layers[2], units=layers[2].units - 1), *layers[3:]]
    removed = [replace(layer, id=index) for index, layer in enumerate([*layers[:3], *layers[4:]])]
    for after, before in ((remaining, split), (removed, first)):
        decision = hw.refine(after, before, use_fine_split=False)
        check_rewrite_plan(
            after, decision.rewrite_plan or RewritePlan(splits=()), decision.assign_layers(after)
        )
        assert [name for names in decision.segments for name in names] == [layer.name for layer in after]


@pytest.mark.parametrize("removed", [(), (0,), (1, 2), (3,), (5,)])
def test_fit_to_layers_after_pruning(removed: tuple[int, ...]) -> None:
    hw, layers = hardware(), chain()
    hw.initial_decision(layers)
    decision = decided(hw, layers, ("npu-m",) * 3, (0, 0, 1, 2, 2, 0), halves(layers, 2, (1, 0)))
    remaining = [layer for layer in layers if layer.id not in removed]
    after = [replace(layer, id=index) for index, layer in enumerate(remaining)]
    result = hw.fit_to_layers(after, decision)
    assert result.assign_layers(after) == tuple(decision.mapping[layer.id] for layer in remaining)
    hw.check_decision(after, result)
    assert hw.fit_to_layers(after, result) == result and (result == decision) is (not removed)
    assert objective(hw, after, result) == objective(hw, after, decision)
    saved = {after[index].name: split.slots for index, split in result.select_splits(after).items()}
    assert saved == ({} if 2 in removed else {layers[2].name: (1, 0)})


def test_refine_splits_where_it_pays_off() -> None:
    hw, layers = hardware(**CHEAP_LINKS, partition={"min_split_gain_ratio": 0.0}), chain()
    first = hw.initial_decision(layers)
    orders = Hardware.make_unit_orders(Listed(layers))  # pyright: ignore[reportArgumentType]
    decision = hw.remap(layers, first, use_fine_split=True, unit_orders=orders)
    assert decision is not None and decision.rewrite_plan is not None
    (split,) = decision.rewrite_plan.splits
    assert list(split.permutation) == list(orders(split.layer))  # the most important units at home
    importance = Listed(layers).unit_importance(split.layer)
    assert bool((importance[list(split.permutation)].diff() <= 0.0).all())
    assert objective(hw, layers, decision) < objective(hw, layers, first)
    coarse = hw.remap(layers, decision, use_fine_split=False)
    assert coarse is not None and coarse.rewrite_plan is None


@pytest.mark.parametrize("seed", range(2))
def test_replace_chips_stays_legal(seed: int) -> None:
    # Places are refined for the chips that are there; other chips may be larger.
    hw, layers = hardware(wafer={"refine_steps": 60}), chain(seed=seed)
    hw.initial_decision(layers)
    small = hw.optimize_placement(layers, decided(hw, layers, ("npu-s",) * 3, (0, 0, 1, 1, 2, 2)))
    assert not wrong_with(hw, small)
    larger = hw.replace_chips(layers, small, ("memory-m", "npu-m", "memory-m"), use_fine_split=False)
    assert larger is not None
    used = hw.select_better(layers, small, larger)
    for decision in (
        hw.optimize_placement(layers, larger),
        used,
        hw.refine(layers, larger, use_fine_split=False),
    ):
        assert not wrong_with(hw, decision), decision


def test_optimize_placement_never_raises_objective() -> None:
    hw, layers = hardware(), chain(seed=1)
    hw.initial_decision(layers)
    for chips in (("npu-s", "memory-m", "npu-m"), ("npu-m", None, "npu-m")):
        decision = decided(hw, layers, chips, (0, 2, 2, 0, 0, 2))
        moved = hw.optimize_placement(layers, decision)
        assert replace(moved, positions_mm=decision.positions_mm) == decision
        problem = hw.make_placement_problem(layers, decision)
        assert hw.placer.compute_loss(moved.positions_mm, problem) <= hw.placer.compute_loss(
            decision.positions_mm, problem
        )


def test_replace_chips_remaps_or_returns_none() -> None:
    hw, layers = hardware(), chain()
    first = hw.initial_decision(layers)
    assert hw.replace_chips(layers, first, (None,) * 3, use_fine_split=False) is None
    fat = [replace(layer, memory_bytes=700 * 10**6, weight_bytes=700 * 10**6) for layer in layers]  # 4.2 GB
    assert hw.replace_chips(fat, first, ("npu-m", None, None), use_fine_split=False) is None
    other = hw.replace_chips(fat, first, ("npu-m", None, "npu-s"), use_fine_split=False)
    assert other is not None and set(other.mapping) == {0, 2} and other.positions_mm == first.positions_mm


def test_to_plan_has_same_cost() -> None:
    hw, layers = hardware(**CHEAP_LINKS), chain()
    hw.initial_decision(layers)
    decision = decided(hw, layers, ("npu-m",) * 3, (0, 0, 0, 1, 1, 2), halves(layers, 2))
    costs, plan = hw.to_plan(layers, decision)
    assert plan.hw_stats == hw.evaluate_cost(layers, decision).stats and plan.assignment == (0, 0, 0, 1, 1, 2)
    assert plan.mapping == (0, 1, 2) and [list(segment.layer_ids) for segment in plan.segments.segments] == [
        [0, 1, 2], [3, 4], [5]
    ]  # fmt: skip
    assert set(plan.splits) == {2} and costs.num_slots == 3
    assert plan.coarse_stats != plan.hw_stats


def test_to_plan_after_removed_layer_keeps_split() -> None:
    hw, layers = hardware(**CHEAP_LINKS), chain()
    hw.initial_decision(layers)
    decision = decided(hw, layers, ("npu-m",) * 3, (0,) * 6, halves(layers, 4))
    remaining = [replace(layer, id=index) for index, layer in enumerate([*layers[:1], *layers[2:]])]
    _, plan = hw.to_plan(remaining, decision)
    assert plan.hw_stats == hw.evaluate_cost(remaining, decision).stats
    assert set(plan.splits) == {3} and plan.splits[3][0].layer == 3


def test_layout_loss_of_full_slots_equals_score() -> None:
    hw, layers = hardware(), chain(seed=1)
    decision = replace(hw.initial_decision(layers), chips=("npu-s", "npu-m", "memory-m"))
    expected = hw.placer.compute_loss(decision.positions_mm, hw.make_placement_problem(layers, decision))
    present = torch.full((3,), 0.5, requires_grad=True)
    for item, share in ((torch.ones(3), 1.0), (torch.zeros(3), 0.0), (present, 0.25)):
        loss = hw.layout_loss(layers, decision, item)
        assert to_float(loss) == pytest.approx(share * expected, rel=1e-5)
    loss.backward()
    assert present.grad is not None and (present.grad > 0.0).all()


def test_model_without_room_states_missing_memory() -> None:
    hw, layers = hardware(), chain()
    fat = [
        replace(layer, memory_bytes=2500 * 10**6, weight_bytes=2500 * 10**6) for layer in layers
    ]  # 15 GB on 3 x 4 GB
    with pytest.raises(InputError, match=r"12000\S* MB: 3000\S*"):
        hw.initial_decision(fat)
    assert hw.reference is None
    first = [
        replace(layer, memory_bytes=5000 * 10**6 if layer.id == 2 else 10**6, weight_bytes=10**6)
        for layer in layers
    ]
    with pytest.raises(InputError, match=r"500\d"):
        hw.initial_decision(first)


def test_initial_chip_defaults_to_most_memory() -> None:
    hw = Hardware(quick(hardware={"chips": [], "initial_chip": None}), library=library(1.0, 8.0, 2.0))
    assert hw.initial_chip.name == "m1" and len(hw.chips) == 3
    subset = Hardware(
        quick(hardware={"chips": ["m0", "m2"], "initial_chip": None}), library=library(1.0, 8.0, 2.0)
    )
    assert subset.initial_chip.name == "m2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"initial_chip": "a100"},
            r"`initial_chip` \(='a100'\) must be one of: npu-s, npu-m, memory-m",
        ),
        ({"chips": ["npu-s", "npu-x"]}, "'npu-x'"),
        ({"link": "wire"}, "'wire'"),
        ({"links": [[0, 1, "wire"]]}, "'wire'"),
        ({"links": [[0, 1, "ucie"]]}, "0"),
        ({"links": [[0, 3, "ucie"]]}, "3"),
        ({"slots": 40}, "40"),
        ({"library": "nowhere.yaml"}, "nowhere.yaml"),
        ({"proxy": "nowhere.safetensors"}, "nowhere.safetensors"),
    ],
)
def test_invalid_hardware_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        hardware(hardware=changes)


def test_chip_larger_than_wafer_is_refused() -> None:
    with pytest.raises(InputError, match=r"15\.\d+"):
        hardware(wafer={"radius_mm": 5.0})


def test_invalid_library_or_proxy_is_refused(tmp_path: Any) -> None:
    (tmp_path / "chips.yaml").write_text("chips: []\nlinks: []\n")
    with pytest.raises(FileFormatError, match="chips"):
        hardware(hardware={"library": str(tmp_path / "chips.yaml")})
    (tmp_path / "proxy.safetensors").write_bytes(b"no")
    with pytest.raises(FileFormatError):
        hardware(hardware={"proxy": str(tmp_path / "proxy.safetensors")})


def test_custom_proxy_is_used(tmp_path: Any) -> None:
    LayerHwProxy.analytic().save(tmp_path / "proxy.safetensors")
    layers, same = chain(), hardware(hardware={"proxy": str(tmp_path / "proxy.safetensors")})
    plain = hardware()
    assert same.evaluate_cost(layers, same.initial_decision(layers)) == plain.evaluate_cost(
        layers, plain.initial_decision(layers)
    )


def test_config_links_replace_all_to_all() -> None:
    line = hardware(hardware={"links": [[0, 1, "ucie"], [1, 2, "ucie"]]})
    all_items = hardware(hardware={"link": "ucie"})
    index = ((0.0, 0.0), (20.0, 0.0), (0.0, 20.0))
    first, other = line.build_network(index), all_items.build_network(index)
    assert first.time_ms(0, 1, 1000) == other.time_ms(0, 1, 1000)
    assert first.time_ms(0, 2, 1000) == pytest.approx(other.time_ms(0, 1, 1000) + other.time_ms(1, 2, 1000))
    # Chips that are farther apart are farther away.
    far = all_items.build_network(((0.0, 0.0), (40.0, 0.0), (0.0, 20.0)))
    assert far.time_ms(0, 1, 1000) > other.time_ms(0, 1, 1000)
    assert far.energy_mj(0, 1, 1000) > other.energy_mj(0, 1, 1000)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_cost_reference_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(InputError, match="`area_mm2`"):
        CostReference(latency_ms=1.0, energy_mj=2.0, area_mm2=value)


def test_evaluate_cost_without_reference_is_refused() -> None:
    hw, layers = hardware(), chain()
    first = hw.initial_decision(layers)
    hw.reference = None
    for call in (
        lambda: hw.evaluate_cost(layers, first),
        lambda: hw.select_better(layers, first, replace(first, chips=("npu-s",) * 3)),
        lambda: hw.fit_to_layers(layers, first),
    ):
        with pytest.raises(InputError):
            call()


def test_check_decision_names_mismatch() -> None:
    hw, layers = hardware(), chain()
    hw.initial_decision(layers)
    empty = decided(hw, layers, ("npu-m", None, "npu-m"), (0, 0, 1, 1, 2, 2))
    with pytest.raises(InputError, match=r"blocks\.0\.mlp"):
        hw.evaluate_cost(layers, empty)
    fat = [replace(layer, memory_bytes=400 * 10**6, weight_bytes=400 * 10**6) for layer in layers]
    small = decided(hw, layers, ("npu-m", "npu-m", "npu-s"), (0, 0, 0, 2, 2, 2))
    with pytest.raises(InputError, match="1200"):
        hw.evaluate_cost(fat, small)
    # Of parts the slot is told, not their place in the split.
    part = decided(hw, layers, (None, "npu-m", "npu-m"), (2,) * 6, halves(layers, 2, (2, 0)))
    with pytest.raises(InputError, match=r"blocks\.0\.mlp"):
        hw.evaluate_cost(layers, part)


def test_check_decision_with_other_order_is_refused() -> None:
    hw, layers = hardware(), chain()
    hw.initial_decision(layers)
    decision = decided(hw, layers, ("npu-m",) * 3, (0,) * 6)
    swapped = replace(decision, segments=(*decision.segments[:2], decision.segments[3], decision.segments[2],
                                          *decision.segments[4:]))  # fmt: skip
    with pytest.raises(FileFormatError):
        hw.check_decision(layers, swapped)
    with pytest.raises(FileFormatError, match=r"blocks\.0\.mlp"):
        hw.check_decision(
            [replace(item, id=index) for index, item in enumerate([*layers[:2], *layers[3:]])], decision
        )


def test_proxy_without_measured_chip_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    spec = DeviceSpec.from_chip(read_library().get_chip("npu-m"))
    proxy = LayerHwProxy.analytic()
    rows = {name: torch.cat([getattr(proxy, name)] * 2) for name in ("power", "workspace")}
    roofline = replace(proxy.roofline, values=proxy.roofline.values.repeat(2, 1, 1, 1),
                       fitted=proxy.roofline.fitted.repeat(2, 1, 1))  # fmt: skip
    for name, values in (("npu-m", 0), ("a GPU", 1)):
        caplog.clear()
        Hardware(quick(), replace(proxy, **rows, roofline=roofline, devices=(replace(spec, name=name),)))
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == values and all("a GPU" in line for line in lines)
    Hardware(quick(), proxy)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("use_fine_split", [False, True])
def test_finalize_is_no_worse_and_has_bound(use_fine_split: bool) -> None:
    hw, layers = hardware(**CHEAP_LINKS, partition={"min_split_gain_ratio": 0.0}), chain(seed=2)
    first = hw.initial_decision(layers)
    poor = decided(hw, layers, ("npu-m",) * 3, (2, 0, 1, 0, 2, 1))
    for decision in (first, poor):
        result, record = hw.finalize(layers, decision, use_fine_split=use_fine_split)
        assert objective(hw, layers, result) <= objective(hw, layers, decision)
        assert (result.chips, result.positions_mm) == (decision.chips, decision.positions_mm)
        assert bool(record["considered"]) is use_fine_split and record["finished"] is True
        total_latency_ms = hw.evaluate_cost(layers, replace(result, rewrite_plan=None)).stats.total_latency_ms
        assert record["lower_bound_ms"] <= total_latency_ms
        assert record["gap"] == pytest.approx(
            (total_latency_ms - record["lower_bound_ms"]) / total_latency_ms
        )


def test_optimize_placement_passes_search_options() -> None:
    hw, layers = hardware(), chain(seed=1)
    hw.initial_decision(layers)
    decision = decided(hw, layers, ("npu-s", "memory-m", "npu-m"), (0, 2, 2, 0, 0, 2))
    with pytest.raises(InputError, match="`method`"):
        hw.optimize_placement(layers, decision, PlacementSearch(method="luck"))
    result = hw.optimize_placement(layers, decision, PlacementSearch(method="annealing", restarts=2, seed=3))
    assert objective(hw, layers, result) <= objective(hw, layers, decision)

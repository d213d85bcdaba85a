"""Tests of `codesign.partition.objective`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.codesign.random_plan import random_plan
from sparseflow.codesign.hardware.network import Network
from sparseflow.codesign.partition.objective import (
    HwStats,
    LayerCosts,
    Mode,
    ObjectiveWeights,
    PartCosts,
    compute_memory_mb,
    evaluate_plan,
    is_feasible,
)
from sparseflow.codesign.workload.layers import slice_layer
from sparseflow.codesign.workload.splits import LayerSplit, RewritePlan, compute_transfer_bytes
from sparseflow.core.layers import LayerNode
from sparseflow.errors import InputError
from tests.codesign.nodes import made_layers

MODES: tuple[Mode, ...] = ("balanced", "serial")

Opened = dict[int, tuple[LayerSplit, PartCosts]]


def a_network(slots: int, seed: int) -> Network:
    """Every way of its own, there and back."""
    rng = np.random.default_rng(seed)
    other = 1.0 - np.eye(slots)
    fixed, item, energy = (rng.uniform(0.1, 1.0, (slots, slots)) * other for _ in range(3))
    return Network(fixed_ms=fixed, ms_per_byte=item * 1e-4, mj_per_byte=energy * 1e-5)


def a_cost(layers: Sequence[LayerNode], slots: int, seed: int, **changes: Any) -> LayerCosts:
    """Costs that have nothing to do with layers, but for memory."""
    rng = np.random.default_rng(seed)
    record = {
        "layers": tuple(layers),
        "latency_ms": rng.uniform(0.5, 4.0, (len(layers), slots)),
        "power_w": rng.uniform(1.0, 20.0, (len(layers), slots)),
        "memory_mb": np.array([layer.memory_bytes / 1e6 for layer in layers]),
        "limit_mb": np.full(slots, 1e3),
        "idle_w": rng.uniform(0.0, 2.0, slots),
        "network": a_network(slots, seed),
    }
    return LayerCosts(**(record | changes))


def opened(plan: RewritePlan, seed: int) -> Opened:
    """A plan's splits, with costs of their parts."""
    rng = np.random.default_rng(seed)

    def figures(split: LayerSplit) -> tuple[float, ...]:
        return tuple(rng.uniform(0.2, 3.0, len(split.sizes)).tolist())

    return {
        item.layer: (
            item,
            PartCosts(latency_ms=figures(item), power_w=figures(item), memory_mb=figures(item)),
        )
        for item in plan.splits
    }


def messages(costs: LayerCosts, assignment: Sequence[int], splits: Opened) -> list[tuple[int, int, int]]:
    """(from, to, bytes) of all that is sent."""
    rows = [
        (assignment[index - 1], assignment[index], layer.traffic_in_bytes)
        for index, layer in enumerate(costs.layers)
        if index and assignment[index - 1] != assignment[index]
    ]
    for layer, (split, _) in splits.items():
        node = costs.layers[layer]
        for slot, size in list(zip(split.slots, split.sizes, strict=True))[1:]:
            back = node.split_out_bytes * size // node.units if node.split_joins else node.split_out_bytes
            rows += [(assignment[layer], slot, node.split_in_bytes), (slot, assignment[layer], back)]
    return rows


def recomputed(
    costs: LayerCosts, assignment: Sequence[int], splits: Opened, weights: ObjectiveWeights
) -> dict[str, Any]:
    """The notation read a second time: a list of all that is done and sent, added up exactly."""
    net, slots = costs.network, range(costs.num_slots)

    def ms(message: tuple[int, int, int]) -> float:
        source, target, size = message
        return float(net.fixed_ms[source, target] + size * net.ms_per_byte[source, target])

    busy: dict[int, list[float]] = {slot: [] for slot in slots}
    computed: dict[int, list[float]] = {slot: [] for slot in slots}
    weights_mb: dict[int, list[float]] = {slot: [] for slot in slots}
    activations_mb: dict[int, list[float]] = {slot: [0.0] for slot in slots}

    def keep(slot: int, layer: LayerNode, memory_mb: float) -> None:
        weights_mb[slot].append(layer.weight_bytes / 1e6)
        activations_mb[slot].append(memory_mb - layer.weight_bytes / 1e6)

    elapsed, active, used = [], [], set(assignment)
    for index, home in enumerate(assignment):
        if index and assignment[index - 1] != home:
            moved = ms((assignment[index - 1], home, costs.layers[index].traffic_in_bytes))
            busy[home].append(moved)
            elapsed.append(moved)
        split, record = splits.get(index, (None, None))
        if split is None or record is None:
            latency, watts = costs.latency_ms[index, home], costs.power_w[index, home]
            active.append(latency * watts)
            keep(home, costs.layers[index], costs.memory_mb[index])
            computed[home].append(latency)
            ways = [latency]
        else:
            sent = iter(messages(costs, assignment, {index: splits[index]})[-2 * (len(split.slots) - 1) :])
            ways = [record.latency_ms[0]]
            used |= set(split.slots)
            for slot, latency in list(zip(split.slots, record.latency_ms, strict=True))[1:]:
                present, back = ms(next(sent)), ms(next(sent))
                busy[slot] += [present, latency]
                ways.append(present + latency + back)
            active += [a * b for a, b in zip(record.latency_ms, record.power_w, strict=True)]
            for part, slot in enumerate(split.slots):
                computed[slot].append(record.latency_ms[part])
                keep(slot, slice_layer(costs.layers[index], split.sizes[part]), record.memory_mb[part])
        busy[home].append(max(ways))
        elapsed.append(max(ways))
    sent_all = messages(costs, assignment, splits)
    item = {slot: math.fsum(busy[slot]) for slot in slots}
    period, serial = max(item.values()), math.fsum(elapsed)
    total = period if weights.mode == "balanced" else serial
    comm = math.fsum(map(ms, sent_all))
    wires = math.fsum(size * net.mj_per_byte[source, target] for source, target, size in sent_all)
    works = {slot: math.fsum(computed[slot]) for slot in slots}
    idle = math.fsum(max(0.0, total - works[s]) * costs.idle_w[s] for s in slots if costs.limit_mb[s] > 0.0)
    imbalance = period - math.fsum(item[slot] for slot in used) / len(used)
    return {
        "serial_ms": serial, "period_ms": period, "total_latency_ms": total, "comm_ms": comm,
        "comm_bytes": sum(size for *_, size in sent_all), "comm_energy_mj": wires,
        "energy_mj": math.fsum(active) + wires + idle, "imbalance_ms": imbalance,
        "objective": weights.w_latency * total + weights.w_comm * comm + weights.w_balance * imbalance,
        "busy_ms": [item[slot] for slot in slots], "compute_ms": [works[slot] for slot in slots],
        "memory_mb": [math.fsum(weights_mb[slot]) + max(activations_mb[slot]) for slot in slots],
    }  # fmt: skip


def agree(result: HwStats, expected: dict[str, Any]) -> None:
    assert set(vars(result)) == set(expected)
    for name, value in expected.items():
        if name == "comm_bytes":
            assert type(result.comm_bytes) is int and result.comm_bytes == value
        else:
            # Imbalance is a difference of what is added up.
            assert getattr(result, name) == pytest.approx(value, rel=1e-9, abs=1e-9), name
    assert result.energy_delay == pytest.approx(expected["energy_mj"] * expected["total_latency_ms"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_evaluate_plan_matches_second_implementation(mode: Mode, back: bool, share: float) -> None:
    joined = summed = 0
    for seed in range(25):
        slots = 1 + seed % 5
        layers = made_layers(1 + seed % 4, seed=seed)
        assignment, plan = random_plan(layers, min(slots, len(layers)), seed=seed, share=share, back=back)
        # A slot more than is used, and in every third instance an empty one.
        costs = a_cost(layers, slots + 2, seed)
        if seed % 3 == 0:
            costs.limit_mb[slots + 1] = 0.0
        splits = opened(plan, seed)
        weights = ObjectiveWeights(mode=mode, w_latency=1.3, w_comm=0.7, w_balance=0.2)
        stats = evaluate_plan(costs, assignment, splits, weights)
        agree(stats, recomputed(costs, assignment, splits, weights))
        assert stats.comm_bytes == sum(compute_transfer_bytes(layers, assignment, plan).values())
        assert stats.memory_mb == tuple(compute_memory_mb(costs, assignment, splits).tolist())
        assert stats.period_ms == max(stats.busy_ms)
        assert splits or sum(stats.busy_ms) == pytest.approx(stats.serial_ms)
        for split in plan.splits:
            joined += layers[split.layer].split_joins
            summed += not layers[split.layer].split_joins
    assert share == 0.0 or min(joined, summed) > 5


def by_hand(joins: bool) -> tuple[LayerCosts, list[int], Opened]:
    """Three layers, two slots; the second layer in parts of one and three units."""
    layers = made_layers(1, seed=0)[:3]
    split = {"split_in_bytes": 1000, "split_out_bytes": 2000, "units": 4, "splittable": True}
    layers[0] = replace(layers[0], weight_bytes=600_000)
    layers[1] = replace(layers[1], split_joins=joins, traffic_out_bytes=500, weight_bytes=1_200_000, **split)
    layers[2] = replace(layers[2], traffic_in_bytes=500, weight_bytes=3_000_000)
    other = 1.0 - np.eye(3)
    costs = LayerCosts(
        layers=tuple(layers),
        latency_ms=np.array([[4.0, 9.0, np.inf], [9.0, 9.0, np.inf], [9.0, 6.0, np.inf]]),
        power_w=np.array([[10.0, 1.0, 0.0], [1.0, 1.0, 0.0], [1.0, 20.0, 0.0]]),
        memory_mb=np.array([1.0, 2.0, 4.0]),
        limit_mb=np.array([10.0, 10.0, 0.0]),
        idle_w=np.array([2.0, 3.0, 100.0]),
        network=Network(fixed_ms=other, ms_per_byte=1e-3 * other, mj_per_byte=1e-3 * other),
    )
    parts = PartCosts(latency_ms=(2.0, 3.0), power_w=(5.0, 8.0), memory_mb=(0.5, 1.5))
    return (
        costs,
        [0, 0, 1],
        {1: (LayerSplit(layer=1, permutation=(0, 1, 2, 3), sizes=(1, 3), slots=(0, 1)), parts)},
    )


def test_evaluate_plan_summed_parts_by_hand() -> None:
    costs, assignment, splits = by_hand(joins=False)
    # There 2 ms, the part 3, back 3: home waits 8 ms and not 2. The state to slot 1 takes 1.5 ms.
    stats = evaluate_plan(costs, assignment, splits, ObjectiveWeights(w_comm=0.1, w_balance=0.1))
    assert stats.busy_ms == pytest.approx((12.0, 12.5, 0.0))
    assert (stats.serial_ms, stats.period_ms, stats.total_latency_ms) == pytest.approx((19.5, 12.5, 12.5))
    assert (stats.comm_ms, stats.comm_bytes, stats.comm_energy_mj) == pytest.approx((6.5, 3500, 3.5))
    assert stats.compute_ms == pytest.approx((4.0 + 2.0, 3.0 + 6.0, 0.0))
    # Layers and parts 40 + 10 + 24 + 120 mJ, what is sent 3.5; slot 0 waits 6.5 ms at 2 W, slot 1 3.5 at 3 W.
    assert stats.energy_mj == pytest.approx(197.5 + 6.5 * 2.0 + 3.5 * 3.0)
    assert stats.imbalance_ms == pytest.approx(0.25)
    assert stats.objective == pytest.approx(12.5 + 0.65 + 0.025)
    # Weights of 0.6 and 0.3 MB and activations of 0.4 (or 0.2); 0.9 and 3 MB and activations of 1 (or 0.6).
    assert stats.memory_mb == pytest.approx((1.3, 4.9, 0.0))
    serial = evaluate_plan(costs, assignment, splits, ObjectiveWeights(mode="serial"))
    assert serial.total_latency_ms == serial.serial_ms == stats.serial_ms
    assert serial.energy_mj == pytest.approx(197.5 + 13.5 * 2.0 + 10.5 * 3.0)


def test_evaluate_plan_joined_parts_by_hand() -> None:
    costs, assignment, splits = by_hand(joins=True)
    # Three of four columns come back: 1500 bytes.
    stats = evaluate_plan(costs, assignment, splits, ObjectiveWeights())
    assert stats.busy_ms == pytest.approx((11.5, 12.5, 0.0))
    assert (stats.serial_ms, stats.comm_ms, stats.comm_bytes) == pytest.approx((19.0, 6.0, 3000))
    assert stats.energy_mj == pytest.approx(194.0 + 3.0 + 6.5 * 2.0 + 3.5 * 3.0)


def test_home_waits_for_slowest_part_only() -> None:
    costs, assignment, splits = by_hand(joins=False)
    split, parts = splits[1]
    longer = {1: (split, replace(parts, latency_ms=(8.5, 3.0)))}
    assert evaluate_plan(costs, assignment, longer, ObjectiveWeights()).busy_ms == pytest.approx(
        (12.5, 12.5, 0.0)
    )


def test_one_slot_moves_no_bytes() -> None:
    costs, _, _ = by_hand(joins=False)
    stats = evaluate_plan(costs, [1, 1, 1], {}, ObjectiveWeights())
    assert (stats.comm_ms, stats.comm_bytes, stats.comm_energy_mj, stats.imbalance_ms) == (0.0, 0, 0.0, 0.0)
    assert stats.serial_ms == stats.period_ms == 24.0
    assert stats.energy_mj == pytest.approx(9.0 + 9.0 + 120.0 + 24.0 * 2.0)


def test_empty_slots_use_no_power() -> None:
    costs, assignment, splits = by_hand(joins=False)
    before = evaluate_plan(costs, assignment, splits, ObjectiveWeights())
    more = replace(costs, idle_w=np.array([2.0, 3.0, 1e6]))
    assert evaluate_plan(more, assignment, splits, ObjectiveWeights()) == before
    present = replace(more, limit_mb=np.array([10.0, 10.0, 1.0]), latency_ms=np.nan_to_num(costs.latency_ms))
    stats = evaluate_plan(present, assignment, splits, ObjectiveWeights())
    assert stats.energy_mj == pytest.approx(before.energy_mj + 12.5e6)
    assert stats.imbalance_ms == before.imbalance_ms


@pytest.mark.parametrize("which", ["latency", "comm", "balance"])
def test_objective_weights(which: str) -> None:
    costs, assignment, splits = by_hand(joins=False)
    record: dict[str, Any] = {f"w_{name}": 2.0 * (name == which) for name in ("latency", "comm", "balance")}
    stats = evaluate_plan(costs, assignment, splits, ObjectiveWeights(**record))
    expected = {"latency": stats.period_ms, "comm": stats.comm_ms, "balance": stats.imbalance_ms}
    assert stats.objective == pytest.approx(2.0 * expected[which])


def test_memory_may_be_used_up() -> None:
    costs, assignment, splits = by_hand(joins=False)
    assert compute_memory_mb(costs, assignment, {}) == pytest.approx([2.6, 4.0, 0.0])
    assert compute_memory_mb(costs, assignment, splits) == pytest.approx([1.3, 4.9, 0.0])
    for limits, full, cut in (
        ([2.6, 4.0, 0.0], True, False),
        ([1.3, 4.9, 0.0], False, True),
        ([2.6, 4.9, 0.0], True, True),
        ([1.2, 9.0, 0.0], False, False),
    ):
        tight = replace(costs, limit_mb=np.array(limits))
        assert is_feasible(tight, assignment, {}) is full
        assert is_feasible(tight, assignment, splits) is cut


def test_empty_slot_is_infeasible() -> None:
    costs, assignment, splits = by_hand(joins=False)
    assert not is_feasible(costs, [0, 0, 2], {})
    split, parts = splits[1]
    assert is_feasible(costs, assignment, splits)
    assert not is_feasible(costs, assignment, {1: (replace(split, slots=(0, 2)), parts)})


@pytest.mark.parametrize("cost", ["fixed_ms", "ms_per_byte"])
def test_unconnected_slots_are_infeasible(cost: str) -> None:
    costs, assignment, splits = by_hand(joins=False)
    for source, target, full, cut in ((0, 1, False, False), (1, 0, True, False), (0, 2, True, True)):
        present = getattr(costs.network, cost).copy()
        present[source, target] = np.inf
        distances = replace(costs, network=replace(costs.network, **{cost: present}))
        # The state goes from slot 0 to slot 1, and what the part computed comes back.
        assert is_feasible(distances, assignment, {}) is full
        assert is_feasible(distances, assignment, splits) is cut


def test_infinite_part_is_infeasible() -> None:
    costs, assignment, splits = by_hand(joins=False)
    split, parts = splits[1]
    assert not is_feasible(costs, assignment, {1: (split, replace(parts, latency_ms=(2.0, np.inf)))})


@pytest.mark.parametrize(
    ("figures", "match"),
    [
        ({"latency_ms": (1.0, np.nan)}, "`latency_ms` is nan for part 1; costs must be at least 0"),
        ({"power_w": (-1.0, 1.0)}, "`power_w` is -1.0 for part 0"),
        ({"memory_mb": (1.0, np.nan)}, "`memory_mb` is nan for part 1"),
        ({"power_w": (1.0,)}, "`power_w` has 1 parts, `latency_ms` has 2"),
    ],
)
def test_invalid_part_costs_are_refused(figures: dict[str, Any], match: str) -> None:
    record: dict[str, Any] = {name: (1.0, 1.0) for name in ("latency_ms", "power_w", "memory_mb")}
    with pytest.raises(InputError, match=match):
        PartCosts(**(record | figures))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"mode": "quick"}, "`mode` (='quick') must be one of: balanced, serial"),
        ({"w_latency": math.nan}, "`w_latency` (=nan)"),
        ({"w_comm": -1.0}, "`w_comm` (=-1.0)"),
        ({"w_balance": math.inf}, "`w_balance` (=inf)"),
    ],
)
def test_invalid_weights_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=re.escape(match)):
        ObjectiveWeights(**changes)


@pytest.mark.parametrize("assignment", [[0, 0], [0, 0, 1, 1], []])
def test_wrong_number_of_slots_is_refused(assignment: list[int]) -> None:
    costs, _, _ = by_hand(joins=False)
    with pytest.raises(InputError, match=rf"{len(assignment)}"):
        evaluate_plan(costs, assignment, {}, ObjectiveWeights())


def test_split_must_start_at_home() -> None:
    costs, _, splits = by_hand(joins=False)
    name = costs.layers[1].name
    with pytest.raises(InputError, match=rf"{name}"):
        evaluate_plan(costs, [0, 1, 1], splits, ObjectiveWeights())


@pytest.mark.parametrize("value", [np.nan, -1.0])
@pytest.mark.parametrize("slots", [3, 4])
@pytest.mark.parametrize(
    ("name", "index", "location"),
    [
        ("latency_ms", (2, 1), r"layer blocks\.0\.mlp, slot 1"),
        ("power_w", (0, 2), "layer embed, slot 2"),
        ("memory_mb", (3,), "layer head"),
        ("limit_mb", (2,), "slot 2"),
        ("idle_w", (0,), "slot 0"),
    ],
)
def test_invalid_costs_are_refused(
    name: str, index: tuple[int, ...], location: str, slots: int, value: float
) -> None:
    layers = made_layers(1, seed=0)  # four of them: as many as slots, in half of the cases
    wrong = getattr(a_cost(layers, slots, 0), name).copy()
    wrong[index] = value
    with pytest.raises(InputError, match=rf"`{name}`"):
        a_cost(layers, slots, 0, **{name: wrong})


@pytest.mark.parametrize("name", ["latency_ms", "power_w", "memory_mb", "limit_mb", "idle_w"])
def test_wrong_shapes_are_refused(name: str) -> None:
    layers = made_layers(1, seed=0)
    value = getattr(a_cost(layers, 3, 0), name)
    with pytest.raises(InputError, match=rf"`{name}`"):
        a_cost(layers, 3, 0, **{name: value[:-1]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"traffic_in_bytes": -5}, r"`traffic_in_bytes` \(=-5\) of layer blocks\.0\.mlp must be finite"),
        ({"traffic_out_bytes": math.nan}, r"`traffic_out_bytes` \(=nan\)"),
        ({"split_in_bytes": -1}, r"`split_in_bytes` \(=-1\)"),
        ({"weight_bytes": -1}, r"`weight_bytes` \(=-1\)"),
        (
            {"traffic_in_bytes": 1},
            r"blocks\.0\.attention sends \d+ bytes, but the next layer, blocks\.0\.mlp, ",
        ),
        ({"traffic_out_bytes": 10**9}, r"blocks\.0\.mlp sends 1000000000 bytes, but the next layer, head, "),
        ({"id": 0}, r"blocks\.0\.mlp has the id 0; ids must count from 0, here 2"),
    ],
)
def test_layers_that_are_no_chain_are_refused(changes: dict[str, Any], message: str) -> None:
    layers = made_layers(1, seed=0)
    layers[2] = replace(layers[2], **changes)
    with pytest.raises(InputError, match=message):
        a_cost(layers, 3, 0, memory_mb=np.ones(4))


def test_network_of_other_size_is_refused() -> None:
    with pytest.raises(InputError, match="`latency_ms`"):
        a_cost(made_layers(1, seed=0), 3, 0, network=a_network(2, 0))


@pytest.mark.parametrize("seed", range(8))
def test_slice_layer_parts_add_up(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for layer in made_layers(3, seed=seed):
        if not layer.splittable:
            continue
        assert slice_layer(layer, layer.units) == layer
        first = int(rng.integers(1, layer.units))
        parts = [slice_layer(layer, units) for units in (first, layer.units - first)]
        assert sum(float(part.flops) for part in parts) == pytest.approx(float(layer.flops))
        assert abs(sum(part.weight_bytes for part in parts) - layer.weight_bytes) <= 1
        assert [part.units for part in parts] == [first, layer.units - first]
        passing = layer.split_in_bytes + layer.split_out_bytes
        # Each part reads and writes what passes; all the rest is shared out.
        assert sum(float(part.bytes) for part in parts) == pytest.approx(float(layer.bytes) + passing)
        for part in parts:
            assert part.weight_bytes + passing <= part.memory_bytes <= layer.memory_bytes
            assert part.num_heads == (part.units if layer.layer_type == "attention" else 0)
            assert part.mlp_ratio == pytest.approx(layer.mlp_ratio * part.units / layer.units)
            assert (part.id, part.name, part.layer_type) == (layer.id, layer.name, layer.layer_type)


def test_slice_layer_grows_with_units() -> None:
    layer = next(item for item in made_layers(1, seed=0) if item.layer_type == "mlp")
    parts = [slice_layer(layer, units) for units in range(1, layer.units + 1)]
    for name in ("flops", "bytes", "weight_bytes", "memory_bytes"):
        rows = [float(getattr(part, name)) for part in parts]
        assert rows == sorted(rows) and rows[0] < rows[-1]


def test_slice_layer_gradients() -> None:
    layer = made_layers(1, seed=0)[2]
    work = torch.tensor(float(layer.flops), requires_grad=True)
    moved = torch.tensor(float(layer.bytes), requires_grad=True)
    part: Any = slice_layer(replace(layer, flops=work, bytes=moved), layer.units // 2)
    (part.flops + part.bytes).backward()
    share = layer.units // 2 / layer.units
    assert [float(item.grad) for item in (work, moved) if item.grad is not None] == pytest.approx([share] * 2)


@pytest.mark.parametrize("units", [0, -1, 1000])
def test_slice_layer_with_wrong_units_is_refused(units: int) -> None:
    layer = made_layers(1, seed=0)[1]
    with pytest.raises(InputError, match=rf"{layer.name}"):
        slice_layer(layer, units)

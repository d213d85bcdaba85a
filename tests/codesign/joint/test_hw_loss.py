"""Tests of `codesign.joint.hw_loss`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseflow.codesign.design.config import Lambdas
from sparseflow.codesign.design.decision import CostReference, HardwareDecision
from sparseflow.codesign.design.hardware import Hardware
from sparseflow.codesign.hardware.network import Network
from sparseflow.codesign.hardware.proxy import LayerHwProxy
from sparseflow.codesign.hardware.slots import ChipSlotConfig
from sparseflow.codesign.joint.hw_loss import EMPTY_COST, SMOOTHNESS, LayerAssignment, compute_hw_loss
from sparseflow.codesign.partition.objective import ObjectiveWeights, PartCosts, evaluate_plan
from sparseflow.codesign.workload.layers import to_float
from sparseflow.codesign.workload.splits import LayerSplit
from sparseflow.core.layers import LayerNode
from sparseflow.errors import InputError, RunError
from tests.codesign.nodes import set_chips
from tests.codesign.toys import chain, hardware

TERMS = {
    "latency_ms": "lambda_T", "energy_mj": "lambda_E", "mem_over": "lambda_mem", "area_mm2": "lambda_area",
    "chips": "lambda_chip", "layout": "lambda_layout",
}  # fmt: skip
ONE = CostReference(latency_ms=1.0, energy_mj=1.0, area_mm2=1.0)
NOTHING = dict.fromkeys(TERMS.values(), 0.0)


def only(**lambdas: float) -> Lambdas:
    return Lambdas(**NOTHING | lambdas)


def holding(hw: Hardware, chips: Sequence[str | None], **overrides: Any) -> ChipSlotConfig:
    config = ChipSlotConfig(hw.chips, len(chips), **overrides)
    set_chips(config, chips)
    return config


def placed(hw: Hardware, assignment: Sequence[int], splits: Any = None) -> LayerAssignment:
    return LayerAssignment(assignment=tuple(assignment), splits=splits or {}, mode=hw.config.mapping.mode)


def loss_of(
    hw: Hardware,
    layers: Sequence[LayerNode],
    slots: ChipSlotConfig,
    assignment: Sequence[int],
    *,
    lambdas: Lambdas | None = None,
    splits: Any = None,
    **overrides: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    return compute_hw_loss(
        layers, slots, placed(hw, assignment, splits), hw.build_network(hw.placer.grid_positions()), hw.proxy,
        hw.lambdas if lambdas is None else lambdas, hw.reference or ONE, **overrides,
    )  # fmt: skip


def by_name(
    layers: Sequence[LayerNode], hw: Hardware, chips: Any, assignment: Sequence[int]
) -> HardwareDecision:
    """A decision whose segments are single layers."""
    return HardwareDecision(
        chips=tuple(chips), segments=tuple((layer.name,) for layer in layers), mapping=tuple(assignment),
        positions_mm=hw.placer.grid_positions(), rewrite_plan=None,
    )  # fmt: skip


CHOICES = [
    (("npu-m", "npu-m", "npu-m"), (0, 0, 1, 1, 2, 2)),
    (("npu-s", "memory-m", "npu-m"), (2, 1, 0, 1, 2, 0)),
    (("npu-m", None, "npu-s"), (0, 2, 2, 0, 0, 2)),
    ((None, "memory-m", None), (1,) * 6),
]


@pytest.mark.parametrize(("chips", "assignment"), CHOICES)
@pytest.mark.parametrize("mode", ["serial", "balanced"])
def test_loss_of_one_hot_slots_equals_decision_cost(
    mode: str, chips: tuple[str | None, ...], assignment: tuple[int, ...]
) -> None:
    hw, layers = hardware(mapping={"mode": mode}), chain(seed=1)
    hw.initial_decision(layers)
    decision = by_name(layers, hw, chips, assignment)
    priced = hw.evaluate_cost(layers, decision)
    slots = holding(hw, chips)
    layout = hw.layout_loss(layers, decision, 1.0 - slots()[0][:, -1])
    loss, terms = loss_of(hw, layers, slots, assignment, layout=layout)
    assert to_float(terms["area_mm2"]) == pytest.approx(priced.area_mm2)
    assert to_float(terms["chips"]) == pytest.approx(priced.chips)
    assert to_float(terms["layout"]) == pytest.approx(priced.layout, rel=1e-4)
    assert to_float(terms["mem_over"]) == 0.0
    latency = to_float(terms["latency_ms"])
    if mode == "serial":
        assert latency == pytest.approx(priced.stats.serial_ms, rel=1e-12)
        assert to_float(terms["energy_mj"]) == pytest.approx(priced.stats.energy_mj, rel=1e-12)
        assert to_float(loss) == pytest.approx(priced.objective, rel=1e-4)
    else:
        off = SMOOTHNESS * math.log(hw.num_slots)
        assert latency == pytest.approx(priced.stats.period_ms, rel=off)
        assert to_float(terms["energy_mj"]) == pytest.approx(priced.stats.energy_mj, rel=off)


def test_sampled_loss_is_loss_of_some_chips() -> None:
    hw, layers, assignment = hardware(mapping={"mode": "serial"}), chain(), (0,) * 6
    expected = []
    for name in ("npu-s", "npu-m", "memory-m"):
        hw.initial_decision(layers)
        expected.append(
            hw.evaluate_cost(layers, by_name(layers, hw, (name,) * 3, assignment)).stats.serial_ms
        )
    slots = ChipSlotConfig(hw.chips, 3)
    with torch.no_grad():
        slots.logits[:, -1] = -50.0  # never empty
    result = set()
    for seed in range(20):
        sampled = torch.Generator().manual_seed(seed)
        latency = to_float(loss_of(hw, layers, slots, assignment, generator=sampled)[1]["latency_ms"])
        result.add(min(range(3), key=lambda index: abs(expected[index] - latency)))
        assert min(abs(item - latency) for item in expected) < 1e-12
    assert result == {0, 1, 2}


def test_loss_is_deterministic_for_a_generator() -> None:
    hw, layers = hardware(), chain()
    slots = ChipSlotConfig(hw.chips, 3, hard=False)
    losses = [
        float(loss_of(hw, layers, slots, (0, 0, 1, 1, 2, 2), generator=g)[0].detach())
        for g in (torch.Generator().manual_seed(3), torch.Generator().manual_seed(3), None, None)
    ]
    assert losses[0] == losses[1] and losses[2] == losses[3] and losses[0] != losses[2]


def test_empty_slot_costs_more_than_slowest_chip() -> None:
    hw, layers, assignment = hardware(mapping={"mode": "serial"}), chain(), (0,) * 6
    table = hw.proxy.predict_table(layers, hw.chips)["lat_ms"]
    _, terms = loss_of(hw, layers, holding(hw, (None,) * 3), assignment, lambdas=only(lambda_T=1.0))
    assert to_float(terms["latency_ms"]) == pytest.approx(EMPTY_COST * table.max(1).sum(), rel=1e-9)


@pytest.mark.parametrize("mode", ["serial", "balanced"])
@pytest.mark.parametrize("joins", [False, True])
def test_parts_cost_their_fraction(mode: str, joins: bool) -> None:
    hw, layers = hardware(mapping={"mode": mode}), chain(seed=2)
    chips, assignment = ("npu-m", "npu-s", "memory-m"), (0, 0, 1, 1, 1, 2)
    index = 0 if joins else 2
    units, positions = layers[index].units, (0, 1) if joins else (1, 0, 2)
    sizes = (units // 3, units - units // 3) if joins else (units - 7, 3, 4)
    assert layers[index].split_joins is joins
    split = LayerSplit(layer=index, permutation=tuple(range(units)), sizes=sizes, slots=positions)
    costs = hw.planner.compute_costs(
        layers, [hw.library.get_chip(name) for name in chips], hw.build_network(hw.placer.grid_positions())
    )
    shares = [size / units for size in sizes]
    parts = PartCosts(
        latency_ms=tuple(
            share * costs.latency_ms[index, slot] for share, slot in zip(shares, positions, strict=True)
        ),
        power_w=tuple(costs.power_w[index, slot] for slot in positions),
        memory_mb=tuple(share * costs.memory_mb[index] for share in shares),
    )
    stats = evaluate_plan(
        costs, assignment, {index: (split, parts)}, ObjectiveWeights(mode=hw.config.mapping.mode)
    )
    _, terms = loss_of(hw, layers, holding(hw, chips), assignment, splits={index: split})
    if mode == "serial":
        assert to_float(terms["latency_ms"]) == pytest.approx(stats.serial_ms, rel=1e-12)
        assert to_float(terms["energy_mj"]) == pytest.approx(stats.energy_mj, rel=1e-12)
    else:
        assert to_float(terms["latency_ms"]) == pytest.approx(stats.period_ms, rel=0.06)


def test_gradients_reach_all_slot_logits() -> None:
    hw, layers = hardware(), chain()
    slots = ChipSlotConfig(hw.chips, 3)
    loss, _ = loss_of(hw, layers, slots, (0, 0, 1, 1, 2, 2))
    loss.backward()
    gradient = slots.logits.grad
    assert gradient is not None and torch.isfinite(gradient).all() and (gradient.abs().amax(1) > 0).all()
    # Softmax does not see a constant.
    torch.testing.assert_close(gradient.sum(1), torch.zeros(3), atol=1e-5, rtol=0.0)


def gated(layers: Sequence[LayerNode], gates: Tensor) -> list[LayerNode]:
    return [
        replace(layer, flops=layer.flops * gate_value, bytes=layer.bytes * gate_value)
        for layer, gate_value in zip(layers, gates, strict=True)
    ]


@pytest.mark.parametrize("mode", ["serial", "balanced"])
@pytest.mark.parametrize("term", ["latency_ms", "energy_mj"])
def test_gradients_reach_all_gates(mode: str, term: str) -> None:
    hw, layers = hardware(mapping={"mode": mode}), chain()
    gates = torch.full((6,), 0.5, requires_grad=True)
    _, terms = loss_of(hw, gated(layers, gates), holding(hw, ("npu-m",) * 3), (0, 0, 1, 1, 2, 2))
    (gradient,) = torch.autograd.grad(terms[term], gates)
    assert torch.isfinite(gradient).all() and (gradient != 0.0).all()
    if mode == "serial":
        assert (gradient > 0.0).all()


def test_gradients_of_flops_and_bytes_are_separate() -> None:
    hw, layers = hardware(mapping={"mode": "serial"}), chain()
    for name in ("flops", "bytes"):
        gate_value = torch.ones((), requires_grad=True)
        soft = [replace(layer, **{name: gate_value * getattr(layer, name)}) for layer in layers]
        loss, _ = loss_of(hw, soft, ChipSlotConfig(hw.chips, 3), (0, 1, 2, 0, 1, 2))
        loss.backward()
        assert gate_value.grad is not None and float(gate_value.grad) > 0.0, name


@pytest.mark.parametrize("lambdas", [only(**{name: 1.0}) for name in TERMS.values()] + [Lambdas()])
def test_gradients_match_finite_differences(lambdas: Lambdas) -> None:
    # In serial mode: the smooth maximum's own scale is held still.
    hw, layers = hardware(mapping={"mode": "serial"}), chain(seed=3)
    decision = hw.initial_decision(layers)
    # So little memory that every slot has too little of it.
    fat = [replace(layer, memory_bytes=layer.memory_bytes + 2 * 10**9) for layer in layers]
    slots = ChipSlotConfig(hw.chips, 3, hard=False, tau=0.9).double()
    generator = torch.Generator().manual_seed(0)
    location = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    gates = (0.5 + torch.rand(6, generator=generator, dtype=torch.float64)).requires_grad_()

    def value() -> Tensor:
        layout = hw.layout_loss(layers, decision, 1.0 - slots()[0][:, -1])
        return loss_of(hw, gated(fat, gates), slots, (0, 1, 1, 2, 0, 2), lambdas=lambdas, layout=layout)[0]

    with torch.no_grad():
        slots.logits.copy_(location)
    value().backward()
    step = 1e-4
    for parameter in (slots.logits, gates):
        assert parameter.grad is not None
        for index in range(parameter.numel()):
            with torch.no_grad():
                ends = []
                for sign in (1.0, -1.0):
                    parameter.view(-1)[index] += sign * step
                    ends.append(float(value()))
                    parameter.view(-1)[index] -= sign * step
            slope = (ends[0] - ends[1]) / (2 * step)
            result = float(parameter.grad.view(-1)[index])
            # The layout is computed in float32.
            assert result == pytest.approx(slope, rel=1e-3, abs=3e-3 if lambdas.lambda_layout else 1e-6)


def test_layout_gradients_reach_empty_probability() -> None:
    hw, layers = hardware(), chain()
    decision = by_name(layers, hw, ("npu-m",) * 3, (0, 0, 1, 1, 2, 2))
    slots = ChipSlotConfig(hw.chips, 3, hard=False)
    layout = hw.layout_loss(layers, decision, 1.0 - slots()[0][:, -1])
    loss, terms = loss_of(
        hw, layers, slots, (0, 0, 1, 1, 2, 2), lambdas=only(lambda_layout=2.0), layout=layout
    )
    assert to_float(loss) == pytest.approx(2.0 * to_float(terms["layout"]), rel=1e-6)
    loss.backward()
    assert slots.logits.grad is not None
    assert (slots.logits.grad[:, -1] < 0.0).all() and (slots.logits.grad[:, :-1] > 0.0).all()


@pytest.mark.parametrize("name", TERMS)
def test_each_lambda_weights_its_term(name: str) -> None:
    hw, layers = hardware(), chain()
    reference = CostReference(latency_ms=3.0, energy_mj=5.0, area_mm2=7.0)
    scale = {"latency_ms": 3.0, "energy_mj": 5.0, "area_mm2": 7.0, "chips": 3.0}.get(name, 1.0)
    fat = [replace(layer, memory_bytes=10**9) for layer in layers]
    slots = ChipSlotConfig(hw.chips, 3, hard=False)
    for value in (0.0, 1.0, 2.5):
        loss, terms = compute_hw_loss(
            fat, slots, placed(hw, (0,) * 6), hw.build_network(hw.placer.grid_positions()), hw.proxy,
            only(**{TERMS[name]: value}), reference, layout=torch.tensor(0.75),
        )  # fmt: skip
        assert set(terms) == set(TERMS) and to_float(terms[name]) > 0.0
        assert to_float(loss) == pytest.approx(value * to_float(terms[name]) / scale)


def test_memory_overflow_favors_larger_chips() -> None:
    hw, layers, assignment = hardware(), chain(), (0,) * 6
    for total_mb, over in ((900.0, 0.0), (1500.0, 0.25), (6000.0, 25.0)):
        size = round(total_mb * 1e6 / 6)
        fat = [replace(layer, memory_bytes=size, weight_bytes=size) for layer in layers]
        _, terms = loss_of(hw, fat, holding(hw, ("npu-s", None, None)), assignment)  # 1 GB
        assert to_float(terms["mem_over"]) == pytest.approx(over, rel=1e-5)
        # Of activations, only the largest count: here as much as that of all weights.
        peak = [replace(layer, memory_bytes=6 * size - 5, weight_bytes=1) for layer in layers]
        _, terms = loss_of(hw, peak, holding(hw, ("npu-s", None, None)), assignment)
        assert to_float(terms["mem_over"]) == pytest.approx(over, rel=1e-5)
    slots = holding(hw, ("npu-s",) * 3)
    loss, _ = loss_of(hw, fat, slots, assignment, lambdas=only(lambda_mem=1.0))
    loss.backward()
    assert slots.logits.grad is not None
    small, middle, large, _ = slots.logits.grad[0].tolist()
    assert large < middle < 0.0 < small and not slots.logits.grad[1:].any()


def test_empty_sample_keeps_gradients_finite() -> None:
    hw, layers, assignment = hardware(), chain(), (0, 0, 1, 1, 2, 2)
    slots = ChipSlotConfig(hw.chips, 3, tau=2.0)
    optimizer = torch.optim.Adam(slots.parameters(), lr=0.1)

    def stepped(generator: torch.Generator | None) -> Tensor:
        optimizer.zero_grad()
        loss_of(hw, layers, slots, assignment, generator=generator)[0].backward()
        before = slots.logits.detach().clone()
        optimizer.step()
        return (slots.logits.detach() - before).abs().amax(1)

    emptied = set()
    for seed in range(12):
        sampled, _ = slots(torch.Generator().manual_seed(seed))
        emptied |= set(torch.nonzero(sampled[:, -1] > 0.5).flatten().tolist())
        stepped(torch.Generator().manual_seed(seed))
    assert emptied == {0, 1, 2}
    moved = stepped(torch.Generator().manual_seed(100))
    assert (moved > 0.0).all(), f"slots without gradient: {moved.tolist()}"


def test_empty_sample_does_not_dominate() -> None:
    hw, layers = hardware(), chain()
    full, _ = loss_of(hw, layers, holding(hw, ("npu-m",) * 3), (0, 0, 1, 1, 2, 2))
    empty, _ = loss_of(hw, layers, holding(hw, ("npu-m", "npu-m", None)), (0, 0, 1, 1, 2, 2))
    # What float32 adds to the task's loss without wiping it out, whatever lambda is.
    assert 1.0 < to_float(empty) / to_float(full) < 1e5


@pytest.mark.parametrize("share", [0.95, 0.8, 0.6, 0.3])
def test_loss_is_monotone_in_work(share: float) -> None:
    # Slot 0 has the most work, slot 1 a share of it.
    hw, layers = hardware(), chain()
    first, second = (replace(layers[2], id=index, traffic_in_bytes=0) for index in (0, 1))
    latencies = []
    for gate_value in (share, share - 0.05):
        soft = [first, replace(second, flops=second.flops * gate_value, bytes=second.bytes * gate_value)]
        network = Network.all_to_all(hw.library.get_link("interposer").model_copy(update={"latency_us": 0.0,
                                     "latency_us_per_mm": 0.0}), torch.zeros(3, 3).numpy())  # fmt: skip
        _, terms = compute_hw_loss(
            soft, holding(hw, ("npu-m",) * 3), placed(hw, (0, 1)), network, hw.proxy, hw.lambdas, ONE
        )
        latencies.append(to_float(terms["latency_ms"]))
    assert latencies[1] <= latencies[0] * (1 + 1e-12)


class Broken(LayerHwProxy):
    """Tells NaN for one figure."""

    wrong: str
    value: float

    def predict_grid(self, layers: Any, devices: Any) -> dict[str, Tensor]:
        prediction = LayerHwProxy.analytic().predict_grid(layers, devices)
        return prediction | {self.wrong: prediction[self.wrong] * self.value}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("figure", "term"), [("lat_ms", "latency_ms"), ("power_w", "energy_mj"), ("mem_mb", "mem_over")]
)
def test_non_finite_loss_names_term(figure: str, term: str, value: float) -> None:
    hw, layers = hardware(mapping={"mode": "serial"}), chain()
    proxy = Broken.__new__(Broken)
    proxy.wrong, proxy.value = figure, value
    with pytest.raises(RunError, match=rf"finite: .*{term} ="):
        compute_hw_loss(
            layers,
            holding(hw, ("npu-m",) * 3),
            placed(hw, (0,) * 6),
            hw.build_network(hw.placer.grid_positions()),
            proxy,
            hw.lambdas,
            ONE,
        )


def test_non_finite_layout_is_refused() -> None:
    hw, layers = hardware(), chain()
    with pytest.raises(RunError, match="="):
        loss_of(hw, layers, ChipSlotConfig(hw.chips, 3), (0,) * 6, layout=torch.tensor(math.nan))


def test_wrong_sizes_are_refused() -> None:
    hw, layers = hardware(), chain()
    with pytest.raises(InputError, match="5"):
        loss_of(hw, layers, ChipSlotConfig(hw.chips, 3), (0,) * 5)
    with pytest.raises(InputError, match="4"):
        loss_of(hw, layers, ChipSlotConfig(hw.chips, 4), (0,) * 6)


@pytest.mark.parametrize("slot", [3, -1])
def test_unknown_slots_are_refused(slot: int) -> None:
    hw, layers = hardware(), chain()
    with pytest.raises(InputError):
        loss_of(hw, layers, ChipSlotConfig(hw.chips, 3), (0, 0, slot, 0, 0, 0))


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_invalid_lambdas_and_references_are_refused(value: float) -> None:
    for name in TERMS.values():
        with pytest.raises(InputError, match=rf"`{name}` \(={value}\)"):
            Lambdas(**{name: value})
    for name in ("latency_ms", "energy_mj", "area_mm2"):
        for item in (value, 0.0):
            with pytest.raises(InputError, match=rf"`{name}` \(={item}\)"):
                CostReference(**{"latency_ms": 1.0, "energy_mj": 1.0, "area_mm2": 1.0} | {name: item})

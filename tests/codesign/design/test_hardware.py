"""Deciding the hardware: what decisions cost, that none is taken that costs more, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sparseflow.codesign.design.decision import Decision, Reference, figures
from sparseflow.codesign.design.hardware import Hardware
from sparseflow.codesign.design.placement import Search
from sparseflow.codesign.hardware.chips import ChipLibrary, library_of, read_library
from sparseflow.codesign.hardware.proxy import DeviceSpec, LayerHwProxy
from sparseflow.codesign.workload.layers import number
from sparseflow.codesign.workload.splits import RewritePlan, Split, check, plan_bytes
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
            "name": f"m{at}", "peak_flops": 2e13, "peak_bw": 4e11, "mem_gb": size, "area_mm2": 50.0,
            "tdp_w": 20.0,
        }
        for at, size in enumerate(mem_gb)
    ]  # fmt: skip
    links = [link.model_dump() for link in read_library().links]
    return library_of({"chips": chips, "links": links})


def decided(hw: Hardware, layers: Sequence[LayerNode], chips: Any, homes: Any, plan: Any = None) -> Decision:
    return Decision(
        chips=tuple(chips), segments=tuple((layer.name,) for layer in layers), mapping=tuple(homes),
        positions_mm=hw.places.grid(), rewrite_plan=plan,
    )  # fmt: skip


def halves(layers: Sequence[LayerNode], at: int, slots: tuple[int, ...] = (0, 1)) -> RewritePlan:
    units = layers[at].units
    sizes = (units // 2, units - units // 2)
    split = Split(layer=at, permutation=tuple(range(units)), sizes=sizes, slots=slots)
    return RewritePlan(splits=(split,))


def objective(hw: Hardware, layers: Sequence[LayerNode], decision: Decision) -> float:
    return hw.price(layers, decision).objective


def test_the_first_decision_is_the_reference() -> None:
    hw, layers = hardware(loss={"lambda_T": 2.0, "lambda_area": 0.5}), chain()
    first = hw.begin(layers)
    assert first.chips == ("npu-m",) * 3 and first.positions_mm == hw.places.grid()
    assert first.rewrite_plan is None and first.homes(layers) == hw.planned(layers, first, fine=False).homes
    priced = hw.price(layers, first)
    assert hw.reference == Reference(
        latency_ms=priced.stats.total_latency_ms, energy_mj=priced.stats.energy_mj, area_mm2=240.0
    )
    # Everything is 1 at first, but for the lambdas.
    assert priced.layout == pytest.approx(1.0)
    assert priced.objective == pytest.approx(2.0 + 1.0 + 0.5 + 0.1 + 0.1)
    assert (priced.chips, priced.area_mm2) == (3, 240.0)


def test_an_objective_is_the_sum_of_its_terms() -> None:
    hw, layers = hardware(), chain(seed=1)
    hw.begin(layers)
    decision = decided(hw, layers, ("npu-s", None, "memory-m"), (0, 0, 2, 2, 0, 2))
    priced, told, zero = hw.price(layers, decision), hw.lambdas, hw.reference
    assert zero is not None and (priced.area_mm2, priced.chips) == (145.0, 2)
    assert priced.objective == pytest.approx(
        told.lambda_T * priced.stats.total_latency_ms / zero.latency_ms
        + told.lambda_E * priced.stats.energy_mj / zero.energy_mj
        + told.lambda_area * 145.0 / 240.0 + told.lambda_chip * 2 / 3
        + told.lambda_layout * hw.places.score(decision.positions_mm, hw.drawn(layers, decision))
    )  # fmt: skip
    assert figures(priced)["energy_delay_mj_ms"] == priced.energy_delay
    assert priced.energy_delay == priced.stats.energy_mj * priced.stats.total_latency_ms


@pytest.mark.parametrize("name", ["lambda_T", "lambda_E", "lambda_area", "lambda_chip", "lambda_layout"])
def test_each_lambda_weighs_its_own_term_of_the_objective(name: str) -> None:
    names = ("lambda_T", "lambda_E", "lambda_mem", "lambda_area", "lambda_chip", "lambda_layout")
    hw, layers = hardware(loss=dict.fromkeys(names, 0.0) | {name: 3.0}), chain()
    assert objective(hw, layers, hw.begin(layers)) == pytest.approx(3.0)


def test_a_layer_on_an_empty_slot_or_too_little_memory_has_no_price() -> None:
    hw, layers = hardware(), chain()
    hw.begin(layers)
    with pytest.raises(InputError):
        hw.price(layers, decided(hw, layers, ("npu-m", None, "npu-m"), (0, 0, 1, 1, 2, 2)))
    fat = [replace(layer, memory_bytes=400 * 10**6) for layer in layers]
    one = decided(hw, layers, ("npu-s", "npu-m", "npu-m"), (0, 0, 0, 1, 1, 1))  # npu-s holds 1 GB
    assert hw.price(layers, one).chips == 3
    with pytest.raises(InputError):
        hw.price(fat, one)


def test_a_part_on_an_empty_slot_has_no_price() -> None:
    hw, layers = hardware(), chain()
    hw.begin(layers)
    decision = decided(hw, layers, ("npu-m", None, "npu-m"), (0,) * 6, halves(layers, 2))
    with pytest.raises(InputError):
        hw.price(layers, decision)


def test_splits_of_layers_that_have_other_units_do_not_count() -> None:
    hw, layers = hardware(), chain()
    hw.begin(layers)
    plain = decided(hw, layers, ("npu-m",) * 3, (0,) * 6)
    split = decided(hw, layers, ("npu-m",) * 3, (0,) * 6, halves(layers, 2))
    assert objective(hw, layers, split) != objective(hw, layers, plain)
    fewer = [*layers[:2], replace(layers[2], units=layers[2].units - 1), *layers[3:]]
    assert hw.price(fewer, split) == hw.price(fewer, plain)


@pytest.mark.parametrize("at", [0, 2])
def test_what_is_drawn_is_what_is_moved(at: int) -> None:
    hw, layers = hardware(), chain(seed=1)
    homes, plan = (0, 0, 0, 1, 1, 2), halves(layers, at, (0, 2))
    drawn = hw.drawn(layers, decided(hw, layers, ("npu-m", "npu-s", "npu-m"), homes, plan))
    wanted = np.zeros((3, 3))
    for pair, size in plan_bytes(layers, homes, plan).items():
        wanted[pair] = size
    np.testing.assert_array_equal(drawn.traffic_bytes, wanted)
    assert drawn.names == ("npu-m", "npu-s", "npu-m") and drawn.tdp_w.tolist() == [22.0, 6.0, 22.0]
    assert drawn.sizes_mm.tolist() == [[10.0, 8.0], [5.0, 5.0], [10.0, 8.0]]


def test_the_better_of_two_decisions() -> None:
    hw, layers = hardware(), chain()
    first = hw.begin(layers)
    worse = replace(first, chips=("memory-m",) * 3)
    assert objective(hw, layers, worse) > objective(hw, layers, first)
    assert hw.better(layers, first, worse) is first and hw.better(layers, worse, first) is first
    assert hw.better(layers, first, None) is first
    twin = replace(first, positions_mm=tuple(reversed(first.positions_mm)))
    if objective(hw, layers, twin) == objective(hw, layers, first):
        assert hw.better(layers, first, twin) is first
    nowhere = replace(first, chips=(None,) * 3)
    assert hw.better(layers, first, nowhere) is first


def test_whatever_fits_is_better_than_what_does_not() -> None:
    hw, layers = hardware(), chain()
    first = hw.begin(layers)
    gone = replace(first, chips=("npu-m", None, None), mapping=(1,) * len(first.mapping))
    with pytest.raises(InputError):
        hw.price(layers, gone)
    assert hw.better(layers, gone, first) is first
    assert hw.better(layers, gone, replace(gone, chips=(None, None, "npu-m"))) is gone


@pytest.mark.parametrize("changes", [CHEAP_LINKS, SERIAL])
@pytest.mark.parametrize("fine", [False, True])
def test_polishing_never_raises_the_objective(changes: Any, fine: bool) -> None:
    hw, layers = hardware(**changes), chain(seed=2)
    first = hw.begin(layers)
    told: list[tuple[str, float]] = []
    polished = hw.polish(layers, first, fine=fine, progress=lambda *one: told.append(one))
    assert objective(hw, layers, polished) <= objective(hw, layers, first)
    assert polished == hw.polish(layers, first, fine=fine)  # the same arguments give the same
    again = hw.polish(layers, polished, fine=fine)
    assert objective(hw, layers, again) <= objective(hw, layers, polished)
    assert fine or polished.rewrite_plan is None
    assert told and all(0.0 <= share <= 1.0 for _, share in told)
    # Some slot of three gives way: area, and what it draws while it waits, are saved.
    assert objective(hw, layers, polished) < objective(hw, layers, first)


def test_a_polished_decision_is_of_the_layers_there_are() -> None:
    # Nothing that could be decided lowers the objective, and of the layers one is gone, one has fewer units.
    hw = hardware(hardware={"slots": 2, "chips": ["npu-m"]}, loss=dict.fromkeys(REST, 0.0))
    layers = chain()
    first = hw.begin(layers)
    home = first.homes(layers)[2]
    split = replace(first, rewrite_plan=halves(layers, 2, (home, 1 - home)))
    left = [*layers[:2], replace(layers[2], units=layers[2].units - 1), *layers[3:]]
    gone = [replace(layer, id=at) for at, layer in enumerate([*layers[:3], *layers[4:]])]
    for after, before in ((left, split), (gone, first)):
        found = hw.polish(after, before, fine=False)
        check(after, found.rewrite_plan or RewritePlan(splits=()), found.homes(after))
        assert [name for names in found.segments for name in names] == [layer.name for layer in after]


@pytest.mark.parametrize("gone", [(), (0,), (1, 2), (3,), (5,)])
def test_a_decision_is_fitted_to_the_layers_that_are_left(gone: tuple[int, ...]) -> None:
    hw, layers = hardware(), chain()
    hw.begin(layers)
    decision = decided(hw, layers, ("npu-m",) * 3, (0, 0, 1, 2, 2, 0), halves(layers, 2, (1, 0)))
    left = [layer for layer in layers if layer.id not in gone]
    after = [replace(layer, id=at) for at, layer in enumerate(left)]
    found = hw.fitted(after, decision)
    assert found.homes(after) == tuple(decision.mapping[layer.id] for layer in left)
    hw.check(after, found)
    assert hw.fitted(after, found) == found and (found == decision) is (not gone)
    assert objective(hw, after, found) == objective(hw, after, decision)
    kept = {after[at].name: split.slots for at, split in found.splits(after).items()}
    assert kept == ({} if 2 in gone else {layers[2].name: (1, 0)})


def test_polishing_splits_where_that_pays() -> None:
    hw, layers = hardware(**CHEAP_LINKS, partition={"min_split_gain_ratio": 0.0}), chain()
    first = hw.begin(layers)
    orders = Hardware.orders(Listed(layers))  # pyright: ignore[reportArgumentType]
    found = hw.remap(layers, first, fine=True, orders=orders)
    assert found is not None and found.rewrite_plan is not None
    (split,) = found.rewrite_plan.splits
    assert list(split.permutation) == list(orders(split.layer))  # the most important units at home
    importance = Listed(layers).unit_importance(split.layer)
    assert bool((importance[list(split.permutation)].diff() <= 0.0).all())
    assert objective(hw, layers, found) < objective(hw, layers, first)
    coarse = hw.remap(layers, found, fine=False)
    assert coarse is not None and coarse.rewrite_plan is None


@pytest.mark.parametrize("seed", range(2))
def test_chips_that_are_exchanged_still_have_room(seed: int) -> None:
    # Places are refined for the chips that are there; other chips may be larger.
    hw, layers = hardware(wafer={"refine_steps": 60}), chain(seed=seed)
    hw.begin(layers)
    small = hw.replaced(layers, decided(hw, layers, ("npu-s",) * 3, (0, 0, 1, 1, 2, 2)))
    assert not wrong_with(hw, small)
    larger = hw.with_chips(layers, small, ("memory-m", "npu-m", "memory-m"), fine=False)
    assert larger is not None
    taken = hw.better(layers, small, larger)
    for decision in (hw.replaced(layers, larger), taken, hw.polish(layers, larger, fine=False)):
        assert not wrong_with(hw, decision), decision


def test_places_of_chips_get_better_or_stay() -> None:
    hw, layers = hardware(), chain(seed=1)
    hw.begin(layers)
    for chips in (("npu-s", "memory-m", "npu-m"), ("npu-m", None, "npu-m")):
        decision = decided(hw, layers, chips, (0, 2, 2, 0, 0, 2))
        moved = hw.replaced(layers, decision)
        assert replace(moved, positions_mm=decision.positions_mm) == decision
        drawn = hw.drawn(layers, decision)
        assert hw.places.score(moved.positions_mm, drawn) <= hw.places.score(decision.positions_mm, drawn)


def test_other_chips_are_mapped_anew_or_refused() -> None:
    hw, layers = hardware(), chain()
    first = hw.begin(layers)
    assert hw.with_chips(layers, first, (None,) * 3, fine=False) is None
    fat = [replace(layer, memory_bytes=700 * 10**6) for layer in layers]  # 4.2 GB
    assert hw.with_chips(fat, first, ("npu-m", None, None), fine=False) is None
    other = hw.with_chips(fat, first, ("npu-m", None, "npu-s"), fine=False)
    assert other is not None and set(other.mapping) == {0, 2} and other.positions_mm == first.positions_mm


def test_a_decision_as_a_plan_says_the_same() -> None:
    hw, layers = hardware(**CHEAP_LINKS), chain()
    hw.begin(layers)
    decision = decided(hw, layers, ("npu-m",) * 3, (0, 0, 0, 1, 1, 2), halves(layers, 2))
    costs, plan = hw.plan_of(layers, decision)
    assert plan.hw_stats == hw.price(layers, decision).stats and plan.homes == (0, 0, 0, 1, 1, 2)
    assert plan.mapping == (0, 1, 2) and [list(each.layer_ids) for each in plan.segments.segments] == [
        [0, 1, 2], [3, 4], [5]
    ]  # fmt: skip
    assert set(plan.splits) == {2} and costs.slots == 3
    assert plan.coarse_stats != plan.hw_stats


def test_a_plan_of_a_model_that_lost_a_layer_in_front_of_a_split() -> None:
    hw, layers = hardware(**CHEAP_LINKS), chain()
    hw.begin(layers)
    decision = decided(hw, layers, ("npu-m",) * 3, (0,) * 6, halves(layers, 4))
    left = [replace(layer, id=at) for at, layer in enumerate([*layers[:1], *layers[2:]])]
    _, plan = hw.plan_of(left, decision)
    assert plan.hw_stats == hw.price(left, decision).stats
    assert set(plan.splits) == {3} and plan.splits[3][0].layer == 3


def test_the_loss_of_a_layout_is_its_score_where_all_chips_are_there() -> None:
    hw, layers = hardware(), chain(seed=1)
    decision = replace(hw.begin(layers), chips=("npu-s", "npu-m", "memory-m"))
    wanted = hw.places.score(decision.positions_mm, hw.drawn(layers, decision))
    there = torch.full((3,), 0.5, requires_grad=True)
    for each, share in ((torch.ones(3), 1.0), (torch.zeros(3), 0.0), (there, 0.25)):
        loss = hw.layout_loss(layers, decision, each)
        assert number(loss) == pytest.approx(share * wanted, rel=1e-5)
    loss.backward()
    assert there.grad is not None and (there.grad > 0.0).all()


def test_a_model_that_fits_no_configuration_says_by_how_much() -> None:
    hw, layers = hardware(), chain()
    fat = [replace(layer, memory_bytes=2500 * 10**6) for layer in layers]  # 15 GB on 3 x 4 GB
    with pytest.raises(InputError, match=r"12000\S* MB: 3000\S*"):
        hw.begin(fat)
    assert hw.reference is None
    one = [replace(layer, memory_bytes=5000 * 10**6 if layer.id == 2 else 10**6) for layer in layers]
    with pytest.raises(InputError, match=r"500\d"):
        hw.begin(one)


def test_the_first_chip_is_that_with_the_most_memory_unless_told() -> None:
    hw = Hardware(quick(hardware={"chips": [], "first": None}), library=library(1.0, 8.0, 2.0))
    assert hw.first.name == "m1" and len(hw.chips) == 3
    some = Hardware(quick(hardware={"chips": ["m0", "m2"], "first": None}), library=library(1.0, 8.0, 2.0))
    assert some.first.name == "m2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first": "a100"}, r"`first` \(='a100'\) must be one of `chips`: npu-s, npu-m, memory-m"),
        ({"chips": ["npu-s", "npu-x"]}, "no chip 'npu-x'; it has: npu-s"),
        ({"link": "wire"}, "no link 'wire'; it has: ucie"),
        ({"links": [[0, 1, "wire"]]}, "no link 'wire'"),
        ({"links": [[0, 1, "ucie"]]}, "no links lead from slot 0 to slots 2"),
        ({"links": [[0, 3, "ucie"]]}, "joins slots 0 and 3; there are slots 0 to 2"),
        ({"slots": 40}, r"40 chips and \d+ sites.*use fewer"),
        ({"library": "nowhere.yaml"}, "nowhere.yaml"),
        ({"proxy": "nowhere.safetensors"}, "nowhere.safetensors"),
    ],
)
def test_what_cannot_be_built_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        hardware(hardware=changes)


def test_a_chip_too_large_for_the_wafer_is_refused() -> None:
    with pytest.raises(InputError, match=r"15\.\d+"):
        hardware(wafer={"radius_mm": 5.0})


def test_a_library_or_a_proxy_that_is_none_is_refused(tmp_path: Any) -> None:
    (tmp_path / "chips.yaml").write_text("chips: []\nlinks: []\n")
    with pytest.raises(FileFormatError, match="chips"):
        hardware(hardware={"library": str(tmp_path / "chips.yaml")})
    (tmp_path / "proxy.safetensors").write_bytes(b"no")
    with pytest.raises(FileFormatError):
        hardware(hardware={"proxy": str(tmp_path / "proxy.safetensors")})


def test_a_proxy_of_ones_own_is_used(tmp_path: Any) -> None:
    LayerHwProxy.analytic().save(tmp_path / "proxy.safetensors")
    layers, same = chain(), hardware(hardware={"proxy": str(tmp_path / "proxy.safetensors")})
    plain = hardware()
    assert same.price(layers, same.begin(layers)) == plain.price(layers, plain.begin(layers))


def test_links_that_are_told_are_the_only_ones() -> None:
    line = hardware(hardware={"links": [[0, 1, "ucie"], [1, 2, "ucie"]]})
    every = hardware(hardware={"link": "ucie"})
    at = ((0.0, 0.0), (20.0, 0.0), (0.0, 20.0))
    one, other = line.network(at), every.network(at)
    assert one.time_ms(0, 1, 1000) == other.time_ms(0, 1, 1000)
    assert one.time_ms(0, 2, 1000) == pytest.approx(other.time_ms(0, 1, 1000) + other.time_ms(1, 2, 1000))
    # Chips that are farther apart are farther away.
    far = every.network(((0.0, 0.0), (40.0, 0.0), (0.0, 20.0)))
    assert far.time_ms(0, 1, 1000) > other.time_ms(0, 1, 1000)
    assert far.energy_mj(0, 1, 1000) > other.energy_mj(0, 1, 1000)


@pytest.mark.parametrize(
    "told",
    [
        {}, {"latency_ms": 1.0}, {"latency_ms": 1.0, "energy_mj": 1.0, "area_mm2": 0.0},
        {"latency_ms": 1.0, "energy_mj": 1.0, "area_mm2": 1.0, "more": 1.0},
        {"latency_ms": "1", "energy_mj": 1.0, "area_mm2": 1.0},
    ],
)  # fmt: skip
def test_a_reference_must_be_one(told: dict[str, Any]) -> None:
    hw = hardware()
    with pytest.raises(InputError):
        hw.fix_reference(told)
    assert hw.reference is None
    hw.fix_reference({"latency_ms": 1.0, "energy_mj": 2.0, "area_mm2": 3.0})
    assert hw.reference == Reference(latency_ms=1.0, energy_mj=2.0, area_mm2=3.0)


def test_costs_need_a_reference() -> None:
    hw, layers = hardware(), chain()
    first = hw.begin(layers)
    hw.reference = None
    for call in (
        lambda: hw.price(layers, first),
        lambda: hw.better(layers, first, replace(first, chips=("npu-s",) * 3)),
        lambda: hw.fitted(layers, first),
    ):
        with pytest.raises(InputError, match="`fix_reference`"):
            call()


def test_what_does_not_fit_is_named() -> None:
    hw, layers = hardware(), chain()
    hw.begin(layers)
    empty = decided(hw, layers, ("npu-m", None, "npu-m"), (0, 0, 1, 1, 2, 2))
    with pytest.raises(InputError, match=r"blocks\.0\.mlp"):
        hw.price(layers, empty)
    fat = [replace(layer, memory_bytes=400 * 10**6) for layer in layers]
    small = decided(hw, layers, ("npu-m", "npu-m", "npu-s"), (0, 0, 0, 2, 2, 2))
    with pytest.raises(InputError, match="1200"):
        hw.price(fat, small)
    # Of parts the slot is told, not their place in the split.
    part = decided(hw, layers, (None, "npu-m", "npu-m"), (2,) * 6, halves(layers, 2, (2, 0)))
    with pytest.raises(InputError, match=r"blocks\.0\.mlp"):
        hw.price(layers, part)


def test_layers_in_another_order_are_other_layers() -> None:
    hw, layers = hardware(), chain()
    hw.begin(layers)
    decision = decided(hw, layers, ("npu-m",) * 3, (0,) * 6)
    swapped = replace(decision, segments=(*decision.segments[:2], decision.segments[3], decision.segments[2],
                                          *decision.segments[4:]))  # fmt: skip
    with pytest.raises(FileFormatError):
        hw.check(layers, swapped)
    with pytest.raises(FileFormatError, match=r"blocks\.0\.mlp"):
        hw.check([replace(each, id=at) for at, each in enumerate([*layers[:2], *layers[3:]])], decision)


def test_a_proxy_that_knows_none_of_the_chips_is_told(caplog: pytest.LogCaptureFixture) -> None:
    spec = DeviceSpec.of(read_library().chip("npu-m"))
    proxy = LayerHwProxy.analytic()
    rows = {name: torch.cat([getattr(proxy, name)] * 2) for name in ("power", "workspace")}
    roofline = replace(proxy.roofline, values=proxy.roofline.values.repeat(2, 1, 1, 1),
                       fitted=proxy.roofline.fitted.repeat(2, 1, 1))  # fmt: skip
    for name, told in (("npu-m", 0), ("a GPU", 1)):
        caplog.clear()
        Hardware(quick(), replace(proxy, **rows, roofline=roofline, devices=(replace(spec, name=name),)))
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == told and all("the proxy knows a GPU" in line for line in lines)
    Hardware(quick(), proxy)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("fine", [False, True])
def test_what_is_concluded_is_no_worse_and_tells_of_a_bound(fine: bool) -> None:
    hw, layers = hardware(**CHEAP_LINKS, partition={"min_split_gain_ratio": 0.0}), chain(seed=2)
    first = hw.begin(layers)
    poor = decided(hw, layers, ("npu-m",) * 3, (2, 0, 1, 0, 2, 1))
    for decision in (first, poor):
        found, told = hw.concluded(layers, decision, fine=fine)
        assert objective(hw, layers, found) <= objective(hw, layers, decision)
        assert (found.chips, found.positions_mm) == (decision.chips, decision.positions_mm)
        assert bool(told["considered"]) is fine and told["finished"] is True
        whole = hw.price(layers, replace(found, rewrite_plan=None)).stats.total_latency_ms
        assert told["lower_bound_ms"] <= whole
        assert told["gap"] == pytest.approx((whole - told["lower_bound_ms"]) / whole)


def test_places_are_searched_as_told() -> None:
    hw, layers = hardware(), chain(seed=1)
    hw.begin(layers)
    decision = decided(hw, layers, ("npu-s", "memory-m", "npu-m"), (0, 2, 2, 0, 0, 2))
    with pytest.raises(InputError, match="`method`"):
        hw.replaced(layers, decision, Search(method="luck"))
    found = hw.replaced(layers, decision, Search(method="annealing", restarts=2, seed=3))
    assert objective(hw, layers, found) <= objective(hw, layers, decision)

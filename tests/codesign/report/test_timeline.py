"""Plans played through: nothing at the same time, in the executor's order, each slot as long as planned."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.codesign.random_plan import random_plan
from sparseflow.codesign.execution.schedule import schedule
from sparseflow.codesign.hardware.chips import Link
from sparseflow.codesign.hardware.network import Network
from sparseflow.codesign.partition.objective import Costs, PartCosts, Weights, evaluate
from sparseflow.codesign.partition.planner import Plan
from sparseflow.codesign.report.timeline import Event, Played, gantt, play
from sparseflow.codesign.workload.segments import chain
from sparseflow.codesign.workload.splits import RewritePlan
from sparseflow.core.report import Figure
from sparseflow.errors import InputError
from tests.codesign.nodes import made_layers

LEAST = 1e-9
"""What sums are off by, relative."""


def a_plan(costs: Costs, homes: Sequence[int], rewrite: RewritePlan | None, seed: int) -> Plan:
    """A plan of layers on slots, with parts of random length."""
    rng = np.random.default_rng(seed)
    parts = {
        each.layer: PartCosts(
            latency_ms=tuple(rng.uniform(0.1, 1.5, len(each.sizes)).tolist()),
            power_w=(1.0,) * len(each.sizes),
            memory_mb=(0.0,) * len(each.sizes),
        )
        for each in (() if rewrite is None else rewrite.splits)
    }
    splits = {} if rewrite is None else {each.layer: (each, parts[each.layer]) for each in rewrite.splits}
    begins = [at for at in range(len(homes)) if at == 0 or homes[at] != homes[at - 1]]
    stats = evaluate(costs, homes, splits, Weights())
    return Plan(
        segments=chain(costs.layers, begins), mapping=tuple(homes[at] for at in begins), homes=tuple(homes),
        rewrite_plan=rewrite if rewrite is not None and rewrite.splits else None, hw_stats=stats,
        coarse_stats=stats, considered=(), lower_bound_ms=0.0, gap=1.0, finished=True, weights=Weights(),
        part_costs=parts,
    )  # fmt: skip


def an_instance(seed: int, *, share: float = 0.0, back: bool = False) -> tuple[Costs, Plan]:
    """Layers on two to five slots; transfers take about as long as layers do."""
    rng = np.random.default_rng(seed)
    layers, slots = made_layers(int(rng.integers(2, 6)), seed=seed), int(rng.integers(2, 6))
    homes, rewrite = random_plan(layers, slots, seed=seed, share=share, back=back)
    distances = rng.uniform(0.0, 100.0, (slots, slots))
    link = Link(name="wire", bandwidth=1e8, latency_us=100.0, latency_us_per_mm=1.0)
    count = len(layers)
    costs = Costs(
        layers=tuple(layers), latency_ms=rng.uniform(0.2, 2.0, (count, slots)),
        power_w=np.ones((count, slots)), memory_mb=np.ones(count), limit_mb=np.full(slots, 1e3),
        idle_w=np.ones(slots), network=Network.all_to_all(link, distances),
    )  # fmt: skip
    return costs, a_plan(costs, homes, rewrite, seed)


def instances(share: float, back: bool, count: int = 20) -> Iterator[tuple[Costs, Plan]]:
    return (an_instance(seed, share=share, back=back) for seed in range(count))


def by_slot(played: Played) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = defaultdict(list)
    for event in played.events:
        found[event.slot].append(event)
    return found


ALL = pytest.mark.parametrize(("share", "back"), [(0.0, False), (0.0, True), (0.5, False), (0.5, True)])


@ALL
def test_a_slot_does_one_thing_at_a_time(share: float, back: bool) -> None:
    for costs, plan in instances(share, back):
        for events in by_slot(play(costs, plan)).values():
            assert events[0].begin_ms >= 0.0 and all(event.end_ms > event.begin_ms for event in events)
            for before, after in pairwise(events):
                assert after.begin_ms >= before.end_ms * (1 - LEAST)


@ALL
def test_slots_are_taken_up_as_planned(share: float, back: bool) -> None:
    for costs, plan in instances(share, back):
        spent: dict[tuple[int, int], float] = defaultdict(float)
        played = play(costs, plan, batches=6)
        for event in played.events:
            spent[event.slot, event.batch] += event.end_ms - event.begin_ms
        for slot, batch in itertools.product(range(costs.slots), range(6)):
            # Home waits longer for parts that have to wait for their slot.
            assert spent[slot, batch] >= plan.hw_stats.busy_ms[slot] * (1 - LEAST)
            assert plan.splits or spent[slot, batch] == pytest.approx(plan.hw_stats.busy_ms[slot])


@ALL
def test_slots_go_by_the_order_of_the_executor(share: float, back: bool) -> None:
    for costs, plan in instances(share, back):
        place = {layer.name: layer.id for layer in costs.layers}
        order, played = schedule(costs.layers, plan.homes, plan.rewrite_plan), play(costs, plan, batches=7)
        batches, events = 1 + max(event.batch for event in played.events), by_slot(played)
        assert batches >= 7
        for slot in range(costs.slots):
            expected = [(batch, task.layer) for batch, task in order.order(batches, slot)]
            done = [(event.batch, place[event.name]) for event in events[slot]]
            assert [key for key, _ in itertools.groupby(done)] == expected


@ALL
def test_what_a_layer_needs_is_there_before_it_begins(share: float, back: bool) -> None:
    for costs, plan in instances(share, back):
        network, batches = costs.network, 5
        ran: dict[tuple[int, str], list[Event]] = defaultdict(list)
        for event in play(costs, plan, batches=batches).events:
            ran[event.batch, event.name].append(event)
        for batch in range(batches):
            before = 0.0
            for at, layer in enumerate(costs.layers):
                home = plan.homes[at]
                events = ran[batch, layer.name]
                own = [event for event in events if event.slot == home]
                assert min(event.begin_ms for event in events) >= before * (1 - LEAST)
                kinds = [event.kind for event in own]
                comes = at > 0 and plan.homes[at - 1] != home
                assert kinds[0] == ("receive" if comes else "run" if at not in plan.splits else "part")
                if comes:
                    took = network.time_ms(plan.homes[at - 1], home, layer.traffic_in_bytes)
                    assert own[0].end_ms - own[0].begin_ms == pytest.approx(took)
                before = max(event.end_ms for event in own)
                if at not in plan.splits:
                    assert len(own) == len(events) == 1 + comes and own[-1].kind == "run"
                    assert own[-1].end_ms - own[-1].begin_ms == pytest.approx(costs.latency_ms[at, home])
                    continue
                split, parts = plan.splits[at]
                begin = own[comes].begin_ms
                for number, (slot, size) in enumerate(zip(split.slots, split.sizes, strict=True)):
                    part = next(each for each in events if each.slot == slot and each.kind == "part")
                    assert part.end_ms - part.begin_ms == pytest.approx(parts.latency_ms[number])
                    if slot == home:
                        continue
                    there = next(each for each in events if each.slot == slot and each.kind == "receive")
                    assert there.begin_ms >= begin * (1 - LEAST) and there.end_ms == part.begin_ms
                    took = network.time_ms(home, slot, layer.split_in_bytes)
                    assert there.end_ms - there.begin_ms == pytest.approx(took)
                    back_bytes = layer.split_out_bytes
                    if layer.split_joins:
                        back_bytes = back_bytes * size // layer.units
                    came_back = part.end_ms + network.time_ms(slot, home, back_bytes)
                    assert before >= came_back * (1 - LEAST)


@pytest.mark.parametrize("batches", [2, 5, 12, 30])
def test_a_plain_pipeline_is_as_fast_as_planned(batches: int) -> None:
    for costs, plan in instances(0.0, False):
        played = play(costs, plan, batches=batches)
        assert played.period_ms == pytest.approx(plan.hw_stats.period_ms)
        first = [event for event in played.events if event.batch == 0]
        assert max(event.end_ms for event in first) == pytest.approx(plan.hw_stats.serial_ms)
        assert played.latency_ms == pytest.approx(plan.hw_stats.serial_ms)
        assert {event.batch for event in played.events} >= set(range(batches))


@ALL
@pytest.mark.parametrize("batches", [2, 12])
def test_no_period_is_shorter_than_what_a_slot_has_to_do(share: float, back: bool, batches: int) -> None:
    for costs, plan in instances(share, back, 80):
        played = play(costs, plan, batches=batches)
        assert played.period_ms >= plan.hw_stats.period_ms * (1 - LEAST)
        assert played.latency_ms == plan.hw_stats.serial_ms


def test_all_on_one_slot() -> None:
    costs, _ = an_instance(0)
    plan = a_plan(costs, [1] * len(costs.layers), None, 0)
    played = play(costs, plan)
    assert played.period_ms == pytest.approx(plan.hw_stats.serial_ms)
    assert {event.kind for event in played.events} == {"run"} and {event.slot for event in played.events} == {
        1
    }


def test_nothing_is_shown_of_what_takes_no_time() -> None:
    costs, plan = an_instance(0)
    other = np.zeros((costs.slots, costs.slots))
    free = replace(costs, network=Network(fixed_ms=other, ms_per_byte=other, mj_per_byte=other))
    played = play(free, plan)
    assert {event.kind for event in played.events} == {"run"}
    assert played.period_ms == pytest.approx(max(evaluate(free, plan.homes, {}, Weights()).busy_ms))


@pytest.mark.parametrize("batches", [1, 0, -1])
def test_a_period_needs_batches(batches: int) -> None:
    costs, plan = an_instance(0)
    with pytest.raises(InputError, match=rf"`batches` \(={batches}\)"):
        play(costs, plan, batches=batches)


@ALL
def test_the_chart_is_a_figure(share: float, back: bool) -> None:
    pytest.importorskip("matplotlib")
    costs, plan = an_instance(3, share=share, back=back)
    played = play(costs, plan)
    figure = gantt(played, [f"slot-{slot}" for slot in range(costs.slots)])
    assert isinstance(figure, Figure) and figure.svg.lstrip().startswith("<svg") and figure.title
    used = {event.slot for event in played.events if event.batch < 4}
    assert f"{len(used)} slots" in figure.alt and f"{played.period_ms:.3g} ms" in figure.alt
    assert f"{played.latency_ms:.3g} ms" in figure.alt


def test_slots_that_do_nothing_are_left_out_of_the_chart() -> None:
    pytest.importorskip("matplotlib")
    costs, _ = an_instance(0)
    plan = a_plan(costs, [1] * len(costs.layers), None, 0)
    names = [f"slot-{slot}" for slot in range(costs.slots)]
    few, many = (gantt(play(costs, plan), names, batches=batches) for batches in (1, 8))
    assert few.alt.startswith("1 slots, 1 batches") and many.alt.startswith("1 slots, 8 batches")
    assert len(few.svg) < len(many.svg)

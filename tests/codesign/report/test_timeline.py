"""Tests of `codesign.report.timeline`."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.codesign.random_plan import random_plan
from sparseflow.codesign.execution.schedule import build_schedule
from sparseflow.codesign.hardware.chips import LinkType
from sparseflow.codesign.hardware.network import Network
from sparseflow.codesign.partition.objective import LayerCosts, ObjectiveWeights, PartCosts, evaluate_plan
from sparseflow.codesign.partition.planner import PartitionPlan
from sparseflow.codesign.report.timeline import (
    PipelineTimeline,
    TimelineEvent,
    plot_timeline,
    simulate_pipeline,
)
from sparseflow.codesign.workload.segments import build_chain
from sparseflow.codesign.workload.splits import RewritePlan
from sparseflow.core.report import Figure
from sparseflow.errors import InputError
from tests.codesign.nodes import made_layers

LEAST = 1e-9
"""What sums are off by, relative."""


def a_plan(
    costs: LayerCosts, assignment: Sequence[int], rewrite: RewritePlan | None, seed: int
) -> PartitionPlan:
    """A plan of layers on slots, with parts of random length."""
    rng = np.random.default_rng(seed)
    parts = {
        split.layer: PartCosts(
            latency_ms=tuple(rng.uniform(0.1, 1.5, len(split.sizes)).tolist()),
            power_w=(1.0,) * len(split.sizes),
            memory_mb=(0.0,) * len(split.sizes),
        )
        for split in (() if rewrite is None else rewrite.splits)
    }
    splits = {} if rewrite is None else {split.layer: (split, parts[split.layer]) for split in rewrite.splits}
    starts = [
        start for start in range(len(assignment)) if start == 0 or assignment[start] != assignment[start - 1]
    ]
    stats = evaluate_plan(costs, assignment, splits, ObjectiveWeights())
    return PartitionPlan(
        segments=build_chain(costs.layers, starts),
        mapping=tuple(assignment[start] for start in starts),
        assignment=tuple(assignment),
        rewrite_plan=rewrite if rewrite is not None and rewrite.splits else None,
        hw_stats=stats,
        coarse_stats=stats,
        split_decisions=(),
        lower_bound_ms=0.0,
        gap=1.0,
        finished=True,
        weights=ObjectiveWeights(),
        part_costs=parts,
    )


def an_instance(seed: int, *, share: float = 0.0, back: bool = False) -> tuple[LayerCosts, PartitionPlan]:
    """Layers on two to five slots; transfers take about as long as layers do."""
    rng = np.random.default_rng(seed)
    layers, slots = made_layers(int(rng.integers(2, 6)), seed=seed), int(rng.integers(2, 6))
    assignment, rewrite = random_plan(layers, slots, seed=seed, share=share, back=back)
    distances = rng.uniform(0.0, 100.0, (slots, slots))
    link = LinkType(name="wire", bandwidth=1e8, latency_us=100.0, latency_us_per_mm=1.0)
    count = len(layers)
    costs = LayerCosts(
        layers=tuple(layers), latency_ms=rng.uniform(0.2, 2.0, (count, slots)),
        power_w=np.ones((count, slots)), memory_mb=np.ones(count), limit_mb=np.full(slots, 1e3),
        idle_w=np.ones(slots), network=Network.all_to_all(link, distances),
    )  # fmt: skip
    return costs, a_plan(costs, assignment, rewrite, seed)


def instances(share: float, back: bool, count: int = 20) -> Iterator[tuple[LayerCosts, PartitionPlan]]:
    return (an_instance(seed, share=share, back=back) for seed in range(count))


def by_slot(played: PipelineTimeline) -> dict[int, list[TimelineEvent]]:
    result: dict[int, list[TimelineEvent]] = defaultdict(list)
    for event in played.events:
        result[event.slot].append(event)
    return result


ALL = pytest.mark.parametrize(("share", "back"), [(0.0, False), (0.0, True), (0.5, False), (0.5, True)])


@ALL
def test_events_of_a_slot_do_not_overlap(share: float, back: bool) -> None:
    for costs, plan in instances(share, back):
        for events in by_slot(simulate_pipeline(costs, plan)).values():
            assert events[0].start_ms >= 0.0 and all(event.end_ms > event.start_ms for event in events)
            for before, after in pairwise(events):
                assert after.start_ms >= before.end_ms * (1 - LEAST)


@ALL
def test_busy_time_matches_plan(share: float, back: bool) -> None:
    for costs, plan in instances(share, back):
        spent: dict[tuple[int, int], float] = defaultdict(float)
        played = simulate_pipeline(costs, plan, num_batches=6)
        for event in played.events:
            spent[event.slot, event.batch] += event.end_ms - event.start_ms
        for slot, batch in itertools.product(range(costs.num_slots), range(6)):
            # Home waits longer for parts that have to wait for their slot.
            assert spent[slot, batch] >= plan.hw_stats.busy_ms[slot] * (1 - LEAST)
            assert plan.splits or spent[slot, batch] == pytest.approx(plan.hw_stats.busy_ms[slot])


@ALL
def test_events_follow_execution_schedule(share: float, back: bool) -> None:
    for costs, plan in instances(share, back):
        index = {layer.name: layer.id for layer in costs.layers}
        order, played = (
            build_schedule(costs.layers, plan.assignment, plan.rewrite_plan),
            simulate_pipeline(costs, plan, num_batches=7),
        )
        batches, events = 1 + max(event.batch for event in played.events), by_slot(played)
        assert batches >= 7
        for slot in range(costs.num_slots):
            expected = [(batch, task.layer) for batch, task in order.iterate_tasks(batches, slot)]
            completed = [(event.batch, index[event.name]) for event in events[slot]]
            assert [key for key, _ in itertools.groupby(completed)] == expected


@ALL
def test_layer_starts_after_its_input(share: float, back: bool) -> None:
    for costs, plan in instances(share, back):
        network, batches = costs.network, 5
        ran: dict[tuple[int, str], list[TimelineEvent]] = defaultdict(list)
        for event in simulate_pipeline(costs, plan, num_batches=batches).events:
            ran[event.batch, event.name].append(event)
        for batch in range(batches):
            before = 0.0
            for index, layer in enumerate(costs.layers):
                home = plan.assignment[index]
                events = ran[batch, layer.name]
                own_value = [event for event in events if event.slot == home]
                assert min(event.start_ms for event in events) >= before * (1 - LEAST)
                kinds = [event.kind for event in own_value]
                comes = index > 0 and plan.assignment[index - 1] != home
                assert kinds[0] == ("receive" if comes else "run" if index not in plan.splits else "part")
                if comes:
                    elapsed_ms = network.time_ms(plan.assignment[index - 1], home, layer.traffic_in_bytes)
                    assert own_value[0].end_ms - own_value[0].start_ms == pytest.approx(elapsed_ms)
                before = max(event.end_ms for event in own_value)
                if index not in plan.splits:
                    assert len(own_value) == len(events) == 1 + comes and own_value[-1].kind == "run"
                    assert own_value[-1].end_ms - own_value[-1].start_ms == pytest.approx(
                        costs.latency_ms[index, home]
                    )
                    continue
                split, parts = plan.splits[index]
                start_ms = own_value[comes].start_ms
                for number, (slot, size) in enumerate(zip(split.slots, split.sizes, strict=True)):
                    part = next(item for item in events if item.slot == slot and item.kind == "part")
                    assert part.end_ms - part.start_ms == pytest.approx(parts.latency_ms[number])
                    if slot == home:
                        continue
                    present = next(item for item in events if item.slot == slot and item.kind == "receive")
                    assert present.start_ms >= start_ms * (1 - LEAST) and present.end_ms == part.start_ms
                    elapsed_ms = network.time_ms(home, slot, layer.split_in_bytes)
                    assert present.end_ms - present.start_ms == pytest.approx(elapsed_ms)
                    back_bytes = layer.split_out_bytes
                    if layer.split_joins:
                        back_bytes = back_bytes * size // layer.units
                    came_back = part.end_ms + network.time_ms(slot, home, back_bytes)
                    assert before >= came_back * (1 - LEAST)


@pytest.mark.parametrize("batches", [2, 5, 12, 30])
def test_period_of_plain_pipeline_matches_plan(batches: int) -> None:
    for costs, plan in instances(0.0, False):
        played = simulate_pipeline(costs, plan, num_batches=batches)
        assert played.period_ms == pytest.approx(plan.hw_stats.period_ms)
        first = [event for event in played.events if event.batch == 0]
        assert max(event.end_ms for event in first) == pytest.approx(plan.hw_stats.serial_ms)
        assert played.latency_ms == pytest.approx(plan.hw_stats.serial_ms)
        assert {event.batch for event in played.events} >= set(range(batches))


@ALL
@pytest.mark.parametrize("batches", [2, 12])
def test_period_is_at_least_busy_time(share: float, back: bool, batches: int) -> None:
    for costs, plan in instances(share, back, 80):
        played = simulate_pipeline(costs, plan, num_batches=batches)
        assert played.period_ms >= plan.hw_stats.period_ms * (1 - LEAST)
        assert played.latency_ms == plan.hw_stats.serial_ms


def test_timeline_of_one_slot() -> None:
    costs, _ = an_instance(0)
    plan = a_plan(costs, [1] * len(costs.layers), None, 0)
    played = simulate_pipeline(costs, plan)
    assert played.period_ms == pytest.approx(plan.hw_stats.serial_ms)
    assert {event.kind for event in played.events} == {"run"} and {event.slot for event in played.events} == {
        1
    }


def test_events_without_duration_are_omitted() -> None:
    costs, plan = an_instance(0)
    other = np.zeros((costs.num_slots, costs.num_slots))
    free = replace(costs, network=Network(fixed_ms=other, ms_per_byte=other, mj_per_byte=other))
    played = simulate_pipeline(free, plan)
    assert {event.kind for event in played.events} == {"run"}
    assert played.period_ms == pytest.approx(
        max(evaluate_plan(free, plan.assignment, {}, ObjectiveWeights()).busy_ms)
    )


@pytest.mark.parametrize("batches", [1, 0, -1])
def test_simulation_of_one_batch_is_refused(batches: int) -> None:
    costs, plan = an_instance(0)
    with pytest.raises(InputError, match=rf"`num_batches` \(={batches}\)"):
        simulate_pipeline(costs, plan, num_batches=batches)


@ALL
def test_plot_timeline_returns_figure(share: float, back: bool) -> None:
    pytest.importorskip("matplotlib")
    costs, plan = an_instance(3, share=share, back=back)
    played = simulate_pipeline(costs, plan)
    figure = plot_timeline(played, [f"slot-{slot}" for slot in range(costs.num_slots)])
    assert isinstance(figure, Figure) and figure.svg.lstrip().startswith("<svg") and figure.title
    used = {event.slot for event in played.events if event.batch < 4}
    assert f"{len(used)} slots" in figure.alt and f"{played.period_ms:.3g} ms" in figure.alt
    assert f"{played.latency_ms:.3g} ms" in figure.alt


def test_plot_timeline_omits_idle_slots() -> None:
    pytest.importorskip("matplotlib")
    costs, _ = an_instance(0)
    plan = a_plan(costs, [1] * len(costs.layers), None, 0)
    names = [f"slot-{slot}" for slot in range(costs.num_slots)]
    small, large = (
        plot_timeline(simulate_pipeline(costs, plan), names, num_batches=batches) for batches in (1, 8)
    )
    assert small.alt.startswith("1 slots, 1 batches") and large.alt.startswith("1 slots, 8 batches")
    assert len(small.svg) < len(large.svg)

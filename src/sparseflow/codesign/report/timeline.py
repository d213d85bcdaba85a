"""Simulated timeline of a pipeline with several batches in flight, and its Gantt chart.

Slots work in the order of the executor, see `execution.schedule`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparseflow.codesign.execution.schedule import build_schedule
from sparseflow.codesign.partition.objective import LayerCosts
from sparseflow.codesign.partition.planner import PartitionPlan
from sparseflow.codesign.workload.splits import compute_return_bytes
from sparseflow.core.checks import check_at_least
from sparseflow.core.report import Figure

EventKind = Literal["run", "part", "receive", "wait"]


@dataclass(frozen=True, kw_only=True)
class TimelineEvent:
    """An activity of a slot.

    Attributes:
        slot: The slot.
        batch: Index of the batch.
        name: Name of the layer.
        kind: Runs the layer, runs a part, receives input, or waits for parts.
        start_ms: Start, ms.
        end_ms: End, ms.
    """

    slot: int
    batch: int
    name: str
    kind: EventKind
    start_ms: float
    end_ms: float


@dataclass(frozen=True, kw_only=True)
class PipelineTimeline:
    """A simulated pipeline.

    Attributes:
        events: Events in execution order; see `execution.schedule`.
        latency_ms: Latency of one batch alone, ms.
        period_ms: Time between the ends of consecutive batches in the full pipeline, ms.
    """

    events: tuple[TimelineEvent, ...]
    latency_ms: float
    period_ms: float


def simulate_pipeline(costs: LayerCosts, plan: PartitionPlan, *, num_batches: int = 12) -> PipelineTimeline:
    """Simulate a plan.

    Args:
        costs: Cost of each layer on each slot.
        plan: The plan.
        num_batches: Number of batches that determine the period, after the pipeline is full.

    Raises:
        InputError: `num_batches` is below 2.
    """
    order = build_schedule(costs.layers, plan.assignment, plan.rewrite_plan)
    check_at_least(2, num_batches=num_batches)
    # Additional batches before and after the timed ones keep the pipeline full.
    first = order.num_stages - 1
    last = first + num_batches - 1
    network, splits = costs.network, plan.splits
    free = [0.0] * costs.num_slots
    ready_ms = [0.0] * (last + order.num_stages)
    events: list[TimelineEvent] = []

    def add(slot: int, batch: int, name: str, kind: EventKind, start: float, end: float) -> float:
        if end > start:
            events.append(
                TimelineEvent(slot=slot, batch=batch, name=name, kind=kind, start_ms=start, end_ms=end)
            )
        free[slot] = max(free[slot], end)
        return end

    def run(batch: int, index: int) -> None:
        layer, home = costs.layers[index], plan.assignment[index]
        start = max(ready_ms[batch], free[home])
        if index and plan.assignment[index - 1] != home:
            time_ms = network.time_ms(plan.assignment[index - 1], home, layer.traffic_in_bytes)
            start = add(home, batch, layer.name, "receive", start, start + time_ms)
        if index not in splits:
            time_ms = float(costs.latency_ms[index, home])
            ready_ms[batch] = add(home, batch, layer.name, "run", start, start + time_ms)
            return
        split, parts = splits[index]
        home_end = add(home, batch, layer.name, "part", start, start + parts.latency_ms[0])
        end = home_end
        for slot, size, time_ms in zip(split.slots[1:], split.sizes[1:], parts.latency_ms[1:], strict=True):
            output_bytes = compute_return_bytes(layer, size, layer.units)
            send_start = max(start, free[slot])
            received = send_start + network.time_ms(home, slot, layer.split_in_bytes)
            add(slot, batch, layer.name, "receive", send_start, received)
            add(slot, batch, layer.name, "part", received, received + time_ms)
            end = max(end, received + time_ms + network.time_ms(slot, home, output_bytes))
        ready_ms[batch] = add(home, batch, layer.name, "wait", home_end, end) if end > home_end else home_end

    for batch, task in order.iterate_tasks(len(ready_ms)):
        run(batch, task.layer)
    return PipelineTimeline(
        events=tuple(events),
        latency_ms=plan.hw_stats.serial_ms,
        # A draining backlog would underestimate the period.
        period_ms=max((ready_ms[last] - ready_ms[first]) / (last - first), plan.hw_stats.period_ms),
    )


def plot_timeline(timeline: PipelineTimeline, names: list[str], *, num_batches: int = 4) -> Figure:
    """Plot the activity of each slot for the first batches.

    Args:
        timeline: The simulated pipeline.
        names: Names of all slots; inactive ones are omitted.
        num_batches: Number of batches to show.
    """
    from sparseflow.core.report.figures import open_axes
    from sparseflow.core.report.svg import AFTER, BAD, BEFORE, GOOD, MUTED, PAPER, from_matplotlib

    events = [event for event in timeline.events if event.batch < num_batches]
    slots = sorted({event.slot for event in events})
    colours = (AFTER, BEFORE, GOOD, MUTED)
    with open_axes(rows=len(slots), row_in=0.42) as (figure, axes):
        for event in events:
            receives = event.kind in ("receive", "wait")
            axes.barh(
                slots.index(event.slot), event.end_ms - event.start_ms, left=event.start_ms,
                height=0.3 if receives else 0.7,
                color=BAD if receives else colours[event.batch % len(colours)],
                edgecolor=PAPER, linewidth=0.4, alpha=0.6 if event.kind == "part" else 1.0,
            )  # fmt: skip
        axes.set_yticks(range(len(slots)), [names[slot] for slot in slots])
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        return from_matplotlib(
            figure,
            title="Pipeline",
            alt=f"{len(slots)} slots, {num_batches} batches; one alone takes {timeline.latency_ms:.3g} ms, "
            f"and the pipeline completes one every {timeline.period_ms:.3g} ms.",
            caption="Wide bars run layers, one color per batch (lighter: parts of split layers); narrow red "
            "bars receive or wait for parts.",
        )

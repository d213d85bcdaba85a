"""When each slot does what, with several batches in flight: a plan played through, and its Gantt chart.

Slots do what is theirs in the order of the executor, see `execute/schedule.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparseflow.codesign.execution.schedule import schedule
from sparseflow.codesign.partition.objective import Costs
from sparseflow.codesign.partition.planner import Plan
from sparseflow.core.report import Figure
from sparseflow.errors import InputError

Kind = Literal["run", "part", "receive", "wait"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """A slot does something.

    Attributes:
        slot: Which.
        batch: For which batch, from 0.
        name: The layer's.
        kind: Runs it, runs a part of it, receives what it takes, or waits for its parts elsewhere.
        begin_ms: From the start of all.
        end_ms: Its end.
    """

    slot: int
    batch: int
    name: str
    kind: Kind
    begin_ms: float
    end_ms: float


@dataclass(frozen=True, kw_only=True)
class Played:
    """A pipeline that was played through.

    Attributes:
        events: Turn by turn, as slots do them; see `execute/schedule.py`.
        latency_ms: Of one batch alone.
        period_ms: From the end of one batch to that of the next, while the pipeline is full.
    """

    events: tuple[Event, ...]
    latency_ms: float
    period_ms: float


def play(costs: Costs, plan: Plan, *, batches: int = 12) -> Played:
    """Play a plan through.

    Args:
        costs: Of layers on slots.
        plan: What runs where.
        batches: That the period is taken over, once the pipeline is full; all are there at the start.

    Raises:
        InputError: Fewer than 2 batches.
    """
    order = schedule(costs.layers, plan.homes, plan.rewrite_plan)
    if batches < 2:
        raise InputError(f"`batches` (={batches}) must be at least 2 to tell a period")
    # As many as fill the pipeline come before and after, when not all slots have something to do.
    first = order.stages - 1
    last = first + batches - 1
    network, splits = costs.network, plan.splits
    free = [0.0] * costs.slots
    now = [0.0] * (last + order.stages)
    events: list[Event] = []

    def add(slot: int, batch: int, name: str, kind: Kind, begin: float, end: float) -> float:
        if end > begin:
            events.append(Event(slot=slot, batch=batch, name=name, kind=kind, begin_ms=begin, end_ms=end))
        free[slot] = max(free[slot], end)
        return end

    def run(batch: int, at: int) -> None:
        layer, home = costs.layers[at], plan.homes[at]
        begin = max(now[batch], free[home])
        if at and plan.homes[at - 1] != home:
            took = network.time_ms(plan.homes[at - 1], home, layer.traffic_in_bytes)
            begin = add(home, batch, layer.name, "receive", begin, begin + took)
        if at not in splits:
            took = float(costs.latency_ms[at, home])
            now[batch] = add(home, batch, layer.name, "run", begin, begin + took)
            return
        split, parts = splits[at]
        own = add(home, batch, layer.name, "part", begin, begin + parts.latency_ms[0])
        done = own
        for slot, size, took in zip(split.slots[1:], split.sizes[1:], parts.latency_ms[1:], strict=True):
            back = layer.split_out_bytes
            if layer.split_joins:
                back = back * size // layer.units
            there = max(begin, free[slot])
            came = there + network.time_ms(home, slot, layer.split_in_bytes)
            add(slot, batch, layer.name, "receive", there, came)
            add(slot, batch, layer.name, "part", came, came + took)
            done = max(done, came + took + network.time_ms(slot, home, back))
        now[batch] = add(home, batch, layer.name, "wait", own, done) if done > own else own

    for batch, task in order.order(len(now)):
        run(batch, task.layer)
    return Played(
        events=tuple(events),
        latency_ms=plan.hw_stats.serial_ms,
        # A backlog that drains faster than it filled would look like a shorter one.
        period_ms=max((now[last] - now[first]) / (last - first), plan.hw_stats.period_ms),
    )


def gantt(played: Played, names: list[str], *, batches: int = 4) -> Figure:
    """What each slot does when, for the first batches.

    Args:
        played: What to show.
        names: Of slots, from slot 0; those that do nothing are left out.
        batches: How many to show.
    """
    from sparseflow.core.report.figures import open_axes
    from sparseflow.core.report.svg import AFTER, BAD, BEFORE, GOOD, MUTED, PAPER, from_matplotlib

    shown = [event for event in played.events if event.batch < batches]
    slots = sorted({event.slot for event in shown})
    colours = (AFTER, BEFORE, GOOD, MUTED)
    with open_axes(rows=len(slots), row_in=0.42) as (figure, axes):
        for event in shown:
            receives = event.kind in ("receive", "wait")
            axes.barh(
                slots.index(event.slot), event.end_ms - event.begin_ms, left=event.begin_ms,
                height=0.3 if receives else 0.7,
                color=BAD if receives else colours[event.batch % len(colours)],
                edgecolor=PAPER, linewidth=0.4, alpha=0.6 if event.kind == "part" else 1.0,
            )  # fmt: skip
        axes.set_yticks(range(len(slots)), [names[slot] for slot in slots])
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        return from_matplotlib(
            figure,
            title="The pipeline",
            alt=f"{len(slots)} slots, {batches} batches: one alone takes {played.latency_ms:.3g} ms, one "
            f"more comes every {played.period_ms:.3g} ms.",
            caption="Wide bars run layers, a colour a batch (paler: parts of a split layer); narrow red ones "
            "receive or wait for parts.",
        )

"""Tests of `codesign.execution.schedule`."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from benchmarks.codesign.random_plan import random_plan
from sparseflow.codesign.execution.links import MAX_IN_FLIGHT
from sparseflow.codesign.execution.schedule import ChannelKey, ExecutionSchedule, build_schedule
from sparseflow.codesign.workload.splits import RewritePlan
from sparseflow.errors import InputError
from sparseflow.pruning.compaction.layered_model import LayeredVideoViT
from tests.codesign.execution.test_rewrite import a_split
from tests.pruning.models import awake

LAYERS = LayeredVideoViT(awake(depth=5)).describe_layers(1)


def make_schedule(seed: int, *, back: bool) -> ExecutionSchedule:
    assignment, plan = random_plan(LAYERS, 4, seed=seed, back=back)
    return build_schedule(LAYERS, assignment, plan)


def test_schedule_stages_and_neighbors() -> None:
    schedule = build_schedule(LAYERS, [3, 3, 3, 0, 0, 3, 3, 3, 1, 1, 1, 1])
    assert schedule.slots == (0, 1, 3) and schedule.num_stages == 4
    assert [task.stage for task in schedule.tasks] == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert [task.source for task in schedule.tasks if task.source is not None] == [3, 0, 3]
    assert [task.target for task in schedule.tasks if task.target is not None] == [0, 3, 1]
    assert schedule.list_channels() == (
        ChannelKey("state", 0, 3, 4), ChannelKey("state", 3, 0, 2), ChannelKey("state", 3, 1, 7),
    )  # fmt: skip


def test_part_is_served_between_layers_of_later_stage() -> None:
    plan = RewritePlan(splits=(a_split(4, 32, (16, 16)),))
    schedule = build_schedule(LAYERS, [0] * 6 + [1] * 6, plan)
    assert schedule.list_channels() == (ChannelKey.for_parts(1, 0), ChannelKey("state", 0, 1, 5))
    progress = [task.progress for task in schedule.tasks]
    assert progress[0] == progress[6] == 0.0 and progress[:6] == sorted(progress[:6])
    # Of the second stage's layers, those with less progress come first.
    before = [layer for layer in range(6, 12) if progress[layer] < progress[4]]
    assert 0 < len(before) < 6
    order = [(batch, task.layer) for batch, task in schedule.iterate_tasks(3, 1)]
    turn = [*((0, layer) for layer in before), (1, 4), *((0, layer) for layer in range(6, 12)
                                                         if layer not in before)]  # fmt: skip
    assert order[:8] == [(0, 4), *turn]


def test_progress_of_split_layer_uses_largest_part() -> None:
    plan = RewritePlan(splits=(a_split(2, 32, (8, 24)),))
    full, split = (build_schedule(LAYERS, [0] * 12, item).tasks for item in (None, plan))
    work = [float(layer.flops) for layer in LAYERS]  # pyright: ignore
    assert full[3].progress == pytest.approx(sum(work[:3]) / sum(work))
    assert split[3].progress == pytest.approx((sum(work[:2]) + 0.75 * work[2]) / (sum(work) - 0.25 * work[2]))


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_task_order(seed: int, back: bool) -> None:
    result = make_schedule(seed, back=back)
    order = list(result.iterate_tasks(5))
    assert len(order) == 5 * len(LAYERS) == len({(batch, task.layer) for batch, task in order})
    for batch in range(5):
        assert [task.layer for item, task in order if item == batch] == list(range(len(LAYERS)))
    for slot in result.slots:
        own_part = [item for item in order if slot in (item[1].home, *item[1].part_slots)]
        assert list(result.iterate_tasks(5, slot)) == own_part


def events(result: ExecutionSchedule, batches: int, slot: int) -> list[tuple[str, ChannelKey, Any]]:
    """What a slot sends and takes, in order, and which sends it waits for: (what, link, message)."""
    record: list[tuple[str, ChannelKey, Any]] = []
    sent: dict[Any, deque[Any]] = {}

    def send(link: ChannelKey, layer: int, direction: int, batch: int) -> None:
        waiting = sent.setdefault((link, layer, direction), deque())
        while len(waiting) >= MAX_IN_FLIGHT:
            record.append(("taken", link, waiting.popleft()))
        waiting.append((batch, layer, direction))
        record.append(("send", link, (batch, layer, direction)))

    for batch, task in result.iterate_tasks(batches, slot):
        layer = task.layer
        parts = [ChannelKey.for_parts(task.home, other) for other in task.part_slots]
        if task.home != slot:
            link = ChannelKey.for_parts(task.home, slot)
            record.append(("take", link, (batch, layer, 0)))
            send(link, layer, 1, batch)
            continue
        if task.source is not None:
            record.append(("take", ChannelKey("state", task.source, slot, layer - 1), (batch, layer - 1, 0)))
        for link in parts:
            send(link, layer, 0, batch)
        record += [("take", link, (batch, layer, 1)) for link in parts]
        if task.target is not None:
            send(ChannelKey("state", slot, task.target, layer), layer, 0, batch)
    record += [("taken", key[0], item) for key, waiting in sent.items() for item in waiting]
    return record


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_schedule_has_no_deadlock(seed: int, back: bool) -> None:
    """Played through with links on which messages are matched by their order, as NCCL does."""
    result = make_schedule(seed, back=back)
    remaining = {slot: deque(events(result, 6, slot)) for slot in result.slots}
    ways: dict[Any, deque[Any]] = {}
    used: set[Any] = set()
    moved = True
    while moved:
        moved = False
        for slot, own_part in remaining.items():
            while own_part:
                kind, link, message = own_part[0]
                if kind == "send":
                    ways.setdefault((link, slot), deque()).append(message)
                elif kind == "taken":
                    if (link, message) not in used:
                        break
                else:
                    other = link.source if slot == link.target else link.target
                    if not ways.get((link, other)):
                        break
                    assert ways[link, other].popleft() == message
                    used.add((link, message))
                own_part.popleft()
                moved = True
    assert not any(remaining.values()) and not any(ways.values())
    assert {link for link, _ in ways} == set(result.list_channels())


@pytest.mark.parametrize("seed", range(15))
def test_both_ends_of_part_channel_agree(seed: int) -> None:
    """So that one queue serves both ways: what one sends, the other takes, in one order."""
    result = make_schedule(seed, back=True)
    for link in result.list_channels():
        ends = [
            [(kind in ("send",), message) for kind, name, message in events(result, 4, slot)
             if name == link and kind != "taken"]
            for slot in (link.source, link.target)
        ]  # fmt: skip
        assert [message for _, message in ends[0]] == [message for _, message in ends[1]]
        assert all(first != other for (first, _), (other, _) in zip(*ends, strict=True))


def test_invalid_assignment_is_refused() -> None:
    with pytest.raises(InputError):
        build_schedule(LAYERS, [0])

"""Who does what when: dependencies, links, and that nobody waits for ever."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from benchmarks.codesign.random_plan import random_plan
from sparseflow.codesign.execution.links import IN_FLIGHT
from sparseflow.codesign.execution.schedule import LinkName, Schedule, schedule
from sparseflow.codesign.workload.splits import RewritePlan
from sparseflow.errors import InputError
from sparseflow.pruning.steps import Steps
from tests.codesign.execution.test_rewrite import a_split
from tests.pruning.models import awake

LAYERS = Steps(awake(depth=5)).describe_layers(1)


def made(seed: int, *, back: bool) -> Schedule:
    homes, plan = random_plan(LAYERS, 4, seed=seed, back=back)
    return schedule(LAYERS, homes, plan)


def test_stages_and_neighbours() -> None:
    found = schedule(LAYERS, [3, 3, 3, 0, 0, 3, 3, 3, 1, 1, 1, 1])
    assert found.slots == (0, 1, 3) and found.stages == 4
    assert [task.stage for task in found.tasks] == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert [task.source for task in found.tasks if task.source is not None] == [3, 0, 3]
    assert [task.target for task in found.tasks if task.target is not None] == [0, 3, 1]
    assert found.links() == (
        LinkName("state", 0, 3, 4), LinkName("state", 3, 0, 2), LinkName("state", 3, 1, 7),
    )  # fmt: skip


def test_a_part_is_served_between_layers_of_a_later_stage() -> None:
    plan = RewritePlan(splits=(a_split(4, 32, (16, 16)),))
    found = schedule(LAYERS, [0] * 6 + [1] * 6, plan)
    assert found.links() == (LinkName.of_parts(1, 0), LinkName("state", 0, 1, 5))
    progress = [task.progress for task in found.tasks]
    assert progress[0] == progress[6] == 0.0 and progress[:6] == sorted(progress[:6])
    # Of the second stage's layers, those with less progress come first.
    before = [layer for layer in range(6, 12) if progress[layer] < progress[4]]
    assert 0 < len(before) < 6
    order = [(batch, task.layer) for batch, task in found.order(3, 1)]
    turn = [*((0, layer) for layer in before), (1, 4), *((0, layer) for layer in range(6, 12)
                                                         if layer not in before)]  # fmt: skip
    assert order[:8] == [(0, 4), *turn]


def test_work_of_a_split_layer_counts_as_its_largest_part() -> None:
    plan = RewritePlan(splits=(a_split(2, 32, (8, 24)),))
    whole, split = (schedule(LAYERS, [0] * 12, each).tasks for each in (None, plan))
    work = [float(layer.flops) for layer in LAYERS]  # pyright: ignore
    assert whole[3].progress == pytest.approx(sum(work[:3]) / sum(work))
    assert split[3].progress == pytest.approx((sum(work[:2]) + 0.75 * work[2]) / (sum(work) - 0.25 * work[2]))


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_the_order(seed: int, back: bool) -> None:
    found = made(seed, back=back)
    order = list(found.order(5))
    assert len(order) == 5 * len(LAYERS) == len({(batch, task.layer) for batch, task in order})
    for batch in range(5):
        assert [task.layer for each, task in order if each == batch] == list(range(len(LAYERS)))
    for slot in found.slots:
        mine = [each for each in order if slot in (each[1].home, *each[1].others)]
        assert list(found.order(5, slot)) == mine


def events(found: Schedule, batches: int, slot: int) -> list[tuple[str, LinkName, Any]]:
    """What a slot sends and takes, in order, and which sends it waits for: (what, link, message)."""
    told: list[tuple[str, LinkName, Any]] = []
    sent: dict[Any, deque[Any]] = {}

    def send(link: LinkName, layer: int, way: int, batch: int) -> None:
        waiting = sent.setdefault((link, layer, way), deque())
        while len(waiting) >= IN_FLIGHT:
            told.append(("taken", link, waiting.popleft()))
        waiting.append((batch, layer, way))
        told.append(("send", link, (batch, layer, way)))

    for batch, task in found.order(batches, slot):
        layer = task.layer
        parts = [LinkName.of_parts(task.home, other) for other in task.others]
        if task.home != slot:
            link = LinkName.of_parts(task.home, slot)
            told.append(("take", link, (batch, layer, 0)))
            send(link, layer, 1, batch)
            continue
        if task.source is not None:
            told.append(("take", LinkName("state", task.source, slot, layer - 1), (batch, layer - 1, 0)))
        for link in parts:
            send(link, layer, 0, batch)
        told += [("take", link, (batch, layer, 1)) for link in parts]
        if task.target is not None:
            send(LinkName("state", slot, task.target, layer), layer, 0, batch)
    told += [("taken", key[0], each) for key, waiting in sent.items() for each in waiting]
    return told


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_nobody_waits_for_ever(seed: int, back: bool) -> None:
    """Played through with links on which messages are matched by their order, as NCCL does."""
    found = made(seed, back=back)
    left = {slot: deque(events(found, 6, slot)) for slot in found.slots}
    ways: dict[Any, deque[Any]] = {}
    taken: set[Any] = set()
    moved = True
    while moved:
        moved = False
        for slot, mine in left.items():
            while mine:
                what, link, message = mine[0]
                if what == "send":
                    ways.setdefault((link, slot), deque()).append(message)
                elif what == "taken":
                    if (link, message) not in taken:
                        break
                else:
                    other = link.source if slot == link.target else link.target
                    if not ways.get((link, other)):
                        break
                    assert ways[link, other].popleft() == message
                    taken.add((link, message))
                mine.popleft()
                moved = True
    assert not any(left.values()) and not any(ways.values())
    assert {link for link, _ in ways} == set(found.links())


@pytest.mark.parametrize("seed", range(15))
def test_both_ends_do_the_same_on_a_link_of_parts(seed: int) -> None:
    """So that one queue serves both ways: what one sends, the other takes, in one order."""
    found = made(seed, back=True)
    for link in found.links():
        ends = [
            [(what in ("send",), message) for what, name, message in events(found, 4, slot)
             if name == link and what != "taken"]
            for slot in (link.source, link.target)
        ]  # fmt: skip
        assert [message for _, message in ends[0]] == [message for _, message in ends[1]]
        assert all(one != other for (one, _), (other, _) in zip(*ends, strict=True))


def test_slots_that_do_not_fit() -> None:
    with pytest.raises(InputError):
        schedule(LAYERS, [0])

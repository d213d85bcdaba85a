"""What each slot does, and in which order, when a model runs on several of them.

A batch goes from layer to layer. Its *stage* is how often it has changed slots on the way. With many batches
in flight, batch b is at stage s in *turn* b + s. In a turn all stages go on side by side: a layer's
*progress* is the share of its stage's operations that come before it, and everything is done in the order of

    (turn, progress, stage, layer)

in which each slot does what is its own: runs layers, and parts of layers that are at home elsewhere. So a
slot serves a part of batch b + 1 between layers of its own, later stage of batch b, about when it is asked.

No deadlock. What is done for (b, layer) needs only what was done for (b, earlier layers): those of its stage
are earlier in the order as they have less progress, those of earlier stages as they are of an earlier turn.
Take the first of all that has not been done: all slots that have to do with it come to it, as whatever they
have to do before is done, and no message is waited for that was not sent before, or is sent in doing it (a
part's input and output). Before a message is sent, that of the same layer and batch b - 2 must have been
taken: its receiver does so in an earlier turn.

Messages between two slots are matched by their order alone. States that leave a layer have a *link* of their
own, on which batches follow each other. What parts take and give back is sent and taken in doing the same
thing on both sides, so one link between two slots serves both ways, and all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sparseflow.codesign.workload.layers import number
from sparseflow.codesign.workload.splits import RewritePlan, check
from sparseflow.core.layers import LayerNode


@dataclass(frozen=True, kw_only=True)
class Task:
    """One layer of one batch.

    Attributes:
        layer: Its place among the layers.
        stage: How often a batch has changed slots when it comes there.
        progress: Share of the stage's operations that come before it.
        home: Slot that runs it.
        source: Slot that its state comes from; None where it is there, or the samples are.
        target: Slot that its state goes to; None where it stays, or is the scores.
        others: Slots of the parts but the first, if it is split.
    """

    layer: int
    stage: int
    progress: float
    home: int
    source: int | None
    target: int | None
    others: tuple[int, ...]


@dataclass(frozen=True, order=True)
class LinkName:
    """Between two slots: `"state"`, one way, behind a layer; `"parts"`, both ways, the lower slot first."""

    kind: str
    source: int
    target: int
    layer: int = 0

    @classmethod
    def of_parts(cls, one: int, other: int) -> LinkName:
        return cls("parts", min(one, other), max(one, other))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Tasks of a batch, in the order of layers.

    Attributes:
        tasks: One a layer.
    """

    tasks: tuple[Task, ...]

    @property
    def slots(self) -> tuple[int, ...]:
        """All that have something to do, ascending."""
        return tuple(sorted({slot for task in self.tasks for slot in (task.home, *task.others)}))

    @property
    def stages(self) -> int:
        return self.tasks[-1].stage + 1

    def links(self) -> tuple[LinkName, ...]:
        """All that messages go over, in one order for everyone."""
        found = {
            LinkName("state", task.home, task.target, task.layer)
            for task in self.tasks
            if task.target is not None
        }
        found |= {LinkName.of_parts(task.home, slot) for task in self.tasks for slot in task.others}
        return tuple(sorted(found))

    def order(self, batches: int, slot: int | None = None) -> Iterator[tuple[int, Task]]:
        """(batch, task) as they are done, by one slot or by all."""
        mine = [task for task in self.tasks if slot is None or slot in (task.home, *task.others)]
        mine.sort(key=lambda task: (task.progress, task.stage, task.layer))
        for turn in range(batches + self.stages - 1):
            for task in mine:
                if 0 <= turn - task.stage < batches:
                    yield turn - task.stage, task


def schedule(layers: Sequence[LayerNode], homes: Sequence[int], plan: RewritePlan | None = None) -> Schedule:
    """Who does what.

    Args:
        layers: In order.
        homes: Slot of each layer.
        plan: What is split.

    Raises:
        InputError: See `rewrite.check`.
    """
    plan = plan or RewritePlan(splits=())
    check(layers, plan, homes)
    splits = {split.layer: split for split in plan.splits}
    comes = [at > 0 and homes[at - 1] != home for at, home in enumerate(homes)]
    stages = list(accumulate(int(each) for each in comes))
    # Parts run side by side: the largest says how long a layer takes.
    work = [
        number(layer.flops) * (max(splits[at].sizes) / layer.units if at in splits else 1.0)
        for at, layer in enumerate(layers)
    ]
    whole, done = [0.0] * (stages[-1] + 1), [0.0] * (stages[-1] + 1)
    for stage, each in zip(stages, work, strict=True):
        whole[stage] += each
    tasks = []
    for at, (home, stage) in enumerate(zip(homes, stages, strict=True)):
        goes = at + 1 < len(homes) and comes[at + 1]
        tasks.append(
            Task(
                layer=at, stage=stage, home=home,
                progress=done[stage] / whole[stage] if whole[stage] else 0.0,
                source=homes[at - 1] if comes[at] else None, target=homes[at + 1] if goes else None,
                others=splits[at].slots[1:] if at in splits else (),
            )
        )  # fmt: skip
        done[stage] += work[at]
    return Schedule(tasks=tuple(tasks))

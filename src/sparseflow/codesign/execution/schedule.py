"""Order of the work of each slot when a model runs on several slots.

A batch passes through the layers; its *stage* is the number of slot changes so far. With many batches in
flight, batch b is at stage s in *turn* b + s. Within a turn all stages advance concurrently: a layer's
*progress* is the fraction of its stage's FLOPs before it, and work is done in the order of

    (turn, progress, stage, layer)

Each slot runs its own layers, and parts of layers of other slots, in this order. A slot thus serves a part of
batch b + 1 between its own layers of a later stage of batch b, at about the time of the request.

No deadlock: work on (b, layer) depends only on (b, earlier layers): those of its stage come earlier because
they have less progress, those of earlier stages because they belong to an earlier turn. Consider the first
unfinished work: all slots involved reach it, because all their earlier work is finished, and every message
they wait for was sent before, or is sent by this work (input and output of a part). A message waits for the
one of the same layer and batch b - 2 to be received, which the receiver does in an earlier turn.

Messages between two slots are matched by order. States that leave a layer have their own channel, on which
batches follow each other. Inputs and outputs of parts are exchanged within the same work on both sides, so
one channel serves both directions and all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sparseflow.codesign.workload.layers import to_float
from sparseflow.codesign.workload.splits import RewritePlan, check_rewrite_plan
from sparseflow.core.layers import LayerNode


@dataclass(frozen=True, kw_only=True)
class LayerTask:
    """One layer of one batch.

    Attributes:
        layer: Index of the layer.
        stage: Number of slot changes before the layer.
        progress: Fraction of the stage's FLOPs before the layer.
        home: Slot that runs the layer.
        source: Slot that sends its input state; None if it is local or the samples.
        target: Slot that receives its output state; None if it is local or the logits.
        part_slots: Slots of all parts but the first, if the layer is split.
    """

    layer: int
    stage: int
    progress: float
    home: int
    source: int | None
    target: int | None
    part_slots: tuple[int, ...]


@dataclass(frozen=True, order=True)
class ChannelKey:
    """A channel between two slots: `"state"`, one way, after a layer; `"parts"`, both ways, lower slot
    first.
    """

    kind: str
    source: int
    target: int
    layer: int = 0

    @classmethod
    def for_parts(cls, first: int, second: int) -> ChannelKey:
        return cls("parts", min(first, second), max(first, second))


@dataclass(frozen=True, kw_only=True)
class ExecutionSchedule:
    """Tasks of a batch.

    Attributes:
        tasks: One task per layer, in order.
    """

    tasks: tuple[LayerTask, ...]

    @property
    def slots(self) -> tuple[int, ...]:
        """All used slots, ascending."""
        return tuple(sorted({slot for task in self.tasks for slot in (task.home, *task.part_slots)}))

    @property
    def num_stages(self) -> int:
        return self.tasks[-1].stage + 1

    def list_channels(self) -> tuple[ChannelKey, ...]:
        """All channels, in a fixed order."""
        keys = {
            ChannelKey("state", task.home, task.target, task.layer)
            for task in self.tasks
            if task.target is not None
        }
        keys |= {ChannelKey.for_parts(task.home, slot) for task in self.tasks for slot in task.part_slots}
        return tuple(sorted(keys))

    def iterate_tasks(self, num_batches: int, slot: int | None = None) -> Iterator[tuple[int, LayerTask]]:
        """Yield (batch, task) in execution order, for one slot or all."""
        tasks = [task for task in self.tasks if slot is None or slot in (task.home, *task.part_slots)]
        tasks.sort(key=lambda task: (task.progress, task.stage, task.layer))
        for turn in range(num_batches + self.num_stages - 1):
            for task in tasks:
                if 0 <= turn - task.stage < num_batches:
                    yield turn - task.stage, task


def build_schedule(
    layers: Sequence[LayerNode], assignment: Sequence[int], plan: RewritePlan | None = None
) -> ExecutionSchedule:
    """Build the schedule of a plan.

    Args:
        layers: All layers, in order.
        assignment: Slot of each layer.
        plan: The splits.

    Raises:
        InputError: See `check_rewrite_plan`.
    """
    plan = plan or RewritePlan(splits=())
    check_rewrite_plan(layers, plan, assignment)
    splits = {split.layer: split for split in plan.splits}
    changes_slot = [index > 0 and assignment[index - 1] != home for index, home in enumerate(assignment)]
    stages = list(accumulate(int(changes) for changes in changes_slot))
    # Parts run concurrently, so the largest determines the time of a layer.
    work = [
        to_float(layer.flops) * (max(splits[index].sizes) / layer.units if index in splits else 1.0)
        for index, layer in enumerate(layers)
    ]
    total_flops, done_flops = [0.0] * (stages[-1] + 1), [0.0] * (stages[-1] + 1)
    for stage, flops in zip(stages, work, strict=True):
        total_flops[stage] += flops
    tasks = []
    for index, (home, stage) in enumerate(zip(assignment, stages, strict=True)):
        leaves_slot = index + 1 < len(assignment) and changes_slot[index + 1]
        tasks.append(
            LayerTask(
                layer=index,
                stage=stage,
                home=home,
                progress=done_flops[stage] / total_flops[stage] if total_flops[stage] else 0.0,
                source=assignment[index - 1] if changes_slot[index] else None,
                target=assignment[index + 1] if leaves_slot else None,
                part_slots=splits[index].slots[1:] if index in splits else (),
            )
        )
        done_flops[stage] += work[index]
    return ExecutionSchedule(tasks=tuple(tasks))

"""Schedules of one search measured on a Ray cluster, several machines of one kind at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sparseflow.core.device import describe_cpu
from sparseflow.core.parallel import map_unordered
from sparseflow.errors import DeviceError
from sparseflow.tuning.measure.evaluator import Evaluator, Trial
from sparseflow.tuning.schedule.problem import Problem
from sparseflow.tuning.schedule.schedule import Schedule

LOT = 8
"""Schedules that a machine measures at a time: enough to repay sending it the matrix."""


@dataclass(frozen=True, kw_only=True)
class Lot:
    """What one machine measures at a time.

    Attributes:
        problem: What is computed.
        reference: What every schedule is timed beside.
        schedules: What to measure.
        seed: What the dense inputs are drawn from.
    """

    problem: Problem
    reference: Schedule
    schedules: tuple[Schedule, ...]
    seed: int


def measure_on(
    cluster: str,
    problem: Problem,
    reference: Schedule,
    schedules: Sequence[Schedule],
    *,
    seed: int,
    threads: int,
) -> Iterator[Trial]:
    """Measure schedules on a cluster; trials come as they are done, in any order.

    Compiled code stays in each machine's own cache.

    Args:
        cluster: Address of a Ray cluster, `"auto"` for the one that this machine belongs to.
        problem: What is computed.
        reference: What every schedule is timed beside.
        schedules: What to measure, in lots.
        seed: What the dense inputs are drawn from.
        threads: CPUs that a lot takes of its machine; give the machines no more, or lots disturb each other.

    Raises:
        DeviceError: There is no cluster at the address, or a machine's processor is not this one's: its times
            would be compared with others'.
        MissingExtraError: Ray is missing.
        RunError: The reference does not run on a machine.
    """
    lots = [
        Lot(problem=problem, reference=reference, schedules=tuple(schedules[first : first + LOT]), seed=seed)
        for first in range(0, len(schedules), LOT)
    ]
    here = describe_cpu()
    for _, (there, trials) in map_unordered(_measured, lots, cluster=cluster, cpus_per_task=float(threads)):
        if there != here:
            raise DeviceError(
                f"a machine of the cluster {cluster!r} has another processor ({there}) than this one "
                f"({here}); search on machines of one kind"
            )
        yield from trials


def _measured(lot: Lot) -> tuple[str, list[Trial]]:
    with Evaluator(lot.problem, lot.reference, seed=lot.seed) as evaluator:
        return describe_cpu(), [evaluator.measure(schedule) for schedule in lot.schedules]

"""Measurement of schedules on several machines of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sparseflow.core.device import describe_cpu
from sparseflow.core.parallel import map_unordered
from sparseflow.errors import DeviceError
from sparseflow.tuning.measure.evaluator import ScheduleEvaluator, Trial
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule

BATCH_SIZE = 8
"""Schedules that a machine measures at a time, enough to amortize sending the matrix."""


@dataclass(frozen=True, kw_only=True)
class MeasurementBatch:
    """Schedules that one machine measures at a time.

    Attributes:
        problem: Problem.
        reference: Reference schedule.
        schedules: Schedules to measure.
        seed: Random seed of the dense inputs.
    """

    problem: SparseProblem
    reference: Schedule
    schedules: tuple[Schedule, ...]
    seed: int


def measure_on_cluster(
    cluster: str,
    problem: SparseProblem,
    reference: Schedule,
    schedules: Sequence[Schedule],
    *,
    seed: int,
    threads: int,
) -> Iterator[Trial]:
    """Measure schedules on a cluster and yield the trials in any order.

    Compiled code is cached on each machine.

    Args:
        cluster: Address of a Ray cluster, `"auto"` for the cluster of this machine.
        problem: Problem.
        reference: Reference schedule.
        schedules: Schedules to measure.
        seed: Random seed of the dense inputs.
        threads: CPUs that a batch takes of its machine. The machines should have no more CPUs, because
            batches on one machine disturb each other.

    Raises:
        DeviceError: No cluster is at the address, or a machine has another processor, so times are not
            comparable.
        MissingExtraError: Ray is missing.
        RunError: The reference does not run on a machine.
    """
    batches = [
        MeasurementBatch(
            problem=problem,
            reference=reference,
            schedules=tuple(schedules[first : first + BATCH_SIZE]),
            seed=seed,
        )
        for first in range(0, len(schedules), BATCH_SIZE)
    ]
    local_cpu = describe_cpu()
    for _, (remote_cpu, trials) in map_unordered(
        _measure_batch, batches, cluster=cluster, cpus_per_task=float(threads)
    ):
        if remote_cpu != local_cpu:
            raise DeviceError(
                f"a machine of cluster {cluster!r} has another processor ({remote_cpu}) than this machine "
                f"({local_cpu}); use a homogeneous cluster"
            )
        yield from trials


def _measure_batch(batch: MeasurementBatch) -> tuple[str, list[Trial]]:
    with ScheduleEvaluator(batch.problem, batch.reference, seed=batch.seed) as evaluator:
        return describe_cpu(), [evaluator.measure(schedule) for schedule in batch.schedules]

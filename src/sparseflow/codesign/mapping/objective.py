"""Objective of a mapping, shared by all strategies, bounds and tests.

Segment k on slot s takes `latency_ms[k, s]`. An edge from slot a to slot b takes `fixed_ms[a, b] +
traffic_bytes * ms_per_byte[a, b]`, and 0 if a = b.

- busy_s: latencies of the segments on slot s plus the times of incoming edges (the receiver waits).
- serial_ms: latency of one sample without overlap, the sum of busy_s over all slots.
- period_ms: the largest busy_s; a full pipeline completes one sample per period.
- objective_ms: `serial_ms` in mode "serial"; `period_ms + serial_weight * serial_ms` in mode "balanced". The
  small weight breaks ties between mappings with nearly the same period.

The memory of a slot is the sum of `memory_mb` over its segments plus their largest `activation_mb`; it is
counted in bytes and must not exceed the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

import numpy as np

from sparseflow.codesign.mapping.problem import BYTES_PER_MB, MappingProblem
from sparseflow.core.checks import check_non_negative, check_one_of
from sparseflow.errors import InputError

Mode = Literal["balanced", "serial"]
MODES = ("balanced", "serial")
SERIAL_WEIGHT = 1e-3


@dataclass(frozen=True, kw_only=True, eq=False)
class MappingEvaluation:
    """Evaluation of a mapping; times are infinite if it cannot run.

    Attributes:
        busy_ms: Busy time of each slot, ms, float64 [S].
        serial_ms: Latency of one sample, ms.
        period_ms: Pipeline period, ms.
        comm_ms: Sum of all transfer times, ms; part of `serial_ms`.
        memory_mb: Memory on each slot, MB, float64 [S].
        fits: Whether every segment is allowed on its slot and memory limits hold.
    """

    busy_ms: np.ndarray
    serial_ms: float
    period_ms: float
    comm_ms: float
    memory_mb: np.ndarray
    fits: bool

    @property
    def feasible(self) -> bool:
        """Whether the mapping can run."""
        return self.fits and isfinite(self.serial_ms)


@dataclass(frozen=True, kw_only=True)
class MappingGoal:
    """Weights of the minimized objective `period_weight * period_ms + serial_weight * serial_ms`.

    Attributes:
        mode: `"balanced"` or `"serial"`.
        tie_weight: Weight of `serial_ms` in mode `"balanced"`.

    Raises:
        InputError: The mode is unknown, or the weight is negative or not finite.
    """

    mode: Mode = "balanced"
    tie_weight: float = SERIAL_WEIGHT

    def __post_init__(self) -> None:
        check_one_of(MODES, mode=self.mode)
        check_non_negative(serial_weight=self.tie_weight)

    @property
    def period_weight(self) -> float:
        return 1.0 if self.mode == "balanced" else 0.0

    @property
    def serial_weight(self) -> float:
        return self.tie_weight if self.mode == "balanced" else 1.0

    def objective_ms(self, evaluation: MappingEvaluation) -> float:
        """Objective of a mapping, ms; infinite if it cannot run."""
        if not evaluation.feasible:
            return float("inf")
        return self.period_weight * evaluation.period_ms + self.serial_weight * evaluation.serial_ms

    def total_latency_ms(self, evaluation: MappingEvaluation) -> float:
        """`period_ms` or `serial_ms`, depending on the mode."""
        return evaluation.period_ms if self.mode == "balanced" else evaluation.serial_ms


def evaluate_mapping(problem: MappingProblem, mapping: Sequence[int] | np.ndarray) -> MappingEvaluation:
    """Evaluate a mapping.

    Args:
        problem: K segments, S slots.
        mapping: Slot of each segment, K integers.

    Raises:
        InputError: The mapping does not consist of K integers from 0 to S - 1.
    """
    slot = check_mapping(problem, mapping)
    indices = np.arange(problem.num_segments)
    a, b = slot[problem.src], slot[problem.dst]
    crosses_slots = a != b
    a, b, receiver = a[crosses_slots], b[crosses_slots], b[crosses_slots]
    with np.errstate(invalid="ignore"):
        transfer = problem.fixed_ms[a, b] + problem.traffic_bytes[crosses_slots] * problem.ms_per_byte[a, b]
    transfer = np.where(problem.connected[a, b], transfer, np.inf)
    latency = problem.latency_ms[indices, slot]
    busy = np.bincount(slot, latency, problem.num_slots) + np.bincount(receiver, transfer, problem.num_slots)
    memory_bytes = np.zeros(problem.num_slots, dtype=np.int64)
    peak_bytes = np.zeros(problem.num_slots, dtype=np.int64)
    np.add.at(memory_bytes, slot, problem.memory_bytes[indices, slot])
    np.maximum.at(peak_bytes, slot, problem.activation_bytes[indices, slot])
    memory_bytes += peak_bytes
    return MappingEvaluation(
        busy_ms=busy,
        serial_ms=float(latency.sum() + transfer.sum()),
        period_ms=float(busy.max()),
        comm_ms=float(transfer.sum()),
        memory_mb=memory_bytes / BYTES_PER_MB,
        fits=bool(problem.allowed[indices, slot].all() and (memory_bytes <= problem.limit_bytes).all()),
    )


def check_mapping(problem: MappingProblem, mapping: Sequence[int] | np.ndarray) -> np.ndarray:
    """Convert a mapping to int64 [K]. Raises InputError if it is invalid."""
    slot = np.asarray(mapping)
    if slot.shape != (problem.num_segments,) or slot.dtype.kind not in "iu":
        raise InputError(
            f"`mapping` has shape {list(slot.shape)} and dtype {slot.dtype}; expected the index of a "
            f"slot for each of {problem.num_segments} segments"
        )
    if slot.min() < 0 or slot.max() >= problem.num_slots:
        raise InputError(f"`mapping` (={slot.tolist()}) must contain slots from 0 to {problem.num_slots - 1}")
    return slot.astype(np.int64)

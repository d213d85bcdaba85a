"""What a mapping is worth: the one definition that every strategy, bound and test goes by.

A segment k on slot s takes `latency_ms[k, s]`. An edge from a segment on slot a to one on slot b takes
`fixed_ms[a, b] + traffic_bytes * ms_per_byte[a, b]`, and nothing where a = b.

- busy_s: latencies of the segments on slot s, and times of the edges that come into s (a receiver waits).
- serial_ms: one sample through, nothing overlapping; the sum of busy_s over all slots.
- period_ms: the largest busy_s; a pipeline full of samples gives a result each period.
- objective_ms: `serial_ms` in the mode `"serial"`; `period_ms + serial_weight * serial_ms` in the mode
  `"balanced"`. The weight is small: it decides among mappings with (nearly) the same period.

The memory of segments on a slot is summed, in whole bytes, and must not exceed the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

import numpy as np

from sparseflow.codesign.mapping.problem import BYTES_PER_MB, Problem
from sparseflow.errors import InputError

Mode = Literal["balanced", "serial"]
MODES = ("balanced", "serial")
SERIAL_WEIGHT = 1e-3


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """What becomes of a mapping; times are infinite where it cannot run.

    Attributes:
        busy_ms: Of each slot, float64 [S].
        serial_ms: One sample through.
        period_ms: From one result to the next.
        comm_ms: Of all transfers; part of `serial_ms`.
        memory_mb: On each slot, float64 [S].
        fits: Whether every segment may be where it is, and memory stays within limits.
    """

    busy_ms: np.ndarray
    serial_ms: float
    period_ms: float
    comm_ms: float
    memory_mb: np.ndarray
    fits: bool

    @property
    def feasible(self) -> bool:
        """Whether it can run."""
        return self.fits and isfinite(self.serial_ms)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What is made small: `period_weight * period_ms + serial_weight * serial_ms`.

    Attributes:
        mode: `"balanced"` or `"serial"`.
        tie_weight: What `serial_ms` weighs in the mode `"balanced"`.

    Raises:
        InputError: An unknown mode, or a weight that is negative or not finite.
    """

    mode: Mode = "balanced"
    tie_weight: float = SERIAL_WEIGHT

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InputError(f"`mode` (={self.mode!r}) must be one of: {', '.join(MODES)}")
        if not (isfinite(self.tie_weight) and self.tie_weight >= 0.0):
            raise InputError(f"`serial_weight` (={self.tie_weight}) must be a finite number of 0 or above")

    @property
    def period_weight(self) -> float:
        return 1.0 if self.mode == "balanced" else 0.0

    @property
    def serial_weight(self) -> float:
        return self.tie_weight if self.mode == "balanced" else 1.0

    def objective_ms(self, found: Evaluation) -> float:
        """What strategies compare; infinite where the mapping cannot run."""
        if not found.feasible:
            return float("inf")
        return self.period_weight * found.period_ms + self.serial_weight * found.serial_ms

    def total_ms(self, found: Evaluation) -> float:
        """`period_ms` or `serial_ms`."""
        return found.period_ms if self.mode == "balanced" else found.serial_ms


def evaluate(problem: Problem, mapping: Sequence[int] | np.ndarray) -> Evaluation:
    """What becomes of a mapping.

    Args:
        problem: K segments, S slots.
        mapping: Slot of each segment, K whole numbers.

    Raises:
        InputError: Not K whole numbers from 0 to S - 1.
    """
    slot = checked(problem, mapping)
    each = np.arange(problem.segments)
    a, b = slot[problem.src], slot[problem.dst]
    moved = a != b
    a, b, into = a[moved], b[moved], b[moved]
    with np.errstate(invalid="ignore"):
        transfer = problem.fixed_ms[a, b] + problem.traffic_bytes[moved] * problem.ms_per_byte[a, b]
    transfer = np.where(problem.connected[a, b], transfer, np.inf)
    latency = problem.latency_ms[each, slot]
    busy = np.bincount(slot, latency, problem.slots) + np.bincount(into, transfer, problem.slots)
    held = np.zeros(problem.slots, dtype=np.int64)
    np.add.at(held, slot, problem.memory_bytes[each, slot])
    return Evaluation(
        busy_ms=busy,
        serial_ms=float(latency.sum() + transfer.sum()),
        period_ms=float(busy.max()),
        comm_ms=float(transfer.sum()),
        memory_mb=held / BYTES_PER_MB,
        fits=bool(problem.allowed[each, slot].all() and (held <= problem.limit_bytes).all()),
    )


def checked(problem: Problem, mapping: Sequence[int] | np.ndarray) -> np.ndarray:
    """A mapping as int64 [K]. Raises InputError where it is not one."""
    slot = np.asarray(mapping)
    if slot.shape != (problem.segments,) or slot.dtype.kind not in "iu":
        raise InputError(
            f"`mapping` has the shape {list(slot.shape)} and holds {slot.dtype}; expected the number of a "
            f"slot for each of {problem.segments} segments"
        )
    if slot.min() < 0 or slot.max() >= problem.slots:
        raise InputError(
            f"`mapping` (={slot.tolist()}) must hold numbers of slots, from 0 to {problem.slots - 1}"
        )
    return slot.astype(np.int64)

"""The mapping problem: K segments in execution order, E edges between them, and S slots.

A segment that cannot run on a slot has infinite latency there, an empty slot has a limit of 0 MB, and slots
that are not connected have infinite transfer time. The segments on a slot keep their weights there and run
one after the other: the slot needs the sum of their weights and the largest of their activations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from sparseflow.errors import InputError

BYTES_PER_MB = 1e6
MAX_MB = 2**53 / BYTES_PER_MB


@dataclass(frozen=True, kw_only=True, eq=False)
class MappingProblem:
    """Segments, edges and slots. Arrays are copied and made read-only.

    Attributes:
        latency_ms: Latency of each segment on each slot, ms, float64 [K, S]; inf where it cannot run.
        memory_mb: Memory that each segment always occupies (weights), MB (1e6 bytes), float64 [K, S], or [K]
            if the same on all slots; inf where it never fits.
        limit_mb: Memory of each slot, MB, float64 [S]; 0 without a chip, inf for no limit.
        src: Source segment of each edge, int64 [E].
        dst: Target segment of each edge, int64 [E]; greater than `src`.
        traffic_bytes: Bytes per sample or batch on each edge, float64 [E].
        fixed_ms: Transfer time of a message of any size, ms, float64 [S, S]; diagonal 0.
        ms_per_byte: Additional time per byte, ms, float64 [S, S]; diagonal 0. inf in either: not connected.
        activation_mb: Memory that each segment needs in addition while it runs, MB, of the same shape as
            `memory_mb`; 0 by default.

    Raises:
        InputError: A shape is wrong, a value is NaN, negative or infinite where it must not be, or an edge is
            out of range or points backwards.
    """

    latency_ms: np.ndarray
    memory_mb: np.ndarray
    limit_mb: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    traffic_bytes: np.ndarray
    fixed_ms: np.ndarray
    ms_per_byte: np.ndarray
    activation_mb: np.ndarray = field(default_factory=lambda: np.zeros(()))

    def __post_init__(self) -> None:
        latency = _to_floats(self.latency_ms, "latency_ms")
        if latency.ndim != 2 or 0 in latency.shape:
            raise InputError(
                f"`latency_ms` has shape {list(latency.shape)}; expected [segments, slots] with at least "
                "one of each"
            )
        segments, slots = latency.shape
        memory = _to_memory(self.memory_mb, "memory_mb", segments, slots)
        activation = _to_memory(self.activation_mb, "activation_mb", segments, slots)
        traffic = _to_floats(self.traffic_bytes, "traffic_bytes")
        edges = len(traffic) if traffic.ndim == 1 else -1
        arrays = {
            "latency_ms": _check_array(latency, "latency_ms", (segments, slots)),
            "memory_mb": _check_array(memory, "memory_mb", (segments, slots)),
            "activation_mb": _check_array(activation, "activation_mb", (segments, slots)),
            "limit_mb": _check_array(_to_floats(self.limit_mb, "limit_mb"), "limit_mb", (slots,)),
            "traffic_bytes": _check_array(traffic, "traffic_bytes", (edges,), finite=True),
            "fixed_ms": _check_array(_to_floats(self.fixed_ms, "fixed_ms"), "fixed_ms", (slots, slots)),
            "ms_per_byte": _check_array(
                _to_floats(self.ms_per_byte, "ms_per_byte"), "ms_per_byte", (slots, slots)
            ),
            "src": _to_indices(self.src, "src", edges),
            "dst": _to_indices(self.dst, "dst", edges),
        }
        for name in ("fixed_ms", "ms_per_byte"):
            if np.diagonal(arrays[name]).any():
                index = int(np.flatnonzero(np.diagonal(arrays[name]))[0])
                raise InputError(
                    f"`{name}`[{index}, {index}] is {arrays[name][index, index]:g}; expected 0 for "
                    "transfers within a slot"
                )
        src, dst = arrays["src"], arrays["dst"]
        wrong = np.flatnonzero((src < 0) | (src >= dst) | (dst >= segments))
        if len(wrong):
            index = int(wrong[0])
            raise InputError(
                f"edge {index} goes from segment {src[index]} to segment {dst[index]}; expected from a "
                f"lower index to a higher one, both from 0 to {segments - 1}, in execution order"
            )
        total = memory + activation
        if np.where(np.isfinite(total), total, 0.0).max(axis=1).sum() > MAX_MB:
            raise InputError(
                f"`memory_mb` and `activation_mb` add up to more than {MAX_MB:.3g} MB; expected MB, not "
                "bytes (divide by 1e6)"
            )
        for name, value in arrays.items():
            value.setflags(write=False)
            object.__setattr__(self, name, value)

    @classmethod
    def chain(
        cls,
        *,
        latency_ms: Any,
        memory_mb: Any,
        limit_mb: Any,
        traffic_bytes: Any,
        fixed_ms: Any,
        ms_per_byte: Any,
        activation_mb: Any = 0.0,
    ) -> MappingProblem:
        """Create a problem in which each segment feeds the next; `traffic_bytes` is [K - 1]."""
        dst = np.arange(1, len(latency_ms), dtype=np.int64)
        return cls(
            latency_ms=latency_ms, memory_mb=memory_mb, limit_mb=limit_mb, src=dst - 1, dst=dst,
            traffic_bytes=traffic_bytes, fixed_ms=fixed_ms, ms_per_byte=ms_per_byte,
            activation_mb=activation_mb,
        )  # fmt: skip

    @property
    def num_segments(self) -> int:
        """K."""
        return self.latency_ms.shape[0]

    @property
    def num_slots(self) -> int:
        """S."""
        return self.latency_ms.shape[1]

    @property
    def num_edges(self) -> int:
        """E."""
        return len(self.src)

    @cached_property
    def memory_bytes(self) -> np.ndarray:
        """`memory_mb` in bytes, rounded up, int64 [K, S]; 0 where it is infinite."""
        return _to_bytes(self.memory_mb)

    @cached_property
    def activation_bytes(self) -> np.ndarray:
        """`activation_mb` in bytes, rounded up, int64 [K, S]; 0 where it is infinite."""
        return _to_bytes(self.activation_mb)

    @cached_property
    def limit_bytes(self) -> np.ndarray:
        """`limit_mb` in bytes, rounded down, int64 [S]; at most what all segments together can need."""
        max_bytes = float((self.memory_bytes + self.activation_bytes).max(axis=1).sum() + 1)
        return np.floor(np.minimum(self.limit_mb * BYTES_PER_MB + 1e-3, max_bytes)).astype(np.int64)

    @cached_property
    def allowed(self) -> np.ndarray:
        """Whether a segment fits alone on a slot and can run there, bool [K, S]."""
        fits = np.isfinite(self.memory_mb + self.activation_mb)
        fits &= self.memory_bytes + self.activation_bytes <= self.limit_bytes
        return np.isfinite(self.latency_ms) & fits & (self.limit_mb > 0.0)

    @cached_property
    def min_total_bytes(self) -> int:
        """Lower bound of the memory on all slots together; every segment must have an allowed slot.

        All weights and the largest activation of a segment, each on its best slot.
        """
        never = np.iinfo(np.int64).max
        memory, activation = (
            np.where(self.allowed, value, never).min(axis=1)
            for value in (self.memory_bytes, self.activation_bytes)
        )
        return int(memory.sum() + activation.max())

    @cached_property
    def connected(self) -> np.ndarray:
        """Whether one slot can send to another, bool [S, S]."""
        return np.isfinite(self.fixed_ms) & np.isfinite(self.ms_per_byte)

    def select_slots(self, slots: np.ndarray) -> MappingProblem:
        """Restrict the problem to some slots.

        Args:
            slots: Indices of the slots, in their new order, int64.
        """
        return MappingProblem(
            latency_ms=self.latency_ms[:, slots],
            memory_mb=self.memory_mb[:, slots],
            limit_mb=self.limit_mb[slots],
            src=self.src,
            dst=self.dst,
            traffic_bytes=self.traffic_bytes,
            fixed_ms=self.fixed_ms[np.ix_(slots, slots)],
            ms_per_byte=self.ms_per_byte[np.ix_(slots, slots)],
            activation_mb=self.activation_mb[:, slots],
        )


def _to_memory(value: Any, name: str, segments: int, slots: int) -> np.ndarray:
    """Convert to float64 [K, S] if the value is a number, [K] or [K, S]."""
    memory = _to_floats(value, name)
    if memory.shape == (segments,):
        memory = memory[:, None]
    elif memory.shape:
        return memory
    return np.broadcast_to(memory, (segments, slots)).copy()


def _to_bytes(memory_mb: np.ndarray) -> np.ndarray:
    finite = np.where(np.isfinite(memory_mb), memory_mb, 0.0)
    # Decimal fractions of a MB are exact up to a thousandth of a byte.
    return np.ceil(np.maximum(finite * BYTES_PER_MB - 1e-3, 0.0)).astype(np.int64)


def _to_floats(value: Any, name: str) -> np.ndarray:
    try:
        return np.array(value, dtype=np.float64, order="C")
    except (TypeError, ValueError) as error:
        raise InputError(f"`{name}` is not an array of numbers: {error}") from None


def _check_array(array: np.ndarray, name: str, shape: tuple[int, ...], *, finite: bool = False) -> np.ndarray:
    if array.shape != shape:
        expected = [size if size >= 0 else "edges" for size in shape]
        raise InputError(f"`{name}` has shape {list(array.shape)}; expected {expected}")
    wrong = ~np.isfinite(array) if finite else np.isnan(array)
    wrong |= array < 0.0
    if wrong.any():
        index = np.argwhere(wrong)[0].tolist()
        requirement = "a finite number of at least 0" if finite else "at least 0, or inf"
        raise InputError(f"`{name}`{index} is {array[tuple(index)]:g}; expected {requirement}")
    return array


def _to_indices(value: Any, name: str, edges: int) -> np.ndarray:
    array = np.array(value)
    if array.shape != (edges,):
        raise InputError(
            f"`{name}` has shape {list(array.shape)}; expected [{edges}], one for each of `traffic_bytes`"
        )
    if array.size and array.dtype.kind not in "iu":
        raise InputError(f"`{name}` has dtype {array.dtype}; expected segment indices")
    return array.astype(np.int64)


def check_feasible(problem: MappingProblem) -> None:
    """Raise InputError if a segment or the sum of all segments exceeds the memory of the slots."""
    usable = problem.limit_mb > 0.0
    if not usable.any():
        raise InputError(f"all {problem.num_slots} slots are empty: every `limit_mb` is 0")
    runs = np.isfinite(problem.latency_ms) & usable
    for k in np.flatnonzero(~problem.allowed.any(axis=1)).tolist():
        if not runs[k].any():
            raise InputError(
                f"segment {k} cannot run on any of the {int(usable.sum())} slots with a chip: its "
                "`latency_ms` is infinite on all of them"
            )
        total_mb = problem.memory_mb[k] + problem.activation_mb[k]
        if not np.isfinite(total_mb[runs[k]]).any():
            raise InputError(
                f"segment {k} does not fit on any of the {int(runs[k].sum())} slots that can run it: its "
                "`memory_mb` or `activation_mb` is infinite on all of them"
            )
        needed_mb = np.where(runs[k], total_mb, np.inf)
        shortage_mb = needed_mb - np.minimum(problem.limit_mb, MAX_MB)
        slot = int(shortage_mb.argmin())
        raise InputError(
            f"segment {k} needs {total_mb[slot]:g} MB, but the largest slot that can run it has "
            f"{problem.limit_mb[slot]:g} MB: {shortage_mb[slot]:.6g} MB are missing; split the segment or "
            "use a larger chip"
        )
    missing_bytes = problem.min_total_bytes - int(problem.limit_bytes[usable].sum())
    if missing_bytes > 0:
        needed, capacity = problem.min_total_bytes / BYTES_PER_MB, problem.limit_mb[usable].sum()
        raise InputError(
            f"{problem.num_segments} segments need {needed:g} MB, but all {int(usable.sum())} slots with a "
            f"chip have {capacity:g} MB: {missing_bytes / BYTES_PER_MB:.6g} MB are missing; use more or "
            "larger chips"
        )


def make_infeasible_error(problem: MappingProblem) -> InputError:
    """Create the error for problems without a feasible mapping."""
    fits = problem.allowed
    needed = np.where(fits, problem.memory_mb + problem.activation_mb, np.inf).min(axis=1)
    disconnected = ~problem.connected
    network = ""
    if disconnected.any():
        a, b = np.argwhere(disconnected)[0].tolist()
        network = f", and {int(disconnected.sum())} pairs of slots are not connected (such as {a} to {b})"
    return InputError(
        f"no mapping is feasible: {problem.num_segments} segments of "
        f"{problem.min_total_bytes / BYTES_PER_MB:g} MB in total, the largest with {needed.max():g} MB, do "
        f"not fit on {problem.num_slots} slots with {problem.limit_mb.sum():g} MB in total, the largest with "
        f"{problem.limit_mb.max():g} MB{network}; use smaller segments or larger chips"
    )

"""What is mapped onto what: K segments in the order they run, E edges between them, S slots with chips.

A segment that cannot run on a slot takes an infinite time there; a slot without a chip has a limit of 0 MB;
two slots that are not connected are infinitely far apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sparseflow.errors import InputError

BYTES_PER_MB = 1e6
MOST_MB = 2**53 / BYTES_PER_MB
NEVER = 2**63 - 1
"""Bytes that nothing has."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Segments, edges and slots. Arrays are copied, and cannot be written to.

    Attributes:
        latency_ms: How long each segment takes on each slot, float64 [K, S]; inf where it cannot run.
        memory_mb: What it holds there, MB (1e6 bytes), float64 [K, S]; or [K], the same on all slots. inf
            where it cannot be, whatever the limit.
        limit_mb: What each slot can hold, float64 [S]; 0 where there is no chip, inf for no limit.
        src: The segment that each edge leaves, int64 [E].
        dst: The segment that it enters, int64 [E]; above `src`.
        traffic_bytes: What goes over it for each sample or batch, float64 [E].
        fixed_ms: What a message takes from slot to slot however little is sent, float64 [S, S]; diagonal 0.
        ms_per_byte: What each byte adds, float64 [S, S]; diagonal 0. inf in either array: not connected.

    Raises:
        InputError: A shape does not fit; a value is NaN, negative or infinite where it must not be; an edge
            leads out of range, backwards or to itself.
    """

    latency_ms: np.ndarray
    memory_mb: np.ndarray
    limit_mb: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    traffic_bytes: np.ndarray
    fixed_ms: np.ndarray
    ms_per_byte: np.ndarray

    def __post_init__(self) -> None:
        latency = _floats(self.latency_ms, "latency_ms")
        if latency.ndim != 2 or 0 in latency.shape:
            raise InputError(
                f"`latency_ms` has the shape {list(latency.shape)}; expected [segments, slots] with at least "
                "one of each"
            )
        segments, slots = latency.shape
        memory = _floats(self.memory_mb, "memory_mb")
        if memory.shape == (segments,):
            memory = np.repeat(memory[:, None], slots, axis=1)
        traffic = _floats(self.traffic_bytes, "traffic_bytes")
        edges = len(traffic) if traffic.ndim == 1 else -1
        whole = {
            "latency_ms": _checked(latency, "latency_ms", (segments, slots)),
            "memory_mb": _checked(memory, "memory_mb", (segments, slots)),
            "limit_mb": _checked(_floats(self.limit_mb, "limit_mb"), "limit_mb", (slots,)),
            "traffic_bytes": _checked(traffic, "traffic_bytes", (edges,), finite=True),
            "fixed_ms": _checked(_floats(self.fixed_ms, "fixed_ms"), "fixed_ms", (slots, slots)),
            "ms_per_byte": _checked(_floats(self.ms_per_byte, "ms_per_byte"), "ms_per_byte", (slots, slots)),
            "src": _numbers(self.src, "src", edges),
            "dst": _numbers(self.dst, "dst", edges),
        }
        for name in ("fixed_ms", "ms_per_byte"):
            if np.diagonal(whole[name]).any():
                at = int(np.flatnonzero(np.diagonal(whole[name]))[0])
                raise InputError(
                    f"`{name}`[{at}, {at}] is {whole[name][at, at]:g}; expected 0, as nothing moves within "
                    "a slot"
                )
        src, dst = whole["src"], whole["dst"]
        wrong = np.flatnonzero((src < 0) | (src >= dst) | (dst >= segments))
        if len(wrong):
            at = int(wrong[0])
            raise InputError(
                f"edge {at} leads from segment {src[at]} to segment {dst[at]}; expected from a lower number "
                f"to a higher one, both from 0 to {segments - 1}: number segments in the order they run"
            )
        if np.where(np.isfinite(memory), memory, 0.0).max(axis=1).sum() > MOST_MB:
            raise InputError(
                f"`memory_mb` adds up to more than {MOST_MB:.3g} MB; expected MB, not bytes: divide by 1e6"
            )
        for name, value in whole.items():
            value.setflags(write=False)
            object.__setattr__(self, name, value)

    @classmethod
    def chain(cls, *, traffic_bytes: Any, **others: Any) -> Problem:
        """Segments of which each feeds the next.

        Args:
            traffic_bytes: From each segment to the next, [K - 1].
            others: The other attributes, but for `src` and `dst`.
        """
        ends = np.arange(1, len(others["latency_ms"]), dtype=np.int64)
        return cls(src=ends - 1, dst=ends, traffic_bytes=traffic_bytes, **others)

    @property
    def segments(self) -> int:
        """K."""
        return self.latency_ms.shape[0]

    @property
    def slots(self) -> int:
        """S."""
        return self.latency_ms.shape[1]

    @property
    def edges(self) -> int:
        """E."""
        return len(self.src)

    @cached_property
    def memory_bytes(self) -> np.ndarray:
        """`memory_mb` in whole bytes, rounded up, int64 [K, S]; 0 where it is infinite."""
        finite = np.where(np.isfinite(self.memory_mb), self.memory_mb, 0.0)
        # A thousandth of a byte is what decimal fractions of a MB are off by.
        return np.ceil(np.maximum(finite * BYTES_PER_MB - 1e-3, 0.0)).astype(np.int64)

    @cached_property
    def limit_bytes(self) -> np.ndarray:
        """`limit_mb` in whole bytes, rounded down, int64 [S]; no more than all segments together can need."""
        most = float(self.memory_bytes.max(axis=1).sum() + 1)
        return np.floor(np.minimum(self.limit_mb * BYTES_PER_MB + 1e-3, most)).astype(np.int64)

    @cached_property
    def allowed(self) -> np.ndarray:
        """Whether a segment can be on a slot if nothing else is, bool [K, S]."""
        fits = np.isfinite(self.memory_mb) & (self.memory_bytes <= self.limit_bytes)
        return np.isfinite(self.latency_ms) & fits & (self.limit_mb > 0.0)

    @cached_property
    def least_bytes(self) -> np.ndarray:
        """Memory of each segment on the allowed slot where it needs least, int64 [K]; `NEVER` without one."""
        return np.where(self.allowed, self.memory_bytes, NEVER).min(axis=1)

    @cached_property
    def connected(self) -> np.ndarray:
        """Whether one slot can send to another, bool [S, S]."""
        return np.isfinite(self.fixed_ms) & np.isfinite(self.ms_per_byte)

    def restricted(self, slots: np.ndarray) -> Problem:
        """The same segments with some of the slots.

        Args:
            slots: Which, in the order they are to have, int64.
        """
        return Problem(
            latency_ms=self.latency_ms[:, slots],
            memory_mb=self.memory_mb[:, slots],
            limit_mb=self.limit_mb[slots],
            src=self.src,
            dst=self.dst,
            traffic_bytes=self.traffic_bytes,
            fixed_ms=self.fixed_ms[np.ix_(slots, slots)],
            ms_per_byte=self.ms_per_byte[np.ix_(slots, slots)],
        )


def _floats(value: Any, name: str) -> np.ndarray:
    try:
        return np.array(value, dtype=np.float64, order="C")
    except (TypeError, ValueError) as error:
        raise InputError(f"`{name}` is not an array of numbers: {error}") from None


def _checked(array: np.ndarray, name: str, shape: tuple[int, ...], *, finite: bool = False) -> np.ndarray:
    if array.shape != shape:
        expected = [size if size >= 0 else "edges" for size in shape]
        raise InputError(f"`{name}` has the shape {list(array.shape)}; expected {expected}")
    wrong = ~np.isfinite(array) if finite else np.isnan(array)
    wrong |= array < 0.0
    if wrong.any():
        at = np.argwhere(wrong)[0].tolist()
        wanted = "a finite number of 0 or above" if finite else "0 or above, or inf"
        raise InputError(f"`{name}`{at} is {array[tuple(at)]:g}; expected {wanted}")
    return array


def _numbers(value: Any, name: str, edges: int) -> np.ndarray:
    array = np.array(value)
    if array.shape != (edges,):
        raise InputError(
            f"`{name}` has the shape {list(array.shape)}; expected [{edges}], one for each of `traffic_bytes`"
        )
    if array.size and array.dtype.kind not in "iu":
        raise InputError(f"`{name}` holds {array.dtype}; expected whole numbers of segments")
    return array.astype(np.int64)


def check_possible(problem: Problem) -> None:
    """Raise InputError where it is plain that no mapping can run; says by how much."""
    usable = problem.limit_mb > 0.0
    if not usable.any():
        raise InputError(f"none of the {problem.slots} slots holds a chip: every `limit_mb` is 0")
    runs = np.isfinite(problem.latency_ms) & usable
    for k in np.flatnonzero(~problem.allowed.any(axis=1)).tolist():
        if not runs[k].any():
            raise InputError(
                f"segment {k} can run on none of the {int(usable.sum())} slots with a chip: its `latency_ms` "
                "is infinite on all of them"
            )
        sizes = np.where(np.isfinite(problem.memory_mb[k]), problem.memory_bytes[k], NEVER)[runs[k]]
        if sizes.min() == NEVER:
            raise InputError(
                f"segment {k} fits on none of the {int(runs[k].sum())} slots that can run it: its "
                "`memory_mb` is infinite on all of them"
            )
        short = sizes - problem.limit_bytes[runs[k]]
        at = int(short.argmin())
        needed, room = problem.memory_mb[k, runs[k]][at], problem.limit_mb[runs[k]][at]
        raise InputError(
            f"segment {k} needs {needed:g} MB and the largest slot that can run it has {room:g} MB: "
            f"{_mb(int(short[at]))} too little; split the segment, or choose a larger chip"
        )
    short = int(problem.least_bytes.sum() - problem.limit_bytes[usable].sum())
    if short > 0:
        needed, room = _least_mb(problem).sum(), problem.limit_mb[usable].sum()
        raise InputError(
            f"{problem.segments} segments need {needed:g} MB and all {int(usable.sum())} slots with a chip "
            f"have {room:g} MB: {_mb(short)} too little; choose more or larger chips"
        )


def impossible(problem: Problem) -> InputError:
    """What to raise where the proof that there is no mapping has no plainer reason."""
    needed, apart = _least_mb(problem), ~problem.connected
    network = ""
    if apart.any():
        a, b = np.argwhere(apart)[0].tolist()
        network = f", and {int(apart.sum())} pairs of slots are not connected (such as {a} to {b})"
    return InputError(
        f"no mapping can run: {problem.segments} segments of {needed.sum():g} MB in all, the largest of "
        f"{needed.max():g} MB, cannot be shared out among {problem.slots} slots of "
        f"{problem.limit_mb.sum():g} MB in all, the largest of {problem.limit_mb.max():g} MB{network}; cut "
        "segments smaller, or choose larger chips"
    )


def _mb(lacking_bytes: int) -> str:
    return f"{lacking_bytes / BYTES_PER_MB:.6g} MB"


def _least_mb(problem: Problem) -> np.ndarray:
    return np.where(problem.allowed, problem.memory_mb, np.inf).min(axis=1)

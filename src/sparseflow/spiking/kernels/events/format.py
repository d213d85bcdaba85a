"""Spike tensors as lists of events, and the pool of memory they live in."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparseflow.spiking.kernels.events.records import EVENTS, SLACK

_LARGEST_NARROW = 1 << 16


class _Pool:
    """Reuses the memory of dead event tensors: pages and cache lines stay warm, and the total stays small."""

    def __init__(self, limit_bytes: int) -> None:
        self._free: list[np.ndarray] = []
        self._limit_bytes = limit_bytes

    def take(self, nbytes: int) -> np.ndarray:
        """A uint8 buffer of at least `nbytes`, 64-byte aligned; the smallest that fits and is not four times too big."""
        fitting = [b for b in self._free if nbytes <= b.nbytes <= 4 * nbytes]
        if fitting:
            best = min(fitting, key=lambda b: b.nbytes)
            self._free = [b for b in self._free if b is not best]
            return best
        raw = np.empty(nbytes + 64, dtype=np.uint8)
        shift = -raw.ctypes.data % 64
        return raw[shift : shift + nbytes]

    def give(self, buffer: np.ndarray) -> None:
        """Take a buffer back; the oldest ones go when more than the limit is idle."""
        self._free.append(buffer)
        while len(self._free) > 1 and sum(b.nbytes for b in self._free) > self._limit_bytes:
            del self._free[0]


_POOL = _Pool(limit_bytes=64 << 20)


class _Memory:
    """One buffer on loan from the pool; it goes back when the last owner dies."""

    def __init__(self, nbytes: int) -> None:
        self.buffer = _POOL.take(nbytes)
        weakref.finalize(self, _POOL.give, self.buffer).atexit = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Events:
    """A spike tensor [T, N, C, H, W] of small whole numbers, as the list of its non-zeros.

    The events of row (t, n, y) are contiguous in `index[t, n, y]`, ordered by x; `start[t, n, y, x]` is where
    those of pixel x begin and `start[t, n, y, W]` how many the row has. An entry is `x * C + c`; a value of 2 is
    the same entry twice. The arrays are views of pooled memory: they hold this tensor as long as it lives.

    Attributes:
        T: Time steps.
        N: Images.
        C: Channels.
        H: Rows.
        W: Columns.
        start: int32 [T, N, H, W + 1].
        index: uint16, or int32 where W * C > 65536, [T, N, H, capacity].
        max_value: Upper bound of the values; 1 for spikes.
        record: What a kernel is told, `records.EVENTS`.
        memory: Owner of the arrays' memory.
    """

    T: int
    N: int
    C: int
    H: int
    W: int
    start: np.ndarray
    index: np.ndarray
    max_value: int = 1
    record: np.ndarray = field(repr=False)
    memory: _Memory = field(repr=False)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(T, N, C, H, W)."""
        return self.T, self.N, self.C, self.H, self.W

    @property
    def wide(self) -> bool:
        """Whether entries are int32."""
        return self.index.dtype == np.int32

    @property
    def nbytes(self) -> int:
        """Bytes set aside, used or not."""
        return self.start.nbytes + self.index.nbytes

    def count(self) -> int:
        """Sum of all values; for spikes, their number."""
        return int(self.start[..., -1].sum(dtype=np.int64))

    @property
    def address(self) -> int:
        """Address of the `records.EVENTS` that kernels read."""
        return address_of_array(self.record)


def address_of_array(array: np.ndarray) -> int:
    """Address of an array's first byte."""
    return array.__array_interface__["data"][0]


def allocate_events(
    shape: tuple[int, int, int, int, int], *, capacity: int | None = None, max_value: int = 1
) -> Events:
    """Events with memory from the pool and no content.

    Args:
        shape: (T, N, C, H, W).
        capacity: Entries that a row can hold, W * C by default.
        max_value: Upper bound of the values.
    """
    t, n, c, h, w = shape
    entry = np.dtype(np.uint16 if w * c <= _LARGEST_NARROW else np.int32)
    row = -(-(w * c if capacity is None else capacity) // SLACK) * SLACK + SLACK
    rows = t * n * h
    start_bytes = -(-rows * (w + 1) * 4 // 64) * 64
    index_bytes = rows * row * entry.itemsize
    memory = _Memory(start_bytes + index_bytes)
    buffer = memory.buffer
    start = buffer[: rows * (w + 1) * 4].view(np.int32).reshape(t, n, h, w + 1)
    index = buffer[start_bytes : start_bytes + index_bytes].view(entry).reshape(t, n, h, row)
    record = np.zeros(1, dtype=EVENTS)
    record[0] = (address_of_array(index), address_of_array(start), row, entry.itemsize == 4)
    return Events(
        T=t, N=n, C=c, H=h, W=w, start=start, index=index, max_value=max_value, record=record, memory=memory
    )


def record_list(events: list[Events]) -> np.ndarray:
    """The records of several event tensors, one after the other."""
    out: np.ndarray = np.empty(max(len(events), 1), dtype=EVENTS)
    for i, one in enumerate(events):
        out[i] = one.record[0]
    return out

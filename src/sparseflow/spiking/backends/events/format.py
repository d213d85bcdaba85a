"""Spike tensors as lists of events, in pooled memory."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

import numpy as np

from sparseflow.spiking.backends.events.kernels.planes import build_plane_table, list_planes
from sparseflow.spiking.backends.events.kernels.records import EVENTS, SLACK

_MAX_NARROW_ENTRIES = 1 << 16


def get_array_address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def round_up_to_cache_line(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def allocate_aligned_zeros(size: int, dtype: np.dtype | type) -> np.ndarray:
    """Allocate zeros [size] aligned to a cache line."""
    resolved_dtype = np.dtype(dtype)
    raw = np.zeros(size * resolved_dtype.itemsize + 64, dtype=np.uint8)
    shift = -get_array_address(raw) % 64
    return raw[shift : shift + size * resolved_dtype.itemsize].view(resolved_dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class _BufferLayout:
    """One layout of a buffer: the arrays of an event tensor and the record that kernels read."""

    start: np.ndarray
    index: np.ndarray
    record: np.ndarray
    address: int


@dataclass(frozen=True, eq=False)
class _Buffer:
    """Memory and the layouts made of it, cached because creating views takes longer than a small layer."""

    raw: np.ndarray
    layouts: dict[tuple[int, ...], _BufferLayout] = field(default_factory=dict)

    def get_layout(self, shape: tuple[int, int, int, int, int], row: int) -> _BufferLayout:
        """Return the layout for (T, N, C, H, W) with `row` entries per row."""
        key = (*shape, row)
        cached = self.layouts.get(key)
        if cached is not None:
            return cached
        t, n, c, h, w = shape
        entry, table = _select_entry_dtype(c, w), build_plane_table(t, c)
        planes = len(table)
        starts = planes * n * h * (w + 1) * 4
        index_offset = _compute_start_bytes(shape)
        start = self.raw[:starts].view(np.int32).reshape(planes, n, h, w + 1)
        index = self.raw[index_offset : index_offset + planes * n * h * row * entry.itemsize]
        index = index.view(entry).reshape(planes, n, h, row)
        record = np.zeros(1, dtype=EVENTS)
        addresses = get_array_address(index), get_array_address(start)
        record[0] = (*addresses, row, entry.itemsize == 4, planes, get_array_address(table))
        views = _BufferLayout(start=start, index=index, record=record, address=get_array_address(record))
        self.layouts[key] = views
        return views


class _BufferPool:
    """Reuses the memory of freed event tensors, which keeps caches warm and bounds the total."""

    def __init__(self, limit_bytes: int) -> None:
        self._free: list[_Buffer] = []
        self._limit_bytes = limit_bytes
        self._lock = threading.RLock()

    def acquire(self, nbytes: int) -> _Buffer:
        """Return the smallest free buffer of `nbytes` to four times that, or a new aligned one."""
        with self._lock:
            fitting = [b for b in self._free if nbytes <= b.raw.nbytes <= 4 * nbytes]
            if fitting:
                best = min(fitting, key=lambda b: b.raw.nbytes)
                self._free = [b for b in self._free if b is not best]
                return best
        raw = np.empty(nbytes + 64, dtype=np.uint8)
        shift = -get_array_address(raw) % 64
        return _Buffer(raw[shift : shift + nbytes])

    def release(self, buffer: _Buffer) -> None:
        """Take a buffer back; free the oldest ones above the limit."""
        with self._lock:
            self._free.append(buffer)
            while len(self._free) > 1 and sum(b.raw.nbytes for b in self._free) > self._limit_bytes:
                del self._free[0]

    def renew_lock(self) -> None:
        """Release the lock in a forked process, in which the thread that held it does not exist."""
        self._lock = threading.RLock()


_POOL = _BufferPool(limit_bytes=64 << 20)
os.register_at_fork(after_in_child=_POOL.renew_lock)


class _PooledBuffer:
    """A buffer that returns to the pool when its last user is garbage-collected."""

    def __init__(self, nbytes: int) -> None:
        self.buffer = _POOL.acquire(nbytes)

    def __del__(self) -> None:
        _POOL.release(self.buffer)


@dataclass(frozen=True, kw_only=True, eq=False)
class Events:
    """A spike tensor [T, N, C, H, W] of small integers, as the list of its non-zeros.

    Events are stored in planes, each of which stands for a set of time steps (see `kernels/planes.py`).
    Those of row (plane, n, y) are contiguous in `index[plane, n, y]`, ordered by x; those of pixel x start
    at `start[plane, n, y, x]`, and `start[plane, n, y, W]` is the number of events of the row. An entry is
    `x * C + c`; a value of 2 is the same entry twice. The arrays are views of pooled memory.

    Attributes:
        T: Time steps.
        N: Images.
        C: Channels.
        H: Rows.
        W: Columns.
        start: int32 [planes, N, H, W + 1].
        index: uint16, or int32 if W * C > 65536, [planes, N, H, row capacity].
        max_value: Upper bound of the values; 1 for spikes.
        record: Kernel argument, one `records.EVENTS`.
        address: Address of `record`.
        memory: Owner of the memory.
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
    address: int = field(repr=False)
    memory: _PooledBuffer = field(repr=False)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(T, N, C, H, W)."""
        return self.T, self.N, self.C, self.H, self.W

    @property
    def wide(self) -> bool:
        """Whether entries are int32."""
        return self.index.dtype == np.int32

    @property
    def row_capacity(self) -> int:
        """Allocated entries per row."""
        return self.index.shape[-1]

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return self.start.nbytes + self.index.nbytes

    def count_events(self) -> int:
        """Return the sum of all values; for spikes, their number."""
        events = self.start[..., -1].sum((1, 2), dtype=np.int64)
        return int((events * [len(p.steps) for p in list_planes(self.T, self.C)]).sum())


def _select_entry_dtype(channels: int, width: int) -> np.dtype:
    return np.dtype(np.uint16 if width * channels <= _MAX_NARROW_ENTRIES else np.int32)


def _compute_start_bytes(shape: tuple[int, int, int, int, int]) -> int:
    t, n, c, h, w = shape
    return -(-len(build_plane_table(t, c)) * n * h * (w + 1) * 4 // 64) * 64


def estimate_row_capacity(channels: int, width: int) -> int:
    """Entries to allocate per row of spikes initially: half of the maximum, which is rarely exceeded."""
    maximum = (width + 1) * -(-channels // SLACK) * SLACK + SLACK
    return maximum - width * channels // 2


def allocate_events(
    shape: tuple[int, int, int, int, int], *, row_capacity: int | None = None, max_value: int = 1
) -> Events:
    """Allocate uninitialized events from the pool.

    Args:
        shape: (T, N, C, H, W).
        row_capacity: Entries per row; `estimate_row_capacity` if None.
        max_value: Upper bound of the values.
    """
    t, n, c, h, w = shape
    entries = estimate_row_capacity(c, w) if row_capacity is None else row_capacity
    entries = -(-entries // SLACK) * SLACK
    rows = len(build_plane_table(t, c)) * n * h
    memory = _PooledBuffer(_compute_start_bytes(shape) + rows * entries * _select_entry_dtype(c, w).itemsize)
    layout = memory.buffer.get_layout(shape, entries)
    return Events(
        T=t, N=n, C=c, H=h, W=w, start=layout.start, index=layout.index, max_value=max_value,
        record=layout.record, address=layout.address, memory=memory,
    )  # fmt: skip

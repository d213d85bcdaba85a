"""Spike tensors as lists of events, and the pool of memory they live in."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from sparseflow.spiking.backends.events.kernels.planes import plane_table, planes_of
from sparseflow.spiking.backends.events.kernels.records import EVENTS, SLACK

_LARGEST_NARROW = 1 << 16


def address_of_array(array: np.ndarray) -> int:
    """Address of an array's first byte."""
    return array.__array_interface__["data"][0]


def aligned_zeros(size: int, dtype: np.dtype | type) -> np.ndarray:
    """Zeros [size] that begin on a cache line."""
    kind = np.dtype(dtype)
    raw = np.zeros(size * kind.itemsize + 64, dtype=np.uint8)
    shift = -address_of_array(raw) % 64
    return raw[shift : shift + size * kind.itemsize].view(kind)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Views:
    """One layout of a buffer: the arrays of an event tensor, and what a kernel is told about them."""

    start: np.ndarray
    index: np.ndarray
    record: np.ndarray
    address: int


@dataclass(frozen=True, eq=False)
class _Buffer:
    """Memory and the layouts it has had; making views anew would cost more than a small layer."""

    raw: np.ndarray
    views: dict[tuple[int, ...], _Views] = field(default_factory=dict)

    def view(self, shape: tuple[int, int, int, int, int], row: int) -> _Views:
        """The layout for (T, N, C, H, W) with `row` entries between two rows."""
        key = (*shape, row)
        found = self.views.get(key)
        if found is not None:
            return found
        t, n, c, h, w = shape
        entry, table = _entry(c, w), plane_table(t, c)
        planes = len(table)
        starts = planes * n * h * (w + 1) * 4
        begin = _start_bytes(shape)
        start = self.raw[:starts].view(np.int32).reshape(planes, n, h, w + 1)
        index = self.raw[begin : begin + planes * n * h * row * entry.itemsize]
        index = index.view(entry).reshape(planes, n, h, row)
        record = np.zeros(1, dtype=EVENTS)
        addresses = address_of_array(index), address_of_array(start)
        record[0] = (*addresses, row, entry.itemsize == 4, planes, address_of_array(table))
        views = _Views(start=start, index=index, record=record, address=address_of_array(record))
        self.views[key] = views
        return views


class _Pool:
    """Reuses the memory of dead event tensors: pages and cache lines stay warm, and the total stays small."""

    def __init__(self, limit_bytes: int) -> None:
        self._free: list[_Buffer] = []
        self._limit_bytes = limit_bytes
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> _Buffer:
        """The smallest buffer of `nbytes` to four times that, or a new one; on a cache line."""
        with self._lock:
            fitting = [b for b in self._free if nbytes <= b.raw.nbytes <= 4 * nbytes]
            if fitting:
                best = min(fitting, key=lambda b: b.raw.nbytes)
                self._free = [b for b in self._free if b is not best]
                return best
        raw = np.empty(nbytes + 64, dtype=np.uint8)
        shift = -address_of_array(raw) % 64
        return _Buffer(raw[shift : shift + nbytes])

    def give(self, buffer: _Buffer) -> None:
        """Take a buffer back; the oldest ones go when more than the limit is idle."""
        with self._lock:
            self._free.append(buffer)
            while len(self._free) > 1 and sum(b.raw.nbytes for b in self._free) > self._limit_bytes:
                del self._free[0]


_POOL = _Pool(limit_bytes=64 << 20)


class _Loan:
    """A buffer on loan from the pool; it goes back when the last tensor that uses it dies."""

    def __init__(self, nbytes: int) -> None:
        self.buffer = _POOL.take(nbytes)

    def __del__(self) -> None:
        _POOL.give(self.buffer)


@dataclass(frozen=True, kw_only=True, eq=False)
class Events:
    """A spike tensor [T, N, C, H, W] of small whole numbers, as the list of its non-zeros.

    Events lie in planes, each of which stands for a set of time steps (see `planes.py`). Those of row (plane,
    n, y) are contiguous in `index[plane, n, y]`, ordered by x; `start[plane, n, y, x]` is where those of
    pixel x begin and `start[plane, n, y, W]` how many the row has. An entry is `x * C + c`; a value of 2 is
    the same entry twice. The arrays are views of pooled memory: they hold this tensor as long as it lives.

    Attributes:
        T: Time steps.
        N: Images.
        C: Channels.
        H: Rows.
        W: Columns.
        start: int32 [planes, N, H, W + 1].
        index: uint16, or int32 where W * C > 65536, [planes, N, H, entries of a row].
        max_value: Upper bound of the values; 1 for spikes.
        record: What a kernel is told, one `records.EVENTS`.
        address: Address of `record`.
        loan: Owner of the memory.
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
    loan: _Loan = field(repr=False)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(T, N, C, H, W)."""
        return self.T, self.N, self.C, self.H, self.W

    @property
    def wide(self) -> bool:
        """Whether entries are int32."""
        return self.index.dtype == np.int32

    @property
    def row(self) -> int:
        """Entries between the beginnings of two rows."""
        return self.index.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes set aside, used or not."""
        return self.start.nbytes + self.index.nbytes

    def count(self) -> int:
        """Sum of all values; for spikes, their number."""
        events = self.start[..., -1].sum((1, 2), dtype=np.int64)
        return int((events * [len(p.steps) for p in planes_of(self.T, self.C)]).sum())


def _entry(channels: int, width: int) -> np.dtype:
    return np.dtype(np.uint16 if width * channels <= _LARGEST_NARROW else np.int32)


def _start_bytes(shape: tuple[int, int, int, int, int]) -> int:
    t, n, c, h, w = shape
    return -(-len(plane_table(t, c)) * n * h * (w + 1) * 4 // 64) * 64


def first_row(channels: int, width: int) -> int:
    """Entries to set aside for a row of spikes at first: half of all, which is seldom outgrown."""
    return longest_row(channels, width) - width * channels // 2


def longest_row(channels: int, width: int) -> int:
    """Entries that certainly hold a row of spikes."""
    return (width + 1) * -(-channels // SLACK) * SLACK + SLACK


def allocate_events(
    shape: tuple[int, int, int, int, int], *, row: int | None = None, max_value: int = 1
) -> Events:
    """Events with memory from the pool and no content.

    Args:
        shape: (T, N, C, H, W).
        row: Entries to set aside for one row; `first_row` when None.
        max_value: Upper bound of the values.
    """
    t, n, c, h, w = shape
    row = -(-(first_row(c, w) if row is None else row) // SLACK) * SLACK
    rows = len(plane_table(t, c)) * n * h
    loan = _Loan(_start_bytes(shape) + rows * row * _entry(c, w).itemsize)
    views = loan.buffer.view(shape, row)
    return Events(
        T=t,
        N=n,
        C=c,
        H=h,
        W=w,
        start=views.start,
        index=views.index,
        max_value=max_value,
        record=views.record,
        address=views.address,
        loan=loan,
    )

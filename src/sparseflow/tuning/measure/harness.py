"""Data exchange with the timing harness (`data/harness.c`): shared-memory arrays and the report.

Arrays are passed in anonymous memory files, which are freed when the last process closes them. The layout of
the report is that of `Report` in `data/harness.c`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from sparseflow.errors import FileFormatError

MAX_SAMPLES = 65536
"""Samples of each kernel that fit in a report."""

SIDES = ("candidate", "reference")
STAGES = ("before it started", "while it was loaded", "in its first run", "while it was timed", "at the end")

_HEADER = np.dtype(
    [
        ("step", "<i8"),
        ("pairs", "<i8"),
        ("calls", "<i8", 2),
        ("wall_ns", "<i8"),
        ("cpu_ns", "<i8"),
        ("waited_ns", "<i8"),
        ("threads", "<i8"),
        ("cpus", "<i8"),
        ("message", "S512"),
    ]
)
_PAIR = np.dtype(("<i8", 2))
REPORT_BYTES = _HEADER.itemsize + _PAIR.itemsize * MAX_SAMPLES
"""Size of a report."""


@dataclass(frozen=True, kw_only=True)
class HarnessReport:
    """Progress and samples of a harness.

    Attributes:
        stage: Kernel and stage that were active last, in words.
        finished: Whether the harness ran to its end.
        message: Error message; empty without an error.
        times_ms: Time of a call of the candidate and of the reference, milliseconds, float64, shape [samples,
            2]. The reference's column is 0 without a reference.
        wall_s, cpu_s: Wall time of the samples, and CPU time of all threads in it, seconds.
        wait_s: Time that runnable threads waited for a CPU, seconds; None if unknown, or if there were more
            threads than CPUs.
    """

    stage: str
    finished: bool
    message: str
    times_ms: np.ndarray
    wall_s: float
    cpu_s: float
    wait_s: float | None


def read_report(fd: int) -> HarnessReport:
    """Read a report from a file descriptor.

    Raises:
        FileFormatError: The content is invalid, because a kernel wrote to it.
    """
    head = np.frombuffer(os.pread(fd, _HEADER.itemsize, 0), dtype=_HEADER)[0]
    stage, side = divmod(int(head["step"]), len(SIDES))
    pairs, calls = int(head["pairs"]), head["calls"]
    if not (0 <= stage < len(STAGES) and 0 <= pairs <= MAX_SAMPLES and (calls >= 0).all()):
        raise FileFormatError("the report of the harness is invalid; a kernel wrote to it")
    raw = os.pread(fd, _PAIR.itemsize * pairs, _HEADER.itemsize)
    samples = np.frombuffer(raw, dtype="<i8").reshape(pairs, len(SIDES))
    wait_unknown = head["waited_ns"] < 0 or head["threads"] > head["cpus"]
    return HarnessReport(
        stage=f"the {SIDES[side]}, {STAGES[stage]}",
        finished=stage == len(STAGES) - 1,
        message=head["message"].decode(errors="replace"),
        times_ms=samples / 1e6 / np.maximum(calls, 1),
        wall_s=float(head["wall_ns"]) / 1e9,
        cpu_s=float(head["cpu_ns"]) / 1e9,
        wait_s=None if wait_unknown else float(head["waited_ns"]) / 1e9,
    )


@contextmanager
def open_memory_file(name: str) -> Iterator[int]:
    """Create an anonymous memory file for a `with` block and return its file descriptor."""
    number = os.memfd_create(f"sparseflow-{name}")
    try:
        yield number
    finally:
        os.close(number)


class ShmTransport:
    """Arrays in anonymous memory files; an array that is added again is not copied again."""

    def __init__(self, known: ShmTransport | None = None) -> None:
        # Keyed by address; the array is referenced, so that its memory is not reused.
        self._shared_files = {} if known is None else known._files
        self._files: dict[tuple[int, int], tuple[int, np.ndarray]] = {}

    def __enter__(self) -> ShmTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def file_descriptors(self) -> tuple[int, ...]:
        return tuple(number for files in (self._shared_files, self._files) for number, _ in files.values())

    def add(self, array: np.ndarray) -> int:
        """Copy an array to a memory file and return its file descriptor.

        Raises:
            OSError: There is not enough memory.
        """
        key = (array.ctypes.data, array.nbytes)
        entry = self._shared_files.get(key) or self._files.get(key)
        if entry is None:
            number = os.memfd_create("sparseflow-array")
            entry = self._files[key] = (number, array)
            remaining = array.reshape(-1).view(np.uint8).data
            while remaining:
                remaining = remaining[os.write(number, remaining) :]
        return entry[0]

    def close(self) -> None:
        for number, _ in self._files.values():
            os.close(number)
        self._files.clear()

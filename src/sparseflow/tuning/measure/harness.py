"""What the harness tells while it measures, in a file in memory that outlives it.

The layout is that of `Report` in `data/harness.c`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from sparseflow.errors import FileFormatError

MOST_PAIRS = 65536
"""Samples of each side that a report has room for."""

SIDES = ("candidate", "reference")
STAGES = ("before it started", "while it was loaded", "in its first run", "while it was timed", "at the end")

_HEAD = np.dtype(
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
ROOM = _HEAD.itemsize + _PAIR.itemsize * MOST_PAIRS
"""Bytes of a report."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """How far a harness came.

    Attributes:
        where: At whom and at what it was last, in words.
        finished: It came to its end.
        message: What it found wrong; empty where nothing was.
        times_ms: Milliseconds a call of the candidate and of the reference, float64, shape (samples, 2).
            Without a reference its column is zero.
        wall_s, cpu_s: What taking them took, and the CPU time of all threads meanwhile.
        waited_s: What its threads were ready to run and had no CPU; None where Linux does not tell, or where
            they were more than the CPUs and so waited for each other.
    """

    where: str
    finished: bool
    message: str
    times_ms: np.ndarray
    wall_s: float
    cpu_s: float
    waited_s: float | None


def read(file: int) -> Report:
    """Read the report behind a file descriptor.

    Raises:
        FileFormatError: It holds what no harness writes: a kernel wrote into it.
    """
    head = np.frombuffer(os.pread(file, _HEAD.itemsize, 0), dtype=_HEAD)[0]
    stage, side = divmod(int(head["step"]), len(SIDES))
    pairs, calls = int(head["pairs"]), head["calls"]
    if not (0 <= stage < len(STAGES) and 0 <= pairs <= MOST_PAIRS and (calls >= 0).all()):
        raise FileFormatError("the harness's report holds nonsense; a kernel has written into it")
    raw = os.pread(file, _PAIR.itemsize * pairs, _HEAD.itemsize)
    samples = np.frombuffer(raw, dtype="<i8").reshape(pairs, len(SIDES))
    silent = head["waited_ns"] < 0 or head["threads"] > head["cpus"]
    return Report(
        where=f"the {SIDES[side]}, {STAGES[stage]}",
        finished=stage == len(STAGES) - 1,
        message=head["message"].decode(errors="replace"),
        times_ms=samples / 1e6 / np.maximum(calls, 1),
        wall_s=float(head["wall_ns"]) / 1e9,
        cpu_s=float(head["cpu_ns"]) / 1e9,
        waited_s=None if silent else float(head["waited_ns"]) / 1e9,
    )


class MemoryFile:
    """An anonymous file in memory, open as long as its block lasts."""

    def __init__(self, name: str) -> None:
        self.number = os.memfd_create(f"sparseflow-{name}")

    def __enter__(self) -> MemoryFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.number)


class Handover:
    """Arrays in anonymous files, each handed over once however often it is added."""

    def __init__(self, known: Handover | None = None) -> None:
        # By where an array lies; the array is held, so that its memory cannot become another's meanwhile.
        self._known = {} if known is None else known._own
        self._own: dict[tuple[int, int], tuple[int, np.ndarray]] = {}

    def __enter__(self) -> Handover:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(number for files in (self._known, self._own) for number, _ in files.values())

    def add(self, array: np.ndarray) -> int:
        """The descriptor of the file that holds an array. Raises OSError where there is no room."""
        key = (array.ctypes.data, array.nbytes)
        found = self._known.get(key) or self._own.get(key)
        if found is None:
            number = os.memfd_create("sparseflow-array")
            found = self._own[key] = (number, array)
            rest = array.reshape(-1).view(np.uint8).data
            while rest:
                rest = rest[os.write(number, rest) :]
        return found[0]

    def close(self) -> None:
        for number, _ in self._own.values():
            os.close(number)
        self._own.clear()

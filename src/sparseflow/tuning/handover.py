"""Arrays on their way to another process, in files in memory that have no name.

Nothing is left of them once nobody has them open, however a process ends.
"""

from __future__ import annotations

import os

import numpy as np


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

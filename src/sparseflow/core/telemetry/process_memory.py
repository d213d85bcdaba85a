"""Memory of this process in RAM, as Linux counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def read_resident_bytes(*, peak: bool = False) -> int:
    """Return the resident memory of this process, or its peak since `measure_peak_bytes` reset it.

    Raises:
        OSError: This system does not count it.
    """
    name = "VmHWM:" if peak else "VmRSS:"
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise OSError(f"{_STATUS} has no {name}")


def release_free_memory() -> None:
    """Collect garbage and return free memory of the C library's allocator to the system.

    Raises:
        OSError: The C library cannot return memory.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError as error:
        raise OSError("the C library has no malloc_trim") from error


def measure_peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak of the resident memory during a call above that before the call.

    Raises:
        OSError: This system does not count it.
    """
    release_free_memory()
    _CLEAR.write_text(_RESET_PEAK)
    before = read_resident_bytes()
    run()
    return max(0, read_resident_bytes(peak=True) - before)

"""Resident memory of this process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from sparseflow.core.telemetry.process_memory import (
    measure_peak_bytes,
)

SIZE = 64 * 2**20


@pytest.fixture(autouse=True)
def _needs_linux() -> None:
    try:
        measure_peak_bytes(lambda: None)
    except OSError as error:
        pytest.skip(f"this system does not count memory: {error}")


def test_peak_counts_memory_that_a_call_frees() -> None:
    def allocate() -> None:
        np.ones(SIZE, dtype=np.uint8)

    peaks = [measure_peak_bytes(allocate) for _ in range(2)]
    assert all(0.9 * SIZE < peak < 1.2 * SIZE for peak in peaks), peaks


def test_resident_memory_falls_when_an_array_is_deleted() -> None:
    # Other threads of this process allocate, too, so a process of its own is measured.
    code = f"""
import numpy as np
from sparseflow.core.telemetry.process_memory import read_resident_bytes, release_free_memory

arrays = [np.ones({SIZE} // 64, dtype=np.uint8) for _ in range(64)]
before = read_resident_bytes()
arrays.clear()
release_free_memory()
print(before - read_resident_bytes())
"""
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(result.stdout) > 0.9 * SIZE

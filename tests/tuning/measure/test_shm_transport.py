"""Arrays are handed over once each, whole, and leave nothing."""

from __future__ import annotations

import gc
import os

import numpy as np

from sparseflow.tuning.measure.harness import Handover, MemoryFile


def content(number: int) -> bytes:
    return os.pread(number, os.fstat(number).st_size, 0)


def test_one_array_is_one_file() -> None:
    array, equal = np.arange(10), np.arange(10)
    with Handover() as files:
        first = files.add(array)
        assert files.add(array) == files.add(array.view()) == files.add(array.reshape(2, 5)) == first
        assert files.add(equal) != first
        assert files.add(array[:5]) != first
        assert content(first) == array.tobytes()
        assert len(files.numbers) == 3


def test_what_is_known_already_is_not_handed_over_again() -> None:
    array = np.arange(10)
    with Handover() as kept:
        first = kept.add(array)
        with Handover(kept) as files:
            assert files.add(array) == first
            second = files.add(np.ones(3))
            assert files.numbers == (first, second)
        assert kept.numbers == (first,)
        assert content(first) == array.tobytes()


def test_odd_arrays() -> None:
    with Handover() as files:
        for array in (np.array(3.5), np.zeros((0, 4)), np.array([True, False]), np.ones(2, complex)):
            assert content(files.add(array)) == array.tobytes()


def test_nothing_is_left_open() -> None:
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    with Handover() as files, MemoryFile("test") as file:
        files.add(np.arange(10))
        assert os.fstat(file.number).st_size == 0
    assert sorted(os.listdir("/proc/self/fd")) == before

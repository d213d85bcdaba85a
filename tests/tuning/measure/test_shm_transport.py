"""Arrays are handed over once each, whole, and leave nothing."""

from __future__ import annotations

import gc
import os

import numpy as np

from sparseflow.tuning.measure.harness import MemoryFile, ShmTransport


def content(number: int) -> bytes:
    return os.pread(number, os.fstat(number).st_size, 0)


def test_add_same_array_once() -> None:
    array, equal = np.arange(10), np.arange(10)
    with ShmTransport() as files:
        first = files.add(array)
        assert files.add(array) == files.add(array.view()) == files.add(array.reshape(2, 5)) == first
        assert files.add(equal) != first
        assert files.add(array[:5]) != first
        assert content(first) == array.tobytes()
        assert len(files.file_descriptors) == 3


def test_add_shared_array_is_not_copied() -> None:
    array = np.arange(10)
    with ShmTransport() as retained:
        first = retained.add(array)
        with ShmTransport(retained) as files:
            assert files.add(array) == first
            second = files.add(np.ones(3))
            assert files.file_descriptors == (first, second)
        assert retained.file_descriptors == (first,)
        assert content(first) == array.tobytes()


def test_add_odd_arrays() -> None:
    with ShmTransport() as files:
        for array in (np.array(3.5), np.zeros((0, 4)), np.array([True, False]), np.ones(2, complex)):
            assert content(files.add(array)) == array.tobytes()


def test_close_closes_all_files() -> None:
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    with ShmTransport() as files, MemoryFile("test") as file:
        files.add(np.arange(10))
        assert os.fstat(file.fd).st_size == 0
    assert sorted(os.listdir("/proc/self/fd")) == before

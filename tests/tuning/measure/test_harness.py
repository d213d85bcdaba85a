"""Data exchange with the timing harness: reports and shared-memory arrays."""

from __future__ import annotations

import gc
import os
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from sparseflow.errors import FileFormatError
from sparseflow.tuning.measure import harness
from sparseflow.tuning.measure.harness import ShmTransport, open_memory_file


@pytest.fixture
def file() -> Iterator[int]:
    number = os.memfd_create("report")
    os.ftruncate(number, harness.REPORT_BYTES)
    yield number
    os.close(number)


def write(
    file: int, *, step: int = 8, pairs: int = 2, calls: tuple[int, int] = (4, 2), remainder: tuple = ()
) -> None:
    numbers = remainder or (3_000_000_000, 5_000_000_000, 250_000_000, 2, 2)
    os.pwrite(file, struct.pack("<9q512s", step, pairs, *calls, *numbers, b"words"), 0)
    os.pwrite(file, struct.pack("<4q", 8_000_000, 1_000_000, 4_000_000, 3_000_000), 9 * 8 + 512)


def test_read_empty_report_is_not_started(file: int) -> None:
    report = harness.read_report(file)
    assert (report.stage, report.finished, report.message) == (
        "the candidate, before it started",
        False,
        "",
    )
    assert report.times_ms.shape == (0, 2)


def test_read_full_report(file: int) -> None:
    write(file)
    report = harness.read_report(file)
    assert report.finished
    assert report.message == "words"
    np.testing.assert_array_equal(report.times_ms, [[2.0, 0.5], [1.0, 1.5]])
    assert (report.wall_s, report.cpu_s, report.wait_s) == (3.0, 5.0, 0.25)


def test_read_stages_and_sides(file: int) -> None:
    write(file, step=2 * 2 + 1)
    assert harness.read_report(file).stage == "the reference, in its first run"
    assert not harness.read_report(file).finished


@pytest.mark.parametrize(("waited_ns", "threads"), [(-1, 2), (10**9, 3)])
def test_read_unknown_wait_is_none(file: int, waited_ns: int, threads: int) -> None:
    write(file, remainder=(10**9, 10**9, waited_ns, threads, 2))
    assert harness.read_report(file).wait_s is None


@pytest.mark.parametrize(
    "bad",
    [{"step": -1}, {"step": 10}, {"pairs": -1}, {"pairs": harness.MAX_SAMPLES + 1}, {"calls": (1, -1)}],
)
def test_read_invalid_report_raises(file: int, bad: dict) -> None:
    write(file, **bad)
    with pytest.raises(FileFormatError):
        harness.read_report(file)


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
    with ShmTransport() as shared:
        first = shared.add(array)
        with ShmTransport(shared) as files:
            assert files.add(array) == first
            second = files.add(np.ones(3))
            assert files.file_descriptors == (first, second)
        assert shared.file_descriptors == (first,)
        assert content(first) == array.tobytes()


def test_add_odd_arrays() -> None:
    with ShmTransport() as files:
        for array in (np.array(3.5), np.zeros((0, 4)), np.array([True, False]), np.ones(2, complex)):
            assert content(files.add(array)) == array.tobytes()


def test_close_closes_all_files() -> None:
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    with ShmTransport() as files, open_memory_file("test") as file:
        files.add(np.arange(10))
        assert os.fstat(file).st_size == 0
    assert sorted(os.listdir("/proc/self/fd")) == before

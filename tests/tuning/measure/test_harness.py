"""Reports of the harness are read as they were written, and nonsense is told apart."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from sparseflow.errors import FileFormatError
from sparseflow.tuning.measure import harness


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
    messages = harness.read_report(file)
    assert (messages.stage, messages.finished, messages.message) == (
        "the candidate, before it started",
        False,
        "",
    )
    assert messages.times_ms.shape == (0, 2)


def test_read_full_report(file: int) -> None:
    write(file)
    messages = harness.read_report(file)
    assert messages.finished
    assert messages.message == "words"
    np.testing.assert_array_equal(messages.times_ms, [[2.0, 0.5], [1.0, 1.5]])
    assert (messages.wall_s, messages.cpu_s, messages.wait_s) == (3.0, 5.0, 0.25)


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

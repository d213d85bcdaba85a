"""The roofline: fitted to a device that follows one, what it guesses, and its record."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("onnx")

from sparseflow.errors import FileFormatError, InputError
from sparseflow.latency.kernels import Kernel
from sparseflow.latency.roofline import Roofline
from tests.latency.synthetic import make_kernel, make_matmul

TRUE = Roofline(launch_ms=0.02, flops_per_s=5e9, bytes_per_s=1e9, typical=1.0, low=1.0, high=1.0)


def copy(elements: int) -> Kernel:
    return make_kernel("Identity", [(elements,)], (elements,))


KERNELS = [
    *(make_matmul(n, n, n) for n in range(8, 400, 16)),
    *(make_matmul(1, n, n) for n in range(8, 400, 16)),
    *(copy(10 ** (n % 7)) for n in range(20)),
]


def test_a_device_that_follows_a_roofline_is_recovered() -> None:
    found = Roofline.fit(KERNELS, [TRUE.floor_ms(kernel) for kernel in KERNELS])
    assert found.launch_ms == pytest.approx(TRUE.launch_ms, rel=0.02)
    assert found.flops_per_s == pytest.approx(TRUE.flops_per_s, rel=0.02)
    assert found.bytes_per_s == pytest.approx(TRUE.bytes_per_s, rel=0.02)
    assert [found.low, found.typical, found.high] == pytest.approx([1.0] * 3, rel=0.05)


def test_how_far_above_the_bound_kernels_stay_is_what_a_guess_reckons_with() -> None:
    above = [1.0, 2.0, 4.0]
    taken = [TRUE.launch_ms + above[n % 3] * TRUE.work_ms(kernel) for n, kernel in enumerate(KERNELS)]
    found = Roofline.fit(KERNELS, taken)
    assert found.typical == pytest.approx(2.0, rel=0.1) and found.high == pytest.approx(4.0, rel=0.1)
    big = make_matmul(900, 900, 900)
    typical, low, high = found.guess_ms(big)
    assert found.floor_ms(big) * 0.9 < low < typical < high
    assert typical == pytest.approx(TRUE.launch_ms + 2.0 * TRUE.work_ms(big), rel=0.1)


def test_the_bound_holds_where_nothing_that_is_bound_by_memory_is_clear_of_the_launch() -> None:
    kernels = [copy(1), *(make_matmul(n, n, n) for n in range(100, 200, 10)), *[copy(5000)] * 10]
    taken = [TRUE.floor_ms(kernel) for kernel in kernels]
    assert taken[-1] < 4 * TRUE.launch_ms
    found = Roofline.fit(kernels, taken)
    assert all(found.floor_ms(k) <= 1.5 * ms for k, ms in zip(kernels, taken, strict=True))


@settings(deadline=None)
@given(
    st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=20),
    st.integers(1, 500),
    st.floats(1e-4, 1e3),
)
def test_whatever_was_measured_guesses_are_ordered_and_waits_are_shares(
    taken: list[float], size: int, latency_ms: float
) -> None:
    found = Roofline.fit(KERNELS[-len(taken) :], taken)
    assert Roofline.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    for kernel in (make_matmul(size, size, size), copy(size), make_kernel("Shape", [], ())):
        typical, low, high = found.guess_ms(kernel)
        assert 0.0 < found.launch_ms <= low <= typical <= high
        waits = found.waits(kernel, latency_ms)
        assert sum(waits) == pytest.approx(1.0) and all(-1e-12 <= share <= 1.0 for share in waits)


def test_waits_name_what_a_kernel_is_bound_by() -> None:
    arithmetic, memory, launch = (
        TRUE.waits(kernel, TRUE.floor_ms(kernel))
        for kernel in (make_matmul(900, 900, 900), copy(10**7), copy(1))
    )
    assert arithmetic[0] > 0.9 and memory[1] > 0.99 and launch[2] > 0.99


@pytest.mark.parametrize("taken", [[], [1.0, 2.0]])
def test_as_many_latencies_as_kernels_are_needed(taken: list[float]) -> None:
    with pytest.raises(InputError, match="some of both are needed"):
        Roofline.fit(KERNELS[: len(taken) // 2], taken)


@pytest.mark.parametrize(
    "record",
    [
        TRUE.to_dict() | {"launch_ms": 0.0},
        TRUE.to_dict() | {"flops_per_s": float("nan")},
        TRUE.to_dict() | {"high": float("inf")},
        TRUE.to_dict() | {"typical": "much"},
        TRUE.to_dict() | {"typical": None},
        TRUE.to_dict() | {"surprise": 1.0},
        {"launch_ms": 1.0},
        [1.0],
        None,
    ],
)
def test_a_damaged_record_is_refused(record: Any) -> None:
    with pytest.raises(FileFormatError, match="roofline cannot be read"):
        Roofline.from_dict(record)

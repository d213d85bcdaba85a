"""Rooflines: fit, estimates and records."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("onnx")

from sparseflow.errors import InputError
from sparseflow.latency.graph.kernels import KernelSpec
from sparseflow.latency.model.roofline import Roofline
from tests.latency.records import from_record, to_record
from tests.latency.synthetic import make_kernel, make_matmul

TRUE = Roofline(
    launch_ms=0.02, flops_per_s=5e9, integer_ops_per_s=2e10, bytes_per_s=1e9, typical=1.0, low=1.0, high=1.0
)


def copy(elements: int) -> KernelSpec:
    return make_kernel("Identity", [(elements,)], (elements,))


KERNELS = [
    *(make_matmul(n, n, n) for n in range(8, 400, 16)),
    *(make_matmul(1, n, n) for n in range(8, 400, 16)),
    *(copy(10 ** (n % 7)) for n in range(20)),
]


def test_fit_recovers_roofline() -> None:
    roofline = Roofline.fit(KERNELS, [TRUE.compute_bound_ms(kernel) for kernel in KERNELS])
    assert roofline.launch_ms == pytest.approx(TRUE.launch_ms, rel=0.02)
    assert roofline.flops_per_s == pytest.approx(TRUE.flops_per_s, rel=0.02)
    assert roofline.bytes_per_s == pytest.approx(TRUE.bytes_per_s, rel=0.02)
    assert [roofline.low, roofline.typical, roofline.high] == pytest.approx([1.0] * 3, rel=0.05)


def test_fit_integer_rate() -> None:
    integers = [
        make_kernel("QLinearMatMul", [(n, n), (), (), (n, n)], (n, n), dtype="int8")
        for n in range(200, 400, 8)
    ]
    kernels = [*KERNELS, *integers]
    roofline = Roofline.fit(kernels, [TRUE.compute_bound_ms(kernel) for kernel in kernels])
    assert roofline.flops_per_s == pytest.approx(TRUE.flops_per_s, rel=0.02)
    assert roofline.integer_ops_per_s == pytest.approx(TRUE.integer_ops_per_s, rel=0.02)


def test_estimate_uses_typical_ratio() -> None:
    above = [1.0, 2.0, 4.0]
    latencies_ms = [
        TRUE.launch_ms + above[n % 3] * TRUE.compute_work_ms(kernel) for n, kernel in enumerate(KERNELS)
    ]
    roofline = Roofline.fit(KERNELS, latencies_ms)
    assert roofline.typical == pytest.approx(2.0, rel=0.1) and roofline.high == pytest.approx(4.0, rel=0.1)
    big = make_matmul(900, 900, 900)
    typical, low, high = roofline.estimate_ms(big)
    assert (low, high) == pytest.approx((typical / 10.0, typical * 100.0))
    assert typical == pytest.approx(TRUE.launch_ms + 2.0 * TRUE.compute_work_ms(big), rel=0.1)


def test_estimate_of_unknown_work_is_unbounded() -> None:
    unknown = make_kernel("NeverHeardOf", [(64, 64)], (64, 64))
    typical, low, high = TRUE.estimate_ms(unknown)
    assert typical == TRUE.compute_bound_ms(unknown) and (low, high) == (0.0, math.inf)


def test_fit_bound_holds_for_short_kernels() -> None:
    kernels = [copy(1), *(make_matmul(n, n, n) for n in range(100, 200, 10)), *[copy(5000)] * 10]
    latencies_ms = [TRUE.compute_bound_ms(kernel) for kernel in kernels]
    assert latencies_ms[-1] < 4 * TRUE.launch_ms
    roofline = Roofline.fit(kernels, latencies_ms)
    assert all(roofline.compute_bound_ms(k) <= 1.5 * ms for k, ms in zip(kernels, latencies_ms, strict=True))


@given(
    st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=20),
    st.integers(1, 500),
    st.floats(1e-4, 1e3),
)
def test_estimates_ordered_and_shares_sum_to_one(
    latencies_ms: list[float], size: int, latency_ms: float
) -> None:
    roofline = Roofline.fit(KERNELS[-len(latencies_ms) :], latencies_ms)
    assert from_record(Roofline, to_record(roofline)) == roofline
    for kernel in (make_matmul(size, size, size), copy(size), make_kernel("Shape", [], ())):
        typical, low, high = roofline.estimate_ms(kernel)
        assert 0.0 < low < typical < high and roofline.launch_ms <= typical
        waits = roofline.compute_bottleneck_shares(kernel, latency_ms)
        assert sum(waits) == pytest.approx(1.0) and all(-1e-12 <= share <= 1.0 for share in waits)


def test_bottleneck_shares() -> None:
    arithmetic, memory, launch = (
        TRUE.compute_bottleneck_shares(kernel, TRUE.compute_bound_ms(kernel))
        for kernel in (make_matmul(900, 900, 900), copy(10**7), copy(1))
    )
    assert arithmetic[0] > 0.9 and memory[1] > 0.99 and launch[2] > 0.99


@pytest.mark.parametrize("latencies_ms", [[], [1.0, 2.0]])
def test_fit_length_mismatch_raises(latencies_ms: list[float]) -> None:
    with pytest.raises(InputError):
        Roofline.fit(KERNELS[: len(latencies_ms) // 2], latencies_ms)


@pytest.mark.parametrize(
    "record",
    [
        to_record(TRUE) | {"launch_ms": 0.0},
        to_record(TRUE) | {"flops_per_s": float("nan")},
        to_record(TRUE) | {"high": float("inf")},
        to_record(TRUE) | {"typical": "much"},
        to_record(TRUE) | {"typical": None},
        to_record(TRUE) | {"surprise": 1.0},
        {"launch_ms": 1.0},
        [1.0],
        None,
    ],
)
def test_roofline_damaged_record_raises(record: Any) -> None:
    with pytest.raises(ValueError):
        from_record(Roofline, record)

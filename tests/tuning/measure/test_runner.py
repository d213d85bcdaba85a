"""Timing of kernels in a separate process, including kernels that fail."""

from __future__ import annotations

import gc
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparseflow.errors import InputError
from sparseflow.tuning.codegen.compile import compile_source
from sparseflow.tuning.measure import runner
from sparseflow.tuning.measure.harness import MAX_SAMPLES
from sparseflow.tuning.measure.runner import KernelJob, KernelTiming, MeasurementSession

HEAD = """
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
void sparseflow_kernel(const void *const *inputs, void *const *outputs) {
    float *y = outputs[0];
"""
AXPY = """
    const float *x = inputs[0];
    #pragma omp parallel for num_threads(2)
    for (int i = 0; i < 1000; i++) y[i] = 2 * x[i] + 1;
"""
HANG = "for (;;) pause();"
QUICK = {"repeats": 3, "min_time_s": 0.0, "max_time_s": 60.0, "timeout_s": 120.0}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    gc.collect()  # garbage of other tests must not close files during this test
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before


def kernel(
    cache: Path,
    body: str,
    *inputs: np.ndarray,
    shape: tuple[int, ...] = (1000,),
    dtype: str = "float32",
) -> KernelJob:
    library = compile_source(HEAD + body + "\n}\n", cache_dir=cache)
    return KernelJob(library=library, inputs=inputs, output_shape=shape, output_dtype=np.dtype(dtype))


def measure_kernel(
    job: KernelJob, reference: KernelJob | None = None, *, cache_dir: Path, **settings: Any
) -> KernelTiming:
    with MeasurementSession(reference, cache_dir=cache_dir) as session:
        return session.measure(job, **settings)


@pytest.fixture
def axpy(cache: Path) -> KernelJob:
    return kernel(cache, AXPY, np.arange(1000, dtype=np.float32))


def test_measure_kernel_alone(axpy: KernelJob, cache: Path) -> None:
    timing = measure_kernel(axpy, **{**QUICK, "repeats": 5}, cache_dir=cache)
    assert timing.error is None
    np.testing.assert_array_equal(timing.output, 2 * axpy.inputs[0] + 1)
    assert timing.output.dtype == np.float32
    assert len(timing.latency_ms) >= 5
    assert all(0 < sample < math.inf for sample in timing.latency_ms)
    assert timing.min_ms == min(timing.latency_ms)
    assert timing.reference_ms == ()
    assert isinstance(timing.contended, bool)
    assert timing.usage is not None
    assert timing.usage.wall_s > 0
    assert timing.usage.cpu_s > 0
    with pytest.raises(InputError):
        _ = timing.ratio


def test_measure_with_reference(axpy: KernelJob, cache: Path) -> None:
    slow = kernel(cache, "usleep(3000); y[0] = 1;", shape=(1,))
    timing = measure_kernel(slow, axpy, **QUICK, cache_dir=cache)
    assert timing.error is None
    assert len(timing.reference_ms) == len(timing.latency_ms) >= 3
    # Only the candidate sleeps, never shorter than requested.
    assert min(timing.latency_ms) >= 3.0 and min(timing.reference_ms) > 0.0
    pairs = zip(timing.latency_ms, timing.reference_ms, strict=True)
    assert timing.ratio == statistics.median(private / reference for private, reference in pairs)
    np.testing.assert_array_equal(timing.output, [1])


def test_measure_reference_against_itself(axpy: KernelJob, cache: Path) -> None:
    timing = measure_kernel(axpy, axpy, **QUICK, cache_dir=cache)
    assert timing.error is None
    assert timing.ratio > 0


def test_measure_min_time_takes_more_samples(axpy: KernelJob, cache: Path) -> None:
    for _ in range(20):
        timing = measure_kernel(axpy, repeats=1, min_time_s=0.1, cache_dir=cache)
        assert timing.usage is not None and timing.usage.wall_s >= 0.1
        # On a busy machine one sample may take all of the time.
        if len(timing.latency_ms) > 1:
            return
    pytest.fail("never more than one")


def test_measure_max_time_takes_fewer_samples(cache: Path) -> None:
    slow = kernel(cache, "usleep(5000); y[0] = 1;", shape=(1,))
    assert 1 <= len(measure_kernel(slow, repeats=1000, max_time_s=0.05, cache_dir=cache).latency_ms) < 1000


def test_measure_slow_first_run_is_only_sample(cache: Path) -> None:
    note = "static int calls; y[0] = ++calls; usleep(60000); if (calls > 1) abort();"
    timing = measure_kernel(kernel(cache, note, shape=(1,)), min_time_s=0.0, max_time_s=0.05, cache_dir=cache)
    assert timing.error is None
    assert len(timing.latency_ms) == 1
    assert timing.min_ms >= 60


def test_measure_slow_candidate_is_stopped(axpy: KernelJob, cache: Path) -> None:
    with MeasurementSession(axpy, cache_dir=cache) as session:
        timing = session.measure(kernel(cache, HANG), repeats=3, min_time_s=0.0, max_slowdown=1.5)
        assert timing.error is not None and "too many times as long as the reference" in timing.error
        assert timing.too_slow and "first run" in timing.error and math.isinf(timing.ratio)
        slow = kernel(cache, "usleep(5000); y[0] = 1;", shape=(1,))
        timing = (session.measure(slow, repeats=3, min_time_s=0.0, max_slowdown=1.5) for _ in range(50))
        assert any(item.error is None for item in timing), "within the grace period, unless it wakes late"
        for wrong in (0.5, 1e9, math.nan):
            with pytest.raises(InputError):
                session.measure(axpy, max_slowdown=wrong)
    with MeasurementSession(cache_dir=cache) as session, pytest.raises(InputError):
        session.measure(axpy, max_slowdown=2.0)


def test_measure_unwritten_output_is_nan(cache: Path) -> None:
    assert np.isnan(measure_kernel(kernel(cache, ""), **QUICK, cache_dir=cache).output).all()
    subset = measure_kernel(kernel(cache, "y[3] = 3;"), **QUICK, cache_dir=cache).output
    assert subset[3] == 3
    assert np.isnan(np.delete(subset, 3)).all()


def test_measure_output_is_from_first_run(cache: Path) -> None:
    timing = measure_kernel(
        kernel(cache, "static int calls; y[0] = ++calls;", shape=(1,)), **QUICK, cache_dir=cache
    )
    np.testing.assert_array_equal(timing.output, [1])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3, 4)])
def test_measure_output_shapes(shape: tuple[int, ...], cache: Path) -> None:
    size = math.prod(shape)
    body = f"for (int i = 0; i < {size}; i++) ((int64_t *)y)[i] = i;"
    timing = measure_kernel(kernel(cache, body, shape=shape, dtype="int64"), **QUICK, cache_dir=cache)
    assert timing.error is None
    np.testing.assert_array_equal(timing.output, np.arange(size).reshape(shape))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 5000) | st.integers(2**21 - 70, 2**21 + 70), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_measure_arrays_are_exact_and_aligned(sizes: list[int], seed: int, cache: Path) -> None:
    generator = np.random.default_rng(seed)
    arrays = [generator.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    body = """
    const int64_t *sizes = inputs[0];
    char *to = (char *)y;
    for (int64_t i = 1; i <= sizes[0]; i++) {
        if ((uintptr_t)inputs[i] % 64 || (uintptr_t)y % 64) abort();
        memcpy(to, inputs[i], sizes[i]);
        to += sizes[i];
    }
    """
    header = np.array([len(sizes), *sizes], dtype=np.int64)
    job = kernel(cache, body, header, *arrays, shape=(sum(sizes),), dtype="uint8")
    timing = measure_kernel(job, repeats=1, min_time_s=0.0, cache_dir=cache)
    assert timing.error is None
    np.testing.assert_array_equal(timing.output, np.concatenate(arrays))


FAILURES = {
    "null": ("*(volatile int *)8 = 1;", ["candidate", "first run", "SIGSEGV"]),
    "abort": ("abort();", ["candidate", "first run", "SIGABRT"]),
    "input written": ("((float *)inputs[0])[0] = 1;", ["SIGSEGV"]),
    "input read past its end": ("y[0] = ((volatile float *)inputs[0])[1024];", ["SIGSEGV"]),
    "output written past its end": ("for (int i = 0; i < 1100; i++) y[i] = 1;", ["SIGSEGV"]),
    "exit": ("exit(3);", ["first run", "status 3"]),
    "exit as if all was well": ("exit(0);", ["first run", "status 0"]),
    "last words": ('write(2, "my last words", 13); _exit(9);', ["status 9: my last words"]),
    "later": ("static int calls; y[0] = 1; if (++calls > 1) abort();", ["while it was timed", "SIGABRT"]),
    "killed": ("raise(SIGKILL);", ["SIGKILL", "out of memory"]),
    "stack": ("volatile char room[64 << 20]; room[0] = 1; y[0] = room[0];", ["SIGSEGV"]),
}


@pytest.mark.parametrize("name", FAILURES)
def test_measure_failing_kernel_has_error(name: str, axpy: KernelJob, cache: Path) -> None:
    body, expected = FAILURES[name]
    job = kernel(cache, body, *axpy.inputs)
    timing = measure_kernel(job, axpy, **QUICK, cache_dir=cache)
    assert timing.error is not None
    for words in expected:
        assert words in timing.error
    assert (timing.latency_ms, timing.reference_ms, timing.output.size) == ((), (), 0)
    assert timing.min_ms == timing.ratio == math.inf
    assert not timing.contended
    assert not timing.drifted


def test_measure_failing_reference_is_named(axpy: KernelJob, cache: Path) -> None:
    timing = measure_kernel(axpy, kernel(cache, "abort();"), **QUICK, cache_dir=cache)
    assert timing.error is not None
    assert timing.error.startswith("the reference, in its first run")


def test_measure_hanging_kernel_is_killed(axpy: KernelJob, cache: Path) -> None:
    job = kernel(cache, HANG)
    for timeout_s in (0.5, 5.0, 50.0):
        timing = measure_kernel(job, axpy, timeout_s=timeout_s, cache_dir=cache)
        assert processes(job.library) == []
        if timing.error is not None and "in its first run" in timing.error:
            break  # else the machine was too slow to start the run
    assert timing.error == f"the candidate, in its first run: killed after {timeout_s:g} s"


def test_measure_hanging_threads_are_killed(cache: Path) -> None:
    body = "\n#pragma omp parallel num_threads(2)\n{ volatile int on = 1; while (on); }"
    timing = measure_kernel(kernel(cache, body), timeout_s=0.5, cache_dir=cache)
    assert timing.error is not None
    assert "0.5 s" in timing.error


def test_harness_dies_with_parent(cache: Path) -> None:
    job = kernel(cache, HANG)
    code = (
        "import sys\nfrom pathlib import Path\nimport numpy as np\n"
        "from sparseflow.tuning.measure.runner import KernelJob, MeasurementSession\n"
        "job = KernelJob(library=Path(sys.argv[1]), inputs=(), output_shape=(1,), "
        "output_dtype=np.dtype('f4'))\n"
        "with MeasurementSession(cache_dir=Path(sys.argv[2])) as session:\n"
        "    session.measure(job, timeout_s=900, max_time_s=2)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(job.library), str(cache)]) as parent:
        try:
            while len(processes(job.library)) < 2:
                assert parent.poll() is None
                time.sleep(0.01)
        finally:
            parent.send_signal(signal.SIGKILL)
    for _ in range(500):
        if not processes(job.library):
            break
        time.sleep(0.01)
    assert processes(job.library) == []


def processes(library: Path) -> list[str]:
    """List the processes with a library in their command line."""
    result = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(library).encode() in entry.read_bytes():
                result.append(entry.parent.name)
        except OSError:
            continue
    return result


def test_measure_library_without_function_fails(cache: Path) -> None:
    library = compile_source("int nothing;", cache_dir=cache)
    job = KernelJob(library=library, inputs=(), output_shape=(1,), output_dtype=np.dtype("f4"))
    timing = measure_kernel(job, cache_dir=cache)
    assert timing.error is not None
    assert "while it was loaded: `sparseflow_kernel` is missing" in timing.error


def test_measure_invalid_library_fails(tmp_path: Path, cache: Path) -> None:
    for name, content in (("absent.so", None), ("text.so", b"text")):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        job = KernelJob(library=tmp_path / name, inputs=(), output_shape=(1,), output_dtype=np.dtype("f4"))
        timing = measure_kernel(job, cache_dir=cache)
        assert timing.error is not None
        assert "cannot be loaded" in timing.error
        assert name in timing.error


def test_measure_relative_library_path(
    axpy: KernelJob, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.so").write_bytes(axpy.library.read_bytes())
    monkeypatch.chdir(tmp_path)
    job = KernelJob(
        library=Path("mine.so"), inputs=axpy.inputs, output_shape=(1000,), output_dtype=np.dtype("f4")
    )
    assert measure_kernel(job, **QUICK, cache_dir=cache).error is None


def test_measure_arrays_beyond_limit_fail(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_check_memory", lambda _: None)
    job = kernel(cache, "y[0] = 1;", shape=(2**26,))
    timing = measure_kernel(job, memory_bytes=2**27, cache_dir=cache)
    assert timing.error is not None
    assert "out of memory" in timing.error
    assert f"limited to {2**27} bytes" in timing.error


def test_measure_allocations_count(cache: Path) -> None:
    body = "char *volatile room = malloc(1 << 28); room[0] = 1; y[0] = room[0]; free(room);"
    timing = measure_kernel(kernel(cache, body, shape=(1,)), memory_bytes=2**27, cache_dir=cache)
    assert timing.error is not None
    assert "SIGSEGV" in timing.error and "134217728" in timing.error


def test_measure_arrays_beyond_memory_fail(cache: Path) -> None:
    timing = measure_kernel(kernel(cache, "y[0] = 1;", shape=(2**50,)), cache_dir=cache)
    assert timing.error is not None
    assert "8589934592 MiB" in timing.error


def test_measure_drops_inherited_settings(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    monkeypatch.setenv("OMP_PROC_BIND", "spread")
    monkeypatch.setenv("LD_PRELOAD", "")
    body = """
    char *bind = getenv("OMP_PROC_BIND");
    y[0] = !getenv("OMP_NUM_THREADS") && !getenv("LD_PRELOAD") && bind && !strcmp(bind, "close");
    """
    np.testing.assert_array_equal(
        measure_kernel(kernel(cache, body, shape=(1,)), **QUICK, cache_dir=cache).output, [1]
    )


def test_session_measures_several_candidates(axpy: KernelJob, cache: Path) -> None:
    failing = kernel(cache, "abort();", *axpy.inputs)
    with MeasurementSession(axpy, cache_dir=cache) as session:
        for job in (axpy, failing, axpy):
            timing = session.measure(job, **QUICK)
            assert (timing.error is None) == (job is axpy)
    with pytest.raises(InputError):
        session.measure(axpy)


def test_session_copies_reference_arrays(cache: Path) -> None:
    copy = "y[0] = *(const float *)inputs[0]; y[1] = *(const float *)inputs[1];"
    shared, private = np.array([1], np.float32), np.array([2], np.float32)
    job = kernel(cache, copy, shared, private, shape=(2,))
    with MeasurementSession(kernel(cache, "y[0] = 1;", shared, shape=(1,)), cache_dir=cache) as session:
        np.testing.assert_array_equal(session.measure(job, **QUICK).output, [1, 2])
        shared[0], private[0] = 3, 4
        np.testing.assert_array_equal(session.measure(job, **QUICK).output, [1, 4])
    with MeasurementSession(shared_arrays=[private], cache_dir=cache) as session:
        shared[0], private[0] = 5, 6
        np.testing.assert_array_equal(session.measure(job, **QUICK).output, [5, 4])


@pytest.mark.parametrize(
    "bad",
    [
        {"repeats": 0},
        {"repeats": MAX_SAMPLES + 1},
        {"min_time_s": -1},
        {"min_time_s": 3.0, "max_time_s": 2.0},
        {"min_time_s": math.nan},
        {"max_time_s": math.inf},
        {"timeout_s": 0},
        {"timeout_s": math.inf},
        {"memory_bytes": 0},
    ],
)
def test_measure_invalid_arguments_raise(bad: dict, axpy: KernelJob, cache: Path) -> None:
    with pytest.raises(InputError, match=next(iter(bad))):
        measure_kernel(axpy, **bad, cache_dir=cache)


def test_job_invalid_arrays_raise() -> None:
    job = KernelJob(library=Path("k.so"), inputs=(), output_shape=(1,), output_dtype=np.dtype("f4"))
    good = np.zeros((3, 4))
    for bad in (good.T, good[:, :2], np.array([object()])):
        with pytest.raises(InputError):
            replace(job, inputs=(good, bad))
    with pytest.raises(InputError):
        replace(job, output_shape=(1, -1))


def test_job_byte_counts() -> None:
    job = KernelJob(
        library=Path("k.so"), inputs=(np.zeros(3),), output_shape=(2, 5), output_dtype=np.dtype("f4")
    )
    assert (job.output_bytes, job.total_bytes) == (40, 64)


def measured(latency_ms: tuple[float, ...], reference_ms: tuple[float, ...] = ()) -> KernelTiming:
    return KernelTiming(
        latency_ms=latency_ms,
        reference_ms=reference_ms,
        output=np.zeros(1),
        contended=False,
        drifted=False,
        error=None,
    )


def test_ratio_is_median_of_pairs() -> None:
    timing = measured((1.0, 20.0, 3.0), (2.0, 40.0, 3.0))
    assert timing.ratio == 0.5
    assert timing.min_ms == 1.0


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ((), False),
        ((1.0, 9.0, 9.0), False),
        ((1.0, 1.0, 1.0, 1.0), False),
        ((1.0, 1.0, 1.05, 1.05), False),
        ((1.0, 1.0, 1.2, 1.2), True),
        ((1.2, 1.2, 1.0, 1.0), True),
        ((1.0, 1.0, 1.0, 50.0, 1.0, 1.0, 1.0), False),
    ],
)
def test_drift_detection(samples: tuple[float, ...], expected: bool) -> None:
    assert runner._has_drifted(samples) is expected

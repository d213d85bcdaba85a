"""Paired times of a tuned kernel and a baseline."""

from __future__ import annotations

import ctypes
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import resources
from multiprocessing import get_context
from typing import Any, Self

import numpy as np

from sparseflow.core.telemetry.cpu_contention import MAX_OTHER_SHARE, CpuUsageMonitor
from sparseflow.errors import RunError
from sparseflow.tuning.codegen.compile import compile_program
from sparseflow.tuning.codegen.kernel import CompiledKernel
from sparseflow.tuning.measure.evaluator import TOLERANCE
from sparseflow.tuning.measure.runner import (
    OPENMP_ENVIRONMENT,
    KernelJob,
    KernelTiming,
    MeasurementSession,
)
from sparseflow.tuning.schedule.problem import SparseProblem

PAIRS = 30
PROCESSES = 6
"""Processes of a comparison; the memory layout of a process changes the time of a kernel by some percent."""

TRIES = 2
"""Maximum number of processes relative to `PROCESSES`, if some are disturbed."""

TIMEOUT_S = 120.0
"""Time limit of a process, which includes the preparation of a library."""

CLEAR, CLEAR_PROCESSES = 1.25, 2
"""A comparison ends after that many processes if the kernel is more than that many times as fast in each."""

CLOSE = 1.1
"""Forms of a baseline that are at most this many times as slow as its fastest are compared in pairs."""

SAMPLE_S = 1e-3
"""Minimum duration of a sample of calls from Python, as in the runner."""

TURNS, TURN_S = 6, 0.25
"""Turns of a comparison of calls from Python, and the duration of each, seconds.

The first half of a turn does not count: threads that start on one CPU are only separated after some 100 ms of
continuous work.
"""

MALLOC_ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=4294967295"
}
"""Settings of the allocator for libraries that allocate results: huge pages, as the runner's arrays have, and
reuse of freed memory. By default every call touches the pages of a large result for the first time."""

Inputs = tuple[np.ndarray, ...]
Check = Callable[[np.ndarray], bool]
MakeCalls = Callable[[SparseProblem, int], Mapping[str, Callable[..., Any]]]
"""(problem, threads) -> form of the baseline -> function of the dense inputs."""

_LOADED = "    memset(kernel.output, 0xFF, kernel.output_bytes);\n"
_PREPARE = """\
    void (*prepare)(const void *const *inputs, void *const *outputs);
    *(void **)&prepare = dlsym(library, "sparseflow_prepare");
    if (prepare)
        prepare(kernel.inputs, (void *[]){kernel.output});
"""


class LibraryJob(KernelJob):
    """A library's kernel; the last row of its output starts with the seconds of its preparation."""


class ComparisonSession(MeasurementSession):
    """A session whose harness calls `sparseflow_prepare` of a library when it loads it.

    In the first call the preparation would count as the duration of a call. The runner takes one call of a
    slow kernel as a sample, so a library would run with cold caches.
    """

    def __enter__(self) -> Self:
        super().__enter__()
        source = (resources.files("sparseflow.tuning") / "data" / "harness.c").read_text(encoding="utf-8")
        assert source.count(_LOADED) == 1
        self._harness = compile_program(source.replace(_LOADED, _LOADED + _PREPARE))
        return self


def checker(problem: SparseProblem, inputs: Inputs) -> Check:
    """Create a function that compares an output with scipy's result in float64."""
    expected = problem.compute_reference(inputs)
    scale = float(np.abs(expected).max(initial=0.0)) or 1.0

    def right(output: np.ndarray) -> bool:
        error = np.abs(output[: len(expected)] - expected).max(initial=0.0)
        return bool(error <= TOLERANCE[problem.dtype] * scale)

    return right


def slower(baseline: KernelJob, tuned: KernelJob, right: Check, processes: int = PROCESSES) -> dict[str, Any]:
    """Measure the time of a baseline over the tuned kernel's: median over processes of medians over pairs.

    Two processes are enough for a clear result, `CLEAR`.
    The two kernels take turns in loading their arrays first, because the first arrays may get better pages.
    """
    result: list[tuple[KernelTiming, list[float]]] = []
    attempts = 0
    while len(result) < processes:
        clear = [statistics.median(pairs) > CLEAR for _, pairs in result]
        if len(clear) >= CLEAR_PROCESSES and all(clear):
            break
        attempts += 1
        tuned_first = len(result) % 2 == 1
        first, second = (tuned, baseline) if tuned_first else (baseline, tuned)
        with ComparisonSession(second) as session:
            item = _measure(session, first, right, min_time_s=0.1, max_time_s=1.0)
        if attempts >= TRIES * processes or not (item.contended or item.drifted):
            pairs = [a / b for a, b in zip(item.latency_ms, item.reference_ms, strict=True)]
            result.append((item, [1.0 / pair for pair in pairs] if tuned_first else pairs))
    times = [
        (item.reference_ms, item.latency_ms) if index % 2 == 0 else (item.latency_ms, item.reference_ms)
        for index, (item, _) in enumerate(result)
    ]
    return {
        "ratio": statistics.median(statistics.median(pairs) for _, pairs in result),
        "pairs": [[round(pair, 3) for pair in pairs[:PAIRS]] for _, pairs in result],
        "tuned_ms": min(min(tuned_ms) for tuned_ms, _ in times),
        "ms": min(min(baseline_ms) for _, baseline_ms in times),
        "disturbed": sum(item.contended or item.drifted for item, _ in result),
        "attempts": attempts,
    }


def _measure(
    session: MeasurementSession, job: KernelJob, right: Check, *, min_time_s: float, max_time_s: float
) -> KernelTiming:
    """Measure a kernel; raises RunError if it fails or its result is wrong."""
    item = session.measure(
        job, repeats=PAIRS, min_time_s=min_time_s, max_time_s=max_time_s, timeout_s=TIMEOUT_S
    )
    if item.error is not None:
        raise RunError(f"a kernel failed: {item.error}")
    if not right(item.output):
        raise RunError("a result is wrong")
    return item


def strongest(
    baselines: Mapping[str, KernelJob], tuned: KernelJob, right: Check, processes: int = PROCESSES
) -> dict[str, Any]:
    """Measure the fastest form of a baseline.

    Every form is timed alone first. The close ones are compared in pairs, and the fastest counts.

    Returns:
        The result of `slower`, the form, the seconds of its preparation, and the time of each form alone or
        its error message.

    Raises:
        RunError: Every form fails.
    """
    forms: dict[str, float | str] = {}
    setup_s: dict[str, float] = {}
    for form, job in baselines.items():
        try:
            with ComparisonSession() as session:
                item = _measure(session, job, right, min_time_s=0.05, max_time_s=0.3)
        except RunError as error:
            forms[form] = str(error)
            continue
        forms[form] = item.min_ms
        setup_s[form] = float(item.output[-1].flat[0]) if isinstance(job, LibraryJob) else 0.0
    fastest_ms = min((time_ms for time_ms in forms.values() if isinstance(time_ms, float)), default=math.inf)
    results = [
        slower(baselines[form], tuned, right, processes) | {"form": form, "setup_s": setup_s[form]}
        for form, time_ms in forms.items()
        if isinstance(time_ms, float) and time_ms <= CLOSE * fastest_ms
    ]
    if not results:
        raise RunError("; ".join(f"{form}: {message}" for form, message in forms.items()))
    return min(results, key=lambda result: result["ratio"]) | {"forms": forms}


def strongest_call(
    make_calls: MakeCalls, kernel: CompiledKernel, inputs: Inputs, threads: int
) -> dict[str, Any]:
    """Measure the fastest form of a baseline against the tuned kernel, both called from Python.

    A new process for each number of the baseline's threads makes all calls. Its OpenMP settings are those of
    the runner. One OpenMP runtime serves both sides; the kernel always has `threads`. In each process, every
    form is timed alone first, and the close ones are compared with the kernel.

    Returns:
        As `strongest`.

    Raises:
        RunError: The process dies or a result is wrong.
    """
    results: dict[str, dict[str, Any]] = {}
    alone_ms: dict[str, float] = {}
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "sparseflow.tuning"])
    for count in sorted({1, threads}):
        with _openmp_environment(), ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
            try:
                calls, forms = pool.submit(
                    _compare_calls, make_calls, kernel, inputs, count, threads
                ).result()
            except BrokenProcessPool as error:
                raise RunError("the process of a library died") from error
        results |= {f"{form}, {count} threads": result for form, result in calls.items()}
        alone_ms |= {f"{form}, {count} threads": time_ms for form, time_ms in forms.items()}
    best = min(results, key=lambda form: results[form]["ratio"])
    return results[best] | {"form": best, "forms": alone_ms}


@contextmanager
def _openmp_environment() -> Iterator[None]:
    """Set the environment of new processes, in which a library uses the libgomp of the kernel."""
    previous = dict(os.environ)
    os.environ.update(OPENMP_ENVIRONMENT | {"LD_PRELOAD": "libgomp.so.1"})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(previous)


def _compare_calls(
    make_calls: MakeCalls, kernel: CompiledKernel, inputs: Inputs, threads: int, kernel_threads: int
) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """Compare the close forms of a baseline with the kernel in this process.

    Returns:
        The results of the close forms, and the time of each form alone, milliseconds.
    """
    right = checker(kernel.problem, inputs)
    set_threads = ctypes.CDLL("libgomp.so.1").omp_set_num_threads
    start_s = time.perf_counter()
    forms = make_calls(kernel.problem, threads)
    setup_s = time.perf_counter() - start_s
    set_threads(threads)
    alone_ms: dict[str, float] = {}
    for form, call in forms.items():
        if not right(np.asarray(call(*inputs))):
            raise RunError(f"the result of {form} is wrong")
        alone_ms[form] = min(_time_turn(call, inputs, _count_calls(call, inputs)))
    if not right(kernel.compute(*inputs)):
        raise RunError("the result of the kernel is wrong")
    results: dict[str, dict[str, Any]] = {}
    for form, call in forms.items():
        if alone_ms[form] > CLOSE * min(alone_ms.values()):
            continue
        sides: list[tuple[Callable[..., Any], int, int]] = []
        for function, count in ((call, threads), (kernel.compute, kernel_threads)):
            set_threads(count)
            sides.append((function, count, _count_calls(function, inputs)))
        samples: list[list[float]] = []
        contended, attempts = True, 0
        while contended and attempts < TRIES:
            attempts += 1
            cpus = CpuUsageMonitor()
            turns: list[list[list[float]]] = [[], []]
            for _ in range(TURNS):
                for (function, count, calls), side_turns in zip(sides, turns, strict=True):
                    set_threads(count)
                    side_turns.append(_time_turn(function, inputs, calls))
            samples = [
                [time_ms for turn, other in zip(*order, strict=True) for time_ms in turn[: len(other)]]
                for order in (turns, turns[::-1])
            ]
            contended = (cpus.measure_other_share() or 0.0) > MAX_OTHER_SHARE
        pairs = [a / b for a, b in zip(*samples, strict=True)]
        results[form] = {
            "ratio": statistics.median(pairs),
            "pairs": [round(pair, 4) for pair in pairs],
            "tuned_ms": min(samples[1]),
            "ms": min(samples[0]),
            "disturbed": int(contended),
            "attempts": attempts,
            "setup_s": setup_s,
        }
    return results, alone_ms


def _time_turn(function: Callable[..., Any], inputs: Inputs, calls: int) -> list[float]:
    """Return the time of a call in each sample of the second half of a turn, milliseconds."""
    start_s = time.perf_counter()
    times_ms: list[float] = []
    while not times_ms or time.perf_counter() - start_s < TURN_S:
        time_ms = 1e3 * _time_calls(function, inputs, calls) / calls
        if not times_ms or time.perf_counter() - start_s > TURN_S / 2:
            times_ms.append(time_ms)
    return times_ms[1:] or times_ms


def _time_calls(function: Callable[..., Any], inputs: Inputs, count: int) -> float:
    start_s = time.perf_counter()
    for _ in range(count):
        function(*inputs)
    return time.perf_counter() - start_s


def _count_calls(function: Callable[..., Any], inputs: Inputs) -> int:
    """Return the number of calls that take as long as a sample."""
    return math.ceil(SAMPLE_S / min(_time_calls(function, inputs, 1) for _ in range(5)))

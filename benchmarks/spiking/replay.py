"""What the GPU benchmarks share: check a candidate, capture it, time it against the others, keep all samples.

A candidate is a callable that returns its result. `Bench.admit` runs it, checks what it returned, captures it
in a CUDA graph, then spoils the result, replays and checks again: what is timed is what was checked.
`Bench.compare` times the admitted ones in paired rounds (`sparseflow.core.timing`). On a CPU nothing is
captured; that serves to try the scripts without a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sparseflow.core import timing
from sparseflow.core.device.ceilings import Ceilings, measure_ceilings
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic

Run = Callable[[], torch.Tensor]
Check = Callable[[torch.Tensor], dict[str, float]]
"""Says how wrong a result is; raises `WrongResult` when it is too wrong."""

TOLERANCE = {"fp32": 5e-6, "tf32": 5e-3, "fp16": 5e-3, "bf16": 4e-2}
"""Largest error of a convolution or product, as a fraction of the largest expected value."""
DTYPE = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PEAK = {"fp32": "float32", "tf32": "tf32", "fp16": "float16", "bf16": "bfloat16"}


class WrongResult(Exception):
    """A candidate's result differs from the reference by more than its precision explains."""


def close_to(expected: torch.Tensor, precision: str) -> Check:
    """A check of the largest and the rms error against float64, relative to the largest value."""
    scale = max(expected.abs().max().item(), 1e-30)

    def check(actual: torch.Tensor) -> dict[str, float]:
        if actual.shape != expected.shape:
            raise WrongResult(f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
        error = (actual.double() - expected) / scale
        report = {"max_error": error.abs().max().item(), "rms_error": error.square().mean().sqrt().item()}
        if not report["max_error"] <= TOLERANCE[precision]:
            raise WrongResult(
                f"error {report['max_error']:.2e} of the largest value (limit {TOLERANCE[precision]})"
            )
        return report

    return check


def same_spikes(expected: torch.Tensor, limit: float = 1e-6) -> Check:
    """A check of the fraction of spikes that differ."""

    def check(actual: torch.Tensor) -> dict[str, float]:
        if actual.shape != expected.shape:
            raise WrongResult(f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
        # a NaN is neither 0 nor 1, so it differs from both
        report = {
            "mismatch": (actual != expected).double().mean().item(),
            "rate": expected.double().mean().item(),
        }
        if not report["mismatch"] <= limit:
            raise WrongResult(f"{report['mismatch']:.2e} of the spikes differ (limit {limit})")
        return report

    return check


@contextlib.contextmanager
def convolutions(precision: str):
    """cuDNN's best algorithm, with TF32 only where it is asked for; matrix products alike."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=True, deterministic=False, allow_tf32=precision == "tf32"
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


class Bench:
    """One device, one set of repetition counts.

    Args:
        device: Where to run.
        rounds: Samples of each candidate.
        calls: Calls in one CUDA graph, hence in one sample; times are divided by it.
        warmup: Samples of each candidate that do not count.
        seed: Orders the candidates within each round.
    """

    def __init__(self, device: torch.device, *, rounds: int, calls: int, warmup: int, seed: int) -> None:
        self.device, self.rounds, self.calls, self.warmup, self.seed = device, rounds, calls, warmup, seed
        self._retained: list[Run] = []
        # Graphs of a row may use each other's memory: they run one at a time, and a result is checked before
        # the next graph is captured.
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.work: dict[str, Callable[[], object]] = {}
        self.checks: dict[str, dict[str, float]] = {}
        self.errors: dict[str, str] = {}

    def start(self) -> None:
        """Forget the candidates of the previous row."""
        self.work, self.checks, self.errors = {}, {}, {}
        self._retained.clear()
        if self._pool is not None:
            self._pool = torch.cuda.graph_pool_handle()

    def admit(
        self,
        name: str,
        make: Callable[[], Run],
        check: Check | None,
        *,
        precision: str = "",
        graph: bool = True,
        poison: Callable[[torch.Tensor], object] = lambda output: output.fill_(float("nan")),
    ) -> None:
        """Check and capture a candidate; what goes wrong is recorded and the candidate left out.

        Args:
            name: Its name in the results.
            make: Builds the callable; its cost is not timed.
            check: What its result must satisfy; None for work that has no result of its own to check.
            precision: Runs under `convolutions(precision)`; empty leaves torch's flags as a user has them.
            graph: Capture it; otherwise it is called `calls` times a sample, launches included.
            poison: Spoils a result before it is computed once more and checked.
        """
        try:
            with convolutions(precision) if precision else contextlib.nullcontext():
                run = make()
                errors = run()
                report = check(errors) if check else {}
                del errors
                work: Callable[[], object] = self._loop(run)
                if graph and self.device.type == "cuda":
                    work, output = self._capture(run)
                    if check:
                        poison(output)
                        work()
                        report = check(output)
                self.checks[name] = report
                self.work[name] = work
                # A graph knows addresses only: what it reads must stay.
                self._retained.append(run)
        except Exception as error:  # one candidate must not cost the others their row
            self.errors[name] = f"{type(error).__name__}: {error}"[:500]
            print(f"    {name}: left out: {self.errors[name][:160]}", flush=True)

    def _loop(self, run: Run) -> Callable[[], object]:
        def work() -> None:
            for _ in range(self.calls):
                run()

        return work

    def _capture(self, run: Run) -> tuple[Callable[[], object], torch.Tensor]:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()
            for _ in range(self.calls - 1):
                run()
        return graph.replay, output

    def compare(self, baseline: str) -> timing.Comparison:
        """Paired rounds of all admitted candidates; milliseconds are those of a single call.

        Raises:
            RuntimeError: The baseline itself was left out.
        """
        if baseline not in self.work:
            raise RuntimeError(f"the baseline was left out: {self.errors.get(baseline)}")
        errors = timing.compare(
            self.work,
            rounds=self.rounds,
            baseline=baseline,
            warmup=self.warmup,
            device=self.device,
            seed=self.seed,
        )
        times = {name: tuple(t / self.calls for t in values) for name, values in errors.times_ms.items()}
        return replace(errors, times_ms=times, calls_per_sample=self.calls)


class Results:
    """A JSON file that is whole after every row, with a hard limit on the time the script may take.

    Args:
        path: The file.
        device: Whose circumstances to record; None until it is known.
        settings: The script's arguments.
        seed: What inputs were drawn from.
        limit_s: After this many seconds the process writes what it has and exits with 3.
    """

    def __init__(
        self, path: Path, device: torch.device, settings: Mapping[str, Any], *, seed: int, limit_s: float
    ) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        plain = {k: str(v) if isinstance(v, Path) else v for k, v in settings.items()}
        self.content: dict[str, Any] = {
            "status": "running", "environment": collect_environment(device, seed=seed),
            "settings": plain, "rows": [],
        }  # fmt: skip
        self._lock = threading.Lock()
        self.save()
        self._timer = threading.Timer(limit_s, self._expire, [limit_s])
        self._timer.daemon = True
        self._timer.start()

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row; it is on disk when this returns."""
        with self._lock:
            self.content["rows"].append(row)
        self.save()

    def save(self) -> None:
        with self._lock:
            write_atomic(self.path, json.dumps(self.content, allow_nan=False) + "\n")

    def finish(self) -> int:
        """Close the file; returns the script's exit code, 1 when a row failed or a result was wrong."""
        self._timer.cancel()
        failed = [
            row["name"]
            for row in self.content["rows"]
            if row.get("failed") or any("WrongResult" in e for e in row.get("errors", {}).values())
        ]
        self.content["status"] = "failed" if failed else "finished"
        self.save()
        return 1 if failed else 0

    def _expire(self, limit_s: float) -> None:
        # A kernel that hangs holds the main thread; only leaving the process ends it.
        self.content["status"] = f"stopped after {limit_s:g} s"
        self.save()
        print(
            f"stopped after {limit_s:g} s; {self.path} holds what was finished", file=sys.stderr, flush=True
        )
        os._exit(3)


def timed(bench: Bench, comparison: timing.Comparison) -> dict[str, Any]:
    """Everything about one comparison, as JSON: all samples, ratios to the baseline, checks, errors."""
    return {
        "baseline": comparison.baseline,
        "timer": comparison.timer,
        "calls_per_sample": comparison.calls_per_sample,
        "samples_ms": {n: [float(f"{t:.6g}") for t in times] for n, times in comparison.times_ms.items()},
        "median_ms": {n: float(f"{comparison.samples(n).median_ms:.6g}") for n in comparison.times_ms},
        "checks": bench.checks,
        "errors": bench.errors,
    }


def ratio(comparison: timing.Comparison, candidate: str, other: str) -> dict[str, Any]:
    """How many times faster `ours` is than `other`, with its interval."""
    speedup = comparison.speedup(candidate) if other == comparison.baseline else timing.bootstrap_median(
        comparison.ratios(candidate, baseline=other), seed=comparison.seed
    )  # fmt: skip
    return {
        "ours": candidate,
        "other": other,
        "speedup": speedup.median,
        "low": speedup.low,
        "high": speedup.high,
    }


def fastest(comparison: timing.Comparison, names: list[str]) -> str | None:
    """The one of `names` with the lowest median, of those that were timed."""
    timed_names = [name for name in names if name in comparison.times_ms]
    return min(timed_names, key=lambda name: comparison.samples(name).median_ms, default=None)


def measured_ceilings(device: torch.device) -> Ceilings | None:
    """What the GPU does at best; None on a CPU, where these scripts are only tried."""
    return measure_ceilings(device) if device.type == "cuda" else None


def floor_ms(ceilings: Ceilings | None, bytes_moved: float, flops: float, precision: str) -> float | None:
    """The time that moving the bytes or doing the operations takes at best, whichever is longer."""
    if ceilings is None:
        return None
    return 1e3 * max(bytes_moved / ceilings.bytes_per_s, flops / ceilings.flops_per_s[PEAK[precision]])

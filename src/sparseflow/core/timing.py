"""Latency measurement of callables; every sample is kept.

`measure` times one callable. `compare` times several in rounds: each round runs every candidate once, in a
random order, and yields one speedup per candidate, so that a drifting clock frequency affects both sides of a
ratio equally.

On a GPU a sample is the time between two CUDA events around the call, on the stream that is current when the
measurement starts. Every sample starts on an idle device: with queued calls, the launches of one candidate
would overlap the work of the previous one, and its time would depend on the order. To exclude launches, pass
the replay of a CUDA graph or raise `calls_per_sample`. On a CPU a sample is read from `perf_counter`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sparseflow.core.checks import check_at_least, check_one_of
from sparseflow.core.metrics import quantile
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError

if TYPE_CHECKING:
    import torch

Work = Callable[[], object]
"""Callable to time; its result is ignored."""

NUM_RESAMPLES = 4000
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median and its bootstrap confidence interval, in the unit of the values."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples of one callable.

    Attributes:
        times_ms: Milliseconds per call, one entry per sample, in the order of measurement.
        timer: `"cuda_event"` or `"perf_counter"`.
        device: Device as PyTorch names it, such as `"cuda:0"`.
        warmup: Calls before the first sample.
        calls_per_sample: Calls in one sample; `times_ms` is already divided by it.
    """

    times_ms: tuple[float, ...]
    timer: str
    device: str
    warmup: int
    calls_per_sample: int = 1

    @property
    def median_ms(self) -> float:
        return float(np.median(self.times_ms))

    @property
    def min_ms(self) -> float:
        return min(self.times_ms)

    def quantile_ms(self, q: float) -> float:
        """The `q`-quantile, 0 <= q <= 1, in milliseconds."""
        return quantile(self.times_ms, q)

    def to_rows(self, **labels: object) -> list[dict[str, object]]:
        """One row per sample, starting with `labels`."""
        return [
            {**labels, "sample": index, "latency_ms": value, "timer": self.timer, "device": self.device}
            for index, value in enumerate(self.times_ms)
        ]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Paired samples of several candidates.

    Attributes:
        baseline: Candidate that speedups are relative to.
        times_ms: Candidate -> milliseconds per call, one entry per round.
        order: Candidates in the order they ran, one entry per round.
        timer: `"cuda_event"` or `"perf_counter"`.
        device: Device as PyTorch names it.
        warmup: Calls of each candidate before the first round.
        seed: Seed of the orders.
        calls_per_sample: Calls in one sample; `times_ms` is already divided by it.
    """

    baseline: str
    times_ms: Mapping[str, tuple[float, ...]]
    order: tuple[tuple[str, ...], ...]
    timer: str
    device: str
    warmup: int
    seed: int
    calls_per_sample: int = 1

    @property
    def rounds(self) -> int:
        return len(self.order)

    def samples(self, name: str) -> Samples:
        """Samples of one candidate.

        Raises:
            InputError: There is no candidate with that name.
        """
        return Samples(
            times_ms=self._times(name),
            timer=self.timer,
            device=self.device,
            warmup=self.warmup,
            calls_per_sample=self.calls_per_sample,
        )

    def ratios(self, name: str, *, baseline: str | None = None) -> tuple[float, ...]:
        """Speedup over the baseline, one entry per round; above 1 the candidate is faster."""
        return tuple(
            baseline_ms / candidate_ms
            for baseline_ms, candidate_ms in zip(
                self._times(self.baseline if baseline is None else baseline), self._times(name), strict=True
            )
        )

    def speedup(self, name: str, *, baseline: str | None = None) -> Interval:
        """Median of `ratios` with its 95 % bootstrap confidence interval over rounds."""
        return bootstrap_median(self.ratios(name, baseline=baseline), seed=self.seed)

    def fastest(self) -> str:
        """The candidate with the lowest median."""
        return min(self.times_ms, key=lambda name: float(np.median(self.times_ms[name])))

    def to_rows(self, **labels: object) -> list[dict[str, object]]:
        """One row per sample in the order of measurement, starting with `labels`."""
        return [
            {
                **labels,
                "round": index,
                "position": position,
                "candidate": name,
                "latency_ms": self.times_ms[name][index],
                "timer": self.timer,
                "device": self.device,
            }
            for index, names in enumerate(self.order)
            for position, name in enumerate(names)
        ]

    def _times(self, name: str) -> tuple[float, ...]:
        try:
            return self.times_ms[name]
        except KeyError:
            raise InputError(
                f"there is no candidate `{name}`; candidates: {', '.join(self.times_ms)}"
            ) from None


def measure(
    fn: Work,
    *,
    warmup: int = 3,
    repeats: int = 20,
    min_time_s: float = 0.0,
    device: str | torch.device = "cpu",
    calls_per_sample: int = 1,
) -> Samples:
    """Time one callable.

    Args:
        fn: Callable to time.
        warmup: Calls before the first sample (compilation, caches, clocks).
        repeats: Minimum number of samples, > 0.
        min_time_s: Continue sampling until the samples add up to this many seconds.
        device: Device that `fn` runs on; decides the timer.
        calls_per_sample: Calls timed together as one sample, for work too short for the timer.

    Raises:
        InputError: A count is out of range, or `device` is neither a CPU nor a CUDA device.
        DeviceError: The CUDA device does not exist.
    """
    check_at_least(1, repeats=repeats, calls_per_sample=calls_per_sample)
    check_at_least(0, warmup=warmup)
    timer = _make_timer(device)
    for _ in range(warmup):
        fn()
    timer.wait()
    times: list[float] = []
    total_ms = 0.0
    while len(times) < repeats or total_ms < min_time_s * 1e3:
        times.append(timer.sample(fn, calls_per_sample))
        total_ms += times[-1] * calls_per_sample
    return Samples(
        times_ms=tuple(times),
        timer=timer.name,
        device=str(device),
        warmup=warmup,
        calls_per_sample=calls_per_sample,
    )


def compare(
    candidates: Mapping[str, Work],
    *,
    rounds: int,
    baseline: str,
    warmup: int = 3,
    device: str | torch.device = "cpu",
    seed: int = 0,
    calls_per_sample: int = 1,
    progress: Progress | None = None,
) -> Comparison:
    """Time candidates against each other, interleaved in a random order in each round.

    Args:
        candidates: Name -> callable. At least one.
        rounds: Samples of each candidate, > 0.
        baseline: Name of the candidate that speedups are relative to.
        warmup: Calls of each candidate before the first round.
        device: Device that the candidates run on; decides the timer.
        seed: Seed of the orders and of the bootstrap.
        calls_per_sample: Calls timed together as one sample.
        progress: Called after each round.

    Raises:
        InputError: A count is out of range, there is no candidate, or `baseline` is not a candidate.
        DeviceError: The CUDA device does not exist.
    """
    names = list(candidates)
    check_one_of(names, baseline=baseline)
    check_at_least(1, rounds=rounds, calls_per_sample=calls_per_sample)
    check_at_least(0, warmup=warmup)
    timer = _make_timer(device)
    for fn in candidates.values():
        for _ in range(warmup):
            fn()
        timer.wait()
    generator = np.random.default_rng(seed)
    times: dict[str, list[float]] = {name: [] for name in names}
    orders: list[tuple[str, ...]] = []
    for count in range(1, rounds + 1):
        order = tuple(names[i] for i in generator.permutation(len(names)))
        for name in order:
            times[name].append(timer.sample(candidates[name], calls_per_sample))
        orders.append(order)
        if progress is not None:
            progress(f"round {count} of {rounds}", count / rounds)
    return Comparison(
        baseline=baseline,
        times_ms={name: tuple(values) for name, values in times.items()},
        order=tuple(orders),
        timer=timer.name,
        device=str(device),
        warmup=warmup,
        seed=seed,
        calls_per_sample=calls_per_sample,
    )


def bootstrap_median(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Median of `values` with its 95 % percentile bootstrap interval, in the unit of `values`.

    Raises:
        InputError: There are no values.
    """
    if len(values) == 0:
        raise InputError("a median needs at least one value, got none")
    array = np.asarray(values, dtype=np.float64)
    indices = np.random.default_rng(seed).integers(len(array), size=(NUM_RESAMPLES, len(array)))
    medians = np.median(array[indices], axis=1)
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(medians, [tail, 1.0 - tail])
    return Interval(median=float(np.median(array)), low=float(low), high=float(high))


class _CpuTimer:
    name = "perf_counter"

    def wait(self) -> None:
        """CPU calls are synchronous, so there is nothing to wait for."""

    def sample(self, fn: Work, calls: int) -> float:
        """Milliseconds per call."""
        start = time.perf_counter_ns()
        for _ in range(calls):
            fn()
        # At least one nanosecond, because ratios divide by this.
        return max(time.perf_counter_ns() - start, 1) / 1e6 / calls


class _CudaTimer:
    name = "cuda_event"

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._event = torch.cuda.Event
        self._stream = torch.cuda.current_stream(device)
        self._synchronize = torch.cuda.synchronize

    def wait(self) -> None:
        self._synchronize(self._device)

    def sample(self, fn: Work, calls: int) -> float:
        """Milliseconds per call, from an idle device to an idle device."""
        start, end = self._event(enable_timing=True), self._event(enable_timing=True)
        start.record(self._stream)
        for _ in range(calls):
            fn()
        end.record(self._stream)
        self.wait()
        return max(start.elapsed_time(end), 1e-6) / calls


def _make_timer(device: str | torch.device) -> _CpuTimer | _CudaTimer:
    kind, _, index = str(device).partition(":")
    if kind == "cpu":
        return _CpuTimer()
    if kind != "cuda":
        raise InputError(f"`device` (={str(device)!r}) must be 'cpu', 'cuda' or 'cuda:N'")
    import torch

    from sparseflow.core.device import select_device

    return _CudaTimer(select_device(int(index) if index else torch.cuda.current_device()))

"""Measuring how long things take, with every sample kept.

`measure` times one callable. `compare` times several against each other in rounds: each round runs every
candidate once, in an order drawn anew, and yields one ratio per candidate, so that a machine that drifts
slows both sides of a ratio alike.

On a GPU a sample is the time between two CUDA events around the call, on the stream that is current when
the measurement starts. Every sample starts on an idle device: were the calls queued behind each other, one
candidate's launches would hide behind another's work and its time would depend on its neighbours. Where
launches are not what is being asked about, hand in the replay of a CUDA graph, or raise `calls_per_sample`.
On a CPU a sample is read from `perf_counter`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sparseflow.errors import InputError

if TYPE_CHECKING:
    import torch

Work = Callable[[], object]

BOOTSTRAP_DRAWS = 4000
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median and the bootstrap interval around it, in the unit of what was given."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Every sample of one callable.

    Attributes:
        times_ms: One entry a sample, in the order taken, milliseconds a call.
        timer: `"cuda_event"` or `"perf_counter"`.
        device: Device as torch writes it, such as `"cuda:0"`.
        warmup: Calls made before the first sample.
        calls_per_sample: Calls inside one sample; `times_ms` is already divided by it.
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
        return float(np.quantile(self.times_ms, q))

    def interval_ms(self, *, seed: int = 0) -> Interval:
        """Median with its 95 % bootstrap interval, in milliseconds."""
        return bootstrap_median(self.times_ms, seed=seed)

    def to_rows(self, **labels: object) -> list[dict[str, object]]:
        """One mapping a sample, each with `labels` in front, ready for a run's records."""
        return [
            {**labels, "sample": index, "latency_ms": value, "timer": self.timer, "device": self.device}
            for index, value in enumerate(self.times_ms)
        ]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Paired samples of several candidates.

    Attributes:
        baseline: The candidate that the others are divided into.
        times_ms: Candidate -> one entry a round, milliseconds a call.
        order: One entry a round: the candidates as they ran.
        timer: `"cuda_event"` or `"perf_counter"`.
        device: Device as torch writes it.
        warmup: Calls of each candidate before the first round.
        seed: What the orders were drawn from.
        calls_per_sample: Calls inside one sample; `times_ms` is already divided by it.
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
        """The samples of one candidate.

        Raises:
            InputError: No candidate has that name.
        """
        return Samples(
            times_ms=self._times(name),
            timer=self.timer,
            device=self.device,
            warmup=self.warmup,
            calls_per_sample=self.calls_per_sample,
        )

    def ratios(self, name: str, *, baseline: str | None = None) -> tuple[float, ...]:
        """Baseline's time over the candidate's, one entry a round: above 1 the candidate is faster."""
        return tuple(
            base / own
            for base, own in zip(
                self._times(self.baseline if baseline is None else baseline), self._times(name), strict=True
            )
        )

    def speedup(self, name: str, *, baseline: str | None = None) -> Interval:
        """Median of `ratios` with its 95 % bootstrap interval over rounds."""
        return bootstrap_median(self.ratios(name, baseline=baseline), seed=self.seed)

    def fastest(self) -> str:
        """The candidate with the lowest median."""
        return min(self.times_ms, key=lambda name: float(np.median(self.times_ms[name])))

    def to_rows(self, **labels: object) -> list[dict[str, object]]:
        """One mapping a sample in the order measured, each with `labels` in front."""
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
                f"no candidate `{name}` was compared; there are: {', '.join(self.times_ms)}"
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
        fn: What to time. Its result is dropped.
        warmup: Calls before the first sample (compilation, caches, clocks).
        repeats: Samples to take at least, > 0.
        min_time_s: Go on sampling until the samples add up to this many seconds.
        device: Where `fn` works; decides the timer.
        calls_per_sample: Calls timed together as one sample, for work too short for the timer.

    Raises:
        InputError: A count is out of range, or `device` is neither a CPU nor a CUDA device.
        DeviceError: A CUDA device was asked for and there is none.
    """
    if repeats < 1:
        raise InputError(f"`repeats` (={repeats}) must be at least 1")
    _check_counts(warmup, calls_per_sample)
    clock = _clock(device)
    for _ in range(warmup):
        fn()
    clock.wait()
    times: list[float] = []
    spent_ms = 0.0
    while len(times) < repeats or spent_ms < min_time_s * 1e3:
        times.append(clock.sample(fn, calls_per_sample))
        spent_ms += times[-1] * calls_per_sample
    return Samples(
        times_ms=tuple(times),
        timer=clock.name,
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
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Time candidates against each other: paired, interleaved, in an order drawn anew each round.

    Args:
        candidates: Name -> what to time. At least one.
        rounds: How often each candidate is timed, > 0.
        baseline: Name of the candidate that ratios are taken against.
        warmup: Calls of each candidate before the first round.
        device: Where the candidates work; decides the timer.
        seed: What the orders (and later the bootstrap) are drawn from.
        calls_per_sample: Calls timed together as one sample.
        progress: Called after each round with (rounds done, rounds in all).

    Raises:
        InputError: A count is out of range, there is no candidate, or `baseline` is not one of them.
        DeviceError: A CUDA device was asked for and there is none.
    """
    names = list(candidates)
    if baseline not in candidates:
        raise InputError(
            f"`baseline` (={baseline!r}) must be one of the candidates: {', '.join(names) or 'none given'}"
        )
    if rounds < 1:
        raise InputError(f"`rounds` (={rounds}) must be at least 1")
    _check_counts(warmup, calls_per_sample)
    clock = _clock(device)
    for fn in candidates.values():
        for _ in range(warmup):
            fn()
        clock.wait()
    generator = np.random.default_rng(seed)
    times: dict[str, list[float]] = {name: [] for name in names}
    orders: list[tuple[str, ...]] = []
    for done in range(1, rounds + 1):
        order = tuple(names[i] for i in generator.permutation(len(names)))
        for name in order:
            times[name].append(clock.sample(candidates[name], calls_per_sample))
        orders.append(order)
        if progress is not None:
            progress(done, rounds)
    return Comparison(
        baseline=baseline,
        times_ms={name: tuple(values) for name, values in times.items()},
        order=tuple(orders),
        timer=clock.name,
        device=str(device),
        warmup=warmup,
        seed=seed,
        calls_per_sample=calls_per_sample,
    )


def bootstrap_median(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Median of `values` with its 95 % percentile-bootstrap interval; unit as given.

    Raises:
        InputError: There are no values.
    """
    if len(values) == 0:
        raise InputError("a median needs at least one value, and none was given")
    array = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(len(array), size=(BOOTSTRAP_DRAWS, len(array)))
    medians = np.median(array[draws], axis=1)
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(medians, [tail, 1.0 - tail])
    return Interval(median=float(np.median(array)), low=float(low), high=float(high))


class _HostClock:
    name = "perf_counter"

    def wait(self) -> None:
        """Nothing runs behind a CPU's back."""

    def sample(self, fn: Work, calls: int) -> float:
        """Milliseconds a call."""
        start = time.perf_counter_ns()
        for _ in range(calls):
            fn()
        # A clock of finite resolution may see no time pass; a ratio must not divide by nothing.
        return max(time.perf_counter_ns() - start, 1) / 1e6 / calls


class _CudaClock:
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
        """Milliseconds a call, from an idle device to an idle device."""
        start, end = self._event(enable_timing=True), self._event(enable_timing=True)
        start.record(self._stream)
        for _ in range(calls):
            fn()
        end.record(self._stream)
        self.wait()
        return max(start.elapsed_time(end), 1e-6) / calls


def _clock(device: str | torch.device) -> _HostClock | _CudaClock:
    kind, _, index = str(device).partition(":")
    if kind == "cpu":
        return _HostClock()
    if kind != "cuda":
        raise InputError(f"`device` (={str(device)!r}) must be 'cpu', 'cuda' or 'cuda:N'")
    import torch

    from sparseflow.core.device import select_device

    return _CudaClock(select_device(int(index) if index else torch.cuda.current_device()))


def _check_counts(warmup: int, calls_per_sample: int) -> None:
    if warmup < 0:
        raise InputError(f"`warmup` (={warmup}) must not be negative")
    if calls_per_sample < 1:
        raise InputError(f"`calls_per_sample` (={calls_per_sample}) must be at least 1")

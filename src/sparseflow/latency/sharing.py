"""How a device is shared with a load: what that makes of a run's mean latency and of its quantiles.

The load works and rests in cycles. While it rests, a run takes what it takes at rest; while it works, the
device goes back and forth between the two in slices, and the run takes longer:

    on   = off + wait * slices         slices: how often the run has to let the load pass
    off  = rest * (1 + presence)       presence: what a load costs that only rests there
    mean = 1 / (share / on + (1 - share) / off)

with `share`, the part of the time in which the load works, read from telemetry and calibrated by what the
load itself says it got. Runs follow each other without a pause, so what adds up over time is how many of them
get done. How long a run is kept waiting in all depends on what its kernels wait for themselves (arithmetic,
memory, their launch). On a GPU a run that was waited for has given the device away, and the next one begins
with a wait; on a CPU it keeps it.

By construction a slowdown is 1 without a load, never below 1, and grows with the load whatever was learned;
and a level that was not measured lies between or beyond those that were, since no level has a parameter of
its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from sparseflow.core.extras import require
from sparseflow.core.telemetry.schema import METRICS
from sparseflow.errors import DeviceError, FileFormatError, InputError
from sparseflow.latency.runner import quantile

if TYPE_CHECKING:
    import numpy as np

PRINCIPAL: Mapping[str, str] = {"cpu": "others", "cuda": "busy"}
"""Kind of device -> the metric that tells how much of the time others work on it."""

WAITS = ("arithmetic", "memory", "launch")
"""What a kernel waits for, as shares that add up to 1."""

RUNS = 4000
"""Runs that are drawn: the 95th percentile of so many is good to a fraction of a percent of them."""

SPREAD = 0.2
"""Cycles differ in length by up to this share."""

_WAITS_MS = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0)
_CYCLES_MS = (20.0, 50.0, 100.0, 200.0, 400.0)
_JITTER_POINTS = 41
_PRIOR = 2.0
_CALIBRATED = 10.0
_PRESENT = 0.1
"""From this share on a load is there all the time, whether it works or rests."""

_SMOOTH = 0.1
"""Slices differ in length by about this share, which blurs where one more is needed."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Runs of one thing beside a load.

    Attributes:
        rest_ms: Latency at rest, milliseconds.
        waits: What it waits for, one share for each of `WAITS`.
        load: The principal metric's share.
        alone: Share of the time in which the load itself says it worked, the runs aside.
        mean_ms: Mean latency beside the load.
        ratios: Each sample over the latency at rest; only looked at for quantiles.
        whole: Whether it is a whole model; where there are some, only they are learned from.
    """

    rest_ms: float
    waits: tuple[float, ...]
    load: float
    alone: float
    mean_ms: float
    ratios: tuple[float, ...] = ()
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How one device is shared. Make one with `Sharing.fit`.

    Attributes:
        metric: Name of the principal metric.
        calm: Its share at rest; what is above it is load.
        scale: `share = scale * load ** power`, at most 1.
        power: See `scale`.
        presence: What a run takes longer, as a share, while the load rests.
        delays: Milliseconds that a millisecond of each of `WAITS` is kept waiting while the load works.
        wait_ms: Length of one wait, milliseconds.
        yields: Whether a run begins with a wait while the load works.
        cycle_ms: Mean length of a cycle of the load, milliseconds.
        jitter: Quantiles, evenly spaced from 0 to 1, of a run at rest over its latency at rest.
    """

    metric: str
    calm: float
    scale: float
    power: float
    presence: float
    delays: tuple[float, ...]
    wait_ms: float
    yields: bool
    cycle_ms: float
    jitter: tuple[float, ...]

    @classmethod
    def fit(
        cls, observed: Sequence[Observed], metric: str, calm: float, jitter: Sequence[float], *, seed: int = 0
    ) -> Sharing:
        """Learn from runs beside loads; of none, load changes nothing.

        Args:
            observed: Kernels and whole models at several levels.
            metric: Name of the principal metric.
            calm: Its share at rest.
            jitter: Samples of whole models at rest over their latency at rest.
            seed: What is drawn is drawn from it.
        """
        points = [n / (_JITTER_POINTS - 1) for n in range(_JITTER_POINTS)]
        none = cls(
            metric=metric,
            calm=calm,
            scale=1.0,
            power=1.0,
            presence=0.0,
            delays=(0.0,) * len(WAITS),
            wait_ms=1.0,
            yields=False,
            cycle_ms=100.0,
            jitter=tuple(quantile(list(jitter), q) for q in points) if jitter else (1.0,) * _JITTER_POINTS,
        )
        if not observed:
            return none
        tried = [_fit_means(none, observed)]
        if metric == PRINCIPAL["cuda"]:
            # Only a GPU is given away between two runs.
            tried += [_fit_means(replace(none, yields=True, wait_ms=wait), observed) for wait in _WAITS_MS]
        best = min(tried, key=lambda entry: entry[1])[0]
        whole = [one for one in observed if one.whole and one.ratios]
        waits = (best.wait_ms,) if best.yields else _WAITS_MS
        grid = [replace(best, cycle_ms=c, wait_ms=w) for c in _CYCLES_MS for w in waits]
        return min(grid, key=lambda one: one._quantile_error(whole, seed)) if whole else best

    def load_of(self, shares: Mapping[str, float]) -> float:
        """The principal metric of a reading.

        Raises:
            DeviceError: It was not read.
            InputError: It is no share.
        """
        if self.metric not in shares:
            raise DeviceError(
                f"the predictor needs the metric `{self.metric}`, and the reading of load holds "
                f"{', '.join(shares) or 'nothing'}: read it from a source that tells it"
            )
        share = shares[self.metric]
        if not 0.0 <= share <= 1.0:
            raise InputError(f"`{self.metric}` (={share}) of the load must be in [0, 1]")
        return share

    def share(self, load: float) -> float:
        """Part of the time in which the load works, in [0, 1]."""
        above = max(load - self.calm, 0.0) / max(1.0 - self.calm, 1e-9)
        return min(self.scale * above**self.power, 1.0) if above > 0.0 else 0.0

    def delay_ms(self, rest_ms: float, waits: Sequence[float]) -> float:
        """What a kernel is kept waiting while the load works, in the long run, milliseconds."""
        return rest_ms * sum(d * w for d, w in zip(self.delays, waits, strict=True))

    def off_ms(self, rest_ms: float, share: float) -> float:
        """Mean latency of a run while a load that works part of the time rests, milliseconds."""
        return rest_ms * (1.0 + self.presence * min(share / _PRESENT, 1.0))

    def on_ms(self, off_ms: float, delay_ms: float) -> float:
        """Mean latency of a run while the load works, given its kernels' delays together, milliseconds."""
        if not self.yields:
            return off_ms + delay_ms
        slices = delay_ms / self.wait_ms
        whole = math.floor(slices)
        # Between whole numbers of slices the next one is reached by those runs whose slices were short.
        blurred = 1.0 / (1.0 + math.exp(-(slices - whole - 1.0) / (_SMOOTH / 2.0)))
        blurred += 1.0 / (1.0 + math.exp(-(slices - whole) / (_SMOOTH / 2.0))) - 1.0 if whole else 0.0
        return off_ms + self.wait_ms * (1.0 + whole + blurred)

    def mean_ms(self, rest_ms: float, delay_ms: float, load: float) -> float:
        """Mean latency of runs beside a load, milliseconds."""
        share = self.share(load)
        if share <= 0.0:
            return rest_ms
        off = self.off_ms(rest_ms, share)
        return 1.0 / (share / self.on_ms(off, delay_ms) + (1.0 - share) / off)

    def runs(
        self, rest_ms: float, delay_ms: float, load: float, *, count: int = RUNS, seed: int = 0
    ) -> np.ndarray:
        """Latencies of single runs beside a load, milliseconds, (count,).

        Args:
            rest_ms: Latency at rest.
            delay_ms: Its kernels' delays together.
            load: The principal metric's share.
            count: Runs to draw.
            seed: What is drawn is drawn from it.
        """
        import numpy as np

        generator = np.random.default_rng(seed)
        points = np.linspace(0.0, 1.0, len(self.jitter))
        rest = rest_ms * np.interp(generator.random(count), points, self.jitter)
        share = self.share(load)
        off_ms = self.off_ms(rest_ms, share)
        rest *= off_ms / rest_ms
        mean_on = self.on_ms(off_ms, delay_ms)
        if share <= 0.0 or mean_on <= off_ms:
            return rest
        slices = delay_ms / self.wait_ms * (1.0 + _SMOOTH * generator.standard_normal(count))
        begin = 1.0 if self.yields else generator.random(count)
        on = rest + self.wait_ms * np.floor(np.maximum(slices, 0.0) + begin)
        # Runs follow each other, so as many begin in a phase as get done in it.
        begun_on = (share / mean_on) / (share / mean_on + (1.0 - share) / off_ms)
        working = generator.random(count) < begun_on
        left = generator.random(count)
        return _through_phases(generator, on, rest, working, left, share, self.cycle_ms)

    def _quantile_error(self, whole: Sequence[Observed], seed: int) -> float:
        total = 0.0
        for one in whole:
            delay = self.delay_ms(one.rest_ms, one.waits)
            drawn = self.runs(one.rest_ms, delay, one.load, count=1000, seed=seed) / one.rest_ms
            drawn = [float(value) for value in drawn]
            total += sum(abs(math.log(quantile(drawn, q) / quantile(one.ratios, q))) for q in (0.5, 0.95))
        return total

    def to_dict(self) -> dict[str, Any]:
        """The parameters in JSON's types."""
        return {**asdict(self), "delays": list(self.delays), "jitter": list(self.jitter)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Sharing:
        """Read back what `to_dict` gave. Raises FileFormatError where it is something else."""
        try:
            found = cls(
                **{
                    **record,
                    "delays": tuple(map(float, record["delays"])),
                    "jitter": tuple(map(float, record["jitter"])),
                }
            )
            numbers = (found.scale, found.power, found.wait_ms, found.cycle_ms, *found.jitter)
            good = all(n > 0.0 for n in numbers) and all(d >= 0.0 for d in found.delays)
            good = good and all(map(math.isfinite, (found.calm, found.presence, *numbers, *found.delays)))
            good = good and found.presence >= 0.0
            good = good and len(found.delays) == len(WAITS) and len(found.jitter) > 1
            good = good and found.metric in METRICS and isinstance(found.yields, bool)
        except (KeyError, TypeError, ValueError) as error:
            raise FileFormatError(f"how the device is shared cannot be read: {error!r}") from error
        if not good:
            raise FileFormatError("how the device is shared cannot be read: a parameter is out of range")
        return found


def _through_phases(
    generator: np.random.Generator,
    on: np.ndarray,
    rest: np.ndarray,
    working: np.ndarray,
    left: np.ndarray,
    share: float,
    cycle_ms: float,
) -> np.ndarray:
    """Latencies of runs that begin within a phase, `left` of it to come, and go on through the next ones."""
    import numpy as np

    count = len(on)
    passed, todo = np.zeros(count), np.ones(count)
    going = np.ones(count, dtype=bool)
    while going.any():
        lengths = cycle_ms * generator.uniform(1.0 - SPREAD, 1.0 + SPREAD, count)
        phase = left * lengths * np.where(working, share, 1.0 - share)
        pace = np.where(working, on, rest)
        step = np.minimum(todo * pace, phase)
        passed[going] += step[going]
        todo[going] -= (step / pace)[going]
        going &= todo > 1e-9
        working, left = ~working, np.ones(count)
    return passed


def _fit_means(start: Sharing, observed: Sequence[Observed]) -> tuple[Sharing, float]:
    """`start` with scale, power, presence and delays that fit the means, and how well they do."""
    import numpy as np

    optimize = require("scipy.optimize", "latency")
    # Whole models are what is asked about, and a kernel alone waits in other ways than inside one.
    observed = [one for one in observed if one.whole] or observed
    measured = np.log([max(one.mean_ms, one.rest_ms) for one in observed])
    blocks = sorted({(o.load, o.alone) for o in observed if start.share(o.load) > 0.0 and o.alone > 0.0})

    def made(values: Sequence[float]) -> Sharing:
        scale, power, presence, *delays = (float(v) for v in values)
        return replace(start, scale=scale, power=power, presence=presence, delays=tuple(delays))

    def errors(values: Sequence[float]) -> np.ndarray:
        sharing = made(values)
        found = [
            sharing.mean_ms(one.rest_ms, sharing.delay_ms(one.rest_ms, one.waits), one.load)
            for one in observed
        ]
        # What the load says it got tells what a reading means; where it says nothing, the reading does.
        means = [_CALIBRATED * math.log(sharing.share(load) / alone) for load, alone in blocks]
        prior = [_PRIOR * math.log(values[0]), _PRIOR * math.log(values[1]), _PRIOR * values[2]]
        return np.concatenate([np.log(found) - measured, means, prior])

    solved = optimize.least_squares(
        errors,
        [1.0, 1.0, 0.01, 1.0, 1.0, 1.0],
        bounds=([0.3, 0.3, 0.0, 0.0, 0.0, 0.0], [2.0, 2.0, 0.5, 20.0, 20.0, 20.0]),
        loss="soft_l1",
        f_scale=0.1,
        diff_step=1e-3,
    )
    return made(solved.x), float(solved.cost)

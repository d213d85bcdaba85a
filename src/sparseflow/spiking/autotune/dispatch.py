"""Decide how each group runs: measured on this device, or by the fixed block rule.

`measured` (the default) times every way that a group can run, on its real input, and keeps the fastest.
Sparse or folded ways must beat the network's own modules with the whole interval of the paired ratio above 1;
otherwise the modules stay. Decisions are remembered on disk by device, shape, dtype and firing rate.

`static` is the rule of thumb by feature-map height: blocks of 16, 8 or 4 pixels, nothing below 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Literal

from sparseflow.core import device as devices
from sparseflow.core import timing
from sparseflow.spiking.autotune.decision_cache import Decision, DecisionCache

Policy = Literal["measured", "static"]


def rate_bucket(rate: float) -> int:
    """Firing rates within a factor of 1.25 share a decision."""
    return -99 if rate <= 0 else round(math.log(rate) / math.log(1.25))


@dataclass(frozen=True, kw_only=True)
class Chooser:
    """Measures candidates and keeps the fastest.

    Attributes:
        device: Where the candidates run ("cpu", "cuda:0").
        rounds, warmup: Interleaved timing rounds that count, and that do not.
        cache: Remembers decisions; None measures every time.
        seed: Orders the candidates within each round.
        calls_per_sample: Calls timed as one; more than 1 hides what it costs to start work on an idle GPU.
    """

    device: str
    rounds: int = 7
    warmup: int = 2
    cache: DecisionCache | None = None
    seed: int = 0
    calls_per_sample: int = 1

    def choose(self, key: str, candidates: Mapping[str, Callable[[], object]], baseline: str) -> Decision:
        """Time `candidates` and keep the fastest; `baseline` stays unless another is surely faster.

        Args:
            key: What the decision depends on, without the device.
            candidates: Name to a call that runs it once.
            baseline: The candidate that is always safe.
        """
        known = self.recall(key, candidates)
        if known is not None:
            return known
        if len(candidates) == 1:
            return Decision(way=baseline, why="nothing else can run this group")
        result = timing.compare(
            candidates,
            baseline=baseline,
            rounds=self.rounds,
            warmup=self.warmup,
            device=self.device,
            seed=self.seed,
            calls_per_sample=self.calls_per_sample,
        )
        ms = {name: result.samples(name).median_ms for name in candidates}
        best = min((n for n in candidates if n != baseline), key=ms.__getitem__)
        ratio = result.speedup(best)
        if ratio.low > 1.0:
            way = best
            why = f"{ratio.median:.2f}x ({ratio.low:.2f}–{ratio.high:.2f}) over the network's own modules"
        else:
            way = baseline
            why = f"nothing surely beat the network's own modules (best: {best}, {ratio.median:.2f}x)"
        decision = Decision(way=way, why=why, ms=ms)
        if self.cache:
            self.cache.put(self._full(key), decision)
        return decision

    def recall(self, key: str, candidates: Container[str]) -> Decision | None:
        """What was decided before, if that is still among the candidates."""
        known = self.cache.get(self._full(key)) if self.cache else None
        return known if known is not None and known.way in candidates else None

    def _full(self, key: str) -> str:
        return f"{devices.describe_device(self.device).key()}|{key}"

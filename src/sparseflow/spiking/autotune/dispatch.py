"""Selection among candidates by timing them on this device.

The policy `measured` (the default) times all ways to run a group on its real input and selects the fastest.
A sparse or folded candidate must beat the network's own modules with the whole interval of the paired ratio
above 1; otherwise the modules stay. Decisions are cached on disk by device, versions of the packages that run
the candidates, shape, dtype and firing rate.

The policy `static` is a rule by feature-map height (`backends.blocks.geometry.select_block_size`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from sparseflow.core import device as devices
from sparseflow.core import timing
from sparseflow.core.extras import get_version
from sparseflow.spiking.autotune.decision_cache import Decision, DecisionCache
from sparseflow.spiking.runtime.cuda_graphs import capture_replay

Policy = Literal["measured", "static"]


def compute_rate_bucket(rate: float) -> int:
    """Compute the bucket of a firing rate; rates within a factor of 1.25 share a decision."""
    return -99 if rate <= 0 else round(math.log(rate) / math.log(1.25))


@functools.cache
def describe_versions() -> str:
    """Describe the versions of the packages that run the candidates."""
    packages = ("sparseflow", "torch", "numba", "triton", "spikingjelly")
    return ",".join(f"{package}={get_version(package)}" for package in packages)


@dataclass(frozen=True, kw_only=True)
class CandidateSelector:
    """Times candidates and selects the fastest.

    Attributes:
        device: Device of the candidates ("cpu", "cuda:0").
        rounds: Interleaved timing rounds.
        warmup: Rounds before them that do not count.
        cache: Cache of decisions; None measures every time.
        seed: Seed of the order of candidates within each round.
        calls_per_sample: Calls timed as one; more than 1 hides the start-up time of an idle GPU.
        capture: Time a CUDA graph of each candidate.
        refresh: Measure even if the cache has a decision, and replace it.
    """

    device: str
    rounds: int = 7
    warmup: int = 2
    cache: DecisionCache | None = None
    seed: int = 0
    calls_per_sample: int = 1
    capture: bool = False
    refresh: bool = False

    def find_cached(self, key: str) -> Decision | None:
        """Return the decision of an earlier `select` with this key on a device of this kind, or None."""
        return self.cache.get(self._complete_key(key)) if self.cache and not self.refresh else None

    def remember(self, key: str, decision: Decision) -> None:
        """Cache a decision that was made without timing."""
        if self.cache:
            self.cache.put(self._complete_key(key), decision)

    def _complete_key(self, key: str) -> str:
        return f"{devices.describe_device(self.device).key()}|{describe_versions()}|{key}"

    def select(
        self,
        key: str,
        candidates: Mapping[str, Callable[[], object]],
        baseline: str,
        *,
        incumbent: str | None = None,
    ) -> Decision:
        """Time `candidates` and select the fastest; `baseline` stays unless another is significantly faster.

        Args:
            key: What the decision depends on, without the device.
            candidates: Name -> call that runs it once.
            baseline: The candidate that is always safe.
            incumbent: A candidate that is only replaced by one that is significantly faster.
        """
        cached = self.find_cached(key)
        if cached is not None and cached.choice in candidates:
            return cached
        if len(candidates) == 1:
            return Decision(choice=baseline, reason="no other candidate")
        result = timing.compare(
            {name: capture_replay(run) for name, run in candidates.items()} if self.capture else candidates,
            baseline=baseline,
            rounds=self.rounds,
            warmup=self.warmup,
            device=self.device,
            seed=self.seed,
            calls_per_sample=self.calls_per_sample,
        )
        latency_ms = {name: result.samples(name).median_ms for name in candidates}
        best = min((n for n in candidates if n != baseline), key=latency_ms.__getitem__)
        if incumbent not in (None, baseline) and result.speedup(best, baseline=incumbent).low <= 1.0:
            best = incumbent
        ratio = result.speedup(best)
        if ratio.low > 1.0:
            choice = best
            reason = f"{ratio.median:.2f}x ({ratio.low:.2f}–{ratio.high:.2f}) over the network's own modules"
        else:
            choice = baseline
            reason = (
                "no candidate is significantly faster than the network's own modules "
                f"(best: {best}, {ratio.median:.2f}x, {ratio.low:.2f}–{ratio.high:.2f})"
            )
        decision = Decision(choice=choice, reason=reason, latency_ms=latency_ms)
        self.remember(key, decision)
        return decision

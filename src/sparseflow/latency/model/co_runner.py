"""A model that runs beside another one on the same device, at a rate.

While both are active they share the device. A GPU alternates between them. A CPU does so only if they have
more threads than there are CPUs; with a CPU for each thread both run at their own speed, apart from shared
caches and memory, which are not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MIN_RATE_PER_S, MAX_RATE_PER_S = 1e-3, 1e6


@dataclass(frozen=True, kw_only=True)
class CoRunnerPrediction:
    """Prediction of a co-runner.

    Attributes:
        model: Name of the model.
        rate_per_s: Requested runs per second.
        idle_ms: Its latency on an idle device.
        mean_ms: Its latency beside the predicted model, whose runs follow each other.
        core_share: Time that a thread waits for the threads of the other model while both are active, over
            the time that it runs; 0 if each has a CPU of its own, 1 on a GPU.
        bottleneck_shares: Shares of arithmetic, memory and launch in `idle_ms`.
    """

    model: str
    rate_per_s: float
    idle_ms: float
    mean_ms: float
    core_share: float
    bottleneck_shares: Mapping[str, float]

    @property
    def duty(self) -> float:
        """Share of the time that it would be active on an idle device, above 1 if the rate is too high."""
        return self.rate_per_s * self.idle_ms / 1e3

    @property
    def active_share(self) -> float:
        """Share of the time that it is active beside the predicted model."""
        return min(self.rate_per_s * self.mean_ms / 1e3, 1.0)

    def list_notes(self) -> Iterator[str]:
        """Yield sentences about limits of the prediction."""
        if self.rate_per_s * self.mean_ms > 1e3:
            yield (
                f"the co-runner cannot run {self.rate_per_s:g} times per second: beside this model it takes "
                f"{self.mean_ms:.3f} ms, so it runs at most {1e3 / self.mean_ms:.3g} times"
            )
        if not self.core_share:
            yield (
                "both models have CPUs of their own, so only shared caches and memory, which are not "
                "modelled, can slow them down"
            )


def compute_core_share(threads: int, cpus: int) -> float:
    """Return the time that each thread waits over the time that it runs, if CPUs are shared equally."""
    return max(threads / cpus - 1.0, 0.0)

"""Background load that is held at several levels, one after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparseflow.core.load.stressor import Stressor
from sparseflow.core.progress import Progress

_POLL_INTERVAL_S = 0.25


@dataclass(frozen=True, kw_only=True)
class LoadLevel:
    """One level of load.

    Attributes:
        target: Requested share of the device's time, in [0, 1].
        achieved: Measured share over the duration.
        duty: Mean duty cycle of the load's processes.
    """

    target: float
    achieved: float
    duty: float


@dataclass(frozen=True, kw_only=True)
class StressResult:
    """Levels of load that were held.

    Attributes:
        kind: Kind of load, one of `core.load.workloads.KINDS`.
        device: Device of the load.
        cpus: CPUs of the load; empty for a GPU.
        levels: Levels in the order of the request.
    """

    kind: str
    device: str
    cpus: tuple[int, ...]
    levels: tuple[LoadLevel, ...]

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return asdict(self)


def hold_levels(
    kind: str,
    levels: Sequence[float],
    *,
    duration_s: float = 10.0,
    timeout_s: float = 30.0,
    threads: int | None = None,
    device: str = "cuda",
    progress: Progress,
) -> StressResult:
    """Load a device to each level and hold it.

    Args:
        kind: Kind of load, one of `core.load.workloads.KINDS`.
        levels: Shares of the device's time, in [0, 1].
        duration_s: Time to hold each level.
        timeout_s: Maximum time to reach a level.
        threads: CPUs to load; by default all.
        device: GPU of a GPU load.
        progress: Callback that takes a message and the fraction done.

    Raises:
        InputError: A level is out of range or the kind is unknown.
        RunError: A level is not reached in time.
    """
    results: list[LoadLevel] = []
    with Stressor(kind, levels[0], workers=threads, device=device) as load:
        for index, level in enumerate(levels):
            load.set_level(level)
            progress(f"{kind} {level:g}: waiting until it is steady", index / len(levels))
            load.wait_until_steady(timeout_s)
            start_s = time.monotonic()
            while (elapsed_s := time.monotonic() - start_s) < duration_s:
                progress(
                    f"{kind} {level:g}: achieved {load.measure_share():.3f}, duty {load.mean_duty():.3f}",
                    (index + elapsed_s / duration_s) / len(levels),
                )
                time.sleep(min(_POLL_INTERVAL_S, duration_s - elapsed_s))
            results.append(
                LoadLevel(
                    target=level,
                    achieved=load.measure_share_between(start_s, time.monotonic()),
                    duty=load.mean_duty(),
                )
            )
        return StressResult(kind=kind, device=load.device, cpus=tuple(load.cpus), levels=tuple(results))

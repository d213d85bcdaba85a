"""Background load that is held at several levels, one after the other. Other work counts to a level."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparseflow.core.load.stressor import Stressor
from sparseflow.core.progress import Progress
from sparseflow.core.telemetry.host_reader import HostReader

_POLL_INTERVAL_S = 0.25


@dataclass(frozen=True, kw_only=True)
class LoadLevel:
    """One level of load.

    Attributes:
        target: Requested share of the device's time, in [0, 1].
        achieved: Measured share over the duration, with that of other work on a CPU.
        other_work: Share of other work; None on a GPU, whose time is not measured by process.
        duty: Mean duty cycle of the load's processes.
    """

    target: float
    achieved: float
    other_work: float | None
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
    """Load a device to each level and hold it; a level that is not reached is logged and held as it is.

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
        DeviceError: The GPU does not exist, or the load of a CPU cannot be read.
        RunError: A process of the load exited.
    """
    results: list[LoadLevel] = []
    with Stressor(kind, 0.0, workers=threads, device=device) as load:
        reader = HostReader(load.cpus, metrics=("others",)) if load.cpus else None
        for index, level in enumerate(levels):
            progress(f"{kind} {level:g}: waiting until it is steady", index / len(levels))
            load.reach_load(level, timeout_s)
            with load.hold_duty():
                start_s = time.monotonic()
                recording = None if reader is None else reader.start()
                while (elapsed_s := time.monotonic() - start_s) < duration_s:
                    progress(
                        f"{kind} {level:g}: share {load.measure_share():.3f}, duty {load.mean_duty():.3f}",
                        (index + elapsed_s / duration_s) / len(levels),
                    )
                    time.sleep(min(_POLL_INTERVAL_S, duration_s - elapsed_s))
                share = load.measure_share_between(start_s, time.monotonic())
                total = share if recording is None else recording.stop()["others"]
            results.append(
                LoadLevel(
                    target=level,
                    achieved=total,
                    other_work=None if recording is None else max(total - share, 0.0),
                    duty=load.mean_duty(),
                )
            )
        return StressResult(kind=kind, device=load.device, cpus=tuple(load.cpus), levels=tuple(results))

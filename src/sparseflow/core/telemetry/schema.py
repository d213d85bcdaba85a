"""Device load as shares in [0, 1]: one table of metric names for all sources.

=================  =======================================  ===========================================
name               GPU (NVML GPM, or DCGM by Prometheus)    host (/proc)
=================  =======================================  ===========================================
`busy`             SMs with a resident warp                 busy time of the usable CPUs
`active`           time in which any kernel ran             busy time of the busiest usable CPU
`occupancy`        resident warps over the maximum          absent
`tensor`           time in which tensor pipes were active   absent
`dram`             time in which memory moved data          absent: /proc counts no bandwidth
`pcie_tx`          bytes sent over the link bandwidth       absent
`pcie_rx`          bytes received over the link bandwidth   absent
`others`           absent                                   `busy` minus the use of this process
`steal`            absent                                   time that a hypervisor gave to other guests
`queue`            absent                                   runnable tasks that wait for a CPU
`switching`        absent                                   CPU time lost to switches, at 10 µs each
`cpu_pressure`     absent                                   time in which a task waited for a CPU (PSI)
`memory_pressure`  absent                                   the same for memory: no bandwidth either
`io_pressure`      absent                                   the same for input and output
`memory_used`      absent                                   memory that a new process cannot use
=================  =======================================  ===========================================

Quantities with different meanings have different names: the memory pressure of a host is not DRAM activity.
A reading lacks the metrics that its source does not provide, and accessing them raises an error; 0.0 is
always a measured value. Load is an average over seconds: windows shorter than `MIN_WINDOW_S` are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sparseflow.core.checks import check_between, check_non_negative
from sparseflow.errors import DeviceError, InputError

METRICS = (
    "busy", "active", "occupancy", "tensor", "dram", "pcie_tx", "pcie_rx", "others", "steal", "queue",
    "switching", "cpu_pressure", "memory_pressure", "io_pressure", "memory_used",
)  # fmt: skip
"""All metric names, in the order of a reading."""

MIN_WINDOW_S = 0.1
"""Hopper counters are not valid over shorter windows, and a CPU clock tick is 10 ms."""

ROUNDING = 0.01
"""Shares up to this far above 1 are clipped as rounding errors; larger ones are source errors."""

_FIELDS = ("timestamp_s", "interval_s", "source", "device")


@dataclass(frozen=True, kw_only=True)
class LoadReading:
    """Load of one device over one window.

    Attributes:
        timestamp_s: End of the window, seconds since 1970 by the clock of the source.
        interval_s: Length of the window. For a Prometheus server the time between its first and its last
            sample in the window, so 0 for a single sample.
        source: `"host"`, `"gpm"` or `"prometheus"`.
        device: `"cpu"`, `"cuda:0"`, or the labels of the device.
        shares: Measured share in [0, 1] by metric name.

    Raises:
        InputError: A metric is unknown, a share is outside [0, 1], or there are no shares.
    """

    timestamp_s: float
    interval_s: float
    source: str
    device: str
    shares: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.shares:
            raise InputError("a load reading must contain at least one share")
        check_metrics(self.shares)
        check_between(0.0, 1.0, **self.shares)
        check_non_negative(timestamp_s=self.timestamp_s, interval_s=self.interval_s)
        ordered = {name: float(self.shares[name]) for name in METRICS if name in self.shares}
        object.__setattr__(self, "shares", ordered)

    def __getitem__(self, name: str) -> float:
        """Return the share of a metric.

        Raises:
            InputError: The metric is unknown.
            DeviceError: The source of this reading does not provide it.
        """
        check_metrics((name,))
        if name not in self.shares:
            raise DeviceError(
                f"`{name}` was not read from {self.source} ({self.device}), which provides: "
                f"{', '.join(self.shares)}; use one of these metrics or another source"
            )
        return self.shares[name]

    def select(self, names: Iterable[str]) -> dict[str, float]:
        """Return the shares of the metrics `names`, in this order; raises like indexing."""
        return {name: self[name] for name in names}

    def to_row(self, prefix: str = "load_") -> dict[str, str | float]:
        """Convert to one flat row of a run or of JSON."""
        fields: dict[str, str | float] = {prefix + name: getattr(self, name) for name in _FIELDS}
        return fields | {prefix + name: value for name, value in self.shares.items()}


class LoadRecording(Protocol):
    """A reading in progress; it has no cost until it is stopped."""

    def stop(self) -> LoadReading:
        """Return the load since the start.

        Raises:
            DeviceError: A metric cannot be read, or the recording is shorter than `MIN_WINDOW_S`.
        """
        ...


class LoadReader(Protocol):
    """Reader of the load of one device.

    Attributes:
        name: `"host"`, `"gpm"` or `"prometheus"`.
        device: The device, as in `LoadReading.device`.
        metrics: Metrics that every reading contains.
    """

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> str: ...

    @property
    def metrics(self) -> tuple[str, ...]: ...

    def read(self, window_s: float = 1.0) -> LoadReading:
        """Read the load over `window_s` seconds: the next ones, or the last ones of a Prometheus server.

        Raises:
            InputError: `window_s` is shorter than `MIN_WINDOW_S`.
            DeviceError: A metric is missing, stale or outside its range.
        """
        ...

    def start(self) -> LoadRecording:
        """Start to record while other work runs; `stop()` of the result returns the load.

        Raises:
            DeviceError: A metric cannot be read.
        """
        ...


def check_metrics(names: Iterable[str]) -> None:
    """Raise InputError if one of `names` is not in `METRICS`."""
    for name in names:
        if name not in METRICS:
            raise InputError(f"unknown load metric {name!r}; expected one of: {', '.join(METRICS)}")


def check_window(window_s: float, name: str = "window_s") -> None:
    """Raise InputError if a window is not finite or shorter than `MIN_WINDOW_S`."""
    if not (math.isfinite(window_s) and window_s >= MIN_WINDOW_S):
        raise InputError(f"`{name}` (={window_s}) must be finite and at least {MIN_WINDOW_S}")


def check_recording_length(interval_s: float) -> None:
    """Raise DeviceError if a recording is shorter than `MIN_WINDOW_S`."""
    if interval_s < MIN_WINDOW_S:
        raise DeviceError(
            f"the load was recorded for {1e3 * interval_s:.0f} ms, but at least {1e3 * MIN_WINDOW_S:.0f} ms "
            "are needed; repeat the work inside the recording, or read a longer window"
        )


def normalize_share(value: float, scale: float, source: str) -> float:
    """Return `value / scale` as a share in [0, 1].

    Args:
        value: Value from the source.
        scale: Value of the source that corresponds to a share of 1, such as 100 for percent.
        source: Metric and source for the error message.

    Raises:
        DeviceError: The value is not finite or is more than `ROUNDING` outside the range.
    """
    share = value / scale
    # NaN fails this comparison.
    if not -1e-9 <= share <= 1.0 + ROUNDING:
        raise DeviceError(f"{source} is {value:g}, expected a value between 0 and {scale:g}")
    return min(max(share, 0.0), 1.0)

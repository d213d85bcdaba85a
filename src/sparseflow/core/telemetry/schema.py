"""How busy a device is, as shares in [0, 1]: one table of names, whichever source they were read from.

=================  =======================================  ===========================================
name               a GPU (NVML GPM, or DCGM by Prometheus)  a host (/proc)
=================  =======================================  ===========================================
`busy`             SMs that had a warp resident             busy time of the CPUs that may be used
`active`           time in which any kernel ran             busy time of the busiest of these CPUs
`occupancy`        resident warps among those that fit      absent
`tensor`           time in which the tensor pipes worked    absent
`dram`             time in which memory moved data          absent: /proc counts no bandwidth
`pcie_tx`          bytes sent, among what the link carries  absent
`pcie_rx`          the same for bytes received              absent
`others`           absent                                   `busy` less what this process used itself
`steal`            absent                                   time that a hypervisor gave to others
`queue`            absent                                   runnable tasks that wait for a CPU
`switching`        absent                                   CPU time lost to switches, at 10 µs each
`cpu_pressure`     absent                                   time in which a task waited for a CPU (PSI)
`memory_pressure`  absent                                   the same for memory: no bandwidth either
`io_pressure`      absent                                   the same for input and output
`memory_used`      absent                                   memory that a new process could not have
=================  =======================================  ===========================================

Two readings that mean different things never share a name: a host's memory pressure is no stand-in for DRAM
activity. What a source does not tell is absent from its readings, and asking for it raises; 0.0 always was
measured. Load is a regime over seconds: no source is asked about less than `MIN_WINDOW_S`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sparseflow.errors import DeviceError, InputError

METRICS = (
    "busy", "active", "occupancy", "tensor", "dram", "pcie_tx", "pcie_rx", "others", "steal", "queue",
    "switching", "cpu_pressure", "memory_pressure", "io_pressure", "memory_used",
)  # fmt: skip
"""Every name that a reading may hold, in the order in which readings show them."""

MIN_WINDOW_S = 0.1
"""Hopper's counters are not valid over less, and a CPU's clock tick is 10 ms."""

SLACK = 0.01
"""A share this far past 1 is rounding and is cut; further out the source is wrong."""

FIELDS = ("timestamp_s", "interval_s", "source", "device")


@dataclass(frozen=True, kw_only=True)
class LoadReading:
    """One reading of one device.

    Attributes:
        timestamp_s: When the reading ended, seconds since 1970 by the source's clock.
        interval_s: Seconds that the shares are an average over. Of a Prometheus server this is the time
            between its first and its last sample in the window, so 0 for a single one.
        source: `"host"`, `"gpm"` or `"prometheus"`.
        device: `"cpu"`, `"cuda:0"`, or what names the device there.
        shares: Name of `METRICS` -> share in [0, 1]. Only what was measured.

    Raises:
        InputError: A share has no known name or is outside [0, 1], or there is none.
    """

    timestamp_s: float
    interval_s: float
    source: str
    device: str
    shares: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.shares:
            raise InputError("a reading must hold at least one share")
        for name, value in self.shares.items():
            check_metrics((name,))
            if not 0.0 <= value <= 1.0:
                raise InputError(f"`{name}` (={value}) of a reading must be in [0, 1]")
        for name, value in (("timestamp_s", self.timestamp_s), ("interval_s", self.interval_s)):
            if not (math.isfinite(value) and value >= 0.0):
                raise InputError(f"`{name}` (={value}) of a reading must be finite and not negative")
        ordered = {name: float(self.shares[name]) for name in METRICS if name in self.shares}
        object.__setattr__(self, "shares", ordered)

    def __getitem__(self, name: str) -> float:
        """The share called `name`.

        Raises:
            InputError: There is no metric of that name.
            DeviceError: The source of this reading does not tell it.
        """
        check_metrics((name,))
        if name not in self.shares:
            raise DeviceError(
                f"`{name}` was not read from {self.source} ({self.device}), which tells: "
                f"{', '.join(self.shares)}; name one of these, or read another source"
            )
        return self.shares[name]

    def select(self, names: Iterable[str]) -> dict[str, float]:
        """The shares called `names`, in that order, as a model's features. Raises as `load[name]` does."""
        return {name: self[name] for name in names}

    def to_row(self, prefix: str = "load_") -> dict[str, str | float]:
        """The reading as one flat row of a run or of JSON; `from_row` takes it back."""
        head: dict[str, str | float] = {prefix + name: getattr(self, name) for name in FIELDS}
        return head | {prefix + name: value for name, value in self.shares.items()}

    @classmethod
    def from_row(cls, row: Mapping[str, object], prefix: str = "load_") -> LoadReading:
        """The reading in a row that may hold other columns too. A share that is None is absent.

        Raises:
            InputError: A field of the reading is missing or of another type, or a column that begins with
                `prefix` is none of a reading.
        """
        here = {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}
        lacking = [prefix + name for name in FIELDS if here.get(name) is None]
        if lacking:
            raise InputError(f"a row with a reading must also hold {', '.join(lacking)}")
        head = {name: here.pop(name) for name in FIELDS}
        check_metrics(here)
        shares = {name: value for name, value in here.items() if value is not None}
        for name, value in (shares | {name: head[name] for name in FIELDS[:2]}).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError(f"`{prefix}{name}` (={value!r}) must be a number")
        return cls(shares=shares, **head)  # type: ignore[arg-type]


class LoadRecording(Protocol):
    """A reading that has begun. It costs nothing until it is stopped."""

    def stop(self) -> LoadReading:
        """The load between the start and now.

        Raises:
            DeviceError: Something could not be read, or the watch was shorter than `MIN_WINDOW_S`.
        """
        ...


class LoadReader(Protocol):
    """A source of readings of one device.

    Attributes:
        name: `"host"`, `"gpm"` or `"prometheus"`.
        device: What is read, as in `Load.device`.
        metrics: The names that every one of its readings holds, among `METRICS`.
    """

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> str: ...

    @property
    def metrics(self) -> tuple[str, ...]: ...

    def read(self, window_s: float = 1.0) -> LoadReading:
        """The load over `window_s` seconds: the next ones, waiting for them, or of a server the last ones.

        Raises:
            InputError: `window_s` is shorter than `MIN_WINDOW_S`.
            DeviceError: A metric is missing, stale or outside its range; never a made-up value.
        """
        ...

    def start(self) -> LoadRecording:
        """Begin to watch while other work runs; `stop()` of the result gives the load meanwhile.

        Raises:
            DeviceError: Something could not be read.
        """
        ...


def check_metrics(names: Iterable[str]) -> None:
    """Raises InputError where one of `names` is not in `METRICS`."""
    for name in names:
        if name not in METRICS:
            raise InputError(f"{name!r} is no metric of a device's load; known are: {', '.join(METRICS)}")


def check_window(window_s: float, name: str = "window_s") -> None:
    """Raises InputError for a window that is too short, or is no finite number."""
    if not (math.isfinite(window_s) and window_s >= MIN_WINDOW_S):
        raise InputError(f"`{name}` (={window_s}) must be finite and at least {MIN_WINDOW_S}")


def check_recording_length(interval_s: float) -> None:
    """Raises DeviceError for a watch that was stopped too soon to mean anything."""
    if interval_s < MIN_WINDOW_S:
        raise DeviceError(
            f"the load was watched for {1e3 * interval_s:.0f} ms and needs at least "
            f"{1e3 * MIN_WINDOW_S:.0f} ms; repeat the work inside the watch, or read a longer window"
        )


def normalize_share(value: float, scale: float, what: str) -> float:
    """`value / scale` as a share in [0, 1].

    Args:
        value: As the source gave it.
        scale: What the source gives for a share of 1: 100 for percent.
        what: What was read and where, for the error.

    Raises:
        DeviceError: The value is not finite or is more than `SLACK` past the range.
    """
    found = value / scale
    # Written so that NaN fails it.
    if not -1e-9 <= found <= 1.0 + SLACK:
        raise DeviceError(
            f"{what} is {value:g}, and must be within 0 and {scale:g}; the source is wrong about it"
        )
    return min(max(found, 0.0), 1.0)

"""The load of a GPU, or of a host, from a Prometheus server that scrapes DCGM's exporter or ours.

A reading is the mean of the samples of the last seconds. It is refused, and nothing is filled in, when a
metric is absent, when its newest sample is too old, when a value cannot be a share, or when the labels fit
more than one device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping

from sparseflow.core.telemetry.dcgm import SERIES, SERIES_BY_NAME, Series, list_series
from sparseflow.core.telemetry.prometheus_http import PrometheusClient, TimeSeries, format_selector
from sparseflow.core.telemetry.schema import (
    METRICS,
    LoadReading,
    check_metrics,
    check_recording_length,
    check_window,
    normalize_share,
)
from sparseflow.errors import DeviceError, InputError

SEARCH_S = 600.0
"""How far back an absent series is looked for, to say whether it ever was there."""

AHEAD_S = 1.0
NAMES_OF_A_DEVICE = ("UUID", "gpu", "device", "Hostname", "instance")


class PrometheusReader:
    """Reads one device from a Prometheus server. A `LoadReader`.

    Args:
        url: Where the server is, such as `"http://127.0.0.1:9090"`.
        labels: What picks the device, such as `{"gpu": "0", "Hostname": "node7"}`.
        metrics: What to read, among `METRICS`. By default what the server has when it is first asked; from
            then on it must have all of them.
        max_age_s: A newest sample older than this is stale. It must be longer than the scrape interval.
        timeout_s: Seconds that an answer may take.
        pcie_bytes_per_s: What the device's PCIe link carries in one direction; `pcie_tx` and `pcie_rx` cannot
            be read without it. DCGM's fields are taken as bytes a second.
        headers: Sent along, for a server that asks for credentials.

    Raises:
        InputError: An argument cannot be used.
    """

    name = "prometheus"

    def __init__(
        self,
        url: str,
        labels: Mapping[str, str] | None = None,
        *,
        metrics: Collection[str] | None = None,
        max_age_s: float = 30.0,
        timeout_s: float = 5.0,
        pcie_bytes_per_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        for name, value in (("max_age_s", max_age_s), ("pcie_bytes_per_s", pcie_bytes_per_s)):
            if value is not None and not (math.isfinite(value) and value > 0.0):
                raise InputError(f"`{name}` (={value}) must be positive")
        if metrics is not None:
            check_metrics(metrics)
            if not metrics:
                raise InputError("`metrics` must name at least one, or be None for all that there are")
            if {"pcie_tx", "pcie_rx"} & set(metrics) and pcie_bytes_per_s is None:
                raise InputError("pcie_tx and pcie_rx need `pcie_bytes_per_s`, what the link carries")
        self.server = PrometheusClient(url, timeout_s=timeout_s, headers=headers)
        self.labels = dict(labels or {})
        self.max_age_s = max_age_s
        self._link = pcie_bytes_per_s
        self._metrics = None if metrics is None else tuple(name for name in METRICS if name in metrics)
        self._chosen: tuple[Series, ...] | None = None
        format_selector(("x",), self.labels)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names that every reading holds. Asks the server if none were given and it was not read yet."""
        if self._metrics is None:
            self.read()
        assert self._metrics is not None
        return self._metrics

    @property
    def device(self) -> str:
        """The labels that pick the device, as Prometheus writes them."""
        return ",".join(f"{label}={value}" for label, value in self.labels.items()) or "the only device"

    def read(self, window_s: float = 1.0) -> LoadReading:
        """The mean over the last `window_s` seconds, and of the newest sample at least; it does not wait.

        Raises:
            InputError: `window_s` is too short.
            DeviceError: The server cannot be reached or answers wrongly; a metric is absent, stale, no share,
                or there are several series of it.
        """
        check_window(window_s)
        wanted = self._chosen or self._candidates()
        picked = format_selector(tuple(series.name for series in wanted), self.labels)
        found = self._by_name(self.server.samples(picked, max(window_s, self.max_age_s)))
        now = self.server.now()
        chosen = self._choose(found, now)
        shares: dict[str, float] = {}
        used: list[float] = []
        newest = math.inf
        for series in chosen:
            samples = found[series.name].samples
            self._check_age(series.name, now - samples[-1][0])
            recent = [sample for sample in samples if sample[0] > now - window_s] or [samples[-1]]
            values = [self._share(series, text) for _, text in recent]
            shares[series.metric] = sum(values) / len(values)
            used += [at for at, _ in recent]
            newest = min(newest, recent[-1][0])
        # Only now, so that a reading that was refused has chosen nothing.
        self._chosen, self._metrics = chosen, tuple(name for name in METRICS if name in shares)
        return LoadReading(
            timestamp_s=newest,
            interval_s=max(used) - min(used),
            source=self.name,
            device=_device(found[chosen[0].name].labels),
            shares=shares,
        )

    def start(self) -> PrometheusRecording:
        """Begin to watch; the server keeps the samples. Raises DeviceError where a reading is refused now."""
        self.read()
        return PrometheusRecording(self)

    def _candidates(self) -> tuple[Series, ...]:
        metrics = METRICS if self._metrics is None else self._metrics
        return tuple(
            series
            for series in SERIES
            if series.metric in metrics and (series.scale is not None or self._link is not None)
        )

    def _by_name(self, answer: tuple[TimeSeries, ...]) -> dict[str, TimeSeries]:
        found: dict[str, TimeSeries] = {}
        for one in answer:
            if one.name not in SERIES_BY_NAME:
                raise DeviceError(
                    f"{self.server.url} answered with a metric {one.name!r} that was not asked for"
                )
            if one.name in found:
                raise self._several(one.name, [each for each in answer if each.name == one.name])
            found[one.name] = one
        devices = {tuple(each.labels.get(label) for label in NAMES_OF_A_DEVICE) for each in found.values()}
        if len(devices) > 1:
            raise self._several("the load", list(found.values()))
        return found

    def _choose(self, found: Mapping[str, TimeSeries], now: float) -> tuple[Series, ...]:
        if self._chosen is not None:
            for series in self._chosen:
                if series.name not in found:
                    raise self._absent((series,), now)
            return self._chosen
        chosen = []
        for metric in METRICS if self._metrics is None else self._metrics:
            here = [series for series in list_series(metric) if series.name in found]
            if here:
                chosen.append(here[0])
            elif self._metrics is not None:
                raise self._absent(list_series(metric), now)
        if not chosen:
            raise self._absent(self._candidates(), now)
        return tuple(chosen)

    def _check_age(self, name: str, age_s: float) -> None:
        if age_s > self.max_age_s:
            raise self._stale(name, age_s)
        if age_s < -AHEAD_S:
            raise DeviceError(
                f"{name} at {self.server.url} has a sample from {-age_s:.1f} s after the server's own clock; "
                "expected none from the future: mend the clocks, or `honor_timestamps: false` in its scrape"
            )

    def _share(self, series: Series, text: str) -> float:
        what = f"{series.name} (`{series.metric}`) of {self.device} at {self.server.url}"
        try:
            value = float(text)
        except ValueError as error:
            raise DeviceError(f"{what} is {text!r}; expected a number") from error
        scale = self._link if series.scale is None else series.scale
        assert scale is not None
        return normalize_share(value, scale, what)

    def _stale(self, name: str, age_s: float) -> DeviceError:
        return DeviceError(
            f"{name} of {self.device} at {self.server.url} is stale: its newest sample is "
            f"{age_s:.1f} s old, and at most {self.max_age_s:g} s were expected; is the exporter still "
            "running, and `max_age_s` longer than the scrape interval?"
        )

    def _several(self, what: str, found: list[TimeSeries]) -> DeviceError:
        labels = sorted(
            {
                label
                for one in found
                for label in one.labels
                if len({str(o.labels.get(label)) for o in found}) > 1
            }
        )
        shown = "; ".join(
            ", ".join(f"{label}={one.labels.get(label, '')}" for label in labels) for one in found[:4]
        )
        return DeviceError(
            f"{what} at {self.server.url} has {len(found)} series for {self.device}, and one device was "
            f"expected; they differ in {', '.join(labels)} ({shown}): pick one with `labels`"
        )

    def _absent(self, wanted: tuple[Series, ...], now: float) -> DeviceError:
        """Why there is nothing: it was there and is stale, it is there for others, or it never was."""
        names = tuple(series.name for series in wanted)
        shown = " or ".join(names[:2]) if len(names) <= 2 else f"any of {', '.join(names[:3])}, …"
        before = self.server.samples(format_selector(names, self.labels), SEARCH_S)
        if before:
            last = max(before, key=lambda one: one.samples[-1][0])
            return self._stale(last.name, max(now - last.samples[-1][0], 0.0))
        expected = f"{self.server.url} has no samples of {shown} for {self.device}"
        others = self.server.samples(format_selector(names, {}), SEARCH_S) if self.labels else ()
        if others:
            there = "; ".join(sorted({_device(one.labels) for one in others})[:4])
            return DeviceError(f"{expected}, only for {there}: mend `labels`")
        return DeviceError(
            f"{expected} in the last {SEARCH_S:g} s; expected a server that scrapes DCGM's exporter, or "
            "`sparseflow latency exporter`, with this field in its list"
        )


class PrometheusRecording:
    """A reading that has begun; made by `PrometheusReader.start`."""

    def __init__(self, reader: PrometheusReader) -> None:
        self._reader = reader
        self._at_s = time.monotonic()

    def stop(self) -> LoadReading:
        """The mean of the samples since the start, and of the newest at least. Raises as `read` does."""
        seconds = time.monotonic() - self._at_s
        check_recording_length(seconds)
        return self._reader.read(seconds)


def _device(labels: Mapping[str, str]) -> str:
    return ",".join(f"{name}={labels[name]}" for name in NAMES_OF_A_DEVICE if labels.get(name)) or "no labels"

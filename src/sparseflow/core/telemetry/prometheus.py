"""Load of a GPU or a host from a Prometheus server that scrapes the exporter of DCGM or of SparseFlow.

A reading is the mean of the samples of the last seconds. An error is raised, and no value is substituted, if
a metric is missing, its newest sample is too old, a value is not a share, or the labels match more than one
device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping

from sparseflow.core.checks import check_positive
from sparseflow.core.telemetry.dcgm import SERIES, SERIES_BY_NAME, Series, list_series
from sparseflow.core.telemetry.prometheus_http import (
    PrometheusClient,
    TimeSeries,
    format_selector,
    parse_number,
)
from sparseflow.core.telemetry.schema import (
    METRICS,
    LoadReading,
    check_metrics,
    check_recording_length,
    check_window,
    normalize_share,
)
from sparseflow.errors import DeviceError, InputError

LOOKBACK_S = 600.0
"""How far back a missing series is searched, to report whether it ever existed."""

MAX_CLOCK_SKEW_S = 1.0
DEVICE_LABELS = ("UUID", "gpu", "device", "Hostname", "instance")


class PrometheusReader:
    """`LoadReader` of one device on a Prometheus server.

    Args:
        url: URL of the server, such as `"http://127.0.0.1:9090"`.
        labels: Labels that select the device, such as `{"gpu": "0", "Hostname": "node7"}`.
        metrics: Metrics to read, among `METRICS`. By default the metrics of the first response, which all
            later responses must contain.
        max_age_s: Age from which the newest sample is stale; must exceed the scrape interval.
        timeout_s: Timeout of a request, seconds.
        pcie_bytes_per_s: Bandwidth of the PCIe link in one direction, required for `pcie_tx` and `pcie_rx`.
        headers: Request headers, such as credentials.

    Raises:
        InputError: An argument is invalid.
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
        check_positive(max_age_s=max_age_s)
        if pcie_bytes_per_s is not None:
            check_positive(pcie_bytes_per_s=pcie_bytes_per_s)
        if metrics is not None:
            check_metrics(metrics)
            if not metrics:
                raise InputError("`metrics` must contain at least one metric, or be None for all")
            if {"pcie_tx", "pcie_rx"} & set(metrics) and pcie_bytes_per_s is None:
                raise InputError("pcie_tx and pcie_rx need `pcie_bytes_per_s`, the bandwidth of the link")
        self.client = PrometheusClient(url, timeout_s=timeout_s, headers=headers)
        self.labels = dict(labels or {})
        self.max_age_s = max_age_s
        self._pcie_bytes_per_s = pcie_bytes_per_s
        self._metrics = None if metrics is None else tuple(name for name in METRICS if name in metrics)
        self._series: tuple[Series, ...] | None = None
        format_selector(("x",), self.labels)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics of every reading; queries the server if none were passed and nothing was read yet."""
        if self._metrics is None:
            self.read()
        assert self._metrics is not None
        return self._metrics

    @property
    def device(self) -> str:
        """Labels that select the device."""
        return ",".join(f"{label}={value}" for label, value in self.labels.items()) or "the only device"

    def read(self, window_s: float = 1.0) -> LoadReading:
        """Average the samples of the last `window_s` seconds, at least the newest one; does not wait.

        Raises:
            InputError: `window_s` is too short.
            DeviceError: The server is unreachable or its response is invalid; a metric is missing, stale, not
                a share, or has several series.
        """
        check_window(window_s)
        candidates = self._series or self._list_candidates()
        selector = format_selector(tuple(series.name for series in candidates), self.labels)
        responses = self._index_by_name(self.client.read_samples(selector, max(window_s, self.max_age_s)))
        now_s = self.client.read_time_s()
        selected = self._select_series(responses, now_s)
        shares: dict[str, float] = {}
        times_s: list[float] = []
        newest_s = math.inf
        for series in selected:
            samples = responses[series.name].samples
            self._check_age(series.name, now_s - samples[-1][0])
            recent = [sample for sample in samples if sample[0] > now_s - window_s] or [samples[-1]]
            values = [self._parse_share(series, text) for _, text in recent]
            shares[series.metric] = sum(values) / len(values)
            times_s += [time_s for time_s, _ in recent]
            newest_s = min(newest_s, recent[-1][0])
        # Only after all checks, so that a failed reading does not fix the series.
        self._series, self._metrics = selected, tuple(name for name in METRICS if name in shares)
        return LoadReading(
            timestamp_s=newest_s,
            interval_s=max(times_s) - min(times_s),
            source=self.name,
            device=_format_device(responses[selected[0].name].labels),
            shares=shares,
        )

    def start(self) -> PrometheusRecording:
        """Start to record; the server keeps the samples. Raises DeviceError if a reading fails now."""
        self.read()
        return PrometheusRecording(self)

    def _list_candidates(self) -> tuple[Series, ...]:
        metrics = METRICS if self._metrics is None else self._metrics
        return tuple(
            series
            for series in SERIES
            if series.metric in metrics and (series.scale is not None or self._pcie_bytes_per_s is not None)
        )

    def _index_by_name(self, responses: tuple[TimeSeries, ...]) -> dict[str, TimeSeries]:
        by_name: dict[str, TimeSeries] = {}
        for response in responses:
            if response.name not in SERIES_BY_NAME:
                raise DeviceError(
                    f"{self.client.url} answered with {response.name!r}, which was not requested"
                )
            if response.name in by_name:
                duplicates = [other for other in responses if other.name == response.name]
                raise self._make_ambiguity_error(response.name, duplicates)
            by_name[response.name] = response
        devices = {tuple(item.labels.get(label) for label in DEVICE_LABELS) for item in by_name.values()}
        if len(devices) > 1:
            raise self._make_ambiguity_error("the load", list(by_name.values()))
        return by_name

    def _select_series(self, responses: Mapping[str, TimeSeries], now_s: float) -> tuple[Series, ...]:
        if self._series is not None:
            for series in self._series:
                if series.name not in responses:
                    raise self._make_missing_error((series,), now_s)
            return self._series
        selected = []
        for metric in METRICS if self._metrics is None else self._metrics:
            available = [series for series in list_series(metric) if series.name in responses]
            if available:
                selected.append(available[0])
            elif self._metrics is not None:
                raise self._make_missing_error(list_series(metric), now_s)
        if not selected:
            raise self._make_missing_error(self._list_candidates(), now_s)
        return tuple(selected)

    def _check_age(self, name: str, age_s: float) -> None:
        if age_s > self.max_age_s:
            raise self._make_stale_error(name, age_s)
        if age_s < -MAX_CLOCK_SKEW_S:
            raise DeviceError(
                f"{name} at {self.client.url} has a sample from {-age_s:.1f} s after the server's own clock; "
                "synchronize the clocks, or set `honor_timestamps: false` in the scrape configuration"
            )

    def _parse_share(self, series: Series, text: str) -> float:
        source = f"{series.name} (`{series.metric}`) of {self.device} at {self.client.url}"
        try:
            value = parse_number(text)
        except ValueError as error:
            raise DeviceError(f"{source} is {text!r}; expected a number") from error
        scale = self._pcie_bytes_per_s if series.scale is None else series.scale
        assert scale is not None
        return normalize_share(value, scale, source)

    def _make_stale_error(self, name: str, age_s: float) -> DeviceError:
        return DeviceError(
            f"{name} of {self.device} at {self.client.url} is stale: its newest sample is {age_s:.1f} s old, "
            f"expected at most {self.max_age_s:g} s; check that the exporter is running and that `max_age_s` "
            "exceeds the scrape interval"
        )

    def _make_ambiguity_error(self, name: str, responses: list[TimeSeries]) -> DeviceError:
        labels = sorted(
            {
                label
                for response in responses
                for label in response.labels
                if len({str(other.labels.get(label)) for other in responses}) > 1
            }
        )
        examples = "; ".join(
            ", ".join(f"{label}={response.labels.get(label, '')}" for label in labels)
            for response in responses[:4]
        )
        return DeviceError(
            f"{name} at {self.client.url} has {len(responses)} series for {self.device}, expected one; "
            f"they differ in {', '.join(labels)} ({examples}): select one with `labels`"
        )

    def _make_missing_error(self, candidates: tuple[Series, ...], now_s: float) -> DeviceError:
        """Make the error of a missing metric: stale, only for other devices, or never there."""
        names = tuple(series.name for series in candidates)
        text = " or ".join(names[:2]) if len(names) <= 2 else f"any of {', '.join(names[:3])}, …"
        earlier = self.client.read_samples(format_selector(names, self.labels), LOOKBACK_S)
        if earlier:
            last = max(earlier, key=lambda series: series.samples[-1][0])
            return self._make_stale_error(last.name, max(now_s - last.samples[-1][0], 0.0))
        message = f"{self.client.url} has no samples of {text} for {self.device}"
        matches = self.client.read_samples(format_selector(names, {}), LOOKBACK_S) if self.labels else ()
        if matches:
            devices = "; ".join(sorted({_format_device(series.labels) for series in matches})[:4])
            return DeviceError(f"{message}, only for {devices}: correct `labels`")
        return DeviceError(
            f"{message} in the last {LOOKBACK_S:g} s; the server must scrape the exporter of DCGM, or "
            "`sparseflow latency exporter`, with this field"
        )


class PrometheusRecording:
    """Reading in progress; created by `PrometheusReader.start`."""

    def __init__(self, reader: PrometheusReader) -> None:
        self._reader = reader
        self._start_s = time.monotonic()

    def stop(self) -> LoadReading:
        """Average the samples since the start, at least the newest; raises like `PrometheusReader.read`."""
        seconds = time.monotonic() - self._start_s
        check_recording_length(seconds)
        return self._reader.read(seconds)


def _format_device(labels: Mapping[str, str]) -> str:
    return ",".join(f"{name}={labels[name]}" for name in DEVICE_LABELS if labels.get(name)) or "no labels"

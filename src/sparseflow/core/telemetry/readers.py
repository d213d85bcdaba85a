"""Choosing a source of load readings by its name, as the command line and configuration files do."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sparseflow.core.telemetry.schema import LoadReader
from sparseflow.errors import InputError

SOURCES = ("host", "gpm", "prometheus")


def open_reader(
    source: str,
    *,
    device: str = "cuda",
    metrics: Collection[str] | None = None,
    url: str | None = None,
    labels: Mapping[str, str] | None = None,
    max_age_s: float = 30.0,
) -> LoadReader:
    """A reader of `source`.

    Args:
        source: `"host"`, `"gpm"` or `"prometheus"`.
        device: The GPU to read through GPM; the others do not look at it.
        metrics: What to read; by default what the source tells.
        url: The Prometheus server.
        labels: What picks the device on that server.
        max_age_s: From when on a sample of that server is stale.

    Raises:
        InputError: An unknown source, or one that lacks what it needs.
        DeviceError: The source is not there.
    """
    if source == "host":
        from sparseflow.core.telemetry.host_reader import HostReader

        return HostReader(metrics=metrics)
    if source == "gpm":
        from sparseflow.core.telemetry.gpm import DEFAULT_METRICS, GpmReader

        return GpmReader(device, metrics=DEFAULT_METRICS if metrics is None else metrics)
    if source == "prometheus":
        from sparseflow.core.telemetry.prometheus import PrometheusReader

        if url is None:
            raise InputError("a load from Prometheus needs the server's `url`, like http://127.0.0.1:9090")
        return PrometheusReader(url, labels, metrics=metrics, max_age_s=max_age_s)
    raise InputError(f"`source` (={source!r}) must be one of: {', '.join(SOURCES)}")

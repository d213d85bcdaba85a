"""Open a reader of device load by the name of its source."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sparseflow.core.checks import check_one_of
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
    """Open a reader of `source`.

    Args:
        source: `"host"`, `"gpm"` or `"prometheus"`.
        device: GPU of a GPM reader; ignored by the other sources.
        metrics: Metrics to read; by default the metrics that the source provides.
        url: URL of the Prometheus server.
        labels: Labels that select the device on that server.
        max_age_s: Age from which a sample of that server is stale.

    Raises:
        InputError: The source is unknown, or an argument that it needs is missing.
        DeviceError: The source is not available.
    """
    check_one_of(SOURCES, source=source)
    if source == "host":
        from sparseflow.core.telemetry.host_reader import HostReader

        return HostReader(metrics=metrics)
    if source == "gpm":
        from sparseflow.core.telemetry.gpm import DEFAULT_METRICS, GpmReader

        return GpmReader(device, metrics=DEFAULT_METRICS if metrics is None else metrics)
    from sparseflow.core.telemetry.prometheus import PrometheusReader

    if url is None:
        raise InputError("`url` is required for a Prometheus source, such as http://127.0.0.1:9090")
    return PrometheusReader(url, labels, metrics=metrics, max_age_s=max_age_s)

"""Grafana dashboard of the load that the exporter of SparseFlow or of DCGM publishes."""

from __future__ import annotations

from typing import Any, NamedTuple

from sparseflow.core.telemetry.dcgm import HOST_SOURCE, SERIES_BY_NAME, Series, list_series

TITLE = "SparseFlow: load of CPUs and GPUs"

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_INSTANCE = 'instance=~"$instance"'
_HOST = f'{_INSTANCE}, source="{HOST_SOURCE}"'
_GPU = f'{_INSTANCE}, source!="{HOST_SOURCE}"'
_SCHEMA_VERSION = 39
_COLUMNS, _HEIGHT = 24, 8


class _Panel(NamedTuple):
    """One graph.

    Attributes:
        title: Title.
        description: Help text.
        queries: Query in PromQL -> legend.
        unit: Unit of Grafana.
        max_value: Upper end of the axis; None fits it to the values.
    """

    title: str
    description: str
    queries: dict[str, str]
    unit: str = "percentunit"
    max_value: float | None = 1.0


def make_dashboard() -> dict[str, Any]:
    """Return the dashboard in the JSON model of Grafana; a variable selects data source and instances."""
    names = "|".join(SERIES_BY_NAME)
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
        {
            "name": "instance",
            "type": "query",
            "label": "Instance",
            "datasource": _DATASOURCE,
            "query": {"query": f'label_values({{__name__=~"{names}"}}, instance)', "refId": "instance"},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        },
    ]
    return {
        "title": TITLE,
        "uid": "sparseflow-load",
        "tags": ["sparseflow"],
        "schemaVersion": _SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": variables},
        "panels": [_format_panel(index, panel) for index, panel in enumerate(_list_panels())],
    }


def _list_panels() -> list[_Panel]:
    return [
        _Panel(
            "CPU: busy share",
            "Busy share of the usable CPUs, and that of other work, which the predictor reads as `others`.",
            _select(("busy", "active", "others", "steal"), _HOST, "{{instance}}"),
        ),
        _Panel(
            "CPU: waiting tasks",
            "Shares of time in which tasks waited, of runnable tasks that wait, and of context switches.",
            _select(("cpu_pressure", "io_pressure", "queue", "switching"), _HOST, "{{instance}}"),
        ),
        _Panel(
            "Memory",
            "Share of the memory that a new process cannot use, and of time in which tasks waited for it.",
            _select(("memory_used", "memory_pressure"), _HOST, "{{instance}}"),
        ),
        _Panel(
            "Exporter",
            "1 if the last scrape succeeded. The exporter refuses a scrape if it has no current reading.",
            {f"up{{{_INSTANCE}}}": "{{instance}}"},
            unit="short",
        ),
        _Panel(
            "GPU: busy share",
            "Share of time with a warp on an SM, which the predictor reads as `busy`, and with any kernel.",
            _select(("busy", "active", "occupancy"), _GPU, "{{instance}} {{gpu}}"),
        ),
        _Panel(
            "GPU: tensor cores and memory",
            "Shares of time with active tensor pipes and with an active memory interface.",
            _select(("tensor", "dram"), _GPU, "{{instance}} {{gpu}}"),
        ),
        _Panel(
            "GPU: PCIe",
            "Bytes that the GPU sends and receives over PCIe.",
            _select(("pcie_tx", "pcie_rx"), _GPU, "{{instance}} {{gpu}}"),
            unit="Bps",
            max_value=None,
        ),
    ]


def _select(metrics: tuple[str, ...], matchers: str, label: str) -> dict[str, str]:
    """Return query -> legend for some metrics: shares, or bytes per second for PCIe."""
    return {
        # The second operand of `or` counts where the first one has no sample.
        " or ".join(_format_query(series, matchers) for series in list_series(metric)): f"{metric} {label}"
        for metric in metrics
    }


def _format_query(series: Series, matchers: str) -> str:
    divisor = f" / {series.scale:g}" if series.scale not in (None, 1.0) else ""
    return f"{series.name}{{{matchers}}}{divisor}"


def _format_panel(index: int, panel: _Panel) -> dict[str, Any]:
    width = _COLUMNS // 2
    limits = {} if panel.max_value is None else {"max": panel.max_value}
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": {"x": index % 2 * width, "y": index // 2 * _HEIGHT, "w": width, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, **limits}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + n), "datasource": _DATASOURCE, "expr": query, "legendFormat": legend}
            for n, (query, legend) in enumerate(panel.queries.items())
        ],
    }

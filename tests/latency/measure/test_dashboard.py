"""The Grafana dashboard; a real Prometheus server answers all of its queries."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from sparseflow.cli.root import run
from sparseflow.core.telemetry.dcgm import HOST_SOURCE, SERIES
from sparseflow.core.telemetry.schema import METRICS, LoadReading
from sparseflow.latency.measure import exporter
from sparseflow.latency.measure.dashboard import make_dashboard
from tests.latency.measure.test_exporter import get, prometheus, until

PCIE_BYTES_PER_S = 64e9
QUERIES = [target["expr"] for panel in make_dashboard()["panels"] for target in panel["targets"]]


def test_dashboard_shows_all_series_once() -> None:
    text = "\n".join(QUERIES)
    assert [series.name for series in SERIES if series.name not in text] == []
    assert len(set(QUERIES)) == len(QUERIES)


def test_dashboard_panels_are_disjoint_and_have_distinct_references() -> None:
    panels = make_dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_dashboard_command_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "dashboard.json"
    assert run(["latency", "dashboard", "--out", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(path)
    assert json.loads(path.read_text()) == make_dashboard()


@contextmanager
def serve_metrics() -> Iterator[str]:
    """Serve all metrics of a host and a GPU, half of their maximum; yields the address."""
    shares = {str(metric): 0.5 for metric in METRICS}
    readings = {
        source: LoadReading(timestamp_s=1e9, interval_s=1.0, source=source, device="d", shares=shares)
        for source in ("host", "gpm")
    }
    text = "".join(
        exporter.format_metrics(readings[source], labels, pcie_bytes_per_s=PCIE_BYTES_PER_S)
        for source, labels in (
            ("host", {"gpu": "0", "source": HOST_SOURCE}),
            ("gpm", {"gpu": "1", "UUID": "GPU-a"}),
        )
    )
    # The text format requires one group of samples for each metric.
    lines = sorted(line for line in text.splitlines() if not line.startswith("#"))
    body = ("\n".join(lines) + "\n").encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", exporter.CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def query_api(url: str, path: str, **arguments: str) -> Any:
    """Return the data of a response of the server's HTTP API."""
    code, _, text = get(f"{url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}")
    assert code == 200, text
    return json.loads(text)["data"]


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no `prometheus` here; on Debian: apt-get install prometheus"
)
def test_prometheus_answers_all_queries(tmp_path: Path) -> None:
    with serve_metrics() as target, prometheus(tmp_path, target) as url:
        until(lambda: query_api(url, "query", query="SPARSEFLOW_STEAL")["result"], bool)
        variable = make_dashboard()["templating"]["list"][1]
        selector = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
        assert selector is not None
        values = query_api(url, f"label/{selector[2]}/values", **{"match[]": selector[1]})
        assert values == [target]
        for instance, count in ((target, 1), (variable["allValue"], 1), ("absent", 0)):
            for query in QUERIES:
                result = query_api(url, "query", query=query.replace("$instance", instance))["result"]
                assert len(result) == count, (query, result)
                if count and not query.startswith("up"):
                    expected = 0.5 * PCIE_BYTES_PER_S if "PCIE" in query else 0.5
                    assert float(result[0]["value"][1]) == pytest.approx(expected)
                    gpu = "0" if f'source="{HOST_SOURCE}"' in query else "1"
                    assert result[0]["metric"]["gpu"] == gpu, query

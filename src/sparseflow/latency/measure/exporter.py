"""Prometheus exporter of this machine's load, under the metric names of the DCGM exporter.

A thread reads the source continuously, and a scrape returns the newest reading. If a reading failed, is late
or does not exist yet, the scrape is answered with 503 and the reason: Prometheus then marks the series as
stale, instead of showing an old value.

A client has `REQUEST_TIMEOUT_S` to send its request, and at most `MAX_CONNECTIONS` connections are served at
a time; further ones are closed at once.

The host's values use DCGM's names, so that everything that reads DCGM works without a GPU; each of them has
the label `source="sparseflow-host"`.
"""

from __future__ import annotations

import io
import logging
import platform
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from sparseflow.core.checks import check_between
from sparseflow.core.extras import require
from sparseflow.core.telemetry.dcgm import GPM_SOURCE, HOST_HELP, HOST_SOURCE, SERIES
from sparseflow.core.telemetry.deadline_reader import DeadlineReader
from sparseflow.core.telemetry.gpm import GpmReader
from sparseflow.core.telemetry.prometheus_http import format_selector
from sparseflow.core.telemetry.schema import LoadReader, LoadReading, check_window
from sparseflow.errors import DeviceError, InputError, SparseFlowError

PORT = 9400
"""Default port of the DCGM exporter."""

MAX_CONNECTIONS = 32
REQUEST_TIMEOUT_S = 10.0
"""Maximum time from a connection to the end of its request, and for each write of the answer, seconds."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

logger = logging.getLogger(__name__)


class Exporter:
    """Reads a source continuously and serves the newest reading at `/metrics`. A context manager.

    Args:
        reader: Source; a `HostReader` or a `GpmReader`.
        host: Address to listen on; by default only this machine can connect.
        port: Port to listen on; 0 selects a free one, see `url`.
        interval_s: Duration of one reading, seconds.
        labels: Labels of every series; by default those of this machine and the reader's device.

    Raises:
        InputError: `interval_s` is too short, a label is invalid, the host is not an address of this
            machine, or the port is out of range or in use.
        MissingExtraError: prometheus-client is missing.
    """

    def __init__(
        self,
        reader: LoadReader,
        *,
        host: str = "127.0.0.1",
        port: int = PORT,
        interval_s: float = 1.0,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        require("prometheus_client", "latency")
        check_window(interval_s, "interval_s")
        check_between(0, 65535, port=port)
        self._reader = reader
        self._interval_s = interval_s
        self._labels = make_labels(reader) if labels is None else dict(labels)
        format_selector(("x",), self._labels)
        if not host:
            raise InputError("`host` is empty; use 127.0.0.1, or 0.0.0.0 to accept other machines")
        self._latest: tuple[float, LoadReading | str] | None = None
        self._stopping = threading.Event()
        try:
            self._server = make_server(host, port, self._serve_request, _Server, _RequestHandler)
        except (OSError, TypeError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                f"cannot listen on {host!r}, port {port}: {reason}; choose another `--host` or `--port`, or "
                "port 0 for a free one"
            ) from error
        self._threads = [
            threading.Thread(target=self._server.serve_forever, args=(0.05,), name="serve", daemon=True),
            threading.Thread(target=self._read_continuously, name="read", daemon=True),
        ]

    @property
    def url(self) -> str:
        """URL of the metrics."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/metrics"

    def __enter__(self) -> Exporter:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join(self._interval_s + 5.0)

    def scrape(self) -> tuple[int, str]:
        """Return the HTTP status and body of a scrape."""
        latest = self._latest
        if latest is None:
            return 503, f"no reading yet; the first takes {self._interval_s:g} s\n"
        read_s, reading = latest
        if isinstance(reading, str):
            return 503, f"cannot read the {self._reader.name}: {reading}\n"
        age_s = time.monotonic() - read_s
        if age_s > 3.0 * self._interval_s + 1.0:
            return 503, f"the newest reading of the {self._reader.name} is {age_s:.1f} s old\n"
        pcie_bytes_per_s = self._reader.pcie_bytes_per_s if isinstance(self._reader, GpmReader) else None
        return 200, format_metrics(reading, self._labels, pcie_bytes_per_s=pcie_bytes_per_s)

    def _serve_request(
        self, environ: dict[str, Any], start_response: Callable[[str, list[tuple[str, str]]], Any]
    ) -> list[bytes]:
        code, text = 404, "the metrics are at /metrics\n"
        if environ["PATH_INFO"] == "/metrics":
            code, text = self.scrape()
        content_type = CONTENT_TYPE if code == 200 else "text/plain; charset=utf-8"
        body = text.encode()
        headers = [("Content-Type", content_type), ("Content-Length", str(len(body)))]
        start_response(f"{code} {HTTPStatus(code).phrase}", headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _read_continuously(self) -> None:
        while not self._stopping.is_set():
            try:
                recording = self._reader.start()
                if self._stopping.wait(self._interval_s):
                    return
                reading: LoadReading | str = recording.stop()
            except Exception as error:
                # A scrape must report any error instead of returning the last value forever.
                prefix = "" if isinstance(error, SparseFlowError) else f"{type(error).__name__}: "
                reading = f"{prefix}{error}"
            previous, self._latest = self._latest, (time.monotonic(), reading)
            if isinstance(reading, str):
                if previous is None or previous[1] != reading:
                    logger.warning("no reading: %s", reading)
                self._stopping.wait(self._interval_s)


def serve(exporter: Exporter, *, ready: Callable[[str], None] = lambda url: None) -> None:
    """Run an exporter until SIGTERM or SIGINT. Only from the main thread.

    Args:
        exporter: Exporter that was not started.
        ready: Receives the URL once the port is open.
    """
    stop = threading.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        with exporter:
            ready(exporter.url)
            stop.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def format_metrics(
    load: LoadReading, labels: Mapping[str, str], *, pcie_bytes_per_s: float | None = None
) -> str:
    """Format a reading in Prometheus' text format.

    Args:
        load: The reading.
        labels: Labels of every sample.
        pcie_bytes_per_s: Bandwidth of the device's link; required for `pcie_tx` and `pcie_rx`.

    Raises:
        DeviceError: The reading contains a PCIe share, and `pcie_bytes_per_s` is None.
    """
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()
    for series in SERIES:
        if series.metric not in load.shares:
            continue
        scale = pcie_bytes_per_s if series.scale is None else series.scale
        if scale is None:
            raise DeviceError(f"{series.name} is in bytes per second, and the link's bandwidth is unknown")
        help_text = HOST_HELP.get(series.metric, series.help) if load.source == "host" else series.help
        gauge = Gauge(series.name, help_text, list(labels), registry=registry)
        (gauge.labels(**labels) if labels else gauge).set(load.shares[series.metric] * scale)
    return generate_latest(registry).decode()


def make_labels(reader: LoadReader) -> dict[str, str]:
    """Return the labels of the DCGM exporter for the reader's device, and the label `source`.

    Raises:
        InputError: The reader is neither of the host nor of GPM.
    """
    host_name = socket.gethostname()
    if isinstance(reader, GpmReader):
        return {
            "gpu": str(reader.index),
            "UUID": reader.uuid,
            "device": f"nvidia{reader.index}",
            "modelName": reader.model,
            "Hostname": host_name,
            "source": GPM_SOURCE,
        }
    if reader.name != "host":
        raise InputError(f"cannot export a {reader.name} reader; use the host or gpm")
    # Constant over restarts, so that the same series continues.
    identifier = uuid.uuid5(uuid.NAMESPACE_DNS, f"{host_name}/{reader.device}")
    return {
        "gpu": "0",
        "UUID": f"CPU-{identifier}",
        "device": "cpu",
        "modelName": platform.processor() or platform.machine(),
        "Hostname": host_name,
        "source": HOST_SOURCE,
    }


class _Server(ThreadingMixIn, WSGIServer):
    """Serves a bounded number of connections, each in a thread."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Clients that leave or are too slow are no errors of the exporter.
        logger.debug("the connection of %s ended", client_address, exc_info=True)


class _RequestHandler(WSGIRequestHandler):
    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(REQUEST_TIMEOUT_S)
        self.rfile.close()
        self.rfile = io.BufferedReader(DeadlineReader(self.connection, time.monotonic() + REQUEST_TIMEOUT_S))

    def log_message(self, format: str, *args: Any) -> None:
        # Scrapes are too frequent for the default log.
        logger.debug(format, *args)

"""Publish this machine's load for Prometheus to scrape, under the names that DCGM's exporter uses.

A thread reads the source over and over; a scrape gets the newest reading. When a reading failed, is late or
has not been taken yet, the scrape is answered with 503 and the reason: Prometheus then marks the series as
stale, which an old number would hide.

A CPU's values stand under DCGM's names so that whatever reads DCGM can be tried without a GPU; every one of
them carries the label `source="sparseflow-host"`.

Source: Prometheus, "Exposition formats", text format 0.0.4.
"""

from __future__ import annotations

import logging
import platform
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType, TracebackType
from typing import Any

from sparseflow.core.telemetry.dcgm import GPM_SOURCE, HOST_HELP, HOST_SOURCE, SERIES
from sparseflow.core.telemetry.gpm import GpmReader
from sparseflow.core.telemetry.schema import LoadReader, LoadReading, check_window
from sparseflow.errors import DeviceError, InputError, SparseFlowError

PORT = 9400
"""What DCGM's exporter listens on."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

logger = logging.getLogger(__name__)


class Exporter:
    """Reads a source and serves the newest reading at `/metrics`. A context manager.

    Args:
        reader: What to read; a `HostReader` or a `GpmReader`.
        host: Address to listen on; by default only this machine can reach it.
        port: Port to listen on; 0 takes a free one, see `url`.
        interval_s: Seconds that one reading takes, and the next begins at once.
        labels: Labels of every series; by default what describes this machine and `reader`'s device.

    Raises:
        InputError: `interval_s` is too short, or the port is no port or is taken.
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
        check_window(interval_s, "interval_s")
        if not 0 <= port <= 65535:
            raise InputError(f"`port` (={port}) must be in [0, 65535]")
        self._reader = reader
        self._interval_s = interval_s
        self._labels = describe(reader) if labels is None else dict(labels)
        self._latest: tuple[float, LoadReading | str] | None = None
        self._stopping = threading.Event()
        try:
            self._server = ThreadingHTTPServer((host, port), _handler(self.scrape))
        except OSError as error:
            raise InputError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; choose another `--port`, or 0 "
                "for a free one"
            ) from error
        # A scrape that hangs must not keep the process alive.
        self._server.daemon_threads = True
        self._threads = [
            threading.Thread(target=self._server.serve_forever, args=(0.05,), name="serve", daemon=True),
            threading.Thread(target=self._keep_reading, name="read", daemon=True),
        ]

    @property
    def url(self) -> str:
        """Where the metrics are."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/metrics"

    def __enter__(self) -> Exporter:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join(self._interval_s + 5.0)

    def scrape(self) -> tuple[int, str]:
        """HTTP status and body of a scrape right now."""
        latest = self._latest
        if latest is None:
            return 503, f"no reading yet; the first takes {self._interval_s:g} s\n"
        at_s, found = latest
        if isinstance(found, str):
            return 503, f"the {self._reader.name} cannot be read: {found}\n"
        late_s = time.monotonic() - at_s
        if late_s > 3.0 * self._interval_s + 1.0:
            return 503, f"the newest reading of the {self._reader.name} is {late_s:.1f} s old\n"
        return 200, exposition(found, self._labels, pcie_bytes_per_s=_link(self._reader))

    def _keep_reading(self) -> None:
        said = ""
        while not self._stopping.is_set():
            try:
                watch = self._reader.start()
                if self._stopping.wait(self._interval_s):
                    return
                found: LoadReading | str = watch.stop()
                said = ""
            except SparseFlowError as error:
                found = str(error)
            except Exception as error:
                # Whatever it is, a scrape must hear of it rather than get the last number for ever.
                found = f"{type(error).__name__}: {error}"
            self._latest = (time.monotonic(), found)
            if isinstance(found, str):
                if found != said:
                    logger.warning("no reading: %s", found)
                said = found
                self._stopping.wait(self._interval_s)


def serve(exporter: Exporter, *, ready: Callable[[str], None] = lambda url: None) -> None:
    """Run `exporter` until SIGTERM or SIGINT, then stop it cleanly. Only from the main thread.

    Args:
        exporter: Not yet started.
        ready: Called with the URL once the port answers.
    """
    stop = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with exporter:
            ready(exporter.url)
            stop.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exposition(load: LoadReading, labels: Mapping[str, str], *, pcie_bytes_per_s: float | None = None) -> str:
    """A reading in Prometheus' text format: HELP, TYPE and one sample for each metric that it holds.

    Args:
        load: The reading.
        labels: Labels of every sample.
        pcie_bytes_per_s: What the device's link carries; needed for `pcie_tx` and `pcie_rx`.

    Raises:
        DeviceError: The reading holds a PCIe share, and `pcie_bytes_per_s` was not given.
    """
    tags = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    lines = []
    for series in SERIES:
        if series.metric not in load.shares:
            continue
        scale = pcie_bytes_per_s if series.scale is None else series.scale
        if scale is None:
            raise DeviceError(f"{series.name} is in bytes a second, and the rate of the link is not known")
        meaning = HOST_HELP.get(series.metric, series.help) if load.source == "host" else series.help
        lines += [
            f"# HELP {series.name} {meaning}",
            f"# TYPE {series.name} gauge",
            f"{series.name}{{{tags}}} {load.shares[series.metric] * scale!r}",
        ]
    return "\n".join(lines) + "\n"


def describe(reader: LoadReader) -> dict[str, str]:
    """The labels that DCGM's exporter gives to a GPU, for what `reader` reads, and the label `source`."""
    here = socket.gethostname()
    if isinstance(reader, GpmReader):
        return {
            "gpu": str(reader.index),
            "UUID": reader.uuid,
            "device": f"nvidia{reader.index}",
            "modelName": reader.model,
            "Hostname": here,
            "source": GPM_SOURCE,
        }
    if reader.name != "host":
        raise InputError(f"a {reader.name} reader cannot be exported; read the host or a GPU through GPM")
    # The same at every start, so that a restart goes on with the same series.
    number = uuid.uuid5(uuid.NAMESPACE_DNS, f"{here}/{reader.device}")
    return {
        "gpu": "0",
        "UUID": f"CPU-{number}",
        "device": "cpu",
        "modelName": platform.processor() or platform.machine(),
        "Hostname": here,
        "source": HOST_SOURCE,
    }


def _link(reader: LoadReader) -> float | None:
    return reader.pcie_bytes_per_s if isinstance(reader, GpmReader) else None


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _handler(scrape: Callable[[], tuple[int, str]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                code, text = scrape()
                kind = CONTENT_TYPE if code == 200 else "text/plain; charset=utf-8"
            else:
                code, text, kind = 404, "the metrics are at /metrics\n", "text/plain; charset=utf-8"
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            # One line a scrape would bury what matters.
            logger.debug(format, *args)

    return Handler

"""The exporter, also scraped by a real Prometheus server on the loopback interface."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from sparseflow.cli.root import run
from sparseflow.core.telemetry.dcgm import HOST_SOURCE, SERIES_BY_NAME
from sparseflow.core.telemetry.gpm import GpmReader
from sparseflow.core.telemetry.host_reader import HostReader
from sparseflow.core.telemetry.prometheus import PrometheusReader
from sparseflow.core.telemetry.schema import LoadReading
from sparseflow.errors import DeviceError, InputError, SparseFlowError
from sparseflow.latency.measure import exporter
from sparseflow.latency.measure.exporter import Exporter

PATIENCE_S = 120.0
T = TypeVar("T")


def load(source: str = "host", **shares: float) -> LoadReading:
    return LoadReading(timestamp_s=1e9, interval_s=0.1, source=source, device="cpu", shares=shares)


class Reader:
    """Reader whose readings the test provides."""

    name = "host"
    device = "cpu"
    metrics = ("busy",)

    def __init__(self, answer: Callable[[], LoadReading]) -> None:
        self.answer = answer

    def read(self, window_s: float = 1.0) -> LoadReading:
        return self.answer()

    def start(self) -> Reader:
        return self

    def stop(self) -> LoadReading:
        return self.answer()


def get(url: str) -> tuple[int, str, str]:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10.0) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def until(request: Callable[[], T], accept: Callable[[T], bool]) -> T:
    end = time.monotonic() + PATIENCE_S
    while not accept(response := request()):
        assert time.monotonic() < end, response
        time.sleep(0.1)
    return response


def parse(text: str) -> dict[str, Metric]:
    return {metric.name: metric for metric in text_string_to_metric_families(text)}


def test_format_metrics_shares_are_described_and_scaled() -> None:
    labels = {"gpu": "0", "source": HOST_SOURCE}
    metrics = parse(exporter.format_metrics(load(busy=0.25, active=0.5, io_pressure=0.0), labels))
    assert {name: metric.samples[0].value for name, metric in metrics.items()} == {
        "DCGM_FI_PROF_SM_ACTIVE": 0.25,
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.5,
        "DCGM_FI_DEV_GPU_UTIL": 50.0,
        "SPARSEFLOW_IO_PRESSURE": 0.0,
    }
    for metric in metrics.values():
        assert metric.type == "gauge" and metric.documentation
        assert [sample.labels for sample in metric.samples] == [labels]


def test_format_metrics_help_differs_for_cpu() -> None:
    name = "DCGM_FI_PROF_SM_ACTIVE"
    cpu, gpu = (parse(exporter.format_metrics(load(source, busy=0.5), {})) for source in ("host", "gpm"))
    assert cpu[name].documentation != gpu[name].documentation


def test_format_metrics_pcie_share_needs_bandwidth() -> None:
    text = exporter.format_metrics(load("gpm", pcie_tx=0.5), {}, pcie_bytes_per_s=60e9)
    assert parse(text)["DCGM_FI_PROF_PCIE_TX_BYTES"].samples[0].value == 30e9
    with pytest.raises(DeviceError, match="DCGM_FI_PROF_PCIE_TX_BYTES"):
        exporter.format_metrics(load("gpm", pcie_tx=0.5), {})


def test_format_metrics_labels_escaped() -> None:
    text = exporter.format_metrics(load(busy=0.5), {"name": 'a\\b"c\nd'})
    assert parse(text)["DCGM_FI_PROF_SM_ACTIVE"].samples[0].labels == {"name": 'a\\b"c\nd'}


def test_make_labels_host_is_stable() -> None:
    labels = exporter.make_labels(HostReader())
    assert labels["source"] == HOST_SOURCE and labels["UUID"].startswith("CPU-")
    assert labels["Hostname"] == socket.gethostname()
    assert labels == exporter.make_labels(HostReader())


def test_make_labels_gpu_matches_dcgm() -> None:
    reader = object.__new__(GpmReader)
    reader.index, reader.uuid, reader.model, reader.device = 3, "GPU-abc", "NVIDIA H200", "cuda:0"
    assert exporter.make_labels(reader) == {
        "gpu": "3",
        "UUID": "GPU-abc",
        "device": "nvidia3",
        "modelName": "NVIDIA H200",
        "Hostname": socket.gethostname(),
        "source": "sparseflow-gpm",
    }


def test_exporter_prometheus_reader_raises() -> None:
    with pytest.raises(InputError):
        Exporter(PrometheusReader("http://127.0.0.1:9"), port=0)


def test_scrape_returns_newest_reading() -> None:
    values = iter([0.25, 0.75])
    second_reading = threading.Event()

    def answer() -> LoadReading:
        value = next(values, 0.75)
        if value == 0.75:
            second_reading.set()
        return load(busy=value)

    with Exporter(Reader(answer), port=0, interval_s=0.1) as running:
        assert second_reading.wait(PATIENCE_S)
        code, kind, _ = until(lambda: get(running.url), lambda response: "} 0.75\n" in response[2])
        assert (code, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert get(running.url.replace("/metrics", "/other"))[0] == 404


@pytest.mark.parametrize("error", [DeviceError("/proc/stat is gone"), RuntimeError("/proc/stat is gone")])
def test_scrape_failed_reading_returns_503(error: Exception) -> None:
    broken = threading.Event()

    def answer() -> LoadReading:
        if broken.is_set():
            raise error
        return load(busy=0.5)

    with Exporter(Reader(answer), port=0, interval_s=0.1) as running:
        until(lambda: get(running.url), lambda response: response[0] == 200)
        broken.set()
        code, kind, text = until(
            lambda: get(running.url), lambda response: "/proc/stat is gone" in response[2]
        )
        assert code == 503
        assert "/proc/stat is gone" in text and "0.5" not in text
        assert kind.startswith("text/plain")
        broken.clear()
        until(lambda: get(running.url), lambda response: response[0] == 200)


def test_scrape_hanging_reading_returns_503() -> None:
    hang, go_on = threading.Event(), threading.Event()

    def answer() -> LoadReading:
        if hang.is_set():
            go_on.wait(2.0 * PATIENCE_S)
        return load(busy=0.5)

    with Exporter(Reader(answer), port=0, interval_s=0.1) as running:
        until(lambda: get(running.url), lambda response: response[0] == 200)
        hang.set()
        text = until(lambda: get(running.url), lambda response: response[0] == 503)[2]
        assert "s old" in text and "DCGM" not in text
        go_on.set()


def test_scrape_before_first_reading_returns_503() -> None:
    unstarted = Exporter(Reader(lambda: load(busy=0.5)), port=0)
    try:
        assert unstarted.scrape() == (503, "no reading yet; the first takes 1 s\n")
    finally:
        unstarted._server.server_close()


def connect(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").removesuffix("/metrics").partition(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


def test_head_returns_length_without_body() -> None:
    with Exporter(Reader(lambda: load(busy=0.5)), port=0, interval_s=0.1) as running:
        text = until(lambda: get(running.url), lambda response: response[0] == 200)[2]
        with connect(running.url) as client:
            client.sendall(b"HEAD /metrics HTTP/1.0\r\n\r\n")
            answer = b"".join(iter(lambda: client.recv(4096), b"")).decode()
    head, _, body = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.0 200") and f"Content-Length: {len(text)}" in head and not body


def test_slow_request_is_closed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(exporter, "REQUEST_TIMEOUT_S", 0.2)
    with Exporter(Reader(lambda: load(busy=0.5)), port=0, interval_s=0.1) as running:
        for request in (b"", b"GET /metrics HTTP/1.1\r\nHost: "):
            with connect(running.url) as client:
                client.sendall(request)
                client.settimeout(0.05)
                end_s = time.monotonic() + PATIENCE_S
                while True:
                    assert time.monotonic() < end_s
                    try:
                        # Each byte would restart a timeout of the socket.
                        if request:
                            client.sendall(b"x")
                        if not client.recv(1):
                            break
                    except TimeoutError:
                        continue
                    except OSError:
                        break
    assert capfd.readouterr().err == ""


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "MAX_CONNECTIONS", 2)
    with Exporter(Reader(lambda: load(busy=0.5)), port=0, interval_s=0.1) as running, ExitStack() as stack:
        idle = [stack.enter_context(connect(running.url)) for _ in range(3)]
        with suppress(ConnectionResetError):
            assert idle[2].recv(1) == b""
        idle[0].close()
        until(lambda: answers(running.url), bool)


def answers(url: str) -> bool:
    try:
        return get(url)[0] == 200
    except OSError:
        return False


def test_exporter_busy_port_raises() -> None:
    with socket.socket() as busy_socket:
        busy_socket.bind(("127.0.0.1", 0))
        busy_socket.listen()
        with pytest.raises(InputError, match=r"--port"):
            Exporter(Reader(lambda: load(busy=0.5)), port=busy_socket.getsockname()[1])


@pytest.mark.parametrize(
    "arguments",
    [
        {"port": -1},
        {"port": 65536},
        {"interval_s": 0.01},
        {"host": ""},
        {"host": "127.0.0.1\0"},
        {"host": "\udc80"},
        {"host": "256.0.0.1"},
        {"labels": {"gpu-index": "0"}},
        {"labels": {"__name__": "x"}},
    ],
)
def test_exporter_invalid_arguments_raise(arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Exporter(Reader(lambda: load(busy=0.5)), **{"port": 0, **arguments})


SERVE = """
import sys
from sparseflow.core.telemetry.host_reader import HostReader
from sparseflow.latency.measure.exporter import Exporter, serve
reader = HostReader([int(sys.argv[1])])
serve(Exporter(reader, port=0, interval_s=0.5), ready=lambda url: print(url, flush=True))
"""


@contextmanager
def child(*command: str | Path, cwd: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start a process that is killed at the end."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=cwd) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_signal_stops(number: signal.Signals) -> None:
    with child(sys.executable, "-c", SERVE, str(min(os.sched_getaffinity(0)))) as process:
        url = address(process)
        until(lambda: get(url), lambda response: response[0] == 200)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0


def free_port() -> int:
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        return free_socket.getsockname()[1]


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Run a Prometheus server that scrapes `target` every second; yields its URL."""
    binary = shutil.which("prometheus")
    assert binary is not None
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [{"job_name": "load", "static_configs": [{"targets": [target]}]}],
    }
    # JSON is YAML.
    (folder / "prometheus.yml").write_text(json.dumps(config))
    with ExitStack() as stack:
        while True:
            port = free_port()
            server = stack.enter_context(
                child(
                    binary,
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                    "--log.level=error",
                    cwd=folder,
                )
            )
            # Another process may have taken the port.
            if until(partial(listens, port, server), lambda listening: listening is not None):
                break
        yield f"http://127.0.0.1:{port}"


def listens(port: int, server: subprocess.Popen[str]) -> bool | None:
    """Return whether the server listens; None while it starts."""
    if server.poll() is not None:
        return False
    with socket.socket() as probe:
        return True if probe.connect_ex(("127.0.0.1", port)) == 0 else None


def quietest_cpu() -> int:
    """Return the CPU with the lowest load."""
    loads = {cpu: HostReader([cpu]).start() for cpu in os.sched_getaffinity(0)}
    time.sleep(0.5)
    return min(loads, key=lambda cpu: loads[cpu].stop()["busy"])


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no `prometheus` here; on Debian: apt-get install prometheus"
)
def test_prometheus_shows_load_and_dead_exporter(tmp_path: Path) -> None:
    cpu = quietest_cpu()
    spin = f"import os\nos.sched_setaffinity(0, [{cpu}])\nwhile True: pass"
    with child(sys.executable, "-c", SERVE, str(cpu)) as publishing:
        target = address(publishing).removeprefix("http://").removesuffix("/metrics")
        with prometheus(tmp_path, target) as url:
            reader = PrometheusReader(url, {"source": HOST_SOURCE, "instance": target}, max_age_s=3.0)

            def read_load() -> LoadReading | str:
                try:
                    return reader.read(1.5)
                except SparseFlowError as error:
                    return str(error)

            idle = until(read_load, lambda reading: isinstance(reading, LoadReading))
            assert isinstance(idle, LoadReading)
            assert set(reader.metrics) == set(HostReader().metrics)
            assert f"instance={target}" in idle.device and "UUID=CPU-" in idle.device

            with child(sys.executable, "-c", spin):
                # An older reading could be busy as well, so a later one is required.
                busy = until(
                    read_load,
                    lambda reading: (
                        isinstance(reading, LoadReading)
                        and reading.timestamp_s > idle.timestamp_s + 2.0
                        and reading["busy"] > 0.9
                    ),
                )
            assert isinstance(busy, LoadReading)

            publishing.kill()
            dead = until(read_load, lambda reading: isinstance(reading, str) and "is stale" in reading)
            assert isinstance(dead, str)
            assert "check that the exporter is running" in dead and url in dead
            assert any(name in dead for name in SERIES_BY_NAME)
            with pytest.raises(DeviceError):
                reader.read(60.0)
        with pytest.raises(DeviceError, match=url):
            reader.read()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sparseflow", "latency", *arguments]


def test_exporter_command_serves_until_sigterm() -> None:
    with child(
        *command("exporter", "--port", "0", "--interval-s", "0.2", "--metric", "busy", "--json")
    ) as process:
        announcement = json.loads(address(process))
        assert announcement["metrics"] == ["busy"]
        text = until(lambda: get(announcement["url"]), lambda response: response[0] == 200)[2]
        assert "DCGM_FI_PROF_SM_ACTIVE{" in text and 'source="sparseflow-host"' in text
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_load_command_shows_host_reading(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["latency", "load", "--window-s", "0.2", "--json"]) == 0
    reading = json.loads(capsys.readouterr().out)
    assert reading["source"] == "host" and 0.0 <= reading["busy"] <= 1.0
    assert run(["latency", "load", "--window-s", "0.2", "--metric", "busy"]) == 0
    assert "busy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "value"),
    [
        (["load", "--source", "prometheus"], 2, "url"),
        (["load", "--source", "prometheus", "--url", "http://127.0.0.1:1"], 1, "127.0.0.1:1"),
        (
            ["load", "--source", "prometheus", "--url", "http://127.0.0.1:1", "--label", "gpu"],
            2,
            "--label gpu",
        ),
        (["load", "--source", "dcgm"], 2, "'dcgm'"),
        (["load", "--metric", "tensor"], 1, "`tensor`"),
        (["load", "--metric", "speed"], 2, "'speed'"),
        (["exporter", "--source", "prometheus"], 2, "'prometheus'"),
        (["exporter", "--port", "70000"], 2, "--port"),
        (["exporter", "--interval-s", "0"], 2, "interval_s"),
    ],
)
def test_load_commands_exit_codes(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, value: str
) -> None:
    assert run(["latency", *arguments, "--json"]) == code
    assert value in json.loads(capsys.readouterr().out)["error"]["message"]

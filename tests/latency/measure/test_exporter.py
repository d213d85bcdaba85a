"""What the exporter serves, and the whole way through Debian's real Prometheus, on loopback."""

from __future__ import annotations

import json
import os
import re
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
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from sparseflow.cli.root import run
from sparseflow.core.telemetry.dcgm import HOST_SOURCE, SERIES_BY_NAME
from sparseflow.core.telemetry.gpm import GpmReader
from sparseflow.core.telemetry.host_reader import HostReader
from sparseflow.core.telemetry.prometheus import PrometheusReader
from sparseflow.core.telemetry.schema import LoadReading
from sparseflow.errors import DeviceError, InputError, SparseFlowError
from sparseflow.latency.measure import exporter
from sparseflow.latency.measure.exporter import Exporter

LINE = re.compile(r"([A-Z_]+)\{(.*)\} ([0-9.e+-]+)")
PATIENCE_S = 120.0
T = TypeVar("T")


def load(source: str = "host", **shares: float) -> LoadReading:
    return LoadReading(timestamp_s=1e9, interval_s=0.1, source=source, device="cpu", shares=shares)


class Reader:
    """A reader whose next readings the test decides."""

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


def until(ask: Callable[[], T], right: Callable[[T], bool]) -> T:
    end = time.monotonic() + PATIENCE_S
    while not right(found := ask()):
        assert time.monotonic() < end, found
        time.sleep(0.1)
    return found


def test_the_text_names_describes_and_scales_every_share() -> None:
    text = exporter.exposition(
        load(busy=0.25, active=0.5, io_pressure=0.0), {"gpu": "0", "source": HOST_SOURCE}
    )
    values = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            found = LINE.fullmatch(line)
            assert found is not None, line
            values[found.group(1)] = float(found.group(3))
            assert found.group(2) == 'gpu="0",source="sparseflow-host"'
            assert f"# TYPE {found.group(1)} gauge\n{line}\n" in text
            assert f"# HELP {found.group(1)} " in text
    assert values == {
        "DCGM_FI_PROF_SM_ACTIVE": 0.25,
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.5,
        "DCGM_FI_DEV_GPU_UTIL": 50.0,
        "SPARSEFLOW_IO_PRESSURE": 0.0,
    }


def test_a_cpus_value_is_told_apart_from_a_gpus() -> None:
    assert "a CPU's value under DCGM's name" in exporter.exposition(load(busy=0.5), {})
    assert "a CPU's value" not in exporter.exposition(load("gpm", busy=0.5), {})


def test_a_link_share_becomes_bytes_a_second_or_an_error() -> None:
    text = exporter.exposition(load("gpm", pcie_tx=0.5), {}, pcie_bytes_per_s=60e9)
    assert "DCGM_FI_PROF_PCIE_TX_BYTES{} 30000000000.0\n" in text
    with pytest.raises(DeviceError, match="DCGM_FI_PROF_PCIE_TX_BYTES"):
        exporter.exposition(load("gpm", pcie_tx=0.5), {})


def test_labels_are_escaped() -> None:
    assert r'{name="a\\b\"c\nd"}' in exporter.exposition(load(busy=0.5), {"name": 'a\\b"c\nd'})


def test_a_host_says_that_it_is_one_and_stays_the_same_series() -> None:
    labels = exporter.describe(HostReader())
    assert labels["source"] == HOST_SOURCE and labels["UUID"].startswith("CPU-")
    assert labels["Hostname"] == socket.gethostname()
    assert labels == exporter.describe(HostReader())


def test_a_gpu_gets_the_labels_that_dcgm_gives() -> None:
    reader = object.__new__(GpmReader)
    reader.index, reader.uuid, reader.model, reader.device = 3, "GPU-abc", "NVIDIA H200", "cuda:0"
    assert exporter.describe(reader) == {
        "gpu": "3",
        "UUID": "GPU-abc",
        "device": "nvidia3",
        "modelName": "NVIDIA H200",
        "Hostname": socket.gethostname(),
        "source": "sparseflow-gpm",
    }


def test_what_was_scraped_is_not_exported_again() -> None:
    with pytest.raises(InputError, match="prometheus reader cannot be exported"):
        Exporter(PrometheusReader("http://127.0.0.1:9"), port=0)


def test_a_scrape_gets_the_newest_reading() -> None:
    values = iter([0.25, 0.75])
    seen = threading.Event()

    def answer() -> LoadReading:
        value = next(values, 0.75)
        if value == 0.75:
            seen.set()
        return load(busy=value)

    with Exporter(Reader(answer), port=0, interval_s=0.1) as running:
        assert seen.wait(PATIENCE_S)
        code, kind, _ = until(lambda: get(running.url), lambda found: "} 0.75\n" in found[2])
        assert (code, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert get(running.url.replace("/metrics", "/other"))[0] == 404


@pytest.mark.parametrize("error", [DeviceError("/proc/stat is gone"), RuntimeError("/proc/stat is gone")])
def test_a_reading_that_fails_answers_503_and_never_the_last_number(error: Exception) -> None:
    broken = threading.Event()

    def answer() -> LoadReading:
        if broken.is_set():
            raise error
        return load(busy=0.5)

    with Exporter(Reader(answer), port=0, interval_s=0.1) as running:
        until(lambda: get(running.url), lambda found: found[0] == 200)
        broken.set()
        code, kind, text = until(lambda: get(running.url), lambda found: "cannot be read" in found[2])
        assert code == 503 and "the host cannot be read" in text
        assert "/proc/stat is gone" in text and "0.5" not in text
        assert kind.startswith("text/plain")
        broken.clear()
        until(lambda: get(running.url), lambda found: found[0] == 200)


def test_a_reading_that_hangs_answers_503() -> None:
    hang, go_on = threading.Event(), threading.Event()

    def answer() -> LoadReading:
        if hang.is_set():
            go_on.wait(2.0 * PATIENCE_S)
        return load(busy=0.5)

    with Exporter(Reader(answer), port=0, interval_s=0.1) as running:
        until(lambda: get(running.url), lambda found: found[0] == 200)
        hang.set()
        text = until(lambda: get(running.url), lambda found: found[0] == 503)[2]
        assert "s old" in text and "DCGM" not in text
        go_on.set()


def test_before_the_first_reading_there_is_503() -> None:
    unstarted = Exporter(Reader(lambda: load(busy=0.5)), port=0)
    try:
        assert unstarted.scrape() == (503, "no reading yet; the first takes 1 s\n")
    finally:
        unstarted._server.server_close()


def test_a_port_that_is_taken_is_bad_input() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match=r"cannot listen on .*--port"):
            Exporter(Reader(lambda: load(busy=0.5)), port=taken.getsockname()[1])


@pytest.mark.parametrize("given", [{"port": -1}, {"port": 65536}, {"interval_s": 0.01}])
def test_odd_arguments_are_bad_input(given: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Exporter(Reader(lambda: load(busy=0.5)), **given)  # type: ignore[arg-type]


SERVE = """
import sys
from sparseflow.core.telemetry.host_reader import HostReader
from sparseflow.latency.measure.exporter import Exporter, serve
reader = HostReader([int(sys.argv[1])])
serve(Exporter(reader, port=0, interval_s=0.5), ready=lambda url: print(url, flush=True))
"""


@contextmanager
def child(*command: str | Path, cwd: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process that is gone at the end, whatever happens."""
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
def test_a_signal_ends_it_cleanly(number: signal.Signals) -> None:
    with child(sys.executable, "-c", SERVE, str(min(os.sched_getaffinity(0)))) as process:
        url = address(process)
        until(lambda: get(url), lambda found: found[0] == 200)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Debian's server, scraping `target` every second; its URL."""
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
            # Somebody may have taken the port meanwhile.
            if until(partial(listens, port, server), lambda found: found is not None):
                break
        yield f"http://127.0.0.1:{port}"


def listens(port: int, server: subprocess.Popen[str]) -> bool | None:
    """Whether it does, or has ended; nothing yet."""
    if server.poll() is not None:
        return False
    with socket.socket() as tried:
        return True if tried.connect_ex(("127.0.0.1", port)) == 0 else None


def quietest_cpu() -> int:
    """The CPU to load: on a machine that others use too, the one where a load shows most."""
    loads = {cpu: HostReader([cpu]).start() for cpu in os.sched_getaffinity(0)}
    time.sleep(0.5)
    return min(loads, key=lambda cpu: loads[cpu].stop()["busy"])


@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no `prometheus` here; on Debian: apt-get install prometheus"
)
def test_a_load_is_seen_through_the_real_prometheus_and_a_dead_exporter_is_noticed(tmp_path: Path) -> None:
    cpu = quietest_cpu()
    spin = f"import os\nos.sched_setaffinity(0, [{cpu}])\nwhile True: pass"
    with child(sys.executable, "-c", SERVE, str(cpu)) as publishing:
        target = address(publishing).removeprefix("http://").removesuffix("/metrics")
        with prometheus(tmp_path, target) as url:
            reader = PrometheusReader(url, {"source": HOST_SOURCE, "instance": target}, max_age_s=3.0)

            def ask() -> LoadReading | str:
                try:
                    return reader.read(1.5)
                except SparseFlowError as error:
                    return str(error)

            idle = until(ask, lambda found: isinstance(found, LoadReading))
            assert isinstance(idle, LoadReading)
            assert set(reader.metrics) == set(HostReader().metrics)
            assert f"instance={target}" in idle.device and "UUID=CPU-" in idle.device

            with child(sys.executable, "-c", spin):
                # On a machine that was busy before, a reading from before would do: ask for a later one.
                busy = until(
                    ask,
                    lambda found: (
                        isinstance(found, LoadReading)
                        and found.timestamp_s > idle.timestamp_s + 2.0
                        and found["busy"] > 0.9
                    ),
                )
            assert isinstance(busy, LoadReading)

            publishing.kill()
            dead = until(ask, lambda found: isinstance(found, str) and "is stale" in found)
            assert isinstance(dead, str)
            assert "is the exporter still running" in dead and url in dead
            assert any(name in dead for name in SERIES_BY_NAME)
            with pytest.raises(DeviceError, match="is stale"):
                reader.read(60.0)
        with pytest.raises(DeviceError, match=url):
            reader.read()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sparseflow", "latency", *arguments]


def test_the_command_serves_until_it_is_told_to_stop() -> None:
    with child(
        *command("exporter", "--port", "0", "--interval-s", "0.2", "--metric", "busy", "--json")
    ) as process:
        told = json.loads(address(process))
        assert told["metrics"] == ["busy"]
        text = until(lambda: get(told["url"]), lambda found: found[0] == 200)[2]
        assert "DCGM_FI_PROF_SM_ACTIVE{" in text and 'source="sparseflow-host"' in text
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_the_command_that_reads_shows_what_a_host_tells(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["latency", "load", "--window-s", "0.2", "--json"]) == 0
    found = LoadReading.from_row(json.loads(capsys.readouterr().out), prefix="")
    assert found.source == "host" and "busy" in found.shares
    assert run(["latency", "load", "--window-s", "0.2", "--metric", "busy"]) == 0
    assert "busy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
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
def test_bad_usage_and_failure_have_their_exit_codes(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    assert run(["latency", *arguments, "--json"]) == code
    assert said in json.loads(capsys.readouterr().out)["error"]["message"]

"""Tests of the Prometheus reader with a simulated server that can return invalid responses.

tests/latency uses a real server.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from sparseflow.core.telemetry import prometheus
from sparseflow.core.telemetry.prometheus import PrometheusReader
from sparseflow.core.telemetry.prometheus_http import PrometheusClient, format_selector
from sparseflow.errors import DeviceError, InputError

NOW = 1_700_000_000.0
GPU0 = {"gpu": "0", "UUID": "GPU-a", "instance": "node7:9400"}
GPU1 = {"gpu": "1", "UUID": "GPU-b", "instance": "node7:9400"}
SM, UTIL, ENGINE = "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
TENSOR, TX = "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_PCIE_TX_BYTES"

Responder = Callable[[BaseHTTPRequestHandler], None]


class FakeServer:
    """Simulated server with `series`: (name, labels, [(age in seconds, value as text), …])."""

    def __init__(self) -> None:
        self.series: list[tuple[str, dict[str, str], list[tuple[float, str]]]] = []
        self.respond: Responder | None = None
        self.queries: list[str] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                query = parse_qs(urlsplit(self.path).query)["query"][0]
                fake.queries.append(query)
                fake.headers = dict(self.headers)
                if fake.respond is not None:
                    fake.respond(self)
                else:
                    send(self, json.dumps({"status": "success", "data": fake.answer(query)}))

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.headers: dict[str, str] = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, query: str) -> dict[str, Any]:
        if query == "time()":
            return {"resultType": "scalar", "result": [NOW, str(NOW)]}
        match = re.fullmatch(r'\{__name__=~"([^"]*)"(.*)\}\[(\d+)ms\]', query)
        assert match is not None, query
        names, window_s = match.group(1).split("|"), int(match.group(3)) / 1e3
        labels_to_match = dict(re.findall(r', (\w+)="([^"]*)"', match.group(2)))
        result = []
        for name, labels, samples in self.series:
            recent = [[NOW - age, value] for age, value in samples if age <= window_s]
            if recent and name in names and labels_to_match.items() <= labels.items():
                result.append({"metric": {"__name__": name, **labels}, "values": recent})
        return {"resultType": "matrix", "result": result}


def send(handler: BaseHTTPRequestHandler, text: str, code: int = 200) -> None:
    body = text.encode()
    handler.send_response(code)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    thread = threading.Thread(target=server.server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.server.shutdown()
    server.server.server_close()
    thread.join()


def format_matrix(series: object) -> str:
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": [series]}})


def make_samples(value: str, ages: range = range(0, 60)) -> list[tuple[float, str]]:
    return [(float(age), value) for age in reversed(ages)]


def test_read_averages_window(fake: FakeServer) -> None:
    fake.series = [
        (SM, GPU0, [(5.0, "0.9"), (2.0, "0.2"), (1.0, "0.3"), (0.5, "0.4")]),
        (UTIL, GPU0, [(5.0, "90"), (2.0, "50"), (1.0, "60"), (0.5, "70")]),
    ]
    load = PrometheusReader(fake.url).read(3.0)
    assert load.shares == pytest.approx({"busy": 0.3, "active": 0.6})
    assert load.source == "prometheus"
    assert load.device == "UUID=GPU-a,gpu=0,instance=node7:9400"
    assert (load.timestamp_s, load.interval_s) == (NOW - 0.5, 1.5)


def test_read_short_window_uses_newest_sample(fake: FakeServer) -> None:
    fake.series = [(SM, GPU0, [(22.0, "0.9"), (7.0, "0.2")])]
    load = PrometheusReader(fake.url).read(1.0)
    assert load.shares == {"busy": 0.2}
    assert (load.timestamp_s, load.interval_s) == (NOW - 7.0, 0.0)


def test_read_labels_select_gpu(fake: FakeServer) -> None:
    fake.series = [(SM, GPU0, make_samples("0.1")), (SM, GPU1, make_samples("0.8"))]
    assert PrometheusReader(fake.url, {"gpu": "1"}).read()["busy"] == pytest.approx(0.8)


def test_read_several_series_raise(fake: FakeServer) -> None:
    fake.series = [(SM, GPU0, make_samples("0.1")), (SM, GPU1, make_samples("0.8"))]
    with pytest.raises(DeviceError, match=r"2 series .*UUID, gpu \(UUID=GPU-a, gpu=0; ") as caught:
        PrometheusReader(fake.url).read()
    assert fake.url in str(caught.value) and SM in str(caught.value)


def test_read_metrics_of_two_devices_raise(fake: FakeServer) -> None:
    fake.series = [(SM, GPU0, make_samples("0.1")), (TENSOR, GPU1, make_samples("0.8"))]
    with pytest.raises(DeviceError, match="`labels`"):
        PrometheusReader(fake.url).read()


def test_read_stale_sample_raises(fake: FakeServer) -> None:
    fake.series = [(SM, GPU0, make_samples("0.5", range(12, 60)))]
    assert PrometheusReader(fake.url, max_age_s=15.0).read()["busy"] == 0.5
    with pytest.raises(DeviceError, match=f"{SM} .*12.0 s old.*3 s") as caught:
        PrometheusReader(fake.url, max_age_s=3.0).read()
    assert fake.url in str(caught.value)
    # Inside the window that is averaged, and still too old.
    with pytest.raises(DeviceError, match=r"12.0 s old"):
        PrometheusReader(fake.url, max_age_s=3.0).read(30.0)


def test_read_one_stale_metric_raises(fake: FakeServer) -> None:
    fake.series = [(SM, GPU0, make_samples("0.5")), (TENSOR, GPU0, make_samples("0.5", range(12, 60)))]
    with pytest.raises(DeviceError, match=f"{TENSOR} .*12.0 s old"):
        PrometheusReader(fake.url, metrics=("busy", "tensor"), max_age_s=3.0).read()
    with pytest.raises(DeviceError, match=f"{TENSOR} .*12.0 s old"):
        PrometheusReader(fake.url, max_age_s=3.0).read(20.0)


def test_read_missing_metric_raises(fake: FakeServer) -> None:
    fake.series = [(SM, GPU0, make_samples("0.5"))]
    load = PrometheusReader(fake.url).read()
    with pytest.raises(DeviceError, match="`tensor`"):
        load["tensor"]
    with pytest.raises(DeviceError, match=f"{TENSOR} for gpu=0.*600 s"):
        PrometheusReader(fake.url, {"gpu": "0"}, metrics=("busy", "tensor")).read()


def test_read_unmatched_labels_list_devices(fake: FakeServer) -> None:
    fake.series = [(SM, GPU0, make_samples("0.5"))]
    with pytest.raises(DeviceError, match=r"gpu=7, .*UUID=GPU-a,gpu=0,.*`labels`"):
        PrometheusReader(fake.url, {"gpu": "7"}).read()


def test_read_empty_server_names_exporter(fake: FakeServer) -> None:
    with pytest.raises(DeviceError, match="sparseflow latency exporter"):
        PrometheusReader(fake.url).read()


def test_read_vanished_metric_raises(fake: FakeServer) -> None:
    fake.series = [
        (SM, GPU0, make_samples("0.5")),
        (ENGINE, GPU0, make_samples("0.6")),
        (UTIL, GPU0, make_samples("70")),
    ]
    reader = PrometheusReader(fake.url)
    assert reader.metrics == ("busy", "active")
    assert reader.read()["active"] == pytest.approx(0.6)
    del fake.series[1]
    # The other series of the metric is another measurement and is not substituted.
    with pytest.raises(DeviceError, match=ENGINE):
        reader.read()


def test_read_pcie_needs_bandwidth(fake: FakeServer) -> None:
    fake.series = [(TX, GPU0, make_samples("5e9")), (SM, GPU0, make_samples("0.5"))]
    assert PrometheusReader(fake.url).read().shares == {"busy": 0.5}
    assert PrometheusReader(fake.url, pcie_bytes_per_s=50e9).read()["pcie_tx"] == pytest.approx(0.1)
    with pytest.raises(InputError, match="pcie_bytes_per_s"):
        PrometheusReader(fake.url, metrics=("pcie_tx",))


@pytest.mark.parametrize(
    "value",
    [
        "NaN",
        "+Inf",
        "-Inf",
        "-0.5",
        "1.7",
        "9223372036854775794",
        "lots",
        "",
        "1_0e-1",
        " 0.5",
        "٠.5",
        "infinity",
    ],
)
def test_read_invalid_share_raises(fake: FakeServer, value: str) -> None:
    fake.series = [(SM, GPU0, [(2.0, "0.5"), (1.0, value), (0.5, "0.5")])]
    with pytest.raises(DeviceError, match=f"{SM} .`busy`. of gpu=0 at {fake.url}"):
        PrometheusReader(fake.url, {"gpu": "0"}).read(3.0)


def test_read_future_sample_raises(fake: FakeServer) -> None:
    fake.series = [(SM, GPU0, [(-20.0, "0.5")])]
    with pytest.raises(DeviceError, match=r"20.0 s"):
        PrometheusReader(fake.url).read()


def test_stop_reads_recorded_window(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.series = [(SM, GPU0, make_samples("0.5"))]
    recording = PrometheusReader(fake.url).start()
    time.sleep(0.12)
    assert recording.stop()["busy"] == 0.5
    monkeypatch.setattr(prometheus, "time", SimpleNamespace(monotonic=lambda: 5.0))
    with pytest.raises(DeviceError, match="100 ms"):
        PrometheusReader(fake.url).start().stop()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<html>hello</html>", "expected JSON"),
        ("", "expected JSON"),
        ("[" * 200_000, "nesting"),
        ('{"status": Infinity}', "Infinity is not a JSON number"),
        ('{"status": 1' + 5000 * "0" + "}", "expected JSON"),
        ("[]", '"status": "success"'),
        ("null", '"status": "success"'),
        ('{"status": "error", "data": {}}', '"status": "success"'),
        ('{"status": "success", "data": {"resultType": "vector", "result": []}}', "type matrix"),
        ('{"status": "success", "data": {"resultType": "matrix", "result": null}}', "type matrix"),
        *(
            (format_matrix(series), "expected")
            for series in (
                5,
                {"metric": {}, "values": [[1, "0.5"]]},
                {"metric": {"__name__": SM}},
                {"metric": {"__name__": SM}, "values": []},
                {"metric": {"__name__": SM}, "values": [[1]]},
                {"metric": {"__name__": SM}, "values": [[1, 0.5]]},
                {"metric": {"__name__": SM}, "values": [["soon", "0.5"]]},
                {"metric": {"__name__": SM}, "values": [[float("nan"), "0.5"]]},
                {"metric": {"__name__": SM}, "values": [[10**400, "0.5"]]},
                {"metric": {"__name__": SM}, "values": [["1_0", "0.5"]]},
            )
        ),
    ],
)
def test_read_malformed_response_raises(fake: FakeServer, text: str, expected: str) -> None:
    fake.respond = lambda handler: send(handler, text)
    with pytest.raises(DeviceError, match=expected) as caught:
        PrometheusReader(fake.url).read()
    assert fake.url in str(caught.value) and SM in str(caught.value)


def test_read_unrequested_metric_raises(fake: FakeServer) -> None:
    answer = format_matrix({"metric": {"__name__": "up"}, "values": [[1, "1"]]})
    time_ = '{"status": "success", "data": {"resultType": "scalar", "result": [1, "1"]}}'
    fake.respond = lambda handler: send(handler, time_ if "time" in handler.path else answer)
    with pytest.raises(DeviceError, match="'up'"):
        PrometheusReader(fake.url).read()


def test_read_http_error_shows_reason(fake: FakeServer) -> None:
    response = '{"status": "error", "errorType": "bad_data", "error": "parse error"}'
    fake.respond = lambda handler: send(handler, response, 400)
    with pytest.raises(DeviceError, match=f"{fake.url}.*HTTP 400: bad_data: parse error"):
        PrometheusReader(fake.url).read()
    fake.respond = lambda handler: send(handler, "nothing here", 404)
    with pytest.raises(DeviceError, match="HTTP 404"):
        PrometheusReader(fake.url).read()


def write(response: bytes, handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(response)


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "])
def test_read_endless_response_times_out(fake: FakeServer, start: bytes) -> None:
    finished = threading.Event()

    def dribble(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(start)
        while not finished.wait(0.05):
            handler.wfile.write(b" ")

    fake.respond = dribble
    try:
        with pytest.raises(DeviceError, match=f"{fake.url}.*0.3 s"):
            PrometheusReader(fake.url, timeout_s=0.3).read()
    finally:
        finished.set()


def test_read_silent_server_times_out(fake: FakeServer) -> None:
    finished = threading.Event()
    fake.respond = lambda handler: (finished.wait(5.0), handler.wfile.close())[1]
    try:
        with pytest.raises(DeviceError, match=r"0.2 s"):
            PrometheusReader(fake.url, timeout_s=0.2).read()
    finally:
        finished.set()


def test_read_error_without_control_characters(fake: FakeServer) -> None:
    for response in (b"\x1b[31mred\r\n", b"HTTP/1.1 500 \x1b[31mred\r\n\r\n"):
        fake.respond = partial(write, response)
        with pytest.raises(DeviceError, match=fake.url) as caught:
            PrometheusReader(fake.url).read()
        assert str(caught.value).isprintable()


def test_read_broken_connection_raises(fake: FakeServer) -> None:
    fake.respond = lambda handler: handler.connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(DeviceError, match=fake.url):
        PrometheusReader(fake.url).read()


def test_read_unreachable_server_raises() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(DeviceError, match=f"http://127.0.0.1:{port}.*refused"):
            PrometheusReader(f"http://127.0.0.1:{port}").read()


@pytest.mark.parametrize(
    "url",
    ["", "localhost:9090", "ftp://host", "file:///etc/passwd", "http://", "http://h:x", "http://h/?a=b"],
)
def test_client_invalid_url_raises(url: str) -> None:
    with pytest.raises(InputError, match="url"):
        PrometheusClient(url)


def test_client_password_in_url_raises_without_showing_it() -> None:
    with pytest.raises(InputError, match="headers") as caught:
        PrometheusClient("http://me:secret@host:9090")
    assert "secret" not in str(caught.value)


def test_read_sends_headers(fake: FakeServer) -> None:
    fake.series = [(SM, GPU0, make_samples("0.5"))]
    PrometheusReader(fake.url, headers={"Authorization": "Bearer x"}).read()
    assert fake.headers["Authorization"] == "Bearer x"


def test_read_huge_time_raises(fake: FakeServer) -> None:
    answer = json.dumps({"status": "success", "data": {"resultType": "scalar", "result": [1, 10**400]}})
    fake.respond = lambda handler: send(handler, answer)
    with pytest.raises(DeviceError, match="out of range"):
        PrometheusClient(fake.url).read_time_s()


def test_redirect_only_within_origin(fake: FakeServer) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        other.settimeout(0.0)
        port = other.getsockname()[1]
        for target in (f"http://127.0.0.1:{port}", fake.url.replace("127.0.0.1", "localhost"), "http://h:x"):
            fake.respond = lambda handler, to=target: redirect(handler, to)
            with pytest.raises(DeviceError, match=f"{fake.url}.*another server"):
                PrometheusReader(fake.url, headers={"Authorization": "Bearer x"}).read()
        with pytest.raises(BlockingIOError):
            other.accept()
    fake.series = [(SM, GPU0, make_samples("0.5"))]

    def move(handler: BaseHTTPRequestHandler) -> None:
        fake.respond = None
        redirect(handler, handler.path)

    fake.respond = move
    assert PrometheusReader(fake.url, headers={"Authorization": "Bearer x"}).read()["busy"] == 0.5
    assert fake.headers["Authorization"] == "Bearer x"


def redirect(handler: BaseHTTPRequestHandler, target: str) -> None:
    handler.send_response(302)
    handler.send_header("Location", target)
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def test_format_selector_quotes_labels_and_checks_names() -> None:
    assert format_selector(("a", "b"), {"gpu": 'x"\\\n'}) == '{__name__=~"a|b", gpu="x\\"\\\\\\n"}'
    for name in ("", "a-b", "__name__", 'a="",b'):
        with pytest.raises(InputError, match="label name"):
            PrometheusReader("http://127.0.0.1:9", {name: "x"})


@pytest.mark.parametrize("options", [{"max_age_s": 0.0}, {"timeout_s": -1.0}, {"pcie_bytes_per_s": 0.0}])
def test_reader_invalid_argument_raises(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        PrometheusReader("http://127.0.0.1:9", **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="`metrics`"):
        PrometheusReader("http://127.0.0.1:9", metrics=())

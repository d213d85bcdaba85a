"""Readings over Prometheus' HTTP API, from a server of our own making that can also misbehave.

The real server is asked in tests/latency/test_exporter.py.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
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

Misbehaviour = Callable[[BaseHTTPRequestHandler], None]


class Fake:
    """A server that knows `series`, each (name, labels, [(age in seconds, value as text), …])."""

    def __init__(self) -> None:
        self.series: list[tuple[str, dict[str, str], list[tuple[float, str]]]] = []
        self.misbehave: Misbehaviour | None = None
        self.queries: list[str] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                query = parse_qs(urlsplit(self.path).query)["query"][0]
                fake.queries.append(query)
                fake.headers = dict(self.headers)
                if fake.misbehave is not None:
                    fake.misbehave(self)
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
        whole = re.fullmatch(r'\{__name__=~"([^"]*)"(.*)\}\[(\d+)ms\]', query)
        assert whole is not None, query
        names, window_s = whole.group(1).split("|"), int(whole.group(3)) / 1e3
        picks = dict(re.findall(r', (\w+)="([^"]*)"', whole.group(2)))
        result = []
        for name, labels, samples in self.series:
            inside = [[NOW - age, value] for age, value in samples if age <= window_s]
            if inside and name in names and picks.items() <= labels.items():
                result.append({"metric": {"__name__": name, **labels}, "values": inside})
        return {"resultType": "matrix", "result": result}


def send(handler: BaseHTTPRequestHandler, text: str, code: int = 200) -> None:
    body = text.encode()
    handler.send_response(code)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture
def fake() -> Iterator[Fake]:
    found = Fake()
    thread = threading.Thread(target=found.server.serve_forever, args=(0.02,))
    thread.start()
    yield found
    found.server.shutdown()
    found.server.server_close()
    thread.join()


def matrix(series: object) -> str:
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": [series]}})


def steady(value: str, ages: range = range(0, 60)) -> list[tuple[float, str]]:
    return [(float(age), value) for age in reversed(ages)]


def test_a_reading_is_the_mean_of_the_window(fake: Fake) -> None:
    fake.series = [
        (SM, GPU0, [(5.0, "0.9"), (2.0, "0.2"), (1.0, "0.3"), (0.5, "0.4")]),
        (UTIL, GPU0, [(5.0, "90"), (2.0, "50"), (1.0, "60"), (0.5, "70")]),
    ]
    load = PrometheusReader(fake.url).read(3.0)
    assert load.shares == pytest.approx({"busy": 0.3, "active": 0.6})
    assert load.source == "prometheus"
    assert load.device == "UUID=GPU-a,gpu=0,instance=node7:9400"
    assert (load.timestamp_s, load.interval_s) == (NOW - 0.5, 1.5)


def test_a_window_between_two_scrapes_gets_the_newest_sample(fake: Fake) -> None:
    fake.series = [(SM, GPU0, [(22.0, "0.9"), (7.0, "0.2")])]
    load = PrometheusReader(fake.url).read(1.0)
    assert load.shares == {"busy": 0.2}
    assert (load.timestamp_s, load.interval_s) == (NOW - 7.0, 0.0)


def test_labels_pick_the_gpu(fake: Fake) -> None:
    fake.series = [(SM, GPU0, steady("0.1")), (SM, GPU1, steady("0.8"))]
    assert PrometheusReader(fake.url, {"gpu": "1"}).read()["busy"] == pytest.approx(0.8)


def test_several_series_are_an_error_that_names_what_differs(fake: Fake) -> None:
    fake.series = [(SM, GPU0, steady("0.1")), (SM, GPU1, steady("0.8"))]
    with pytest.raises(DeviceError, match=r"2 series .* differ in UUID, gpu \(UUID=GPU-a, gpu=0; ") as caught:
        PrometheusReader(fake.url).read()
    assert fake.url in str(caught.value) and SM in str(caught.value)


def test_metrics_of_two_devices_are_never_mixed(fake: Fake) -> None:
    fake.series = [(SM, GPU0, steady("0.1")), (TENSOR, GPU1, steady("0.8"))]
    with pytest.raises(DeviceError, match=r"the load .*pick one with `labels`"):
        PrometheusReader(fake.url).read()


def test_a_stale_sample_is_an_error_and_never_the_last_value(fake: Fake) -> None:
    fake.series = [(SM, GPU0, steady("0.5", range(12, 60)))]
    assert PrometheusReader(fake.url, max_age_s=15.0).read()["busy"] == 0.5
    with pytest.raises(DeviceError, match=f"{SM} .* is stale: .* is 12.0 s old, and at most 3 s") as caught:
        PrometheusReader(fake.url, max_age_s=3.0).read()
    assert fake.url in str(caught.value)
    # Inside the window that is averaged, and still too old.
    with pytest.raises(DeviceError, match=r"is stale: .* 12.0 s old"):
        PrometheusReader(fake.url, max_age_s=3.0).read(30.0)


def test_one_stale_metric_among_fresh_ones_is_an_error(fake: Fake) -> None:
    fake.series = [(SM, GPU0, steady("0.5")), (TENSOR, GPU0, steady("0.5", range(12, 60)))]
    with pytest.raises(DeviceError, match=f"{TENSOR} .* is stale"):
        PrometheusReader(fake.url, metrics=("busy", "tensor"), max_age_s=3.0).read()
    with pytest.raises(DeviceError, match=f"{TENSOR} .* is stale"):
        PrometheusReader(fake.url, max_age_s=3.0).read(20.0)


def test_an_absent_metric_is_an_error_and_never_zero(fake: Fake) -> None:
    fake.series = [(SM, GPU0, steady("0.5"))]
    load = PrometheusReader(fake.url).read()
    with pytest.raises(DeviceError, match="`tensor` was not read"):
        load["tensor"]
    with pytest.raises(DeviceError, match=f"no samples of {TENSOR} for gpu=0 in the last 600 s"):
        PrometheusReader(fake.url, {"gpu": "0"}, metrics=("busy", "tensor")).read()


def test_labels_that_fit_nothing_tell_what_there_is(fake: Fake) -> None:
    fake.series = [(SM, GPU0, steady("0.5"))]
    with pytest.raises(DeviceError, match=r"for gpu=7, only for UUID=GPU-a,gpu=0,.*: mend `labels`"):
        PrometheusReader(fake.url, {"gpu": "7"}).read()


def test_a_server_without_any_of_it_says_what_should_be_scraped(fake: Fake) -> None:
    with pytest.raises(DeviceError, match=r"any of .*sparseflow latency exporter"):
        PrometheusReader(fake.url).read()


def test_a_metric_that_was_there_must_stay(fake: Fake) -> None:
    fake.series = [(SM, GPU0, steady("0.5")), (ENGINE, GPU0, steady("0.6")), (UTIL, GPU0, steady("70"))]
    reader = PrometheusReader(fake.url)
    assert reader.metrics == ("busy", "active")
    assert reader.read()["active"] == pytest.approx(0.6)
    del fake.series[1]
    # The other name of it is another measurement, and is not slipped in.
    with pytest.raises(DeviceError, match=f"no samples of {ENGINE}"):
        reader.read()


def test_pcie_needs_what_the_link_carries(fake: Fake) -> None:
    fake.series = [(TX, GPU0, steady("5e9")), (SM, GPU0, steady("0.5"))]
    assert PrometheusReader(fake.url).read().shares == {"busy": 0.5}
    assert PrometheusReader(fake.url, pcie_bytes_per_s=50e9).read()["pcie_tx"] == pytest.approx(0.1)
    with pytest.raises(InputError, match="pcie_bytes_per_s"):
        PrometheusReader(fake.url, metrics=("pcie_tx",))


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-0.5", "1.7", "9223372036854775794", "lots", ""])
def test_a_value_that_is_no_share_is_an_error(fake: Fake, value: str) -> None:
    fake.series = [(SM, GPU0, [(2.0, "0.5"), (1.0, value), (0.5, "0.5")])]
    with pytest.raises(DeviceError, match=f"{SM} .`busy`. of gpu=0 at {fake.url} is "):
        PrometheusReader(fake.url, {"gpu": "0"}).read(3.0)


def test_a_sample_from_the_future_is_an_error(fake: Fake) -> None:
    fake.series = [(SM, GPU0, [(-20.0, "0.5")])]
    with pytest.raises(DeviceError, match=r"20.0 s after the server's own clock"):
        PrometheusReader(fake.url).read()


def test_a_watch_reads_the_time_it_lasted(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.series = [(SM, GPU0, steady("0.5"))]
    watch = PrometheusReader(fake.url).start()
    time.sleep(0.12)
    assert watch.stop()["busy"] == 0.5
    monkeypatch.setattr(prometheus, "time", SimpleNamespace(monotonic=lambda: 5.0))
    with pytest.raises(DeviceError, match="at least 100 ms"):
        PrometheusReader(fake.url).start().stop()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<html>hello</html>", "expected JSON"),
        ("", "expected JSON"),
        ("[]", '"status": "success"'),
        ("null", '"status": "success"'),
        ('{"status": "error", "data": {}}', '"status": "success"'),
        ('{"status": "success", "data": {"resultType": "vector", "result": []}}', "type matrix"),
        ('{"status": "success", "data": {"resultType": "matrix", "result": null}}', "type matrix"),
        *(
            (matrix(series), "expected")
            for series in (
                5,
                {"metric": {}, "values": [[1, "0.5"]]},
                {"metric": {"__name__": SM}},
                {"metric": {"__name__": SM}, "values": []},
                {"metric": {"__name__": SM}, "values": [[1]]},
                {"metric": {"__name__": SM}, "values": [[1, 0.5]]},
                {"metric": {"__name__": SM}, "values": [["soon", "0.5"]]},
                {"metric": {"__name__": SM}, "values": [[float("nan"), "0.5"]]},
            )
        ),
    ],
)
def test_an_answer_of_another_form_is_an_error(fake: Fake, text: str, expected: str) -> None:
    fake.misbehave = lambda handler: send(handler, text)
    with pytest.raises(DeviceError, match=expected) as caught:
        PrometheusReader(fake.url).read()
    assert fake.url in str(caught.value) and SM in str(caught.value)


def test_a_metric_that_nobody_asked_for_is_an_error(fake: Fake) -> None:
    answer = matrix({"metric": {"__name__": "up"}, "values": [[1, "1"]]})
    time_ = '{"status": "success", "data": {"resultType": "scalar", "result": [1, "1"]}}'
    fake.misbehave = lambda handler: send(handler, time_ if "time" in handler.path else answer)
    with pytest.raises(DeviceError, match="'up' that was not asked for"):
        PrometheusReader(fake.url).read()


def test_a_refusal_gives_the_servers_reason(fake: Fake) -> None:
    told = '{"status": "error", "errorType": "bad_data", "error": "parse error"}'
    fake.misbehave = lambda handler: send(handler, told, 400)
    with pytest.raises(DeviceError, match=f"{fake.url} refused .* HTTP 400: bad_data: parse error"):
        PrometheusReader(fake.url).read()
    fake.misbehave = lambda handler: send(handler, "nothing here", 404)
    with pytest.raises(DeviceError, match=r"HTTP 404: .*is this the address of a Prometheus server"):
        PrometheusReader(fake.url).read()


def test_an_answer_that_does_not_end_is_given_up(fake: Fake) -> None:
    enough = threading.Event()

    def dribble(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not enough.wait(0.05):
            handler.wfile.write(b" ")

    fake.misbehave = dribble
    try:
        with pytest.raises(DeviceError, match=f"{fake.url} did not answer .* within 0.3 s"):
            PrometheusReader(fake.url, timeout_s=0.3).read()
    finally:
        enough.set()


def test_silence_is_given_up(fake: Fake) -> None:
    enough = threading.Event()
    fake.misbehave = lambda handler: (enough.wait(5.0), handler.wfile.close())[1]
    try:
        with pytest.raises(DeviceError, match="did not answer"):
            PrometheusReader(fake.url, timeout_s=0.2).read()
    finally:
        enough.set()


def test_a_connection_that_breaks_is_an_error(fake: Fake) -> None:
    fake.misbehave = lambda handler: handler.connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(DeviceError, match=f"{fake.url} cannot be reached"):
        PrometheusReader(fake.url).read()


def test_an_unreachable_server_is_an_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(DeviceError, match=f"http://127.0.0.1:{port} cannot be reached .*refused"):
            PrometheusReader(f"http://127.0.0.1:{port}").read()


@pytest.mark.parametrize(
    "url",
    ["", "localhost:9090", "ftp://host", "file:///etc/passwd", "http://", "http://h:x", "http://h/?a=b"],
)
def test_a_url_that_is_none_is_bad_input(url: str) -> None:
    with pytest.raises(InputError, match="url"):
        PrometheusClient(url)


def test_a_password_in_the_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(InputError, match="headers") as caught:
        PrometheusClient("http://me:secret@host:9090")
    assert "secret" not in str(caught.value)


def test_headers_are_sent(fake: Fake) -> None:
    fake.series = [(SM, GPU0, steady("0.5"))]
    PrometheusReader(fake.url, headers={"Authorization": "Bearer x"}).read()
    assert fake.headers["Authorization"] == "Bearer x"


def test_labels_are_quoted_and_their_names_checked() -> None:
    assert format_selector(("a", "b"), {"gpu": 'x"\\\n'}) == '{__name__=~"a|b", gpu="x\\"\\\\\\n"}'
    for name in ("", "a-b", "__name__", 'a="",b'):
        with pytest.raises(InputError, match="no label's name"):
            PrometheusReader("http://127.0.0.1:9", {name: "x"})


@pytest.mark.parametrize("given", [{"max_age_s": 0.0}, {"timeout_s": -1.0}, {"pcie_bytes_per_s": 0.0}])
def test_odd_arguments_are_bad_input(given: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(given))):
        PrometheusReader("http://127.0.0.1:9", **given)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="at least one"):
        PrometheusReader("http://127.0.0.1:9", metrics=())

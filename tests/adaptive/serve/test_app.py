"""Tests of the HTTP API with OpenAI's client and a local server."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import random
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest
from fastapi import FastAPI
from PIL import Image

from sparseflow.adaptive.prompts.messages import RequestLimits
from sparseflow.adaptive.serve.lifecycle import Server
from tests.adaptive.serve.fake import (
    MODEL,
    PLANS,
    FakeBackend,
    Script,
    make_app,
    make_data_url,
    make_messages,
    read_metric,
    run_in_thread,
    wait_until,
)

SCRIPTS = {
    "poem": Script("Roses are réd 😀, violets END are blue"),
    "slow": Script("one two three four five", token_ms=5.0),
    "hang": Script("start", hang=True),
    "fails": Script("some words", fail=4),
    "fails immediately": Script("nothing", fail=0),
}


class RunningServer:
    """A server with HTTP clients."""

    def __init__(self, app: FastAPI, server: Server, fake: FakeBackend) -> None:
        self.app, self.server, self.fake = app, server, fake
        self.url = f"http://127.0.0.1:{server.port}"
        # Shorter than the server's, so that no connection is used while the server closes it.
        limits = httpx2.Limits(keepalive_expiry=1.0)
        self.http = httpx2.Client(base_url=self.url, timeout=60.0, limits=limits)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=60.0)
        self.service = app.state.service

    def complete(self, text: str, **options: Any) -> Any:
        return self.client.chat.completions.create(model=MODEL, messages=make_messages(text), **options)

    def close(self) -> None:
        self.http.close()
        self.client.close()


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    yield from run_server(FakeBackend(scripts=SCRIPTS))


def run_server(fake: FakeBackend, limits: RequestLimits | None = None) -> Iterator[RunningServer]:
    app = make_app(fake, limits=limits)
    with run_in_thread(app) as server:
        running = RunningServer(app, server, fake)
        yield running
        running.close()
    assert fake.closed
    assert fake.running == 0


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    """Function that starts a server for one test."""
    servers: list[Iterator[RunningServer]] = []

    def start(fake: FakeBackend, **limits: Any) -> RunningServer:
        servers.append(run_server(fake, RequestLimits(**limits)))
        return next(servers[-1])

    yield start
    for server in servers:
        with pytest.raises(StopIteration):
            next(server)


def test_completion_default_returns_text_and_report(running: RunningServer) -> None:
    completion = running.complete("Hi", max_completion_tokens=64)
    assert completion.choices[0].message.content == "Hello, wörld!"
    assert (completion.choices[0].finish_reason, completion.object, completion.model) == (
        "stop",
        "chat.completion",
        MODEL,
    )
    assert completion.usage.completion_tokens == 14
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + 14
    report = completion.sparseflow
    assert report["plan"]["id"] == PLANS[2].id
    assert report["plan"]["tier"] == "high"
    assert report["predicted_ms"]["p99"] > report["predicted_ms"]["p50"] > 0.0
    assert report["measured_ms"] >= report["first_token_ms"] >= report["queued_ms"] > 0.0
    assert (report["budget_ms"], report["budget_met"], report["truncated"]) == (None, None, False)
    assert completion._request_id


def test_stream_with_usage_returns_pieces(running: RunningServer) -> None:
    chunks = list(running.complete("poem", stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content for chunk in chunks[1:-2]]
    assert "".join(pieces) == "Roses are réd 😀, violets END are blue"
    assert len(pieces) > 20
    assert all(piece and "\ufffd" not in piece for piece in pieces)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(SCRIPTS["poem"].text.encode())
    assert chunks[-1].sparseflow["plan"]["id"] == PLANS[2].id
    assert not any(hasattr(chunk, "sparseflow") for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_without_usage_ends_with_report(running: RunningServer) -> None:
    chunks = list(running.complete("Hi", stream=True, extra_body={"latency_budget_ms": 5000}))
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is None
    assert chunks[-1].sparseflow["budget_met"] is True


def test_stream_body_is_server_sent_events(running: RunningServer) -> None:
    body = {"model": MODEL, "messages": make_messages("Hi"), "stream": True}
    with running.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        assert "content-length" not in response.headers
        events = response.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(
        json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk" for event in events[:-2]
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [("END", "Roses are réd 😀, violets "), (["zzz", "réd"], "Roses are "), ("Roses", ""), ("blue!", None)],
)
def test_completion_stop_string_ends_text(
    running: RunningServer, stop: Any, expected: str | None, stream: bool
) -> None:
    completion = running.complete("poem", stop=stop, stream=stream)
    if stream:
        chunks = list(completion)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        text, reason = completion.choices[0].message.content, completion.choices[0].finish_reason
    assert (text, reason) == (SCRIPTS["poem"].text if expected is None else expected, "stop")
    if expected is not None:
        wait_until(lambda: running.fake.running == 0)


def test_completion_max_tokens_limits_length(running: RunningServer) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        completion = running.complete("Hi", **{name: 5})
        assert (completion.choices[0].message.content, completion.choices[0].finish_reason) == (
            "Hello",
            "length",
        )
        assert completion.sparseflow["truncated"] is False


def test_completion_sampling_parameters_reach_backend(running: RunningServer) -> None:
    running.complete("Hi", temperature=0.5, top_p=0.25, seed=7)
    sampling = running.fake.jobs[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.25, 7)
    running.complete("Hi", seed=-1)
    assert running.fake.jobs[-1].sampling.seed == 2**63 - 1
    running.complete("Hi")
    assert running.fake.jobs[-1].sampling.temperature == 1.0
    assert running.fake.jobs[-1].sampling.seed != running.fake.jobs[-2].sampling.seed


def test_completion_images_reach_backend(running: RunningServer) -> None:
    red, blue = (make_data_url(Image.new("RGB", (6, 4), color)) for color in ("red", "blue"))
    completion = running.client.chat.completions.create(
        model=MODEL, messages=make_messages("what?", red, blue)
    )
    assert completion.choices[0].message.content == "Hello, wörld!"
    job = running.fake.jobs[-1]
    assert job.prompt.images == 2
    assert job.prompt.inputs["pixel_values"].tolist() == [[255, 0, 0], [0, 0, 255]]
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == job.prompt.tokens == job.prompt.text_tokens + 8


def test_completion_budget_selects_plan(start_server: Callable[..., RunningServer]) -> None:
    # The plans take 1, 1.5 and 3 minutes.
    running = start_server(FakeBackend(base_ms=60_000.0, per_token_ms=0.0))
    for minutes, plan in ((1.3, 0), (2.3, 1), (4.0, 2), (None, 2)):
        budget_ms = None if minutes is None else minutes * 60_000.0
        completion = running.complete("Hi", extra_body={"latency_budget_ms": budget_ms})
        assert completion.sparseflow["plan"]["id"] == PLANS[plan].id
        job = running.fake.jobs[-1]
        assert job.budget_ms == budget_ms
        target_end_s = math.inf if minutes is None else job.received_s + minutes * 60.0
        assert job.target_end_s == pytest.approx(target_end_s)


def test_completion_budget_header_is_used(running: RunningServer) -> None:
    completion = running.complete("Hi", extra_headers={"X-Latency-Budget-Ms": "4000"})
    assert (completion.sparseflow["budget_ms"], completion.sparseflow["budget_met"]) == (4000.0, True)


@pytest.mark.parametrize("budget_ms", [0, -5, "180", "nan", True, float("1e300")])
def test_completion_invalid_budget_raises(running: RunningServer, budget_ms: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        running.complete("Hi", extra_body={"latency_budget_ms": budget_ms})
    assert caught.value.param == "latency_budget_ms"


def test_completion_infeasible_budget_returns_422(running: RunningServer) -> None:
    num_jobs = len(running.fake.jobs)
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        running.complete("Hi", extra_body={"latency_budget_ms": 3})
    assert caught.value.code == "budget_infeasible"
    body: Any = caught.value.body
    assert 16 <= body["least_feasible_ms"] < 5000
    assert f"{body['least_feasible_ms']} ms" in body["message"]
    assert len(running.fake.jobs) == num_jobs


def test_completion_best_effort_runs_cheapest_plan(running: RunningServer) -> None:
    completion = running.complete("slow", extra_body={"latency_budget_ms": 3, "on_infeasible": "best_effort"})
    assert completion.choices[0].message.content == SCRIPTS["slow"].text
    assert completion.sparseflow["plan"]["id"] == PLANS[0].id
    assert completion.sparseflow["budget_met"] is False


def test_completion_truncate_shortens_answer(start_server: Callable[..., RunningServer]) -> None:
    running = start_server(FakeBackend(base_ms=1.0, per_token_ms=1000.0))
    completion = running.complete("Hi", extra_body={"latency_budget_ms": 7500, "on_infeasible": "truncate"})
    assert completion.choices[0].finish_reason == "length"
    assert 1 <= completion.usage.completion_tokens <= 7
    assert "Hello, wörld!".startswith(completion.choices[0].message.content)
    assert (completion.sparseflow["truncated"], completion.sparseflow["budget_met"]) == (True, True)


def test_completion_truncate_below_one_token_returns_422(running: RunningServer) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        running.complete("Hi", extra_body={"latency_budget_ms": 2, "on_infeasible": "truncate"})
    body: Any = caught.value.body
    assert "1 new tokens" in body["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_completion_truncate_ends_at_deadline(running: RunningServer, stream: bool) -> None:
    completion = running.complete(
        "hang", stream=stream, extra_body={"latency_budget_ms": 2000, "on_infeasible": "truncate"}
    )
    last = list(completion)[-1] if stream else completion
    assert last.choices[0].finish_reason == "length"
    assert last.sparseflow["truncated"] is True
    assert last.sparseflow["measured_ms"] >= 1997.0
    wait_until(lambda: running.fake.running == 0)


ERRORS: list[tuple[dict[str, Any], type[openai.APIStatusError], str]] = [
    ({"model": "gpt-4o"}, openai.NotFoundError, "model_not_found"),
    ({"n": 2}, openai.BadRequestError, "unsupported_parameter"),
    (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        openai.BadRequestError,
        "unsupported_parameter",
    ),
    ({"messages": []}, openai.BadRequestError, "invalid_value"),
    ({"messages": make_messages("x" * 5000)}, openai.BadRequestError, "context_length_exceeded"),
    (
        {"messages": make_messages("x"), "max_completion_tokens": 4090},
        openai.BadRequestError,
        "context_length_exceeded",
    ),
    (
        {"messages": make_messages("x"), "max_completion_tokens": 5000},
        openai.BadRequestError,
        "invalid_value",
    ),
    (
        {"messages": make_messages("x", "https://example.org/a.png")},
        openai.BadRequestError,
        "invalid_image_url",
    ),
    (
        {"messages": make_messages("x", "data:image/png;base64,aGVsbG8=")},
        openai.BadRequestError,
        "invalid_image",
    ),
    ({"messages": make_messages("x", *["data:,"] * 9)}, openai.BadRequestError, "invalid_value"),
    ({"messages": make_messages("<image>")}, openai.BadRequestError, "invalid_value"),
    ({"messages": make_messages("fails immediately")}, openai.InternalServerError, "engine_failed"),
]


@pytest.mark.parametrize(("fields", "error_type", "code"), ERRORS)
@pytest.mark.parametrize("stream", [False, True])
def test_completion_invalid_request_raises_typed_error(
    running: RunningServer,
    fields: dict[str, Any],
    error_type: type[openai.APIStatusError],
    code: str,
    stream: bool,
) -> None:
    with pytest.raises(error_type) as caught:
        running.client.chat.completions.create(
            **{"model": MODEL, "messages": make_messages("Hi"), "stream": stream, **fields}
        )
    assert caught.value.code == code
    assert caught.value.response.headers["x-request-id"]
    assert set(caught.value.response.json()["error"]) >= {"message", "type", "param", "code"}


def test_refused_and_abandoned_bodies_are_released(running: RunningServer) -> None:
    body = b'{"model": "' + b"x" * 300_000
    assert running.http.post("/v1/chat/completions", content=body).status_code == 400
    with socket.create_connection(("127.0.0.1", running.server.port)) as connection:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\n"
        connection.sendall(head + body)
        wait_until(lambda: running.service._held_bytes > 0)
    wait_until(lambda: running.service._held_bytes == 0)
    assert running.complete("Hi").choices[0].message.content == "Hello, wörld!"


def test_stream_failure_after_tokens_raises(running: RunningServer) -> None:
    text = ""
    with pytest.raises(openai.APIError, match="scripted"):
        for chunk in running.complete("fails", stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text == "some"
    with pytest.raises(openai.InternalServerError):
        running.complete("fails")


def test_routes_models_health_and_errors(running: RunningServer) -> None:
    assert [model.id for model in running.client.models.list()] == [MODEL]
    assert running.client.models.retrieve(MODEL).owned_by == "sparseflow"
    with pytest.raises(openai.NotFoundError):
        running.client.models.retrieve("other")
    for path in ("/health", "/ready"):
        assert running.http.get(path).status_code == 200
    assert running.http.get("/ready").json() == {"status": "open", "ready": True}
    assert running.http.get("/v1/unknown").json()["error"]["code"] == "not_found"
    response = running.http.get("/v1/chat/completions")
    assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")


def test_metrics_after_requests_are_exported(start_server: Callable[..., RunningServer]) -> None:
    running = start_server(FakeBackend(scripts=SCRIPTS))
    running.complete("Hi", extra_body={"latency_budget_ms": 5000})
    with pytest.raises(openai.APIStatusError):
        running.complete("Hi", extra_body={"latency_budget_ms": 1})
    with pytest.raises(openai.APIStatusError):
        running.complete("fails")
    text = running.http.get("/metrics").text
    assert 'sparseflow_requests_total{code="",outcome="answered"} 1.0' in text
    assert 'sparseflow_requests_total{code="budget_infeasible",outcome="infeasible"} 1.0' in text
    assert 'sparseflow_requests_total{code="engine_failed",outcome="failed"} 1.0' in text
    assert 'sparseflow_budgets_total{result="kept"} 1.0' in text
    assert "sparseflow_running 0.0" in text
    assert f'sparseflow_latency_seconds_count{{plan="{PLANS[2].id}"}} 1.0' in text


def test_completions_concurrent_are_independent(start_server: Callable[..., RunningServer]) -> None:
    fake = FakeBackend(slots=4, scripts=SCRIPTS)
    running = start_server(fake, max_queued=200)

    async def send_all() -> list[Any]:
        client = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0, timeout=60.0)

        async def send(index: int) -> str:
            text = "poem" if index % 2 else "Hi"
            if index % 3:
                completion = await client.chat.completions.create(model=MODEL, messages=make_messages(text))
                return completion.choices[0].message.content or ""
            stream = await client.chat.completions.create(
                model=MODEL, messages=make_messages(text), stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async with client:
            return await asyncio.gather(*map(send, range(24)))

    texts = asyncio.run(send_all())
    assert texts == [SCRIPTS["poem"].text if index % 2 else "Hello, wörld!" for index in range(24)]
    assert fake.max_running == 4
    assert read_metric(running.service.metrics, "requests_total", outcome="answered", code="") == 24


def test_completion_full_server_returns_429(start_server: Callable[..., RunningServer]) -> None:
    running = start_server(FakeBackend(slots=1, scripts=SCRIPTS), max_queued=2)
    stream = running.complete("hang", stream=True)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(running.complete, "Hi") for _ in range(2)]
        wait_until(lambda: running.service.queue.waiting == 2)
        with pytest.raises(openai.RateLimitError) as caught:
            running.complete("Hi")
        assert caught.value.code == "overloaded"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert int(caught.value.response.headers["retry-after-ms"]) >= 1
        assert running.http.get("/ready").status_code == 200
        stream.close()
        assert [future.result().choices[0].finish_reason for future in waiting] == ["stop", "stop"]
    assert read_metric(running.service.metrics, "requests_total", outcome="shed", code="overloaded") == 1


def test_completion_budget_shorter_than_queue_returns_429(start_server: Callable[..., RunningServer]) -> None:
    running = start_server(FakeBackend(slots=1, base_ms=60_000.0, scripts=SCRIPTS))
    stream = running.complete("hang", stream=True)
    with pytest.raises(openai.RateLimitError) as caught:
        running.complete("Hi", extra_body={"latency_budget_ms": 90_000})
    assert caught.value.code == "overloaded"
    assert caught.value.response.headers["retry-after"]
    with ThreadPoolExecutor(1) as threads:
        # Without a guarantee the request is queued.
        future = threads.submit(
            running.complete, "Hi", extra_body={"latency_budget_ms": 90_000, "on_infeasible": "best_effort"}
        )
        wait_until(lambda: running.service.queue.waiting == 1)
        stream.close()
        assert future.result().choices[0].message.content == "Hello, wörld!"


def test_disconnect_during_stream_frees_slot(start_server: Callable[..., RunningServer]) -> None:
    running = start_server(FakeBackend(slots=2, scripts=SCRIPTS))
    abandoned = running.complete("hang", stream=True)
    assert next(iter(abandoned)).choices[0].delta.role == "assistant"
    second = running.complete("slow", stream=True)
    assert running.fake.running == 2
    abandoned.close()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in second) == SCRIPTS["slow"].text
    wait_until(lambda: running.fake.running == running.service.queue.running == 0)
    assert running.fake.cancelled == [running.fake.jobs[0].id]
    assert (
        read_metric(running.service.metrics, "requests_total", outcome="cancelled", code="client_gone") == 1
    )


def test_disconnect_before_first_token_or_in_queue_frees_slot(
    start_server: Callable[..., RunningServer],
) -> None:
    running = start_server(FakeBackend(slots=1, scripts={"hang": Script("", hang=True)}))
    impatient = openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0, timeout=3.0)
    with impatient, ThreadPoolExecutor(2) as threads:
        futures = [
            threads.submit(
                impatient.chat.completions.create, model=MODEL, messages=make_messages("hang"), stream=stream
            )
            for stream in (False, True)
        ]
        for future in futures:
            with pytest.raises(openai.APITimeoutError):
                future.result()
    wait_until(
        lambda: running.service.queue.waiting == running.service.queue.running == running.fake.running == 0
    )
    assert len(running.fake.jobs) in (1, 2)
    assert running.complete("Hi").choices[0].finish_reason == "stop"


def test_completion_large_body_returns_413(start_server: Callable[..., RunningServer]) -> None:
    running = start_server(FakeBackend(), body_bytes=100_000)
    with pytest.raises(openai.APIStatusError) as caught:
        running.complete("x" * 200_000)
    assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")

    def iter_large_body() -> Iterator[bytes]:
        for _ in range(40):
            yield b"[" * 10_000

    response = running.http.post("/v1/chat/completions", content=iter_large_body())
    assert response.status_code == 413
    assert running.complete("Hi").choices[0].finish_reason == "stop"


def test_completion_slow_body_returns_408(start_server: Callable[..., RunningServer]) -> None:
    running = start_server(FakeBackend(), body_s=0.05)

    def iter_slow_body() -> Iterator[bytes]:
        yield b"{"
        labels = {"outcome": "refused", "code": "request_timeout"}
        wait_until(lambda: read_metric(running.service.metrics, "requests_total", **labels) == 1)
        yield b"}"

    response = running.http.post("/v1/chat/completions", content=iter_slow_body())
    assert (response.status_code, response.json()["error"]["code"]) == (408, "request_timeout")
    assert running.service.queue.estimate_wait_ms() == 0.0


def test_completion_stopped_engine_returns_503(start_server: Callable[..., RunningServer]) -> None:
    running = start_server(FakeBackend())
    running.fake.alive = False
    assert running.http.get("/health").status_code == 503
    assert running.http.get("/ready").json() == {"status": "engine_stopped", "ready": False}
    with pytest.raises(openai.InternalServerError) as caught:
        running.complete("Hi")
    assert (caught.value.status_code, caught.value.code) == (503, "engine_stopped")


def test_completion_backend_exception_fails_single_request(
    start_server: Callable[..., RunningServer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    running = start_server(FakeBackend(slots=1))

    def fail(*_: object) -> None:
        raise ZeroDivisionError("simulated")

    with monkeypatch.context() as patch:
        for name in ("submit", "min_service_ms"):
            patch.setattr(running.fake, name, fail)
            with pytest.raises(openai.InternalServerError) as caught:
                running.complete("Hi")
            assert "simulated" not in caught.value.message
    assert "simulated" in caplog.text
    for code in ("engine_failed", "internal_error"):
        assert read_metric(running.service.metrics, "requests_total", outcome="failed", code=code) == 1
    assert running.service.queue.running == running.service.queue.waiting == 0
    assert running.complete("Hi").choices[0].finish_reason == "stop"


def corrupt(rng: random.Random, value: Any) -> Any:
    """Replace a random part of a value."""
    replacements = [
        None,
        True,
        0,
        -1,
        2**70,
        1.5,
        float("nan"),
        float("inf"),
        "",
        "x",
        "\ud800",
        [],
        {},
        [None],
        {"type": "text"},
    ]
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        return {**value, key: corrupt(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        return [*value[:index], corrupt(rng, value[index]), *value[index + 1 :]]
    return rng.choice([*replacements, [value], {"a": value}])


def test_completion_corrupt_request_never_returns_500(running: RunningServer) -> None:
    rng = random.Random(3)
    url = make_data_url(Image.new("RGB", (5, 5)))
    valid_request = {
        "model": MODEL, "messages": [{"role": "system", "content": "s"}, *make_messages("Hi", url)],
        "max_tokens": 3,
        "temperature": 0.5, "top_p": 0.5, "seed": 1, "stop": ["a"], "stream": False,
        "latency_budget_ms": 3000, "on_infeasible": "reject", "n": 1, "tools": [],
        "stream_options": None, "user": "eve",
    }  # fmt: skip
    statuses = set()
    for _ in range(120):
        body = valid_request
        for _ in range(rng.randint(1, 2)):
            body = corrupt(rng, body)
        content = json.dumps(body).encode()
        if rng.random() < 0.1:
            index = rng.randrange(len(content))
            content = content[:index] + bytes([rng.randrange(256)]) + content[index + 1 :]
        response = running.http.post("/v1/chat/completions", content=content)
        statuses.add(response.status_code)
        assert response.status_code < 500, content
        if response.status_code != 200:
            error = response.json()["error"]
            assert error["message"]
            assert error["code"]
    assert {200, 400} <= statuses
    assert running.service.queue.running == running.service.queue.waiting == 0


def test_completion_damaged_image_never_returns_500(running: RunningServer) -> None:
    rng = random.Random(4)
    content = base64.b64decode(make_data_url(Image.new("RGB", (9, 9), "red"), "JPEG").partition(",")[2])
    for _ in range(30):
        damaged = bytearray(content[: rng.randint(1, len(content))])
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        url = f"data:image/jpeg;base64,{base64.b64encode(damaged).decode()}"
        response = running.http.post(
            "/v1/chat/completions", json={"model": MODEL, "messages": make_messages("Hi", url)}
        )
        assert response.status_code in (200, 400), damaged

"""OpenAI's own client against a real server, on this machine."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import random
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
    Fake,
    Script,
    data_url,
    eventually,
    make_app,
    serving,
    user,
)

SCRIPTS = {
    "poem": Script("Roses are réd 😀, violets END are blue"),
    "slow": Script("one two three four five", token_ms=5.0),
    "hang": Script("start", hang=True),
    "breaks": Script("some words", fail=4),
    "breaks at once": Script("nothing", fail=0),
}


class Here:
    """A server, and clients for it."""

    def __init__(self, app: FastAPI, server: Server, fake: Fake) -> None:
        self.app, self.server, self.fake = app, server, fake
        self.url = f"http://127.0.0.1:{server.port}"
        # Kept for less long than the server keeps it: one that it just closes must not be used.
        kept = httpx2.Limits(keepalive_expiry=1.0)
        self.http = httpx2.Client(base_url=self.url, timeout=60.0, limits=kept)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=60.0)
        self.service = app.state.service

    def ask(self, text: str, **how: Any) -> Any:
        return self.client.chat.completions.create(model=MODEL, messages=user(text), **how)

    def close(self) -> None:
        self.http.close()
        self.client.close()


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    yield from started(Fake(scripts=SCRIPTS))


def started(fake: Fake, limits: RequestLimits | None = None) -> Iterator[Here]:
    app = make_app(fake, limits=limits)
    with serving(app) as server:
        found = Here(app, server, fake)
        yield found
        found.close()
    assert fake.closed
    assert fake.running == 0


@pytest.fixture
def make() -> Iterator[Callable[..., Here]]:
    """Servers of a test's own."""
    opened: list[Iterator[Here]] = []

    def one(fake: Fake, **limits: Any) -> Here:
        opened.append(started(fake, RequestLimits(**limits)))
        return next(opened[-1])

    yield one
    for each in opened:
        with pytest.raises(StopIteration):
            next(each)


def test_a_plain_answer(here: Here) -> None:
    found = here.ask("Hi", max_completion_tokens=64)
    assert found.choices[0].message.content == "Hello, wörld!"
    assert (found.choices[0].finish_reason, found.object, found.model) == ("stop", "chat.completion", MODEL)
    assert found.usage.completion_tokens == 14
    assert found.usage.total_tokens == found.usage.prompt_tokens + 14
    report = found.sparseflow
    assert report["plan"]["id"] == PLANS[2].id
    assert report["plan"]["tier"] == "high"
    assert report["predicted_ms"]["p99"] > report["predicted_ms"]["p50"] > 0.0
    assert report["measured_ms"] >= report["first_token_ms"] >= report["queued_ms"] > 0.0
    assert (report["budget_ms"], report["budget_met"], report["truncated"]) == (None, None, False)
    assert found._request_id


def test_a_streamed_answer(here: Here) -> None:
    chunks = list(here.ask("poem", stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content for chunk in chunks[1:-2]]
    assert "".join(pieces) == "Roses are réd 😀, violets END are blue"
    assert len(pieces) > 20
    assert all(piece and "\ufffd" not in piece for piece in pieces)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(SCRIPTS["poem"].say.encode())
    assert chunks[-1].sparseflow["plan"]["id"] == PLANS[2].id
    assert not any(hasattr(chunk, "sparseflow") for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_usage_ends_with_the_report(here: Here) -> None:
    chunks = list(here.ask("Hi", stream=True, extra_body={"latency_budget_ms": 5000}))
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is None
    assert chunks[-1].sparseflow["budget_met"] is True


def test_a_stream_on_the_wire(here: Here) -> None:
    body = {"model": MODEL, "messages": user("Hi"), "stream": True}
    with here.http.stream("POST", "/v1/chat/completions", json=body) as response:
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
    ("stop", "text"),
    [("END", "Roses are réd 😀, violets "), (["zzz", "réd"], "Roses are "), ("Roses", ""), ("blue!", None)],
)
def test_stop_strings(here: Here, stop: Any, text: str | None, stream: bool) -> None:
    found = here.ask("poem", stop=stop, stream=stream)
    if stream:
        chunks = list(found)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        said, reason = found.choices[0].message.content, found.choices[0].finish_reason
    assert (said, reason) == (SCRIPTS["poem"].say if text is None else text, "stop")
    if text is not None:
        eventually(lambda: here.fake.running == 0)


def test_as_many_tokens_as_asked_for(here: Here) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        found = here.ask("Hi", **{name: 5})
        assert (found.choices[0].message.content, found.choices[0].finish_reason) == ("Hello", "length")
        assert found.sparseflow["truncated"] is False


def test_what_says_how_tokens_are_drawn_gets_there(here: Here) -> None:
    here.ask("Hi", temperature=0.5, top_p=0.25, seed=7)
    drawn = here.fake.jobs[-1].sampling
    assert (drawn.temperature, drawn.top_p, drawn.seed) == (0.5, 0.25, 7)
    here.ask("Hi", seed=-1)
    assert here.fake.jobs[-1].sampling.seed == 2**63 - 1
    here.ask("Hi")
    assert here.fake.jobs[-1].sampling.temperature == 1.0
    assert here.fake.jobs[-1].sampling.seed != here.fake.jobs[-2].sampling.seed


def test_images_are_seen(here: Here) -> None:
    red, blue = (data_url(Image.new("RGB", (6, 4), colour)) for colour in ("red", "blue"))
    found = here.client.chat.completions.create(model=MODEL, messages=user("what?", red, blue))
    assert found.choices[0].message.content == "Hello, wörld!"
    job = here.fake.jobs[-1]
    assert job.prompt.images == 2
    assert job.prompt.inputs["pixel_values"].tolist() == [[255, 0, 0], [0, 0, 255]]
    assert found.usage is not None
    assert found.usage.prompt_tokens == job.prompt.tokens == job.prompt.text_tokens + 8


def test_budgets_choose_plans(make: Callable[..., Here]) -> None:
    # A minute by the cheapest plan; one and a half, and three by the others.
    here = make(Fake(least_ms=60_000.0, per_token_ms=0.0))
    for minutes, plan in ((1.3, 0), (2.3, 1), (4.0, 2), (None, 2)):
        budget_ms = None if minutes is None else minutes * 60_000.0
        found = here.ask("Hi", extra_body={"latency_budget_ms": budget_ms})
        assert found.sparseflow["plan"]["id"] == PLANS[plan].id
        job = here.fake.jobs[-1]
        assert job.budget_ms == budget_ms
        until_s = math.inf if minutes is None else job.received_s + minutes * 60.0
        assert job.until_s == pytest.approx(until_s)


def test_a_budget_as_a_header(here: Here) -> None:
    found = here.ask("Hi", extra_headers={"X-Latency-Budget-Ms": "4000"})
    assert (found.sparseflow["budget_ms"], found.sparseflow["budget_met"]) == (4000.0, True)


@pytest.mark.parametrize("budget_ms", [0, -5, "180", "nan", True, float("1e300")])
def test_budgets_that_are_none(here: Here, budget_ms: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        here.ask("Hi", extra_body={"latency_budget_ms": budget_ms})
    assert caught.value.param == "latency_budget_ms"


def test_a_budget_that_no_plan_keeps(here: Here) -> None:
    ran = len(here.fake.jobs)
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        here.ask("Hi", extra_body={"latency_budget_ms": 3})
    assert caught.value.code == "budget_infeasible"
    body: Any = caught.value.body
    assert 16 <= body["least_feasible_ms"] < 5000
    assert f"{body['least_feasible_ms']} ms is the least" in body["message"]
    assert len(here.fake.jobs) == ran


def test_best_effort_runs_all_the_same(here: Here) -> None:
    found = here.ask("slow", extra_body={"latency_budget_ms": 3, "on_infeasible": "best_effort"})
    assert found.choices[0].message.content == SCRIPTS["slow"].say
    assert found.sparseflow["plan"]["id"] == PLANS[0].id
    assert found.sparseflow["budget_met"] is False


def test_truncate_answers_with_fewer_tokens(make: Callable[..., Here]) -> None:
    here = make(Fake(least_ms=1.0, per_token_ms=1000.0))
    found = here.ask("Hi", extra_body={"latency_budget_ms": 7500, "on_infeasible": "truncate"})
    assert found.choices[0].finish_reason == "length"
    assert 1 <= found.usage.completion_tokens <= 7
    assert "Hello, wörld!".startswith(found.choices[0].message.content)
    assert (found.sparseflow["truncated"], found.sparseflow["budget_met"]) == (True, True)


def test_truncate_has_an_end_too(here: Here) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        here.ask("Hi", extra_body={"latency_budget_ms": 2, "on_infeasible": "truncate"})
    body: Any = caught.value.body
    assert "with 1 new tokens" in body["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_truncate_ends_when_time_is_up(here: Here, stream: bool) -> None:
    found = here.ask(
        "hang", stream=stream, extra_body={"latency_budget_ms": 2000, "on_infeasible": "truncate"}
    )
    last = list(found)[-1] if stream else found
    assert last.choices[0].finish_reason == "length"
    assert last.sparseflow["truncated"] is True
    assert last.sparseflow["measured_ms"] >= 1997.0
    eventually(lambda: here.fake.running == 0)


ERRORS: list[tuple[dict[str, Any], type[openai.APIStatusError], str]] = [
    ({"model": "gpt-4o"}, openai.NotFoundError, "model_not_found"),
    ({"n": 2}, openai.BadRequestError, "unsupported_parameter"),
    (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        openai.BadRequestError,
        "unsupported_parameter",
    ),
    ({"messages": []}, openai.BadRequestError, "invalid_value"),
    ({"messages": user("x" * 5000)}, openai.BadRequestError, "context_length_exceeded"),
    (
        {"messages": user("x"), "max_completion_tokens": 4090},
        openai.BadRequestError,
        "context_length_exceeded",
    ),
    ({"messages": user("x"), "max_completion_tokens": 5000}, openai.BadRequestError, "invalid_value"),
    ({"messages": user("x", "https://example.org/a.png")}, openai.BadRequestError, "invalid_image_url"),
    ({"messages": user("x", "data:image/png;base64,aGVsbG8=")}, openai.BadRequestError, "invalid_image"),
    ({"messages": user("x", *["data:,"] * 9)}, openai.BadRequestError, "invalid_value"),
    ({"messages": user("<image>")}, openai.BadRequestError, "invalid_value"),
    ({"messages": user("breaks at once")}, openai.InternalServerError, "engine_failed"),
]


@pytest.mark.parametrize(("change", "kind", "code"), ERRORS)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_typed(
    here: Here, change: dict[str, Any], kind: type[openai.APIStatusError], code: str, stream: bool
) -> None:
    with pytest.raises(kind) as caught:
        here.client.chat.completions.create(
            **{"model": MODEL, "messages": user("Hi"), "stream": stream, **change}
        )
    assert caught.value.code == code
    assert caught.value.response.headers["x-request-id"]
    assert set(caught.value.response.json()["error"]) >= {"message", "type", "param", "code"}


def test_a_failure_in_mid_stream_is_an_error(here: Here) -> None:
    said = ""
    with pytest.raises(openai.APIError, match="scripted"):
        for chunk in here.ask("breaks", stream=True):
            said += chunk.choices[0].delta.content or ""
    assert said == "some"
    with pytest.raises(openai.InternalServerError):
        here.ask("breaks")


def test_addresses(here: Here) -> None:
    assert [model.id for model in here.client.models.list()] == [MODEL]
    assert here.client.models.retrieve(MODEL).owned_by == "sparseflow"
    with pytest.raises(openai.NotFoundError):
        here.client.models.retrieve("other")
    for path in ("/health", "/ready"):
        assert here.http.get(path).status_code == 200
    assert here.http.get("/ready").json() == {"status": "open", "ready": True}
    assert here.http.get("/v1/nothing").json()["error"]["code"] == "not_found"
    response = here.http.get("/v1/chat/completions")
    assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")


def test_numbers_for_prometheus(make: Callable[..., Here]) -> None:
    here = make(Fake(scripts=SCRIPTS))
    here.ask("Hi", extra_body={"latency_budget_ms": 5000})
    with pytest.raises(openai.APIStatusError):
        here.ask("Hi", extra_body={"latency_budget_ms": 1})
    with pytest.raises(openai.APIStatusError):
        here.ask("breaks")
    text = here.http.get("/metrics").text
    assert 'sparseflow_requests_total{code="",outcome="answered"} 1.0' in text
    assert 'sparseflow_requests_total{code="budget_infeasible",outcome="infeasible"} 1.0' in text
    assert 'sparseflow_requests_total{code="engine_failed",outcome="failed"} 1.0' in text
    assert 'sparseflow_budgets_total{result="kept"} 1.0' in text
    assert "sparseflow_running 0.0" in text
    assert f'sparseflow_latency_seconds_count{{plan="{PLANS[2].id}"}} 1.0' in text


def test_many_at_once(make: Callable[..., Here]) -> None:
    fake = Fake(slots=4, scripts=SCRIPTS)
    here = make(fake, places=200)

    async def all_of_them() -> list[Any]:
        client = openai.AsyncOpenAI(base_url=f"{here.url}/v1", api_key="any", max_retries=0, timeout=60.0)

        async def one(at: int) -> str:
            text = "poem" if at % 2 else "Hi"
            if at % 3:
                found = await client.chat.completions.create(model=MODEL, messages=user(text))
                return found.choices[0].message.content or ""
            stream = await client.chat.completions.create(model=MODEL, messages=user(text), stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async with client:
            return await asyncio.gather(*map(one, range(60)))

    found = asyncio.run(all_of_them())
    assert found == [SCRIPTS["poem"].say if at % 2 else "Hello, wörld!" for at in range(60)]
    assert fake.most == 4
    assert here.service.metrics.value("requests_total", outcome="answered", code="") == 60


def test_a_full_server_sheds(make: Callable[..., Here]) -> None:
    here = make(Fake(slots=1, scripts=SCRIPTS), places=2)
    streams = [here.ask("hang", stream=True) for _ in range(1)]
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(here.ask, "Hi") for _ in range(2)]
        eventually(lambda: here.service.line.waiting == 2)
        with pytest.raises(openai.RateLimitError) as caught:
            here.ask("Hi")
        assert caught.value.code == "overloaded"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert int(caught.value.response.headers["retry-after-ms"]) >= 1
        assert here.http.get("/ready").status_code == 200
        for stream in streams:
            stream.close()
        assert [each.result().choices[0].finish_reason for each in waiting] == ["stop", "stop"]
    assert here.service.metrics.value("requests_total", outcome="shed", code="overloaded") == 1


def test_a_budget_that_the_line_would_eat_is_shed(make: Callable[..., Here]) -> None:
    here = make(Fake(slots=1, least_ms=60_000.0, scripts=SCRIPTS))
    stream = here.ask("hang", stream=True)
    with pytest.raises(openai.RateLimitError) as caught:
        here.ask("Hi", extra_body={"latency_budget_ms": 90_000})
    assert caught.value.code == "overloaded"
    assert "try again in" in caught.value.message
    with ThreadPoolExecutor(1) as threads:
        # It was told of no promise, so it may wait.
        ask = threads.submit(
            here.ask, "Hi", extra_body={"latency_budget_ms": 90_000, "on_infeasible": "best_effort"}
        )
        eventually(lambda: here.service.line.waiting == 1)
        stream.close()
        assert ask.result().choices[0].message.content == "Hello, wörld!"


def test_who_goes_away_frees_a_slot_and_hurts_nobody(make: Callable[..., Here]) -> None:
    here = make(Fake(slots=2, scripts=SCRIPTS))
    gone = here.ask("hang", stream=True)
    assert next(iter(gone)).choices[0].delta.role == "assistant"
    other = here.ask("slow", stream=True)
    assert here.fake.running == 2
    gone.close()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in other) == SCRIPTS["slow"].say
    eventually(lambda: here.fake.running == here.service.line.running == 0)
    assert here.fake.cancelled == [here.fake.jobs[0].id]
    assert here.service.metrics.value("requests_total", outcome="cancelled", code="client_gone") == 1


def test_who_goes_away_before_the_first_token_or_from_the_line(make: Callable[..., Here]) -> None:
    here = make(Fake(slots=1, scripts={"hang": Script("", hang=True)}))
    impatient = openai.OpenAI(base_url=f"{here.url}/v1", api_key="any", max_retries=0, timeout=3.0)
    with impatient, ThreadPoolExecutor(2) as threads:
        asked = [
            threads.submit(
                impatient.chat.completions.create, model=MODEL, messages=user("hang"), stream=stream
            )
            for stream in (False, True)
        ]
        for each in asked:
            with pytest.raises(openai.APITimeoutError):
                each.result()
    eventually(lambda: here.service.line.waiting == here.service.line.running == here.fake.running == 0)
    assert len(here.fake.jobs) in (1, 2)
    assert here.ask("Hi").choices[0].finish_reason == "stop"


def test_a_body_that_is_too_large(make: Callable[..., Here]) -> None:
    here = make(Fake(), body_bytes=100_000)
    with pytest.raises(openai.APIStatusError) as caught:
        here.ask("x" * 200_000)
    assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")

    def endless() -> Iterator[bytes]:
        for _ in range(40):
            yield b"[" * 10_000

    response = here.http.post("/v1/chat/completions", content=endless())
    assert response.status_code == 413
    assert here.ask("Hi").choices[0].finish_reason == "stop"


def test_a_body_that_does_not_come(make: Callable[..., Here]) -> None:
    here = make(Fake(), body_s=0.05)

    def slow() -> Iterator[bytes]:
        yield b"{"
        refused = {"outcome": "refused", "code": "request_timeout"}
        eventually(lambda: here.service.metrics.value("requests_total", **refused) == 1)
        yield b"}"

    response = here.http.post("/v1/chat/completions", content=slow())
    assert (response.status_code, response.json()["error"]["code"]) == (408, "request_timeout")
    assert here.service.line.wait_ms() == 0.0


def test_an_engine_that_died(make: Callable[..., Here]) -> None:
    here = make(Fake())
    here.fake.alive = False
    assert here.http.get("/health").status_code == 503
    assert here.http.get("/ready").json() == {"status": "engine_stopped", "ready": False}
    with pytest.raises(openai.InternalServerError) as caught:
        here.ask("Hi")
    assert (caught.value.status_code, caught.value.code) == (503, "engine_stopped")


def test_a_backend_that_raises_breaks_one_request_only(
    make: Callable[..., Here], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = make(Fake(slots=1))

    def raises(*_: object) -> None:
        raise ZeroDivisionError("a slip")

    with monkeypatch.context() as patch:
        for name in ("submit", "least_ms"):
            patch.setattr(here.fake, name, raises)
            with pytest.raises(openai.InternalServerError) as caught:
                here.ask("Hi")
            assert "a slip" not in caught.value.message
    assert "a slip" in caplog.text
    for code in ("engine_failed", "internal_error"):
        assert here.service.metrics.value("requests_total", outcome="failed", code=code) == 1
    assert here.service.line.running == here.service.line.waiting == 0
    assert here.ask("Hi").choices[0].finish_reason == "stop"


def spoilt(drawn: random.Random, value: Any) -> Any:
    """Something like a value, but not quite."""
    other = [
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
    if isinstance(value, dict) and value and drawn.random() < 0.8:
        key = drawn.choice(list(value))
        return {**value, key: spoilt(drawn, value[key])}
    if isinstance(value, list) and value and drawn.random() < 0.8:
        at = drawn.randrange(len(value))
        return [*value[:at], spoilt(drawn, value[at]), *value[at + 1 :]]
    return drawn.choice([*other, [value], {"a": value}])


def test_spoilt_requests_are_never_an_error_of_ours(here: Here) -> None:
    drawn = random.Random(3)
    url = data_url(Image.new("RGB", (5, 5)))
    whole = {
        "model": MODEL, "messages": [{"role": "system", "content": "s"}, *user("Hi", url)], "max_tokens": 3,
        "temperature": 0.5, "top_p": 0.5, "seed": 1, "stop": ["a"], "stream": False,
        "latency_budget_ms": 3000, "on_infeasible": "reject", "n": 1, "tools": [],
        "stream_options": None, "user": "eve",
    }  # fmt: skip
    seen = set()
    for _ in range(250):
        body = whole
        for _ in range(drawn.randint(1, 2)):
            body = spoilt(drawn, body)
        content = json.dumps(body).encode()
        if drawn.random() < 0.1:
            at = drawn.randrange(len(content))
            content = content[:at] + bytes([drawn.randrange(256)]) + content[at + 1 :]
        response = here.http.post("/v1/chat/completions", content=content)
        seen.add(response.status_code)
        assert response.status_code < 500, content
        if response.status_code != 200:
            error = response.json()["error"]
            assert error["message"]
            assert error["code"]
    assert {200, 400} <= seen
    assert here.service.line.running == here.service.line.waiting == 0


def test_torn_images_are_never_an_error_of_ours(here: Here) -> None:
    drawn = random.Random(4)
    content = base64.b64decode(data_url(Image.new("RGB", (9, 9), "red"), "JPEG").partition(",")[2])
    for _ in range(60):
        torn = bytearray(content[: drawn.randint(1, len(content))])
        torn[drawn.randrange(len(torn))] = drawn.randrange(256)
        url = f"data:image/jpeg;base64,{base64.b64encode(torn).decode()}"
        response = here.http.post("/v1/chat/completions", json={"model": MODEL, "messages": user("Hi", url)})
        assert response.status_code in (200, 400), torn

"""Requests: what is read, let pass, refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.adaptive.prompts.messages import ApiError, ImagePart, TextPart
from sparseflow.adaptive.serve.protocol import ChatRequest, parse

PLAIN: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def of_user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


def read(headers: dict[str, str] | None = None, /, **fields: Any) -> ChatRequest:
    return parse(json.dumps({**PLAIN, **fields}).encode(), headers or {})


def refused(headers: dict[str, str] | None = None, /, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(headers, **fields)
    assert caught.value.status == 400
    return caught.value


def test_a_plain_request_has_nothing_else() -> None:
    request = read()
    assert request.messages[0].content == [TextPart(type="text", text="Hi")]
    assert (request.new_tokens, request.stops, request.include_usage) == (None, (), False)
    assert (request.latency_budget_ms, request.on_infeasible) == (None, None)


def test_everything_that_is_read() -> None:
    url = {"url": "data:,", "detail": "high"}
    content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "what?"}]
    request = read(
        messages=[
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": content, "name": "eve"},
            {"role": "assistant", "content": "A cat."}, {"role": "user", "content": ""},
        ],
        max_completion_tokens=5, temperature=0, top_p=0.5, seed=-3, stop=["a", "b"], stream=True,
        stream_options={"include_usage": True}, latency_budget_ms=180, on_infeasible="truncate",
    )  # fmt: skip
    assert [part for message in request.messages for part in message.content if isinstance(part, ImagePart)]
    assert request.new_tokens == 5
    assert request.stops == ("a", "b")
    assert request.include_usage
    assert request.latency_budget_ms == 180.0


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "eve"}, {"metadata": {"a": "b"}}, {"store": False}, {"service_tier": "auto"}, {"n": 1},
        {"tools": []}, {"tools": None}, {"tool_choice": "auto"}, {"logprobs": False}, {"top_logprobs": 0},
        {"logit_bias": {}}, {"response_format": {"type": "text"}}, {"modalities": ["text"]},
        {"frequency_penalty": 0}, {"presence_penalty": 0.0}, {"prediction": {"type": "content"}},
        {"reasoning_effort": "low"}, {"parallel_tool_calls": True}, {"never_heard_of": [1, {"a": None}]},
        {"max_tokens": None, "temperature": None, "stop": None, "stream": None, "latency_budget_ms": None},
        {"max_tokens": 3, "max_completion_tokens": 3},
    ],
)  # fmt: skip
def test_what_changes_nothing_is_let_pass(fields: dict[str, Any]) -> None:
    read(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2), ("n", 0), ("n", True), ("n", "1"), ("n", 1.0), ("tools", [{"type": "function"}]),
        ("tool_choice", "required"), ("functions", [{}]), ("function_call", {"name": "f"}), ("audio", {}),
        ("modalities", ["text", "audio"]), ("logprobs", True), ("top_logprobs", 3), ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}), ("frequency_penalty", 0.1), ("presence_penalty", -1),
        ("presence_penalty", False), ("web_search_options", {}),
    ],
)  # fmt: skip
def test_what_would_silently_do_nothing_is_refused(field: str, value: Any) -> None:
    refusal = refused(**{field: value})
    assert (refusal.code, refusal.param) == ("unsupported_parameter", field)
    assert f"`{field}` is not supported" in refusal.message


@pytest.mark.parametrize(
    "value",
    [0, -1, -0.0, 0.0, "180", "", True, [180], {}, 2e9, 10**400, float("nan"), float("inf"), -float("inf")],
)
def test_budgets_that_are_none_are_refused(value: Any) -> None:
    refusal = refused(latency_budget_ms=value)
    assert refusal.param in ("latency_budget_ms", None)
    assert "latency_budget_ms" in refusal.message or refusal.code == "invalid_json"


@pytest.mark.parametrize(
    "value", ["0", "-5", "nan", "inf", "1e3", "0x10", "1_0", "", "ms", "180ms", "9" * 13, "٣", "+5"]
)
def test_budgets_in_the_header_that_are_none_are_refused(value: str) -> None:
    refusal = refused({"x-latency-budget-ms": value})
    assert refusal.param == "X-Latency-Budget-Ms"


def test_headers_say_the_same_as_the_body() -> None:
    headers = {"x-latency-budget-ms": " 180.5 ", "x-on-infeasible": "best_effort"}
    for request in (read(headers), read(headers, latency_budget_ms=180.5, on_infeasible="best_effort")):
        assert (request.latency_budget_ms, request.on_infeasible) == (180.5, "best_effort")
    assert "give it once" in refused(headers, latency_budget_ms=170).message
    assert "give it once" in refused(headers, on_infeasible="reject").message
    assert "must be one of reject, best_effort, truncate" in refused({"x-on-infeasible": "hope"}).message


@pytest.mark.parametrize(
    "name", ["latency_budget", "budget_ms", "latencyBudgetMs", "on_infeasable_budget", "deadline_ms"]
)
def test_a_budget_is_not_lost_to_its_spelling(name: str) -> None:
    refusal = refused(**{name: 180})
    assert (refusal.code, refusal.param) == ("unknown_parameter", name)
    assert "latency_budget_ms" in refusal.message


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"model": 5}, "model", "valid string; it is 5"),
        ({"model": None}, "model", "it is None"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "Hi"}, "messages", "valid list; it is 'Hi'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "it is 'tool'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
        ({"messages": of_user(None)}, "messages.0.content", "string, or an array of parts"),
        ({"messages": of_user([{"type": "input_audio"}])}, "messages.0.content.0", "'input_audio'"),
        ({"messages": of_user([{"type": "text"}])}, "messages.0.content.0.text", "required"),
        (
            {"messages": of_user([{"type": "image_url", "image_url": "data:"}])},
            "messages.0.content.0.image_url", "dictionary",
        ),
        (
            {"messages": [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0", "of the user only, not of the system",
        ),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1; it is 0"),
        ({"max_tokens": 5.5}, "max_tokens", "it is 5.5"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, None, "differ"),
        ({"temperature": 2.1}, "temperature", "it is 2.1"),
        ({"temperature": "hot"}, "temperature", "it is 'hot'"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"stop": ["a"] * 5}, None, "stop must be 1 to 4"),
        ({"stop": [""]}, None, "stop must be"),
        ({"stop": "x" * 300}, None, "stop must be"),
        ({"stop": [1]}, "stop.0", "valid string"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"stream_options": {"include_usage": True}}, None, "goes with stream"),
        ({"on_infeasible": "hope"}, "on_infeasible", "it is 'hope'"),
    ],
)  # fmt: skip
def test_errors_say_which_field_and_what_it_was(fields: dict[str, Any], param: str | None, said: str) -> None:
    refusal = refused(**fields)
    assert refusal.param == param
    assert said in refusal.message
    assert len(refusal.message) < 600


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b"[1]", b'"text"', b"null", b"3", b"true", b"[" * 100_000, b'{"a":' * 5_000,
     b"\xff\xfe", b'{"model": "\xff"}',
     b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}'],
)  # fmt: skip
def test_bodies_that_are_no_json_objects(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body, {})
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from([*ChatRequest.model_fields, "n", "tools", "logit_bias", "response_format", "user"])


@settings(deadline=None)
@given(st.dictionaries(FIELDS, JSON, max_size=6), st.dictionaries(FIELDS, JSON, max_size=3), st.booleans())
def test_any_json_is_a_request_or_a_refusal(body: dict[str, Any], part: dict[str, Any], plain: bool) -> None:
    if plain:
        body = {**PLAIN, **body, **part}
    try:
        parse(json.dumps(body).encode(), {})
    except ApiError as refusal:
        assert refusal.status == 400
        assert json.dumps(refusal.body, allow_nan=False)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_or_a_refusal(body: bytes) -> None:
    with pytest.raises(ApiError):
        parse(body, {})


@settings(deadline=None)
@given(st.text(max_size=16))
def test_any_header_is_a_budget_or_a_refusal(value: str) -> None:
    try:
        request = read({"x-latency-budget-ms": value})
    except ApiError as refusal:
        assert refusal.status == 400
    else:
        assert request.latency_budget_ms is not None
        assert 0.0 < request.latency_budget_ms <= 1e9


@settings(deadline=None)
@given(
    st.floats(1e-6, 1e9),
    st.integers(1, 4096),
    st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=4),
)
def test_what_is_right_is_read_as_it_is(budget: float, tokens: int, stops: list[str]) -> None:
    request = read(latency_budget_ms=budget, max_tokens=tokens, stop=stops)
    assert (request.latency_budget_ms, request.new_tokens, list(request.stops)) == (budget, tokens, stops)

"""Tests of request parsing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.adaptive.prompts.messages import ApiError, ImagePart, TextPart
from sparseflow.adaptive.serve.protocol import ChatRequest, parse_request

MINIMAL_REQUEST: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def make_user_message(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


def parse_fields(headers: dict[str, str] | None = None, /, **fields: Any) -> ChatRequest:
    return parse_request(json.dumps({**MINIMAL_REQUEST, **fields}).encode(), headers or {})


def parse_invalid(headers: dict[str, str] | None = None, /, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_fields(headers, **fields)
    assert caught.value.status == 400
    return caught.value


def test_parse_request_minimal_has_no_options() -> None:
    request = parse_fields()
    assert request.messages[0].content == [TextPart(type="text", text="Hi")]
    assert (request.new_tokens, request.stops, request.include_usage) == (None, (), False)
    assert (request.latency_budget_ms, request.on_infeasible) == (None, None)


def test_parse_request_all_fields_are_read() -> None:
    url = {"url": "data:,", "detail": "high"}
    content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "what?"}]
    request = parse_fields(
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
        {"frequency_penalty": 0}, {"presence_penalty": 0.0},
        {"parallel_tool_calls": True}, {"never_heard_of": None}, {"prompt_cache_key": "k"}, {"top_k": -1},
        {"min_p": 0.0}, {"repetition_penalty": 1}, {"best_of": 1}, {"ignore_eos": False}, {"echo": False},
        {"stop_token_ids": []}, {"service_tier": "default"}, {"guided_json": None}, {"min_tokens": 0},
        {"messages": [{"role": "user", "content": "Hi", "name": "eve"},
                      {"role": "assistant", "content": "A", "refusal": None, "annotations": [], "audio": None,
                       "tool_calls": None, "function_call": None}]},
        {"messages": make_user_message([{"type": "text", "text": "Hi", "cache_control": {"type": "e"}}])},
        {"max_tokens": None, "temperature": None, "stop": None, "stream": None, "latency_budget_ms": None},
        {"max_tokens": 3, "max_completion_tokens": 3},
    ],
)  # fmt: skip
def test_parse_request_fields_without_effect_are_accepted(fields: dict[str, Any]) -> None:
    parse_fields(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2), ("n", 0), ("n", True), ("n", "1"), ("n", 1.0), ("tools", [{"type": "function"}]),
        ("tool_choice", "required"), ("functions", [{}]), ("function_call", {"name": "f"}), ("audio", {}),
        ("modalities", ["text", "audio"]), ("logprobs", True), ("top_logprobs", 3), ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}), ("frequency_penalty", 0.1), ("presence_penalty", -1),
        ("presence_penalty", False), ("web_search_options", {}), ("top_k", 5), ("min_p", 0.1), ("best_of", 2),
        ("repetition_penalty", 1.1), ("use_beam_search", True), ("ignore_eos", True), ("min_tokens", 3),
        ("stop_token_ids", [5]), ("bad_words", ["a"]), ("guided_json", {}), ("prompt_logprobs", 1),
        ("echo", True), ("chat_template", "x"), ("reasoning_effort", "low"), ("service_tier", "flex"),
        ("prediction", {"type": "content", "content": "x"}),
    ],
)  # fmt: skip
def test_parse_request_unsupported_field_raises(field: str, value: Any) -> None:
    error = parse_invalid(**{field: value})
    assert (error.code, error.param) == ("unsupported_parameter", field)
    assert field in error.message


@pytest.mark.parametrize(
    "value",
    [0, -1, -0.0, 0.0, "180", "", True, [180], {}, 2e9, 10**400, float("nan"), float("inf"), -float("inf")],
)
def test_parse_request_invalid_budget_raises(value: Any) -> None:
    error = parse_invalid(latency_budget_ms=value)
    assert error.param in ("latency_budget_ms", None)
    assert "latency_budget_ms" in error.message or error.code == "invalid_json"


@pytest.mark.parametrize(
    "value", ["0", "-5", "nan", "inf", "1e3", "0x10", "1_0", "", "ms", "180ms", "9" * 13, "٣", "+5"]
)
def test_parse_request_invalid_budget_header_raises(value: str) -> None:
    error = parse_invalid({"x-latency-budget-ms": value})
    assert error.param == "X-Latency-Budget-Ms"


def test_parse_request_headers_override_absent_fields() -> None:
    headers = {"x-latency-budget-ms": " 180.5 ", "x-on-infeasible": "best_effort"}
    for request in (
        parse_fields(headers),
        parse_fields(headers, latency_budget_ms=180.5, on_infeasible="best_effort"),
    ):
        assert (request.latency_budget_ms, request.on_infeasible) == (180.5, "best_effort")
    assert "170" in parse_invalid(headers, latency_budget_ms=170).message
    assert "'reject'" in parse_invalid(headers, on_infeasible="reject").message
    assert "'hope'" in parse_invalid({"x-on-infeasible": "hope"}).message


@pytest.mark.parametrize(
    "name",
    ["latency_budget", "budget_ms", "latencyBudgetMs", "on_infeasable_budget", "deadline_ms", "slo_ms",
     "timeout_ms", "max_time", "budgt_ms"],
)  # fmt: skip
def test_parse_request_misspelled_budget_raises(name: str) -> None:
    error = parse_invalid(**{name: 180})
    assert (error.code, error.param) == ("unknown_parameter", name)
    assert "latency_budget_ms" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"never_heard_of": [1]}, "never_heard_of"),
        ({"x" * 500: False}, "x" * 64),
        ({"max_token": 5}, "max_token"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}},
         "stream_options.continuous_usage_stats"),
        ({"messages": [{"role": "assistant", "content": "A", "reasoning_content": "so"}]},
         "messages.0.reasoning_content"),
        ({"messages": make_user_message([{"type": "text", "text": "Hi", "lang": "en"}])},
         "messages.0.content.0.lang"),
    ],
)  # fmt: skip
def test_parse_request_unknown_field_raises(fields: dict[str, Any], param: str) -> None:
    error = parse_invalid(**fields)
    assert (error.code, error.param) == ("unknown_parameter", param)
    assert len(error.message) < 600


def test_parse_request_misspelled_field_names_similar_one() -> None:
    assert "'max_tokens'" in parse_invalid(max_token=5).message


@pytest.mark.parametrize(
    ("fields", "param", "value"),
    [
        ({"model": 5}, "model", "5"),
        ({"model": None}, "model", "None"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "Hi"}, "messages", "'Hi'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "'tool'"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role", "tool calls"),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
            "messages.0", "tool calls",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content", "None"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
        ({"messages": make_user_message(None)}, "messages.0.content", ""),
        ({"messages": make_user_message([{"type": "input_audio"}])}, "messages.0.content.0", "'input_audio'"),
        ({"messages": make_user_message([{"type": "text"}])}, "messages.0.content.0.text", "required"),
        (
            {"messages": make_user_message([{"type": "image_url", "image_url": "data:"}])},
            "messages.0.content.0.image_url", "dictionary",
        ),
        (
            {"messages": [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0", "system",
        ),
        ({"max_tokens": 0}, "max_tokens", "0"),
        ({"max_tokens": 5.5}, "max_tokens", "5.5"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, None, "max_completion_tokens"),
        ({"temperature": 2.1}, "temperature", "2.1"),
        ({"temperature": "hot"}, "temperature", "'hot'"),
        ({"top_p": 0}, "top_p", "0"),
        ({"seed": 2**63}, "seed", str(2**63)),
        ({"stop": ["a"] * 5}, None, "stop"),
        ({"stop": [""]}, None, "stop"),
        ({"stop": "x" * 300}, None, "stop"),
        ({"stop": [1]}, "stop.0", "1"),
        ({"stream": "yes"}, "stream", "'yes'"),
        ({"stream_options": {"include_usage": True}}, None, "stream_options"),
        ({"on_infeasible": "hope"}, "on_infeasible", "'hope'"),
    ],
)  # fmt: skip
def test_parse_request_invalid_field_names_field_and_value(
    fields: dict[str, Any], param: str | None, value: str
) -> None:
    error = parse_invalid(**fields)
    assert error.param == param
    assert value in error.message
    assert len(error.message) < 600


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b"[1]", b'"text"', b"null", b"3", b"true", b"[" * 100_000, b'{"a":' * 5_000,
     b"\xff\xfe", b'{"model": "\xff"}',
     b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}'],
)  # fmt: skip
def test_parse_request_invalid_json_raises(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(body, {})
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from([*ChatRequest.model_fields, "n", "tools", "logit_bias", "response_format", "user"])


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(FIELDS, JSON, max_size=6), st.dictionaries(FIELDS, JSON, max_size=3), st.booleans())
def test_parse_request_any_json_parses_or_raises_400(
    body: dict[str, Any], part: dict[str, Any], minimal: bool
) -> None:
    if minimal:
        body = {**MINIMAL_REQUEST, **body, **part}
    try:
        parse_request(json.dumps(body).encode(), {})
    except ApiError as error:
        assert error.status == 400
        assert json.dumps(error.body, allow_nan=False)


@settings(deadline=None, max_examples=40)
@given(st.binary(max_size=60))
def test_parse_request_random_bytes_raises(body: bytes) -> None:
    with pytest.raises(ApiError):
        parse_request(body, {})


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=16))
def test_parse_request_any_budget_header_parses_or_raises_400(value: str) -> None:
    try:
        request = parse_fields({"x-latency-budget-ms": value})
    except ApiError as error:
        assert error.status == 400
    else:
        assert request.latency_budget_ms is not None
        assert 0.0 < request.latency_budget_ms <= 1e9


@settings(deadline=None, max_examples=30)
@given(
    st.floats(1e-6, 1e9),
    st.integers(1, 4096),
    st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=4),
)
def test_parse_request_valid_values_are_unchanged(budget: float, tokens: int, stops: list[str]) -> None:
    request = parse_fields(latency_budget_ms=budget, max_tokens=tokens, stop=stops)
    assert (request.latency_budget_ms, request.new_tokens, list(request.stops)) == (budget, tokens, stops)

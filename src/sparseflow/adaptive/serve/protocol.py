"""Chat completion protocol: parsing of requests and format of responses.

OpenAI clients send more fields than a server implements. A field that cannot change the answer is ignored,
and so is a value without effect, such as `top_k=-1`. Every other field that is not implemented is refused,
whether it is known or not: a caller who sets it expects another answer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any

import numpy as np
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from sparseflow.adaptive.policy.selector import ON_INFEASIBLE, OnInfeasible
from sparseflow.adaptive.prompts.messages import ApiError, Message, RequestLimits, RequestModel, invalid
from sparseflow.adaptive.serve.answer import AnswerStream

BUDGET_HEADER = "X-Latency-Budget-Ms"
ON_INFEASIBLE_HEADER = "X-On-Infeasible"

_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?")
_MAX_STOP_LENGTH = 256
_MAX_BYTES_PER_CHAR = 12
"""A character outside the basic plane is two escapes of six bytes in JSON."""
_OTHER_FIELDS_BYTES = 65536
_SEPARATORS_PER_PART = 16
"""Commas and opening brackets that a message or part needs at most."""


class StreamOptions(RequestModel):
    """Streaming options."""

    IGNORED = frozenset({"include_obfuscation"})

    include_usage: bool | None = None


class ChatRequest(RequestModel):
    """A parsed request."""

    IGNORED = frozenset(
        {
            "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
            "prompt_cache_retention", "parallel_tool_calls",
        }
    )  # fmt: skip

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    latency_budget_ms: Annotated[float, Field(gt=0.0, le=1e9)] | None = None
    on_infeasible: OnInfeasible | None = None

    @property
    def new_tokens(self) -> int | None:
        """Maximum number of generated tokens; None if not set."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @field_validator("stop", mode="before")
    @classmethod
    def _wrap_stop(cls, stop: object) -> object:
        return [stop] if isinstance(stop, str) else stop

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise ValueError("max_tokens and max_completion_tokens differ; set max_completion_tokens only")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options requires stream=true")
        if len(self.stops) > 4 or any(not 0 < len(stop) <= _MAX_STOP_LENGTH for stop in self.stops):
            raise ValueError(f"stop must be 1 to 4 strings of 1 to {_MAX_STOP_LENGTH} characters")
        return self


_TOOLS = "tool calls are not implemented"
_LOGPROBS = "log probabilities are not implemented"
_PENALTY = "penalties are not implemented"
_SAMPLING = "only temperature, top_p and seed are implemented"
_LENGTH = "an answer ends at a stop token, at a string of stop, or after max_completion_tokens"
_TEXT = "only plain text is generated"
_TEMPLATE = "the chat template of the model is used"
_OFF, _ZERO, _ONE = (False,), (0, 0.0), (1, 1.0)
_UNSUPPORTED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "n": ((1,), "only one choice per request is supported; send n requests"),
    "best_of": ((1,), "only one choice per request is supported; send n requests"),
    "tools": (([], {}), _TOOLS),
    "tool_choice": (("none", "auto"), _TOOLS),
    "functions": (([], {}), _TOOLS),
    "function_call": (("none", "auto"), _TOOLS),
    "audio": ((), "audio is not implemented"),
    "modalities": (([], ["text"]), _TEXT),
    "response_format": (({"type": "text"},), _TEXT),
    "guided_json": ((), _TEXT),
    "guided_regex": ((), _TEXT),
    "guided_choice": ((), _TEXT),
    "guided_grammar": ((), _TEXT),
    "structured_outputs": ((), _TEXT),
    "logprobs": (_OFF, _LOGPROBS),
    "top_logprobs": ((0,), _LOGPROBS),
    "prompt_logprobs": ((), _LOGPROBS),
    "logit_bias": (([], {}), "logit bias is not implemented"),
    "frequency_penalty": (_ZERO, f"{_PENALTY}; use 0"),
    "presence_penalty": (_ZERO, f"{_PENALTY}; use 0"),
    "repetition_penalty": (_ONE, f"{_PENALTY}; use 1"),
    "length_penalty": (_ONE, f"{_PENALTY}; use 1"),
    "top_k": ((-1, 0), _SAMPLING),
    "min_p": (_ZERO, _SAMPLING),
    "typical_p": (_ONE, _SAMPLING),
    "use_beam_search": (_OFF, _SAMPLING),
    "early_stopping": (_OFF, _SAMPLING),
    "ignore_eos": (_OFF, _LENGTH),
    "min_tokens": ((0,), _LENGTH),
    "stop_token_ids": (([],), _LENGTH),
    "bad_words": (([],), _LENGTH),
    "include_stop_str_in_output": (_OFF, _LENGTH),
    "skip_special_tokens": ((True,), "special tokens are always left out"),
    "echo": (_OFF, "the answer does not repeat the prompt"),
    "add_generation_prompt": ((True,), _TEMPLATE),
    "continue_final_message": (_OFF, _TEMPLATE),
    "chat_template": ((), _TEMPLATE),
    "chat_template_kwargs": (({},), _TEMPLATE),
    "reasoning_effort": (("none",), "the effort is set by latency_budget_ms"),
    "verbosity": (("medium",), "the length is set by max_completion_tokens"),
    "service_tier": (("auto", "default"), "there is one service tier"),
    "prediction": ((), "predicted outputs are not implemented"),
    "priority": ((0,), "requests are ordered by latency_budget_ms"),
    "web_search_options": ((), "web search is not implemented"),
}
"""Field -> values without effect besides null, and the reason for refusing other values."""

_PART_KIND_INDEX = 4
"""Index of the kind of a content part in an error location: messages, 0, content, 0, text, …"""

_BUDGET_LIKE = re.compile(r"budg|infeas|latenc|deadline|timeout|max_?time|(^|_)slo(_|$)", re.IGNORECASE)


def get_max_text_bytes(max_text_chars: int) -> int:
    """Return the maximum size of a body without images."""
    return _MAX_BYTES_PER_CHAR * max_text_chars + _OTHER_FIELDS_BYTES


def check_size(body: bytes | bytearray, limits: RequestLimits, *, max_text_chars: int) -> None:
    """Check the size of a body in milliseconds, before it is parsed.

    Parsing holds the interpreter lock, for seconds if a body consists of millions of values.

    Raises:
        ApiError: 400 if the body has too much text, or too many values for its messages.
    """
    if len(body) <= _OTHER_FIELDS_BYTES:
        return
    if len(body) > get_max_text_bytes(max_text_chars) and b'"image_url"' not in body:
        raise make_length_error(f"the request has {len(body)} bytes and no image", max_text_chars)
    characters = np.frombuffer(body, np.uint8)
    num_separators = sum(int(np.count_nonzero(characters == ord(separator))) for separator in ",[{")
    if num_separators > max_text_chars + _SEPARATORS_PER_PART * (limits.messages + limits.parts):
        raise invalid("the request has too many values; send fewer messages and parts", "messages")


def make_length_error(size: str, max_text_chars: int) -> ApiError:
    """Create the error of a request with more text than the context can hold."""
    return invalid(
        f"{size}; the context of this model holds at most {max_text_chars} characters of text, so shorten it",
        "messages", code="context_length_exceeded",
    )  # fmt: skip


def _check_counts(messages: object, limits: RequestLimits) -> None:
    """Check the number of messages and parts before they are validated one by one."""
    if not isinstance(messages, list):
        return
    if len(messages) > limits.messages:
        raise invalid(f"{len(messages)} messages are too many; send at most {limits.messages}", "messages")
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    if num_parts > limits.parts:
        raise invalid(f"{num_parts} content parts are too many; send at most {limits.parts}", "messages")


def parse_request(
    body: bytes | bytearray, headers: Mapping[str, str], limits: RequestLimits | None = None
) -> ChatRequest:
    """Parse a chat completion request.

    Args:
        body: Request body.
        headers: HTTP headers by lower-case name.
        limits: Maximum number of messages and parts.

    Raises:
        ApiError: 400 with the invalid field and its valid values.
    """
    try:
        content = from_json(body)
    except ValueError as error:
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise invalid(
            f"the body must be a JSON object, not {_describe_json_type(content)}", code="invalid_json"
        )
    _check_counts(content.get("messages"), limits or RequestLimits())
    for name, (harmless, reason) in _UNSUPPORTED.items():
        value = content.get(name)
        # In Python True == 1, so types are compared as well.
        if value is not None and not any(type(value) is type(other) and value == other for other in harmless):
            raise invalid(f"`{name}` is not supported: {reason}", name, code="unsupported_parameter")
    supported = {}
    for name, value in content.items():
        if name in _UNSUPPORTED:
            continue
        if value is not None and name not in ChatRequest.model_fields and name not in ChatRequest.IGNORED:
            raise _make_unknown_error(name)
        supported[name] = value
    try:
        request = ChatRequest.model_validate(supported)
    except ValidationError as error:
        raise _convert_validation_error(error) from error
    return _apply_headers(request, headers)


def _make_unknown_error(name: str) -> ApiError:
    similar = get_close_matches(name[:64], ChatRequest.model_fields, n=1)
    if _BUDGET_LIKE.search(name[:64]):
        advice = "a budget is set by latency_budget_ms and on_infeasible"
    else:
        advice = f"did you mean {similar[0]!r}?" if similar else "it would be ignored, so remove it"
    return invalid(f"unknown field {name[:64]!r}; {advice}", name[:64], code="unknown_parameter")


def _apply_headers(request: ChatRequest, headers: Mapping[str, str]) -> ChatRequest:
    overrides: dict[str, Any] = {}
    budget = headers.get(BUDGET_HEADER.lower())
    if budget is not None:
        value = float(budget) if _NUMBER.fullmatch(budget.strip()) else math.nan
        if not 0.0 < value <= 1e9:
            raise invalid(
                f"{BUDGET_HEADER} (={budget[:64]!r}) must be a positive number of milliseconds", BUDGET_HEADER
            )
        overrides["latency_budget_ms"] = value
    on_infeasible = headers.get(ON_INFEASIBLE_HEADER.lower())
    if on_infeasible is not None:
        if on_infeasible.strip() not in ON_INFEASIBLE:
            raise invalid(
                f"{ON_INFEASIBLE_HEADER} (={on_infeasible[:64]!r}) must be one of {', '.join(ON_INFEASIBLE)}",
                ON_INFEASIBLE_HEADER,
            )
        overrides["on_infeasible"] = on_infeasible.strip()
    for name, value in overrides.items():
        body_value = getattr(request, name)
        if body_value is not None and body_value != value:
            raise invalid(
                f"`{name}` is {body_value!r} in the body and {value!r} in the header; set it once", name
            )
    return request.model_copy(update=overrides)


def _convert_validation_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    # pydantic adds the kind of a content part, which is not a field of the request.
    param = ".".join(str(name) for index, name in enumerate(first["loc"]) if index != _PART_KIND_INDEX)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return invalid(
            f"unknown field `{param[:200]}`; it would be ignored, so remove it",
            param[:200], code="unknown_parameter",
        )  # fmt: skip
    value = first["input"]
    if isinstance(value, str | int | float) or value is None:
        message += f"; got {str(value)[:64]!r}" if isinstance(value, str) else f"; got {str(value)[:64]}"
    missing = first["type"] == "missing"
    return invalid(
        f"`{param[:200]}`: {message}" if param else message,
        param[:200] or None,
        code="missing_required_parameter" if missing else "invalid_value",
    )


def _describe_json_type(content: object) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(content), "a number"
    )


DONE = b"data: [DONE]\n\n"


def make_completion(answer: AnswerStream, model: str, text: str) -> dict[str, Any]:
    """Build the response of a completed request."""
    message = {"role": "assistant", "content": text, "refusal": None}
    return {
        **_make_header(answer, model, "chat.completion"),
        "choices": [
            {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
        ],
        "usage": answer.usage,
        "sparseflow": answer.report(),
    }


def make_chunk(answer: AnswerStream, model: str, **delta: str) -> dict[str, Any]:
    """Build a streaming chunk; without `delta` it carries the finish reason."""
    reason = None if delta else answer.finish_reason
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    return {**_make_header(answer, model, "chat.completion.chunk"), "choices": [choice]}


def make_last_chunks(answer: AnswerStream, model: str, *, usage: bool) -> list[dict[str, Any]]:
    """Build the last chunks of a stream: finish reason, token counts if requested, and the report."""
    chunks = [make_chunk(answer, model)]
    if usage:
        chunks.append(
            {**_make_header(answer, model, "chat.completion.chunk"), "choices": [], "usage": answer.usage}
        )
    chunks[-1]["sparseflow"] = answer.report()
    return chunks


def encode_event(content: dict[str, Any]) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"


def _make_header(answer: AnswerStream, model: str, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created_s, "model": model}

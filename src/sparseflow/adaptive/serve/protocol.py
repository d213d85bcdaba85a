"""Chat completion protocol: parsing of requests and format of responses.

OpenAI clients send more fields than a server implements. A field that cannot change the answer is ignored. A
field that should change the answer but is not implemented is refused, and so is an unknown field that looks
like a misspelled budget.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from sparseflow.adaptive.policy.selector import ON_INFEASIBLE, OnInfeasible
from sparseflow.adaptive.prompts.messages import ApiError, Message, RequestModel, invalid
from sparseflow.adaptive.serve.answer import AnswerStream

BUDGET_HEADER = "X-Latency-Budget-Ms"
ON_INFEASIBLE_HEADER = "X-On-Infeasible"

_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?")
_MAX_STOP_LENGTH = 256


class StreamOptions(RequestModel):
    """Streaming options."""

    include_usage: bool | None = None


class ChatRequest(RequestModel):
    """A parsed request; null fields are treated as absent."""

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


_UNSUPPORTED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "n": ((1,), "only one choice per request is supported; send n requests"),
    "tools": (([], {}), "tool calls are not implemented"),
    "tool_choice": (("none", "auto"), "tool calls are not implemented"),
    "functions": (([], {}), "function calls are not implemented"),
    "function_call": (("none", "auto"), "function calls are not implemented"),
    "audio": ((), "audio is not implemented"),
    "modalities": (([], ["text"]), "only text is generated"),
    "logprobs": ((False,), "log probabilities are not implemented"),
    "top_logprobs": ((0,), "log probabilities are not implemented"),
    "logit_bias": (([], {}), "logit bias is not implemented"),
    "response_format": (({"type": "text"},), "only plain text is generated"),
    "frequency_penalty": ((0, 0.0), "penalties are not implemented; use 0"),
    "presence_penalty": ((0, 0.0), "penalties are not implemented; use 0"),
    "web_search_options": ((), "web search is not implemented"),
}
"""Field -> values without effect besides null, and the reason for refusing other values."""

_PART_KIND_INDEX = 4
"""Index of the kind of a content part in an error location: messages, 0, content, 0, text, …"""

_BUDGET_LIKE = re.compile(r"budget|infeasible|latency|deadline", re.IGNORECASE)


def parse_request(body: bytes, headers: Mapping[str, str]) -> ChatRequest:
    """Parse a chat completion request.

    Args:
        body: Request body.
        headers: HTTP headers by lower-case name.

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
    for name, (harmless, reason) in _UNSUPPORTED.items():
        value = content.get(name)
        # In Python True == 1, so types are compared as well.
        if value is not None and not any(type(value) is type(other) and value == other for other in harmless):
            raise invalid(f"`{name}` is not supported: {reason}", name, code="unsupported_parameter")
    for name in content:
        if name not in ChatRequest.model_fields and _BUDGET_LIKE.search(name):
            raise invalid(
                f"unknown field {name[:64]!r}; a budget is set by latency_budget_ms and on_infeasible",
                name[:64], code="unknown_parameter",
            )  # fmt: skip
    try:
        request = ChatRequest.model_validate(content)
    except ValidationError as error:
        raise _convert_validation_error(error) from error
    return _apply_headers(request, headers)


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

"""A request for a chat completion: which fields are read, which are let pass, and which are refused.

OpenAI's clients send more fields than any one server knows. What cannot change an answer is let pass; what
would be expected to change it, and here would not, is refused, so that nobody counts on it. A budget must not
be lost to a spelling: an unknown field that looks like one is refused too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from sparseflow.adaptive.policy.selector import ON_INFEASIBLE, OnInfeasible
from sparseflow.adaptive.prompts.messages import ApiError, Message, RequestModel, invalid
from sparseflow.adaptive.serve.answer import AnswerStream

BUDGET_HEADER = "X-Latency-Budget-Ms"
ON_INFEASIBLE_HEADER = "X-On-Infeasible"

_NUMERAL = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?")
_MOST_STOP_CHARACTERS = 256


class StreamOptions(RequestModel):
    """How an answer is streamed."""

    include_usage: bool | None = None


class ChatRequest(RequestModel):
    """A request as it is understood; a field that is null is as one that is absent."""

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
        """Most tokens of the answer; None where the request does not say."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings before which the answer ends."""
        return tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """Whether a stream is to end with the numbers of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @field_validator("stop", mode="before")
    @classmethod
    def _list_of_stops(cls, stop: object) -> object:
        return [stop] if isinstance(stop, str) else stop

    @model_validator(mode="after")
    def _fit_together(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise ValueError("max_tokens and max_completion_tokens differ; give max_completion_tokens only")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream (=true) only")
        if len(self.stops) > 4 or any(not 0 < len(stop) <= _MOST_STOP_CHARACTERS for stop in self.stops):
            raise ValueError(f"stop must be 1 to 4 strings of 1 to {_MOST_STOP_CHARACTERS} characters")
        return self


def _absent(value: object) -> bool:
    return value is None


def _empty(value: object) -> bool:
    return value is None or value == [] or value == {}


def _any_of(*harmless: object) -> Callable[[object], bool]:
    # A bool equals a number in Python, so types are compared, too.
    return lambda value: value is None or any(type(value) is type(h) and value == h for h in harmless)


_UNSUPPORTED: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "n": (_any_of(1), "one answer a request is given; ask n times"),
    "tools": (_empty, "tools cannot be called"),
    "tool_choice": (_any_of("none", "auto"), "tools cannot be called"),
    "functions": (_empty, "functions cannot be called"),
    "function_call": (_any_of("none", "auto"), "functions cannot be called"),
    "audio": (_absent, "audio is neither taken nor given"),
    "modalities": (_any_of([], ["text"]), "answers are text only"),
    "logprobs": (_any_of(False), "log probabilities are not given"),
    "top_logprobs": (_any_of(0), "log probabilities are not given"),
    "logit_bias": (_empty, "logits cannot be biased"),
    "response_format": (_any_of({"type": "text"}), "answers are plain text only"),
    "frequency_penalty": (_any_of(0, 0.0), "tokens are not penalised; leave it 0"),
    "presence_penalty": (_any_of(0, 0.0), "tokens are not penalised; leave it 0"),
    "web_search_options": (_absent, "nothing is fetched from the network"),
}
"""Field -> which of its values change nothing, and why no other can be used."""

_KIND_AT = 4
"""Where the kind of a part stands in the place of an error: messages, 0, content, 0, text, …"""

_BUDGET_LIKE = re.compile(r"budget|infeasible|latency|deadline", re.IGNORECASE)


def parse(body: bytes, headers: Mapping[str, str]) -> ChatRequest:
    """Read a request.

    Args:
        body: JSON in UTF-8.
        headers: Of HTTP, by lower-case names; the two about budgets are read.

    Raises:
        Refusal: 400; it says which field is wrong, and what it may be.
    """
    try:
        content = from_json(body)
    except ValueError as error:
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise invalid(f"the body must be a JSON object, not {_kind(content)}", code="invalid_json")
    for name, (harmless, why) in _UNSUPPORTED.items():
        if not harmless(content.get(name)):
            raise invalid(f"`{name}` is not supported: {why}", name, code="unsupported_parameter")
    for name in content:
        if name not in ChatRequest.model_fields and _BUDGET_LIKE.search(name):
            raise invalid(
                f"there is no field {name[:64]!r}; a budget is given as latency_budget_ms and on_infeasible",
                name[:64], code="unknown_parameter",
            )  # fmt: skip
    try:
        request = ChatRequest.model_validate(content)
    except ValidationError as error:
        raise _of(error) from error
    return _with_headers(request, headers)


def _with_headers(request: ChatRequest, headers: Mapping[str, str]) -> ChatRequest:
    found: dict[str, Any] = {}
    budget = headers.get(BUDGET_HEADER.lower())
    if budget is not None:
        value = float(budget) if _NUMERAL.fullmatch(budget.strip()) else math.nan
        if not 0.0 < value <= 1e9:
            raise invalid(
                f"{BUDGET_HEADER} (={budget[:64]!r}) must be a number of milliseconds above 0", BUDGET_HEADER
            )
        found["latency_budget_ms"] = value
    chosen = headers.get(ON_INFEASIBLE_HEADER.lower())
    if chosen is not None:
        if chosen.strip() not in ON_INFEASIBLE:
            raise invalid(
                f"{ON_INFEASIBLE_HEADER} (={chosen[:64]!r}) must be one of {', '.join(ON_INFEASIBLE)}",
                ON_INFEASIBLE_HEADER,
            )
        found["on_infeasible"] = chosen.strip()
    for name, value in found.items():
        given = getattr(request, name)
        if given is not None and given != value:
            raise invalid(
                f"`{name}` is {given!r} in the body and {value!r} in the header; give it once", name
            )
    return request.model_copy(update=found)


def _of(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    # Behind the number of a part stands its kind, which is no name in the request.
    where = ".".join(str(name) for at, name in enumerate(first["loc"]) if at != _KIND_AT)
    said = first["msg"].removeprefix("Value error, ")
    given = first["input"]
    if isinstance(given, str | int | float) or given is None:
        said += f"; it is {str(given)[:64]!r}" if isinstance(given, str) else f"; it is {str(given)[:64]}"
    missing = first["type"] == "missing"
    return invalid(
        f"`{where[:200]}`: {said}" if where else said,
        where[:200] or None,
        code="missing_required_parameter" if missing else "invalid_value",
    )


def _kind(content: object) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(content), "a number"
    )


DONE = b"data: [DONE]\n\n"


def completion(answer: AnswerStream, model: str, text: str) -> dict[str, Any]:
    """The whole answer, once it has ended."""
    message = {"role": "assistant", "content": text, "refusal": None}
    return {
        **_head(answer, model, "chat.completion"),
        "choices": [
            {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
        ],
        "usage": answer.usage,
        "sparseflow": answer.report(),
    }


def chunk(answer: AnswerStream, model: str, **delta: str) -> dict[str, Any]:
    """A part of the answer; the last one, without anything new, says why it ended."""
    reason = None if delta else answer.finish_reason
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    return {**_head(answer, model, "chat.completion.chunk"), "choices": [choice]}


def last_chunks(answer: AnswerStream, model: str, *, usage: bool) -> list[dict[str, Any]]:
    """What ends a stream: why the answer ended, numbers of tokens where they are asked for, and our report in
    the very last."""
    chunks = [chunk(answer, model)]
    if usage:
        chunks.append({**_head(answer, model, "chat.completion.chunk"), "choices": [], "usage": answer.usage})
    chunks[-1]["sparseflow"] = answer.report()
    return chunks


def event(content: dict[str, Any]) -> bytes:
    """As a server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"


def error_event(refusal: ApiError) -> bytes:
    """An error in the middle of a stream, as OpenAI's clients understand it."""
    return event(refusal.body)


def _head(answer: AnswerStream, model: str, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created_s, "model": model}

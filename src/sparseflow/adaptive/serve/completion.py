"""Answers in OpenAI's form: one object, or server-sent events. What is ours stands under `sparseflow`."""

from __future__ import annotations

import json
from typing import Any

from sparseflow.adaptive.serve.answer import Answer
from sparseflow.adaptive.serve.refusal import Refusal

DONE = b"data: [DONE]\n\n"


def completion(answer: Answer, model: str, text: str) -> dict[str, Any]:
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


def chunk(answer: Answer, model: str, **delta: str) -> dict[str, Any]:
    """A part of the answer; the last one, without anything new, says why it ended."""
    reason = None if delta else answer.finish_reason
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    return {**_head(answer, model, "chat.completion.chunk"), "choices": [choice]}


def last_chunks(answer: Answer, model: str, *, usage: bool) -> list[dict[str, Any]]:
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


def error_event(refusal: Refusal) -> bytes:
    """An error in the middle of a stream, as OpenAI's clients understand it."""
    return event(refusal.body)


def _head(answer: Answer, model: str, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created_s, "model": model}

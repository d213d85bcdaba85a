"""A scripted backend, tokenizer and image processor for server tests, without an engine."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI

from sparseflow.adaptive.plan.space import TIERS, Plan, Tier
from sparseflow.adaptive.prompts.chat import PromptBuilder
from sparseflow.adaptive.prompts.messages import ApiError, Prompt, RequestLimits
from sparseflow.adaptive.serve.app import create_app
from sparseflow.adaptive.serve.backend import (
    BackendJob,
    EndedEvent,
    Event,
    FailedEvent,
    ServiceTime,
    StartedEvent,
    TokensEvent,
)
from sparseflow.adaptive.serve.connections import ConnectionLimits
from sparseflow.adaptive.serve.lifecycle import Server
from sparseflow.adaptive.serve.metrics import ServerMetrics
from sparseflow.adaptive.serve.service import Service

MODEL = "fake-moe"
IMAGE = "<image>"
PLANS = tuple(
    Plan(tier=tier, insertion_position=1, top_k=k, blocks=tuple(range(n)))
    for tier, k, n in zip(TIERS, (4, 6, 8), (12, 14, 16), strict=True)
)


class ByteTokenizer:
    """Tokenizer of UTF-8 bytes, with an image token and a stop token."""

    chat_template: Any = "fixed"
    image_id, stop_id = 256, 257

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        turns = []
        for message in conversation:
            parts = message["content"]
            if not isinstance(parts, str):
                parts = "".join(IMAGE if part["type"] == "image" else part["text"] for part in parts)
            turns.append(f"{message['role']}: {parts}\n")
        return "".join(turns) + "assistant:"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for index, piece in enumerate(text.split(IMAGE)):
            ids += ([self.image_id] if index else []) + list(piece.encode())
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        text = bytes(token for token in token_ids if token < 256).decode(errors="replace")
        return IMAGE if token_ids == [self.image_id] and not skip_special_tokens else text


class FakeImageProcessor:
    """Represents an image by its mean color; 4, 2 or 1 tokens per image and tier."""

    placeholder = IMAGE

    def inputs(self, text: str, images: Sequence[torch.Tensor]) -> dict[str, Any]:
        ids: list[int] = []
        for token in ByteTokenizer().encode(text):
            ids += [token] * (4 if token == ByteTokenizer.image_id else 1)
        means = torch.stack([image.float().mean((1, 2)) for image in images])
        return {"input_ids": torch.tensor([ids]), "pixel_values": means}

    def tokens(self, inputs: Mapping[str, Any]) -> dict[Tier, int]:
        images = len(inputs["pixel_values"])
        return {"low": images, "medium": 2 * images, "high": 4 * images}


class Script:
    """Scripted answer to a request.

    Args:
        text: Text of the answer, one token per byte.
        token_ms: Delay before each token with the cheapest plan; 1.5 and 3 times as long with the others.
        fail: Index of the token that is replaced by an error.
        hang: Whether the answer never ends.
        wait_for: File that must exist before the answer ends.
    """

    def __init__(
        self, text: str = "Hello, wörld!", *, token_ms: float = 0.0, fail: int | None = None,
        hang: bool = False, wait_for: str = "/",
    ) -> None:  # fmt: skip
        self.text, self.token_ms, self.fail, self.hang = text, token_ms, fail, hang
        self.wait_for = Path(wait_for)


class FakeBackend:
    """Backend that runs the last of `scripts` whose key occurs in the prompt."""

    def __init__(
        self, *, slots: int = 4, context: int = 4096, base_ms: float = 10.0, per_token_ms: float = 0.1,
        scripts: dict[str, Script] | None = None,
    ) -> None:  # fmt: skip
        self.slots, self.context, self.alive = slots, context, True
        self.base_ms, self.per_token_ms = base_ms, per_token_ms
        self.scripts = {"": Script(), **(scripts or {})}
        self.jobs: list[BackendJob] = []
        self.cancelled: list[str] = []
        self.running = 0
        self.max_running = 0
        self.closed = False
        self._free: dict[str, Callable[[], None]] = {}

    def min_service_ms(self, prompt: Prompt, max_new_tokens: int, num_concurrent: int | None) -> ServiceTime:
        p99_ms = self.base_ms + self.per_token_ms * max_new_tokens
        return ServiceTime(0.8 * p99_ms, p99_ms)

    def submit(self, job: BackendJob, emit: Callable[[Event], None]) -> Callable[[], None]:
        self.jobs.append(job)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        assert self.running <= self.slots
        task = asyncio.ensure_future(self._run(job, emit))
        freed = False

        def free(_: object = None) -> None:
            nonlocal freed
            self.running -= not freed
            freed = True

        def cancel() -> None:
            if not freed:
                self.cancelled.append(job.id)
                free()
                task.cancel()

        task.add_done_callback(free)
        # A call of `cancel` after the last event does not count as a cancellation.
        self._free[job.id] = free
        return cancel

    def close(self) -> None:
        self.closed = True

    async def _run(self, job: BackendJob, emit: Callable[[Event], None]) -> None:
        text = ByteTokenizer().decode(job.prompt.inputs["input_ids"][0].tolist())
        script = next(script for word, script in reversed(self.scripts.items()) if word in text)
        remaining_ms = (job.target_end_s - time.perf_counter()) * 1000.0
        min_service_ms = self.min_service_ms(job.prompt, job.max_new_tokens, job.num_concurrent).p99
        level = sum(remaining_ms >= min_service_ms * factor for factor in (1.5, 3.0))
        waited_ms = (time.perf_counter() - job.received_s) * 1000.0
        service_ms = min_service_ms * (1.0, 1.5, 3.0)[level]
        emit(
            StartedEvent(
                plan=PLANS[level], p50_ms=waited_ms + service_ms * 0.8, p99_ms=waited_ms + service_ms
            )
        )
        token_ids = list(script.text.encode())
        last: Event = EndedEvent("stop" if len(token_ids) <= job.max_new_tokens else "length")
        for index, token in enumerate(token_ids[: job.max_new_tokens]):
            await asyncio.sleep(script.token_ms * (1.0, 1.5, 3.0)[level] / 1000.0)
            if script.fail == index:
                last = FailedEvent(ApiError(500, "scripted", code="engine_failed"))
                break
            emit(TokensEvent((token,)))
        while script.hang or not script.wait_for.exists():
            await asyncio.sleep(0.01)
        self._free.pop(job.id)()
        emit(last)


def make_app(
    backend: FakeBackend | None = None, *, context: int = 4096, limits: RequestLimits | None = None
) -> FastAPI:
    """Create the app of a fake model."""
    prompts = PromptBuilder(ByteTokenizer(), context=context, image_processor=FakeImageProcessor())
    return create_app(Service(MODEL, backend or FakeBackend(), prompts, limits=limits))


@contextmanager
def run_in_thread(
    app: FastAPI, *, drain_s: float = 5.0, connection_limits: ConnectionLimits | None = None
) -> Iterator[Server]:
    """Serve the app on a free port, in a thread."""
    listening = threading.Event()
    server = Server(
        app, port=0, drain_s=drain_s, announce=lambda _: listening.set(), connection_limits=connection_limits
    )
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        assert listening.wait(120.0)
        yield server
    finally:
        server.stop()
        thread.join(120.0)
        assert not thread.is_alive()


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until the condition is true; fails after 2 minutes."""
    deadline_s = time.monotonic() + 120.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def read_metric(metrics: ServerMetrics, name: str, **labels: str) -> float:
    """Return the value of a metric, named without prefix; 0 if nothing was counted."""
    value = metrics.registry.get_sample_value(f"sparseflow_{name}", labels)
    return 0.0 if value is None else float(value)


def make_data_url(image: Any, image_format: str = "PNG") -> str:
    """Encode a Pillow image as a data URL."""
    buffer = io.BytesIO()
    image.save(buffer, image_format)
    return f"data:image/{image_format.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def make_messages(text: str, *urls: str) -> list[Any]:
    """Build a conversation with one user message."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": text}, *parts] if urls else text}]

"""A model that answers by script: what serving needs of an engine, without one."""

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
    StartedEvent,
    TokensEvent,
)
from sparseflow.adaptive.serve.lifecycle import Server
from sparseflow.adaptive.serve.service import Service

MODEL = "fake-moe"
IMAGE = "<image>"
PLANS = tuple(
    Plan(tier=tier, insertion_position=1, top_k=k, blocks=tuple(range(n)))
    for tier, k, n in zip(TIERS, (4, 6, 8), (12, 14, 16), strict=True)
)


class Bytes:
    """A tokenizer whose tokens are bytes of UTF-8; 256 stands for an image, 257 ends."""

    chat_template: Any = "by hand"
    image, end = 256, 257

    def apply_chat_template(self, conversation: list[dict[str, Any]], **how: Any) -> str:
        assert how == {"tokenize": False, "add_generation_prompt": True}
        turns = []
        for message in conversation:
            parts = message["content"]
            if not isinstance(parts, str):
                parts = "".join(IMAGE if part["type"] == "image" else part["text"] for part in parts)
            turns.append(f"{message['role']}: {parts}\n")
        return "".join(turns) + "assistant:"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for at, piece in enumerate(text.split(IMAGE)):
            ids += ([self.image] if at else []) + list(piece.encode())
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        text = bytes(token for token in token_ids if token < 256).decode(errors="replace")
        return IMAGE if token_ids == [self.image] and not skip_special_tokens else text


class Squares:
    """Images of four tokens, and at lower tiers of two and one, as their mean colour."""

    placeholder = IMAGE

    def inputs(self, text: str, images: Sequence[torch.Tensor]) -> dict[str, Any]:
        ids: list[int] = []
        for token in Bytes().encode(text):
            ids += [token] * (4 if token == Bytes.image else 1)
        means = torch.stack([image.float().mean((1, 2)) for image in images])
        return {"input_ids": torch.tensor([ids]), "pixel_values": means}

    def tokens(self, inputs: Mapping[str, Any]) -> dict[Tier, int]:
        images = len(inputs["pixel_values"])
        return {"low": images, "medium": 2 * images, "high": 4 * images}


class Script:
    """What a fake model does with a request.

    Args:
        say: Its answer, one token a byte.
        token_ms: Before each token, by the cheapest plan; dearer ones take a half and twice as long again.
        fail: An error instead of the token with this number.
        hang: Whether it stops before the end and says nothing any more.
        wait_for: It stops before the end until there is a file of this name.
    """

    def __init__(
        self, say: str = "Hello, wörld!", *, token_ms: float = 0.0, fail: int | None = None,
        hang: bool = False, wait_for: str = "/",
    ) -> None:  # fmt: skip
        self.say, self.token_ms, self.fail, self.hang = say, token_ms, fail, hang
        self.wait_for = Path(wait_for)


class Fake:
    """A backend by script. What text stands in a prompt chooses the script: `scripts` knows it by a word of
    it."""

    def __init__(
        self, *, slots: int = 4, context: int = 4096, least_ms: float = 10.0, per_token_ms: float = 0.1,
        scripts: dict[str, Script] | None = None,
    ) -> None:  # fmt: skip
        self.slots, self.context, self.alive = slots, context, True
        self.base_ms, self.per_token_ms = least_ms, per_token_ms
        self.scripts = {"": Script(), **(scripts or {})}
        self.jobs: list[BackendJob] = []
        self.cancelled: list[str] = []
        self.running = 0
        self.most = 0
        self.closed = False
        self._free: dict[str, Callable[[], None]] = {}

    def least_ms(self, prompt: Prompt, new_tokens: int, beside: int | None) -> float:
        return self.base_ms + self.per_token_ms * new_tokens

    def submit(self, job: BackendJob, emit: Callable[[Event], None]) -> Callable[[], None]:
        self.jobs.append(job)
        self.running += 1
        self.most = max(self.most, self.running)
        assert self.running <= self.slots
        task = asyncio.ensure_future(self._run(job, emit))
        over = False

        def free(_: object = None) -> None:
            nonlocal over
            self.running -= not over
            over = True

        def call_off() -> None:
            if not over:
                self.cancelled.append(job.id)
                free()
                task.cancel()

        task.add_done_callback(free)
        # What it is called off by after its last event is no cancelling.
        self._free[job.id] = free
        return call_off

    def close(self) -> None:
        self.closed = True

    async def _run(self, job: BackendJob, emit: Callable[[Event], None]) -> None:
        text = Bytes().decode(job.prompt.inputs["input_ids"][0].tolist())
        script = next(script for word, script in reversed(self.scripts.items()) if word in text)
        left_ms = (job.until_s - time.perf_counter()) * 1000.0
        least = self.least_ms(job.prompt, job.max_new_tokens, job.beside)
        level = sum(left_ms >= least * factor for factor in (1.5, 3.0))
        before_ms = (time.perf_counter() - job.received_s) * 1000.0
        took_ms = least * (1.0, 1.5, 3.0)[level]
        emit(StartedEvent(plan=PLANS[level], p50_ms=before_ms + took_ms * 0.8, p99_ms=before_ms + took_ms))
        said = list(script.say.encode())
        last: Event = EndedEvent("stop" if len(said) <= job.max_new_tokens else "length")
        for at, token in enumerate(said[: job.max_new_tokens]):
            await asyncio.sleep(script.token_ms * (1.0, 1.5, 3.0)[level] / 1000.0)
            if script.fail == at:
                last = FailedEvent(ApiError(500, "scripted", code="engine_failed"))
                break
            emit(TokensEvent((token,)))
        while script.hang or not script.wait_for.exists():
            await asyncio.sleep(0.01)
        self._free.pop(job.id)()
        emit(last)


def make_app(
    backend: Fake | None = None, *, context: int = 4096, limits: RequestLimits | None = None
) -> FastAPI:
    """An app of a fake model; temperature 0 is not looked at, for the script says what comes."""
    prompts = PromptBuilder(Bytes(), context=context, sight=Squares(), stop=[Bytes.end])
    return create_app(Service(MODEL, backend or Fake(), prompts, limits=limits))


@contextmanager
def serving(app: FastAPI, *, drain_s: float = 5.0) -> Iterator[Server]:
    """The app behind a real server on a port of its own, in a thread."""
    up = threading.Event()
    server = Server(app, port=0, drain_s=drain_s, announce=lambda _: up.set())
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        assert up.wait(120.0)
        yield server
    finally:
        server.stop()
        thread.join(120.0)
        assert not thread.is_alive()


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something holds; it has no time of its own, only an end."""
    end = time.monotonic() + 120.0
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def data_url(image: Any, kind: str = "PNG") -> str:
    """A Pillow image as a data URL."""
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def user(text: str, *urls: str) -> list[Any]:
    """A conversation of one turn."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": text}, *parts] if urls else text}]

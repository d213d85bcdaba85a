"""Tests of preparation and admission below the HTTP layer."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from PIL import Image

from sparseflow.adaptive.prompts.chat import PromptBuilder
from sparseflow.adaptive.prompts.messages import ApiError, Prompt, RequestLimits
from sparseflow.adaptive.serve import answer as answers
from sparseflow.adaptive.serve import service as services
from sparseflow.adaptive.serve.answer import AnswerStream
from sparseflow.adaptive.serve.backend import (
    BackendJob,
    EndedEvent,
    FailedEvent,
    ServiceTime,
    StartedEvent,
    TokensEvent,
)
from sparseflow.adaptive.serve.service import Service
from sparseflow.errors import InputError
from tests.adaptive.serve.fake import (
    MODEL,
    PLANS,
    ByteTokenizer,
    FakeImageProcessor,
    make_data_url,
    make_messages,
    read_metric,
)


class IdleBackend:
    """Backend that emits no events by itself."""

    def __init__(self, *, slots: int = 1, service_ms: float = 100.0, median_ratio: float = 1.0) -> None:
        self.slots, self.context, self.alive = slots, 512, True
        self.service_ms, self.median_ratio = service_ms, median_ratio
        self.jobs: list[tuple[BackendJob, Callable[[Any], None]]] = []
        self.cancelled: list[str] = []
        self.queries: list[tuple[int, int | None]] = []

    def min_service_ms(self, prompt: Any, max_new_tokens: int, num_concurrent: int | None) -> ServiceTime:
        self.queries.append((max_new_tokens, num_concurrent))
        p99_ms = self.service_ms * (1 + (num_concurrent or 0))
        return ServiceTime(self.median_ratio * p99_ms, p99_ms)

    def submit(self, job: BackendJob, emit: Callable[[Any], None]) -> Callable[[], None]:
        self.jobs.append((job, emit))
        return lambda: self.cancelled.append(job.id)

    def close(self) -> None:
        pass


def run_scenario(
    scenario: Callable[[Service, IdleBackend], Awaitable[None]],
    backend: IdleBackend | None = None,
    **limits: Any,
) -> None:
    async def run() -> None:
        used_backend = backend or IdleBackend()
        service = Service(
            MODEL,
            used_backend,
            PromptBuilder(ByteTokenizer(), context=512, image_processor=FakeImageProcessor()),
            limits=RequestLimits(**limits),
        )
        await service.open()
        await scenario(service, used_backend)
        assert service.queue.running == service.queue.waiting == 0
        await service.close()

    asyncio.run(run())


async def submit(service: Service, *, ago_s: float = 0.0, **fields: Any) -> AnswerStream:
    async def read() -> bytes:
        return json.dumps({"model": MODEL, "messages": make_messages("Hi"), **fields}).encode()

    return await service.submit(read, {}, time.perf_counter() - ago_s)


def test_submit_budget_feasible_only_when_idle_returns_overloaded() -> None:
    async def scenario(service: Service, backend: IdleBackend) -> None:
        first = await submit(service)
        # It takes 100 ms on an idle device and 200 ms with one other request.
        with pytest.raises(ApiError) as caught:
            await submit(service, latency_budget_ms=180)
        assert (caught.value.status, caught.value.code) == (429, "overloaded")
        # It would be 20 ms late, plus the time since its receipt.
        assert caught.value.retry_after_s is not None and caught.value.retry_after_s > 0.0199
        with pytest.raises(ApiError) as caught:
            await submit(service, latency_budget_ms=80)
        assert (caught.value.status, caught.value.code) == (422, "budget_infeasible")
        first.disconnect()

    run_scenario(scenario, IdleBackend(slots=2))


def test_preparation_threads_use_one_torch_thread() -> None:
    async def scenario(service: Service, backend: IdleBackend) -> None:
        loop, initial_threads = asyncio.get_running_loop(), torch.get_num_threads()
        num_threads = max(initial_threads, 2)
        torch.set_num_threads(num_threads)
        try:
            counts = [loop.run_in_executor(service._threads, torch.get_num_threads) for _ in range(8)]
            assert set(await asyncio.gather(*counts)) == {1}
            assert torch.get_num_threads() == num_threads
            assert await asyncio.to_thread(torch.get_num_threads) == num_threads
        finally:
            torch.set_num_threads(initial_threads)

    run_scenario(scenario)


def test_queued_request_starts_when_running_one_ends() -> None:
    async def scenario(service: Service, backend: IdleBackend) -> None:
        first, second = await submit(service), await submit(service)
        assert len(backend.jobs) == 1
        job, emit = backend.jobs[0]
        emit(StartedEvent(plan=PLANS[0], p50_ms=50.0, p99_ms=60.0))
        emit(TokensEvent(tuple(b"Yes")))
        await first.wait_first_token()
        assert len(backend.jobs) == 1
        emit(EndedEvent("stop"))
        # The second request runs before the first answer is read.
        assert len(backend.jobs) == 2
        emit(TokensEvent(tuple(b"late")))
        assert "".join([piece async for piece in first.iter_text()]) == "Yes"
        assert first.report()["predicted_ms"] == {"p50": 50.0, "p99": 60.0}
        backend.jobs[1][1](EndedEvent("length"))
        assert [piece async for piece in second.iter_text()] == []
        assert second.finish_reason == "length"
        assert backend.cancelled == [job.id, backend.jobs[1][0].id]

    run_scenario(scenario)


def test_submit_image_limits_new_tokens_by_lowest_tier() -> None:
    async def scenario(service: Service, backend: IdleBackend) -> None:
        # Context of 512; the prompt has 508 tokens at the lowest tier and 511 at the highest.
        image_url = make_data_url(Image.new("RGB", (2, 2)))
        answer = await submit(service, messages=make_messages("x" * 490, image_url))
        ((job, _),) = backend.jobs
        # Without a requested length the answer leaves room for the highest tier.
        assert (job.prompt.count_tokens("low"), job.prompt.tokens, job.max_new_tokens) == (508, 511, 1)
        assert answer.usage["prompt_tokens"] == 511
        backend.jobs[0][1](StartedEvent(plan=PLANS[0], p50_ms=1.0, p99_ms=2.0))
        assert answer.usage["prompt_tokens"] == 508
        answer.disconnect()
        with pytest.raises(ApiError, match="512"):
            await submit(service, messages=make_messages("x" * 490, image_url), max_tokens=5)

    run_scenario(scenario)


def test_submit_without_length_gets_all_room_of_highest_tier() -> None:
    async def scenario(service: Service, backend: IdleBackend) -> None:
        image_url = make_data_url(Image.new("RGB", (2, 2)))
        # The prompt has 19 tokens of text, and an image of 1, 2 or 4 tokens, in a context of 512.
        for fields, tokens in (
            ({}, 489), ({"latency_budget_ms": 1e6}, 64), ({"max_tokens": 491}, 491),
            ({"latency_budget_ms": 1e6, "on_infeasible": "truncate"}, 489),
        ):  # fmt: skip
            answer = await submit(service, messages=make_messages("xx", image_url), **fields)
            job = backend.jobs[-1][0]
            assert (job.max_new_tokens, job.prompt.tokens) == (tokens, 23)
            assert job.expected_tokens == (tokens if "max_tokens" in fields else 64)
            answer.disconnect()

    run_scenario(scenario)


def test_wait_first_token_failed_event_raises_its_error() -> None:
    async def scenario(service: Service, backend: IdleBackend) -> None:
        answer = await submit(service)
        backend.jobs[0][1](FailedEvent(ApiError(503, "no room", code="out_of_memory")))
        with pytest.raises(ApiError, match="no room"):
            await answer.wait_first_token()
        assert read_metric(service.metrics, "requests_total", outcome="failed", code="out_of_memory") == 1

    run_scenario(scenario)


def test_disconnect_queued_answer_never_runs() -> None:
    async def scenario(service: Service, backend: IdleBackend) -> None:
        first, second, third = [await submit(service) for _ in range(3)]
        second.disconnect()
        second.disconnect()
        first.disconnect()
        assert backend.cancelled == [backend.jobs[0][0].id]
        assert [job.id for job, _ in backend.jobs] == [first.id, third.id]
        third.disconnect()
        assert read_metric(service.metrics, "requests_total", outcome="cancelled", code="client_gone") == 3

    run_scenario(scenario)


def test_submit_budget_counts_from_receipt() -> None:
    async def scenario(service: Service, backend: IdleBackend) -> None:
        answer = await submit(service, ago_s=100.0, latency_budget_ms=160_000)
        job = backend.jobs[0][0]
        assert job.target_end_s - time.perf_counter() < 60.0
        answer.disconnect()
        # The budget meets the minimum of an idle server, so the error does not suggest a larger one.
        with pytest.raises(ApiError) as caught:
            await submit(service, ago_s=100.0, latency_budget_ms=100_050)
        assert (caught.value.status, caught.value.code) == (429, "overloaded")

    run_scenario(scenario)


def test_start_budget_expired_in_queue_returns_overloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class HourLaterClock:
        time = staticmethod(time.time)

        @staticmethod
        def perf_counter() -> float:
            return time.perf_counter() + 3600.0

    async def scenario(service: Service, backend: IdleBackend) -> None:
        running = await submit(service)
        # The first request is not known to be slow.
        waiting = await submit(service, latency_budget_ms=60_000)
        best_effort = await submit(service, latency_budget_ms=60_000, on_infeasible="best_effort")
        monkeypatch.setattr(answers, "time", HourLaterClock)
        running.disconnect()
        with pytest.raises(ApiError) as caught:
            await waiting.wait_first_token()
        assert (caught.value.status, caught.value.retry_after_s) == (429, 1.0)
        assert read_metric(service.metrics, "budgets_total", result="missed") == 1
        # Best-effort requests run even though their budget expired.
        assert [job.id for job, _ in backend.jobs] == [running.id, best_effort.id]
        best_effort.disconnect()

    run_scenario(scenario, IdleBackend(service_ms=1.0))


def test_submit_passes_number_of_concurrent_requests() -> None:
    async def scenario(service: Service, backend: IdleBackend) -> None:
        answers = [await submit(service) for _ in range(4)]
        assert [job.num_concurrent for job, _ in backend.jobs] == [0, 1, 2]
        # None stands for an idle engine.
        assert [num_concurrent for _, num_concurrent in backend.queries[1:]] == [None, 1, 2, 2]
        for answer in answers:
            answer.disconnect()

    run_scenario(scenario, IdleBackend(slots=3))


def test_min_budget_increases_when_predictions_are_too_low() -> None:
    async def scenario(service: Service, backend: IdleBackend) -> None:
        with pytest.raises(ApiError) as caught:
            await submit(service, latency_budget_ms=20_000)
        initial_ms = caught.value.more["least_feasible_ms"]
        for _ in range(60):
            await submit(service)
            job, emit = backend.jobs[-1]
            now_ms = (time.perf_counter() - job.received_s) * 1000.0
            emit(StartedEvent(plan=PLANS[0], p50_ms=now_ms, p99_ms=now_ms + 1e-3))
            emit(EndedEvent("stop"))
        with pytest.raises(ApiError) as caught:
            await submit(service, latency_budget_ms=20_000)
        assert caught.value.more["least_feasible_ms"] > 1.3 * initial_ms

    run_scenario(scenario, IdleBackend(service_ms=100_000.0))


def test_submit_idle_server_accepts_budget_above_median() -> None:
    async def scenario(service: Service, backend: IdleBackend) -> None:
        answer = await submit(service, latency_budget_ms=60_000)
        assert answer.report()["guaranteed"] is False
        answer.disconnect()
        answer = await submit(service, latency_budget_ms=120_000)
        assert answer.report()["guaranteed"] is True
        answer.disconnect()

    run_scenario(scenario, IdleBackend(service_ms=100_000.0, median_ratio=0.5))


def test_submit_idle_server_probes_too_high_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(service: Service, backend: IdleBackend) -> None:
        running = await submit(service, latency_budget_ms=60_000)
        assert running.report()["guaranteed"] is False
        for _ in range(2):
            # The server is busy at first, and has just probed afterwards.
            with pytest.raises(ApiError, match="no plan meets"):
                await submit(service, latency_budget_ms=60_000)
            running.disconnect()
        monkeypatch.setattr(services, "_PROBE_INTERVAL_S", 0.0)
        with pytest.raises(ApiError, match="no plan meets"):
            await submit(service, latency_budget_ms=20_000)
        (await submit(service, latency_budget_ms=30_000)).disconnect()

    run_scenario(scenario, IdleBackend(service_ms=100_000.0))


def test_start_probably_late_request_leaves_slot_to_others() -> None:
    async def scenario(service: Service, backend: IdleBackend) -> None:
        running = await submit(service)
        late = await submit(service, ago_s=100.0, latency_budget_ms=100_100, on_infeasible="truncate")
        waiting = await submit(service)
        late.ticket.median_ms = 1e6
        running.disconnect()
        with pytest.raises(ApiError, match="expired"):
            await late.wait_first_token()
        assert [job.id for job, _ in backend.jobs] == [running.id, waiting.id]
        waiting.disconnect()

    run_scenario(scenario, IdleBackend(service_ms=1.0))


def test_min_budget_excludes_waiting_time_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(service: Service, backend: IdleBackend) -> None:
        with pytest.raises(ApiError) as caught:
            await submit(service, latency_budget_ms=1_000)
        assert caught.value.more["least_feasible_ms"] < 100_300

    build_prompt = PromptBuilder.prompt

    def build_slowly(self: PromptBuilder, *args: Any) -> Prompt:
        time.sleep(0.3)
        return build_prompt(self, *args)

    monkeypatch.setattr(PromptBuilder, "prompt", build_slowly)
    run_scenario(scenario, IdleBackend(service_ms=100_000.0))


def test_submit_drain_during_body_read_raises() -> None:
    async def scenario(service: Service, backend: IdleBackend) -> None:
        async def read_body() -> bytes:
            await service.drain.drain(0.0)
            return json.dumps({"model": MODEL, "messages": make_messages("Hi")}).encode()

        with pytest.raises(ApiError) as caught:
            await service.submit(read_body, {}, time.perf_counter())
        assert caught.value.code == "shutting_down"
        assert backend.jobs == []
        with pytest.raises(ApiError) as caught:
            await submit(service)
        assert caught.value.code == "shutting_down"

    run_scenario(scenario)


def test_submit_slow_bodies_take_no_places() -> None:
    async def scenario(service: Service, backend: IdleBackend) -> None:
        async def read_forever() -> bytes:
            await asyncio.sleep(60.0)
            return b""

        tasks = [
            asyncio.ensure_future(service.submit(read_forever, {}, time.perf_counter())) for _ in range(30)
        ]
        await asyncio.sleep(0)
        (await submit(service)).disconnect()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run_scenario(scenario, max_queued=2)


def test_submit_cancelled_during_preparation_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    started, finish = threading.Event(), threading.Event()
    rendered: list[str] = []

    class BlockingTokenizer(ByteTokenizer):
        def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> str:
            rendered.append(str(conversation))
            started.set()
            assert finish.wait(60.0)
            return super().apply_chat_template(conversation, **options)

    async def scenario(service: Service, backend: IdleBackend) -> None:
        service.prompts.tokenizer = BlockingTokenizer()
        tasks = [
            asyncio.ensure_future(submit(service, messages=make_messages("abandoned"))) for _ in range(3)
        ]
        await asyncio.to_thread(started.wait, 60.0)
        with pytest.raises(ApiError, match="the server is full"):
            await submit(service)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        finish.set()
        (await submit(service, messages=make_messages("Hi"))).disconnect()
        assert len(rendered) == 2, "requests that waited for the thread are not prepared"
        assert read_metric(service.metrics, "requests_total", outcome="cancelled", code="client_gone") == 4

    run_scenario(scenario, max_queued=2, prepare_threads=1)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({"messages": make_messages("x" * 16_385)}, "16385 characters of text"),
        ({"messages": make_messages("x" * 300_000)}, "bytes and no image"),
        ({"messages": make_messages("Hi") * 1025}, "1025 messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2049}]}, "2049 content"),
        ({"messages": make_messages("Hi"), "x": [0] * 100_000, "image_url": 1}, "too many values"),
    ],
)
def test_submit_large_text_is_refused_before_template(content: dict[str, Any], match: str) -> None:
    async def scenario(service: Service, backend: IdleBackend) -> None:
        def fail(*args: Any, **options: Any) -> str:
            raise AssertionError("the template was rendered")

        service.prompts.tokenizer.apply_chat_template = fail  # type: ignore[method-assign]
        with pytest.raises(ApiError, match=match) as caught:
            await submit(service, **content)
        assert (caught.value.status, caught.value.param) == (400, "messages")

    run_scenario(scenario)


def test_submit_too_much_data_at_once_is_refused() -> None:
    async def scenario(service: Service, backend: IdleBackend) -> None:
        service.hold_body(600)
        with pytest.raises(ApiError) as caught:
            service.hold_body(600)
        assert (caught.value.status, caught.value.code) == (429, "overloaded")
        service.release_body(1200)
        service.hold_body(1000)

    run_scenario(scenario, total_body_bytes=1000)


def test_service_invalid_arguments_raise() -> None:
    prompts = PromptBuilder(ByteTokenizer(), context=1000)
    with pytest.raises(InputError, match=r"1000.*512"):
        Service(MODEL, IdleBackend(), prompts)
    with pytest.raises(InputError, match="model"):
        Service("", IdleBackend(), PromptBuilder(ByteTokenizer(), context=5))
    with pytest.raises(InputError, match=r"-1\.0"):
        Service(MODEL, IdleBackend(), PromptBuilder(ByteTokenizer(), context=5), temperature=-1.0)

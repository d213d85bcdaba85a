"""How requests are let in: what `test_app.py` does not see from outside."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from PIL import Image

from sparseflow.adaptive.prompts.chat import PromptBuilder
from sparseflow.adaptive.prompts.messages import ApiError, Prompt, RequestLimits
from sparseflow.adaptive.serve import answer as answers
from sparseflow.adaptive.serve.answer import AnswerStream
from sparseflow.adaptive.serve.backend import BackendJob, EndedEvent, FailedEvent, StartedEvent, TokensEvent
from sparseflow.adaptive.serve.service import Service
from sparseflow.errors import InputError
from tests.adaptive.serve.fake import MODEL, PLANS, Bytes, Squares, data_url, user


class Still:
    """A backend that does nothing by itself."""

    def __init__(self, *, slots: int = 1, least_ms: float = 100.0) -> None:
        self.slots, self.context, self.alive = slots, 512, True
        self.ms = least_ms
        self.jobs: list[tuple[BackendJob, Callable[[Any], None]]] = []
        self.called_off: list[str] = []
        self.asked: list[tuple[int, int | None]] = []

    def least_ms(self, prompt: Any, new_tokens: int, beside: int | None) -> float:
        self.asked.append((new_tokens, beside))
        return self.ms * (1 + (beside or 0))

    def submit(self, job: BackendJob, emit: Callable[[Any], None]) -> Callable[[], None]:
        self.jobs.append((job, emit))
        return lambda: self.called_off.append(job.id)

    def close(self) -> None:
        pass


def scene(
    story: Callable[[Service, Still], Awaitable[None]], backend: Still | None = None, **limits: Any
) -> None:
    async def whole() -> None:
        made = backend or Still()
        service = Service(
            MODEL, made, PromptBuilder(Bytes(), context=512, sight=Squares()), limits=RequestLimits(**limits)
        )
        await service.open()
        await story(service, made)
        assert service.line.running == service.line.waiting == 0
        await service.close()

    asyncio.run(whole())


async def ask(service: Service, *, ago_s: float = 0.0, **fields: Any) -> AnswerStream:
    async def read() -> bytes:
        return json.dumps({"model": MODEL, "messages": user("Hi"), **fields}).encode()

    return await service.answer(read, {}, time.perf_counter() - ago_s)


def test_who_could_be_answered_in_time_alone_is_told_to_come_again() -> None:
    async def story(service: Service, backend: Still) -> None:
        first = await ask(service)
        # Alone it takes 100 ms, beside the other one 200.
        with pytest.raises(ApiError) as caught:
            await ask(service, latency_budget_ms=180)
        assert (caught.value.status, caught.value.code) == (429, "overloaded")
        # It would end 20 ms late, and what has passed since it came.
        assert caught.value.retry_after_s is not None and caught.value.retry_after_s > 0.0199
        with pytest.raises(ApiError) as caught:
            await ask(service, latency_budget_ms=80)
        assert (caught.value.status, caught.value.code) == (422, "budget_infeasible")
        first.leave()

    scene(story, Still(slots=2))


def test_threads_that_prepare_compute_alone() -> None:
    async def story(service: Service, backend: Still) -> None:
        loop, before = asyncio.get_running_loop(), torch.get_num_threads()
        count = max(before, 2)
        torch.set_num_threads(count)
        try:
            threads = [loop.run_in_executor(service._threads, torch.get_num_threads) for _ in range(8)]
            assert set(await asyncio.gather(*threads)) == {1}
            assert torch.get_num_threads() == count
            assert await asyncio.to_thread(torch.get_num_threads) == count
        finally:
            torch.set_num_threads(before)

    scene(story)


def test_the_line_moves_on_when_one_ends() -> None:
    async def story(service: Service, backend: Still) -> None:
        first, second = await ask(service), await ask(service)
        assert len(backend.jobs) == 1
        job, emit = backend.jobs[0]
        emit(StartedEvent(plan=PLANS[0], p50_ms=50.0, p99_ms=60.0))
        emit(TokensEvent(tuple(b"Yes")))
        await first.begin()
        assert len(backend.jobs) == 1
        emit(EndedEvent("stop"))
        # Nobody has read the first one yet, and the second one runs.
        assert len(backend.jobs) == 2
        emit(TokensEvent(tuple(b"late")))
        assert "".join([piece async for piece in first.pieces()]) == "Yes"
        assert first.report()["predicted_ms"] == {"p50": 50.0, "p99": 60.0}
        backend.jobs[1][1](EndedEvent("length"))
        assert [piece async for piece in second.pieces()] == []
        assert second.finish_reason == "length"
        assert backend.called_off == [job.id, backend.jobs[1][0].id]

    scene(story)


def test_an_answer_has_the_room_that_the_lowest_tier_leaves() -> None:
    async def story(service: Service, backend: Still) -> None:
        # 508 tokens with the image at the lowest tier, 511 at the highest, of 512.
        picture = data_url(Image.new("RGB", (2, 2)))
        answer = await ask(service, messages=user("x" * 490, picture))
        ((job, _),) = backend.jobs
        assert (job.prompt.at("low"), job.prompt.tokens, job.max_new_tokens) == (508, 511, 4)
        assert answer.usage["prompt_tokens"] == 511
        backend.jobs[0][1](StartedEvent(plan=PLANS[0], p50_ms=1.0, p99_ms=2.0))
        assert answer.usage["prompt_tokens"] == 508
        answer.leave()
        with pytest.raises(ApiError, match="context is 512 tokens"):
            await ask(service, messages=user("x" * 490, picture), max_tokens=5)

    scene(story)


def test_a_failure_before_the_first_token_is_told_at_the_beginning() -> None:
    async def story(service: Service, backend: Still) -> None:
        answer = await ask(service)
        backend.jobs[0][1](FailedEvent(ApiError(503, "no room", code="out_of_memory")))
        with pytest.raises(ApiError, match="no room"):
            await answer.begin()
        assert service.metrics.value("requests_total", outcome="failed", code="out_of_memory") == 1

    scene(story)


def test_who_leaves_the_line_never_runs() -> None:
    async def story(service: Service, backend: Still) -> None:
        first, second, third = [await ask(service) for _ in range(3)]
        second.leave()
        second.leave()
        first.leave()
        assert backend.called_off == [backend.jobs[0][0].id]
        assert [job.id for job, _ in backend.jobs] == [first.id, third.id]
        third.leave()
        assert service.metrics.value("requests_total", outcome="cancelled", code="client_gone") == 3

    scene(story)


def test_time_that_passed_before_counts() -> None:
    async def story(service: Service, backend: Still) -> None:
        answer = await ask(service, ago_s=100.0, latency_budget_ms=160_000)
        job = backend.jobs[0][0]
        assert job.until_s - time.perf_counter() < 60.0
        answer.leave()
        # What is left would do for an idle server's least, had less time passed: no reason to ask for a
        # larger budget.
        with pytest.raises(ApiError) as caught:
            await ask(service, ago_s=100.0, latency_budget_ms=100_050)
        assert (caught.value.status, caught.value.code) == (429, "overloaded")

    scene(story)


def test_a_budget_that_was_used_up_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        """An hour later."""

        time = staticmethod(time.time)

        @staticmethod
        def perf_counter() -> float:
            return time.perf_counter() + 3600.0

    async def story(service: Service, backend: Still) -> None:
        running = await ask(service)
        # Nothing says that the first one takes long.
        waiting = await ask(service, latency_budget_ms=60_000)
        hoping = await ask(service, latency_budget_ms=60_000, on_infeasible="best_effort")
        monkeypatch.setattr(answers, "time", Clock)
        running.leave()
        with pytest.raises(ApiError) as caught:
            await waiting.begin()
        assert (caught.value.status, caught.value.retry_after_s) == (429, 1.0)
        assert service.metrics.value("budgets_total", result="missed") == 1
        # Who is to be run at any rate is run.
        assert [job.id for job, _ in backend.jobs] == [running.id, hoping.id]
        hoping.leave()

    scene(story, Still(least_ms=1.0))


def test_what_runs_beside_is_told() -> None:
    async def story(service: Service, backend: Still) -> None:
        answers = [await ask(service) for _ in range(4)]
        assert [job.beside for job, _ in backend.jobs] == [0, 1, 2]
        assert [beside for _, beside in backend.asked[1:]] == [0, 1, 2, 2]
        for answer in answers:
            answer.leave()

    scene(story, Still(slots=3))


def test_where_predictions_are_too_short_the_least_is_more() -> None:
    async def story(service: Service, backend: Still) -> None:
        with pytest.raises(ApiError) as caught:
            await ask(service, latency_budget_ms=90_000)
        first = caught.value.more["least_feasible_ms"]
        for _ in range(60):
            await ask(service)
            job, emit = backend.jobs[-1]
            now_ms = (time.perf_counter() - job.received_s) * 1000.0
            emit(StartedEvent(plan=PLANS[0], p50_ms=now_ms, p99_ms=now_ms + 1e-3))
            emit(EndedEvent("stop"))
        with pytest.raises(ApiError) as caught:
            await ask(service, latency_budget_ms=90_000)
        assert caught.value.more["least_feasible_ms"] > 1.3 * first

    scene(story, Still(least_ms=100_000.0))


def test_waits_of_threads_are_not_in_the_least_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(service: Service, backend: Still) -> None:
        with pytest.raises(ApiError) as caught:
            await ask(service, latency_budget_ms=1_000)
        assert caught.value.more["least_feasible_ms"] < 100_300

    real = PromptBuilder.prompt

    def waiting(self: PromptBuilder, *given: Any) -> Prompt:
        time.sleep(0.3)
        return real(self, *given)

    monkeypatch.setattr(PromptBuilder, "prompt", waiting)
    scene(story, Still(least_ms=100_000.0))


def test_a_request_that_comes_as_the_gate_shuts() -> None:
    async def story(service: Service, backend: Still) -> None:
        async def slowly() -> bytes:
            await service.gate.drain(0.0)
            return json.dumps({"model": MODEL, "messages": user("Hi")}).encode()

        with pytest.raises(ApiError, match="shutting down"):
            await service.answer(slowly, {}, time.perf_counter())
        assert backend.jobs == []
        with pytest.raises(ApiError, match="shutting down"):
            await ask(service)

    scene(story)


def test_who_is_cut_off_while_it_is_read_keeps_no_place() -> None:
    async def story(service: Service, backend: Still) -> None:
        async def never() -> bytes:
            await asyncio.sleep(60.0)
            return b""

        tasks = [asyncio.ensure_future(service.answer(never, {}, time.perf_counter())) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="the server is full"):
            await ask(service)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        (await ask(service)).leave()

    scene(story, places=2)


def test_services_that_cannot_be() -> None:
    prompts = PromptBuilder(Bytes(), context=1000)
    with pytest.raises(InputError, match="1000 tokens are more than the 512 of the backend"):
        Service(MODEL, Still(), prompts)
    with pytest.raises(InputError, match="not an empty one"):
        Service("", Still(), PromptBuilder(Bytes(), context=5))
    with pytest.raises(InputError, match="temperature"):
        Service(MODEL, Still(), PromptBuilder(Bytes(), context=5), temperature=-1.0)

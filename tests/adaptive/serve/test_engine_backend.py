"""Tests of the engine backend, with a fake engine and with a real one."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
import torch
from PIL import Image

from sparseflow.adaptive.engine.engine import Engine
from sparseflow.adaptive.engine.requests.handle import RequestHandle
from sparseflow.adaptive.engine.requests.request import (
    EngineStopped,
    FixedPlan,
    GenerationRequest,
    InitialDecision,
    PlanDecision,
    RequestCancelled,
    RequestFailed,
    RequestOutOfMemory,
    RequestOutput,
    RequestRejected,
)
from sparseflow.adaptive.engine.requests.sampling import SamplingParams
from sparseflow.adaptive.plan.adapter import get_adapter
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.adaptive.predictor import PlanLatencyPredictor
from sparseflow.adaptive.predictor.features import LatencyQuery
from sparseflow.adaptive.profile import collect_profile, select_representative_plans
from sparseflow.adaptive.prompts.chat import PromptBuilder
from sparseflow.adaptive.prompts.images import decode
from sparseflow.adaptive.prompts.messages import Message, Prompt, RequestLimits
from sparseflow.adaptive.prompts.processors import CropProcessor
from sparseflow.adaptive.serve.app import create_app
from sparseflow.adaptive.serve.backend import (
    BackendJob,
    EndedEvent,
    FailedEvent,
    ServiceTime,
    StartedEvent,
    TokensEvent,
)
from sparseflow.adaptive.serve.engine_backend import EngineBackend, PredictorForecast, make_job_decider
from sparseflow.adaptive.serve.service import Service
from sparseflow.errors import InputError, PlanError
from tests.adaptive import tiny
from tests.adaptive.fake_runner import FakeRunner, make_space
from tests.adaptive.serve.fake import make_data_url, make_messages, run_in_thread, wait_until

PLAN = Plan(tier=None, insertion_position=1, top_k=2, blocks=(0, 1, 2))
STOP = 2


def make_job(**overrides: Any) -> BackendJob:
    ids = torch.tensor([[5, 6, 7]])
    prompt = Prompt(inputs={"input_ids": ids}, text_tokens=3)
    base = {
        "id": "a",
        "prompt": prompt,
        "max_new_tokens": 4,
        "expected_tokens": overrides.get("max_new_tokens", 4),
        "sampling": SamplingParams(),
        "received_s": time.perf_counter(),
    }
    return BackendJob(**{**base, **overrides})


def make_output(**overrides: Any) -> RequestOutput:
    base: dict[str, Any] = {
        "tokens": (8, 9), "plan": PLAN, "reason": "length", "prompt_tokens": 3, "feasible": True,
        "predicted_ms": None, "budget_ms": None, "queued_ms": 2.0, "decide_ms": 1.0, "vision_ms": 1.0,
        "prefill_ms": 3.0, "decode_ms": 4.0, "total_ms": 11.0,
    }  # fmt: skip
    return RequestOutput(**{**base, **overrides})


class FakeForecast:
    """Constant forecast that records observations."""

    def __init__(self, error: Exception | None = None) -> None:
        self.observations: list[tuple[Any, ...]] = []
        self.isolated: list[bool] = []
        self.error = error

    def min_service_ms(self, prompt: Prompt, max_new_tokens: int, num_concurrent: int | None) -> ServiceTime:
        return ServiceTime(0.5, 1.0 + max_new_tokens)

    def predict(self, plan: Plan, job: BackendJob) -> tuple[float, float]:
        return 10.0, 20.0

    def observe(self, job: BackendJob, output: RequestOutput, *, isolated: bool) -> None:
        if self.error is not None:
            raise self.error
        self.observations.append((job.prompt, job.num_concurrent, job.load, output))
        self.isolated.append(isolated)


class RecordingDecider:
    """Decider that records the remaining times."""

    def __init__(self, decision: Plan | PlanDecision = PLAN) -> None:
        self.decision = decision
        self.remaining: list[float] = []

    def choose_initial(self, request: GenerationRequest, remaining_ms: float) -> InitialDecision:
        self.remaining.append(remaining_ms)
        return InitialDecision(tier=None, insertion_position=1)

    def choose_plan(
        self, latency_token: torch.Tensor, request: GenerationRequest, remaining_ms: float
    ) -> Plan | PlanDecision:
        self.remaining.append(remaining_ms)
        return self.decision


class PreparingDecider(RecordingDecider):
    num_prepared = 0

    def prepare(self, request: GenerationRequest) -> None:
        self.num_prepared += 1


class FakeEngine:
    """Engine that produces no tokens by itself."""

    max_batch, max_tokens, load = 3, 64, 0.25

    def __init__(self, error: Exception | None = None) -> None:
        self.handles: list[RequestHandle] = []
        self.error = error
        self.num_wakes = 0
        self.closed: list[bool] = []

    def submit(self, request: GenerationRequest) -> RequestHandle:
        if self.error is not None:
            raise self.error
        self.handles.append(RequestHandle(request, self._wake))
        return self.handles[-1]

    def snapshot(self) -> Any:
        return SimpleNamespace(healthy=not self.closed)

    def shutdown(self, *, drain: bool) -> None:
        self.closed.append(drain)

    def _wake(self) -> None:
        self.num_wakes += 1


def make_backend(engine: Any, decider: Any = None, forecast: Any = None) -> EngineBackend:
    return EngineBackend(
        engine,
        decider=lambda _: decider or FixedPlan(plan=PLAN),
        forecast=forecast or FakeForecast(),
        stop=[STOP],
    )


def run_on_thread(*functions: Callable[[], object]) -> None:
    """Call functions on another thread, as an engine does."""
    thread = threading.Thread(target=lambda: [function() for function in functions])
    thread.start()
    thread.join()


async def run_pending_callbacks() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def test_submit_emits_events_in_order() -> None:
    async def scenario() -> None:
        engine, forecast, events = FakeEngine(), FakeForecast(), []
        job = make_job(received_s=time.perf_counter() - 1.0, num_concurrent=1)
        make_backend(engine, RecordingDecider(PlanDecision(plan=PLAN)), forecast).submit(job, events.append)
        (handle,) = engine.handles
        request = handle.request
        assert (request.id, request.max_new_tokens, request.stop) == ("a", 4, {STOP})
        assert events == []
        run_on_thread(
            lambda: request.decide.choose_initial(request, math.inf),
            lambda: request.decide.choose_plan(torch.zeros(2), request, math.inf),
            lambda: handle.append_token(8), lambda: handle.append_token(9), lambda: handle.append_token(STOP),
            lambda: handle.finish(make_output(tokens=(8, 9, STOP), reason="stop")),
        )  # fmt: skip
        await run_pending_callbacks()
        started, *tokens, ended = events
        assert isinstance(started, StartedEvent)
        # The request waited for a second before its start.
        assert started.p99_ms - started.p50_ms == pytest.approx(10.0)
        assert started.p50_ms >= 1010.0
        assert started.plan == PLAN
        assert [token for event in tokens for token in event.ids] == [8, 9]
        assert ended == EndedEvent("stop")
        # The load is that of the engine at the start.
        assert [observation[:-1] for observation in forecast.observations] == [(job.prompt, 1, 0.25)]

    asyncio.run(scenario())


def test_observe_marks_requests_that_ran_without_others() -> None:
    async def scenario() -> None:
        engine, forecast = FakeEngine(), FakeForecast()
        engine_backend = make_backend(engine, forecast=forecast)
        cancels = [engine_backend.submit(make_job(), lambda _: None) for _ in range(2)]
        for _ in range(2):
            run_on_thread(lambda: engine.handles[-1].finish(make_output()))
            await run_pending_callbacks()
            engine_backend.submit(make_job(), lambda _: None)
            # The first job still runs at the first time.
            cancels[0]()
        run_on_thread(lambda: engine.handles[-1].finish(make_output()))
        await run_pending_callbacks()
        engine_backend.submit(make_job(), lambda _: None)
        run_on_thread(lambda: engine.handles[-1].finish(make_output()))
        await run_pending_callbacks()
        assert forecast.isolated == [False, False, True, True]

    asyncio.run(scenario())


@pytest.mark.parametrize("decider_type", [RecordingDecider, PreparingDecider])
@pytest.mark.parametrize(("target_s", "expected_ms"), [(math.inf, 5e6), (9000.0, 5e6), (1000.0, 1e6)])
def test_decider_remaining_time_is_limited_to_target_end(
    decider_type: Any, target_s: float, expected_ms: float
) -> None:
    async def scenario() -> None:
        engine, decider = FakeEngine(), decider_type()
        make_backend(engine, decider).submit(
            make_job(target_end_s=time.perf_counter() + target_s), lambda _: None
        )
        request = engine.handles[0].request
        decide: Any = request.decide
        decide.choose_initial(request, 5e6)
        decide.prepare(request)
        assert decider_type is not PreparingDecider or decider.num_prepared == 1
        decide.choose_plan(torch.zeros(2), request, 5e6)
        for remaining_ms in decider.remaining:
            assert remaining_ms <= expected_ms
            assert remaining_ms == pytest.approx(expected_ms, rel=0.5)
        await run_pending_callbacks()

    asyncio.run(scenario())


def test_cancel_running_job_emits_nothing_more() -> None:
    async def scenario() -> None:
        engine, events = FakeEngine(), []
        cancel = make_backend(engine).submit(make_job(), events.append)
        run_on_thread(lambda: engine.handles[0].append_token(8))
        await run_pending_callbacks()
        cancel()
        cancel()
        assert (engine.handles[0].cancelled, engine.num_wakes) == (True, 1)
        run_on_thread(
            lambda: engine.handles[0].append_token(9),
            lambda: engine.handles[0].finish(RequestCancelled("cancelled")),
        )
        await run_pending_callbacks()
        assert events == [TokensEvent((8,))]

    asyncio.run(scenario())


def test_cancel_ended_job_has_no_effect() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        cancel = make_backend(engine).submit(make_job(), lambda _: None)
        run_on_thread(lambda: engine.handles[0].finish(make_output()))
        await run_pending_callbacks()
        cancel()
        assert engine.num_wakes == 0

    asyncio.run(scenario())


ERRORS = [
    (RequestRejected("time is short", 180.2), 422, "budget_infeasible"),
    (RequestOutOfMemory("full"), 503, "out_of_memory"),
    (EngineStopped("stopped"), 503, "engine_stopped"),
    (PlanError("`tier` is 'low'"), 400, "invalid_value"),
    (RequestFailed("failed"), 500, "engine_failed"),
    (ZeroDivisionError("simulated"), 500, "engine_failed"),
]


@pytest.mark.parametrize(("error", "status", "code"), ERRORS)
@pytest.mark.parametrize("on_submit", [False, True])
def test_submit_engine_error_emits_failed_event(
    error: Exception, status: int, code: str, on_submit: bool
) -> None:
    async def scenario() -> None:
        engine, events = FakeEngine(error if on_submit else None), []
        cancel = make_backend(engine).submit(make_job(), events.append)
        assert events == []
        if not on_submit:
            run_on_thread(lambda: engine.handles[0].finish(error))
        await run_pending_callbacks()
        (event,) = events
        assert isinstance(event, FailedEvent)
        expected = (429, "overloaded") if on_submit and isinstance(error, RequestRejected) else (status, code)
        assert (event.error.status, event.error.code) == expected
        assert "simulated" not in event.error.message
        if event.error.code == "budget_infeasible":
            assert event.error.more == {"least_feasible_ms": 181}
        cancel()

    asyncio.run(scenario())


def test_engine_events_after_loop_is_closed_are_ignored() -> None:
    engine, events = FakeEngine(), []

    async def scenario() -> None:
        make_backend(engine).submit(make_job(), events.append)

    asyncio.run(scenario())
    engine.handles[0].append_token(8)
    engine.handles[0].finish(make_output())
    assert events == []


def test_observe_error_is_logged_and_answer_completes(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        engine, events = FakeEngine(), []
        make_backend(engine, forecast=FakeForecast(InputError("invalid"))).submit(make_job(), events.append)
        run_on_thread(lambda: engine.handles[0].finish(make_output()))
        await run_pending_callbacks()
        assert events == [EndedEvent("length")]

    asyncio.run(scenario())
    assert "invalid" in caplog.text


def test_backend_reports_engine_properties() -> None:
    engine: Any = FakeEngine()
    engine_backend = make_backend(engine)
    assert (engine_backend.slots, engine_backend.context, engine_backend.alive) == (3, 64, True)
    assert engine_backend.min_service_ms(make_job().prompt, 4, 0) == (0.5, 5.0)
    engine_backend.close()
    assert engine.closed == [False]
    assert not engine_backend.alive


PREDICTOR_PLANS: tuple[tuple[Tier, int], ...] = (("low", 3), ("low", 2), ("high", 2), ("high", 1))


class FakePredictor:
    """Predictor with a formula that records its queries."""

    def __init__(
        self,
        runner: str = "engine",
        device: str = "cuda",
        loads: tuple[float, ...] = (0.0, 0.7),
        **sizes: int,
    ) -> None:
        self.queries: list[dict[str, Any]] = []
        self.forgotten: list[float] = []
        self.observed: list[tuple[LatencyQuery, float, float | None]] = []
        self.metadata = SimpleNamespace(
            config={"runner": runner, **sizes},
            device={"kind": device},
            count_images=lambda tokens: tokens / 24,
        )
        self.loads = loads
        self.space = SimpleNamespace(
            plans=tuple(
                Plan(tier=tier, insertion_position=1, top_k=2, blocks=tuple(range(blocks)))
                for tier, blocks in PREDICTOR_PLANS
            )
        )

    def predict_all(self, *, new_tokens: int, **query: Any) -> tuple[np.ndarray, np.ndarray]:
        self.queries.append(query)
        p50 = np.array([len(plan.blocks) * 10.0 + new_tokens for plan in self.space.plans])
        return p50, p50 * 2.0

    def observe(self, query: LatencyQuery, measured_ms: float, *, prefill_ms: float | None = None) -> None:
        self.observed.append((query, measured_ms, prefill_ms))

    def forget(self, fraction: float, *, keep_medians: bool = False) -> None:
        self.forgotten.append(fraction)
        self.kept_medians = keep_medians


def test_forecast_queries_predictor_with_job_conditions() -> None:
    predictor: Any = FakePredictor()
    plans = predictor.space.plans[:3]
    forecast = PredictorForecast(predictor, plans, load=lambda: 0.25)
    text = make_job().prompt
    # The fourth plan is faster, but the engine does not run it.
    assert forecast.min_service_ms(text, 5, 2) == (25.0, 50.0)
    image_prompt = Prompt(inputs={}, text_tokens=3, images=1, vision={"low": 2, "high": 6})
    assert forecast.min_service_ms(image_prompt, 5, 0).p99 == 50.0
    assert predictor.queries == [
        {"text_tokens": text.text_tokens, "images": 0, "batch": 3, "load": 0.25},
        {"text_tokens": 3, "images": 0.25, "batch": 1, "load": 0.25},
    ]
    # None stands for an idle device.
    forecast.min_service_ms(text, 5, None)
    assert (predictor.queries[-1]["batch"], predictor.queries[-1]["load"]) == (1, 0.0)
    image_job = make_job(prompt=image_prompt, max_new_tokens=5, num_concurrent=1, load=0.5)
    assert forecast.predict(plans[0], image_job) == (35.0, 70.0)
    # Without images the tier has no effect.
    assert forecast.predict(replace(plans[0], tier=None), make_job(max_new_tokens=5, num_concurrent=1)) == (
        35.0,
        70.0,
    )
    # The load is that at the start of the job.
    assert [query["load"] for query in predictor.queries[-2:]] == [0.5, 0.0]
    forecast.observe(image_job, make_output(plan=plans[0]), isolated=False)
    ((query, measured_ms, prefill_ms),) = predictor.observed
    assert (query.load, query.images) == (0.5, 0.25)
    assert (query.new_tokens, query.queued_ms, query.batch, measured_ms, prefill_ms) == (2, 2.0, 2, 11.0, 5.0)
    with pytest.raises(InputError, match="plans"):
        PredictorForecast(predictor, [])
    with pytest.raises(InputError, match="1"):
        PredictorForecast(predictor, [replace(plans[0], top_k=1)])


def test_forecast_learned_state_decays_with_time() -> None:
    busy, idle = FakePredictor(), FakePredictor()
    time_s = [0.0]
    forecast = PredictorForecast(
        busy, busy.space.plans, idle_predictor=idle, clock=lambda: time_s[0]  # type: ignore[arg-type]
    )  # fmt: skip
    text = make_job().prompt
    for _ in range(100):
        forecast.min_service_ms(text, 5, 1)
        time_s[0] += 0.1
    # 10 s are one half-life, in steps of at least 1 s.
    assert 8 <= len(busy.forgotten) <= 10
    assert math.prod(1.0 - fraction for fraction in busy.forgotten) == pytest.approx(0.5, rel=0.1)
    assert busy.forgotten == idle.forgotten
    assert (busy.kept_medians, idle.kept_medians) == (False, True)


def test_forecast_idle_engine_learns_from_isolated_requests_only() -> None:
    busy: Any = FakePredictor()
    idle: Any = FakePredictor()
    forecast = PredictorForecast(busy, busy.space.plans, idle_predictor=idle)
    job, output = make_job(), make_output(plan=replace(busy.space.plans[0], tier=None))
    forecast.observe(job, output, isolated=False)
    forecast.observe(job, output, isolated=True)
    assert (len(busy.observed), len(idle.observed)) == (2, 1)
    for num_concurrent in (None, 0, 1):
        forecast.min_service_ms(job.prompt, 5, num_concurrent)
    forecast.predict(output.plan, job)
    assert (len(busy.queries), len(idle.queries)) == (1, 3)
    # With one predictor, every request is learned once.
    forecast = PredictorForecast(busy, busy.space.plans)
    forecast.observe(job, output, isolated=True)
    assert len(busy.observed) == 3


def test_burst_does_not_change_forecast_of_idle_engine(tmp_path: Path) -> None:
    """Requests of a burst take 20 times as long as predicted."""
    space = make_space(8, 4)
    profile = collect_profile(
        FakeRunner(), space, tmp_path / "p.parquet", text_tokens=(4, 16),
        plans=select_representative_plans(space, 8), rounds=2, decode_steps=2, warmup_runs=0,
    )  # fmt: skip
    busy, idle = PlanLatencyPredictor.fit(profile), PlanLatencyPredictor.fit(profile)
    time_s = [0.0]
    plans = busy.space.plans[:4]
    forecast = PredictorForecast(busy, plans, idle_predictor=idle, clock=lambda: time_s[0])
    job = make_job(num_concurrent=1)
    before = forecast.min_service_ms(job.prompt, 4, None), forecast.min_service_ms(job.prompt, 4, 1)
    for _ in range(100):
        total_ms = 20.0 * before[1].p50
        output = make_output(plan=replace(plans[0], tier=None), queued_ms=0.0, total_ms=total_ms)
        forecast.observe(job, replace(output, decode_ms=0.5 * total_ms), isolated=False)
    assert forecast.min_service_ms(job.prompt, 4, None) == before[0]
    assert forecast.min_service_ms(job.prompt, 4, 1).p50 > 5.0 * before[1].p50
    time_s[0] += 120.0
    assert forecast.min_service_ms(job.prompt, 4, 1) == pytest.approx(before[1], rel=0.05)


def test_min_service_ms_ignores_plans_above_context() -> None:
    predictor: Any = FakePredictor()
    low, cheap, _, high = predictor.space.plans
    forecast = PredictorForecast(predictor, [low, high], max_tokens=10)
    image_prompt = Prompt(inputs={}, text_tokens=3, images=1, vision={"low": 2, "high": 6})
    assert forecast.min_service_ms(image_prompt, 2, 0).p99 == 24.0
    # The last token is not run: 3 + 6 + 2 - 1 = 10 fits and 11 does not.
    assert forecast.min_service_ms(image_prompt, 3, 0).p99 == 66.0
    # Without images the tier has no effect; if no plan fits, the engine rejects the request later.
    assert forecast.min_service_ms(Prompt(inputs={}, text_tokens=5), 3, 0).p99 == 26.0
    assert forecast.min_service_ms(image_prompt, 40, 0).p99 == 100.0
    assert PredictorForecast(predictor, [low, cheap, high]).min_service_ms(image_prompt, 40, 0).p99 == 100.0


def test_forecast_profile_with_single_load_warns(caplog: pytest.LogCaptureFixture) -> None:
    idle: Any = FakePredictor(loads=(0.0,))
    busy: Any = FakePredictor()
    PredictorForecast(busy, busy.space.plans)
    assert not caplog.records
    PredictorForecast(idle, idle.space.plans)
    assert "(0)" in caplog.text and "--load 0 --load 0.7" in caplog.text


def test_forecast_eager_gpu_profile_raises() -> None:
    eager: Any = FakePredictor("eager")
    with pytest.raises(InputError, match="--runner engine"):
        PredictorForecast(eager, eager.space.plans)
    on_cpu: Any = FakePredictor("eager", "cpu")
    # A profile of the eager runner has no engine sizes.
    PredictorForecast(on_cpu, on_cpu.space.plans, max_batch=4, max_tokens=64)


def test_forecast_profile_of_other_engine_size_raises() -> None:
    predictor: Any = FakePredictor("engine", max_batch=8, max_tokens=64)
    PredictorForecast(predictor, predictor.space.plans)
    PredictorForecast(predictor, predictor.space.plans, max_batch=8, max_tokens=64)
    with pytest.raises(InputError, match=r"`max_batch` \(=8\).* 4;"):
        PredictorForecast(predictor, predictor.space.plans, max_batch=4)
    with pytest.raises(InputError, match=r"`max_tokens` \(=64\).* 128;"):
        PredictorForecast(predictor, predictor.space.plans, max_batch=8, max_tokens=128)


def test_job_decider_never_rejects() -> None:
    queries: list[dict[str, Any]] = []
    metadata = SimpleNamespace(count_images=lambda tokens: tokens / 24)
    selector: Any = SimpleNamespace(
        make_policy=lambda **query: queries.append(query), predictor=SimpleNamespace(metadata=metadata)
    )
    make_decider = make_job_decider(selector)
    for mode in ("reject", "best_effort", "truncate"):
        make_decider(make_job(on_infeasible=mode, num_concurrent=2, load=0.5))
    assert [query["on_infeasible"] for query in queries] == ["best_effort", "best_effort", "truncate"]
    assert all(
        (query["text_tokens"], query["images"], query["batch"], query["load"]) == (3, 0, 3, 0.5)
        for query in queries
    )
    assert all(torch.equal(query["input_ids"], make_job().prompt.inputs["input_ids"]) for query in queries)


class LetterTokenizer:
    """Tokenizer of letters for the tiny models."""

    chat_template: Any = "fixed"

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> str:
        return (
            "".join(
                "#" if part["type"] == "image" else part["text"]
                for message in conversation
                for part in message["content"]
            )
            + "."
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [tiny.IMAGE if letter == "#" else 3 + ord(letter) % 50 for letter in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join("#" if token == tiny.IMAGE else chr(0x410 + token) for token in token_ids)


FULL = Plan(tier="high", insertion_position=1, top_k=6, blocks=tuple(range(6)))
CHEAP = Plan(tier="low", insertion_position=1, top_k=2, blocks=(0, 1, 2, 4))


def select_plan(plan: Plan, images: int) -> Plan:
    tier = plan.tier if images else None
    return Plan(tier=tier, insertion_position=plan.insertion_position, top_k=plan.top_k, blocks=plan.blocks)


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[Any, Engine]]:
    pytest.importorskip("transformers")
    model = tiny.build_llava_siglip()
    adapter = get_adapter(model)
    plans = [FULL, CHEAP, select_plan(FULL, 0), select_plan(CHEAP, 0)]
    engine = Engine(adapter, PlanRuntime(adapter), plans=plans, max_batch=3, max_tokens=160, graphs=False)
    yield adapter, engine
    engine.shutdown(drain=False)


def make_engine_app(real: tuple[Any, Engine]) -> Any:
    adapter, engine = real
    image_processor = CropProcessor(
        LetterTokenizer(), image_token=tiny.IMAGE, size=tiny.SIZE, tokens_per_crop=adapter.tokens_per_crop,
        mean=[0.5] * 3, std=[0.5] * 3,
    )  # fmt: skip

    def make_policy(job: BackendJob) -> FixedPlan:
        # Budgets below a minute select the cheap plan.
        plan = CHEAP if job.target_end_s < time.perf_counter() + 60 else FULL
        return FixedPlan(plan=select_plan(plan, job.prompt.images))

    engine_backend = EngineBackend(engine, decider=make_policy, forecast=FakeForecast(), stop=[STOP])
    engine_backend.close = lambda: None
    return create_app(
        Service(
            "tiny",
            engine_backend,
            PromptBuilder(LetterTokenizer(), context=160, image_processor=image_processor),
            temperature=0.0,
        )
    )


def test_real_engine_concurrent_answers_match_sequential(real: tuple[Any, Engine]) -> None:
    app = make_engine_app(real)
    with run_in_thread(app) as server:
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="x", max_retries=0, timeout=60.0
        )
        with client:
            image_url = make_data_url(Image.effect_noise((20, 12), 90.0).convert("RGB"))
            sequential = {}
            for name, urls, budget_ms in (
                ("text", [], None),
                ("image", [image_url], None),
                ("cheap", [image_url], 50_000),
            ):
                completion: Any = client.chat.completions.create(
                    model="tiny", messages=make_messages("describe", *urls), max_completion_tokens=6,
                    extra_body={"latency_budget_ms": budget_ms},
                )  # fmt: skip
                plan = select_plan(CHEAP if budget_ms else FULL, len(urls))
                assert completion.sparseflow["plan"]["id"] == plan.id
                assert completion.usage.completion_tokens <= 6
                service: Service = app.state.service
                prompt = service.prompts.prompt([_message("describe", urls)], [_pixels(url) for url in urls])
                assert completion.usage.prompt_tokens == prompt.count_tokens(plan.tier)
                sequential[name] = completion.choices[0].message.content
                request = GenerationRequest(
                    inputs=prompt.inputs, decide=FixedPlan(plan=plan), max_new_tokens=6, stop=[STOP]
                )
                output = real[1].submit(request).result(60.0)
                assert output.prompt_tokens == completion.usage.prompt_tokens
                tokens = [token for token in output.tokens if token != STOP]
                assert sequential[name] == LetterTokenizer().decode(tokens)

            def stream_answer(name: str, urls: list[str], budget_ms: int | None) -> None:
                stream = client.chat.completions.create(
                    model="tiny",
                    messages=make_messages("describe", *urls),
                    max_completion_tokens=6,
                    stream=True,
                    extra_body={"latency_budget_ms": budget_ms},
                )
                concurrent[name] = "".join(chunk.choices[0].delta.content or "" for chunk in stream)

            # Concurrent requests with different plans get the same answers.
            concurrent: dict[str, str] = {}
            threads = [
                threading.Thread(target=stream_answer, args=case)
                for case in (("text", [], None), ("image", [image_url], None), ("cheap", [image_url], 50_000))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert concurrent == sequential


def test_real_engine_disconnect_frees_slot(real: tuple[Any, Engine]) -> None:
    app = make_engine_app(real)
    with run_in_thread(app) as server:
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="x", max_retries=0, timeout=60.0
        )
        with client:
            abandoned = client.chat.completions.create(
                model="tiny", messages=make_messages("a"), max_completion_tokens=150, stream=True
            )
            next(iter(abandoned))
            abandoned.close()
            wait_until(lambda: real[1].snapshot().running == 0)
            completion = client.chat.completions.create(
                model="tiny", messages=make_messages("a"), max_completion_tokens=2
            )
            assert completion.usage is not None
            assert completion.usage.completion_tokens <= 2


def _message(text: str, urls: list[str]) -> Any:
    return Message.model_validate(make_messages(text, *urls)[0])


def _pixels(url: str) -> torch.Tensor:
    return decode(url, RequestLimits())

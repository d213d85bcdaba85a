"""The engine as a backend: first a stand-in for it, whose every step the test takes, then the real one."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
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
from sparseflow.adaptive.plan.adapter import adapter_of
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.adaptive.predictor.features import LatencyQuery
from sparseflow.adaptive.prompts.chat import PromptBuilder
from sparseflow.adaptive.prompts.images import decode
from sparseflow.adaptive.prompts.messages import Message, Prompt, RequestLimits
from sparseflow.adaptive.prompts.processors import CropProcessor
from sparseflow.adaptive.serve.app import create_app
from sparseflow.adaptive.serve.backend import BackendJob, EndedEvent, FailedEvent, StartedEvent, TokensEvent
from sparseflow.adaptive.serve.engine_backend import EngineBackend, PredictorForecast, deciding
from sparseflow.adaptive.serve.service import Service
from sparseflow.errors import InputError, PlanError
from tests.adaptive import tiny
from tests.adaptive.serve.fake import data_url, eventually, serving, user

PLAN = Plan(tier=None, insertion_position=1, top_k=2, blocks=(0, 1, 2))
STOP = 2


def job(**how: Any) -> BackendJob:
    ids = torch.tensor([[5, 6, 7]])
    prompt = Prompt(inputs={"input_ids": ids}, text_tokens=3)
    base = {
        "id": "a",
        "prompt": prompt,
        "max_new_tokens": 4,
        "sampling": SamplingParams(),
        "received_s": time.perf_counter(),
    }
    return BackendJob(**{**base, **how})


def finished(**how: Any) -> RequestOutput:
    base: dict[str, Any] = {
        "tokens": (8, 9), "plan": PLAN, "reason": "length", "prompt_tokens": 3, "feasible": True,
        "predicted_ms": None, "budget_ms": None, "queued_ms": 2.0, "decide_ms": 1.0, "vision_ms": 1.0,
        "prefill_ms": 3.0, "decode_ms": 4.0, "total_ms": 11.0,
    }  # fmt: skip
    return RequestOutput(**{**base, **how})


class Forecast:
    """Always the same, and remembers what it was told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.error = error

    def least_ms(self, prompt: Prompt, new_tokens: int, beside: int | None) -> float:
        return 1.0 + new_tokens

    def of(self, plan: Plan, job: BackendJob) -> tuple[float, float]:
        return 10.0, 20.0

    def observe(self, job: BackendJob, finished: RequestOutput) -> None:
        if self.error is not None:
            raise self.error
        self.seen.append((job.prompt, job.beside, job.load, finished))


class Asked:
    """A decider that remembers what it was told remains."""

    def __init__(self, found: Plan | PlanDecision = PLAN) -> None:
        self.found = found
        self.remaining: list[float] = []

    def first(self, request: GenerationRequest, remaining_ms: float) -> InitialDecision:
        self.remaining.append(remaining_ms)
        return InitialDecision(tier=None, insertion_position=1)

    def second(
        self, latency_token: torch.Tensor, request: GenerationRequest, remaining_ms: float
    ) -> Plan | PlanDecision:
        self.remaining.append(remaining_ms)
        return self.found


class Replanning(Asked):
    def again(self, request: GenerationRequest, choice: InitialDecision, remaining_ms: float) -> int:
        self.remaining.append(remaining_ms)
        return 1


class Getting(Asked):
    """As `StudyConfig`, and gets ready."""

    ready = 0

    def prepare(self, request: GenerationRequest) -> None:
        self.ready += 1


class Standing:
    """A stand-in for an engine: it does nothing by itself."""

    max_batch, max_tokens, load = 3, 64, 0.25

    def __init__(self, error: Exception | None = None) -> None:
        self.handles: list[RequestHandle] = []
        self.error = error
        self.woken = 0
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
        self.woken += 1


def backend(engine: Any, decider: Any = None, forecast: Any = None, **how: Any) -> EngineBackend:
    return EngineBackend(
        engine,
        decider=lambda _: decider or FixedPlan(plan=PLAN),
        forecast=forecast or Forecast(),
        stop=[STOP],
        **how,
    )


def on_thread(*steps: Callable[[], object]) -> None:
    """Take steps on a thread of their own, as an engine does."""
    thread = threading.Thread(target=lambda: [step() for step in steps])
    thread.start()
    thread.join()


async def settled() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def test_what_happens_comes_in_order() -> None:
    async def story() -> None:
        engine, forecast, events = Standing(), Forecast(), []
        asked = job(received_s=time.perf_counter() - 1.0, beside=1)
        backend(engine, Asked(PlanDecision(plan=PLAN)), forecast).submit(asked, events.append)
        (handle,) = engine.handles
        request = handle.request
        assert (request.id, request.max_new_tokens, request.stop) == ("a", 4, {STOP})
        assert events == []
        on_thread(
            lambda: request.decide.first(request, math.inf),
            lambda: request.decide.second(torch.zeros(2), request, math.inf),
            lambda: handle.put(8), lambda: handle.put(9), lambda: handle.put(STOP),
            lambda: handle.end(finished(tokens=(8, 9, STOP), reason="stop")),
        )  # fmt: skip
        await settled()
        started, *tokens, ended = events
        assert isinstance(started, StartedEvent)
        # A second had gone by before its turn.
        assert started.p99_ms - started.p50_ms == pytest.approx(10.0)
        assert started.p50_ms >= 1010.0
        assert started.plan == PLAN
        assert [token for each in tokens for token in each.ids] == [8, 9]
        assert ended == EndedEvent("stop")
        # With the load that the engine had when its turn came.
        assert [told[:-1] for told in forecast.seen] == [(asked.prompt, 1, 0.25)]

    asyncio.run(story())


@pytest.mark.parametrize("kind", [Asked, Replanning, Getting])
@pytest.mark.parametrize(("until_s", "told_ms"), [(math.inf, 5e6), (9000.0, 5e6), (1000.0, 1e6)])
def test_a_decider_is_told_what_remains_until_the_end(kind: Any, until_s: float, told_ms: float) -> None:
    async def story() -> None:
        engine, decider = Standing(), kind()
        backend(engine, decider).submit(job(until_s=time.perf_counter() + until_s), lambda _: None)
        request = engine.handles[0].request
        decide: Any = request.decide
        choice = decide.first(request, 5e6)
        assert hasattr(decide, "again") == (kind is Replanning)
        if kind is Replanning:
            assert decide.again(request, choice, 5e6) == 1
        decide.prepare(request)
        assert kind is not Getting or decider.ready == 1
        decide.second(torch.zeros(2), request, 5e6)
        for told in decider.remaining:
            assert told <= told_ms
            assert told == pytest.approx(told_ms, rel=0.5)
        await settled()

    asyncio.run(story())


def test_what_is_called_off_says_nothing_more() -> None:
    async def story() -> None:
        engine, events = Standing(), []
        call_off = backend(engine).submit(job(), events.append)
        on_thread(lambda: engine.handles[0].put(8))
        await settled()
        call_off()
        call_off()
        assert (engine.handles[0].cancelled, engine.woken) == (True, 1)
        on_thread(lambda: engine.handles[0].put(9), lambda: engine.handles[0].end(RequestCancelled("gone")))
        await settled()
        assert events == [TokensEvent((8,))]

    asyncio.run(story())


def test_what_has_ended_is_not_called_off() -> None:
    async def story() -> None:
        engine = Standing()
        call_off = backend(engine).submit(job(), lambda _: None)
        on_thread(lambda: engine.handles[0].end(finished()))
        await settled()
        call_off()
        assert engine.woken == 0

    asyncio.run(story())


ERRORS = [
    (RequestRejected("too little time", 180.2), 422, "budget_infeasible"),
    (RequestOutOfMemory("no room"), 503, "out_of_memory"),
    (EngineStopped("the engine broke"), 503, "engine_stopped"),
    (PlanError("`tier` is 'low'"), 400, "invalid_value"),
    (RequestFailed("the model failed"), 500, "engine_failed"),
    (ZeroDivisionError("a slip"), 500, "engine_failed"),
]


@pytest.mark.parametrize(("error", "status", "code"), ERRORS)
@pytest.mark.parametrize("at_once", [False, True])
def test_errors_become_refusals(error: Exception, status: int, code: str, at_once: bool) -> None:
    async def story() -> None:
        engine, events = Standing(error if at_once else None), []
        call_off = backend(engine).submit(job(), events.append)
        assert events == []
        if not at_once:
            on_thread(lambda: engine.handles[0].end(error))
        await settled()
        (event,) = events
        assert isinstance(event, FailedEvent)
        expected = (429, "overloaded") if at_once and isinstance(error, RequestRejected) else (status, code)
        assert (event.refusal.status, event.refusal.code) == expected
        assert "a slip" not in event.refusal.message
        if event.refusal.code == "budget_infeasible":
            assert event.refusal.more == {"least_feasible_ms": 181}
        call_off()

    asyncio.run(story())


def test_a_server_that_has_gone_does_not_stop_the_engine() -> None:
    engine, events = Standing(), []

    async def story() -> None:
        backend(engine).submit(job(), events.append)

    asyncio.run(story())
    engine.handles[0].put(8)
    engine.handles[0].end(finished())
    assert events == []


def test_what_cannot_be_learnt_from_is_an_answer_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        engine, events = Standing(), []
        backend(engine, forecast=Forecast(InputError("no time"))).submit(job(), events.append)
        on_thread(lambda: engine.handles[0].end(finished()))
        await settled()
        assert events == [EndedEvent("length")]

    asyncio.run(story())
    assert "could not be learnt from" in caplog.text


def test_what_the_engine_is() -> None:
    engine: Any = Standing()
    made = backend(engine)
    assert (made.slots, made.context, made.alive) == (3, 64, True)
    assert backend(engine, slots=1).slots == 1
    for slots in (0, 4):
        with pytest.raises(InputError, match="must be 1 to 3"):
            backend(engine, slots=slots)
    assert made.least_ms(job().prompt, 4, 0) == 5.0
    made.close()
    assert engine.closed == [False]
    assert not made.alive


KINDS: tuple[tuple[Tier, int], ...] = (("low", 3), ("low", 2), ("high", 2), ("high", 1))


class Predictor:
    """As that of `predictor`, by a formula; remembers what it was asked."""

    def __init__(
        self,
        runner: str = "engine",
        device: str = "cuda",
        loads: tuple[float, ...] = (0.0, 0.7),
        **sizes: int,
    ) -> None:
        self.asked: list[dict[str, Any]] = []
        self.forgot: list[float] = []
        self.observed: list[tuple[LatencyQuery, float, float | None]] = []
        self.about = SimpleNamespace(
            how={"runner": runner, **sizes}, device={"kind": device}, images=lambda tokens: tokens / 24
        )
        self.loads = loads
        self.space = SimpleNamespace(
            plans=tuple(
                Plan(tier=tier, insertion_position=1, top_k=2, blocks=tuple(range(blocks)))
                for tier, blocks in KINDS
            )
        )

    def predict_all(self, *, new_tokens: int, **asked: Any) -> tuple[np.ndarray, np.ndarray]:
        self.asked.append(asked)
        p50 = np.array([len(plan.blocks) * 10.0 + new_tokens for plan in self.space.plans])
        return p50, p50 * 2.0

    def observe(self, ask: LatencyQuery, measured_ms: float, *, prefill_ms: float | None = None) -> None:
        self.observed.append((ask, measured_ms, prefill_ms))

    def forget(self, share: float) -> None:
        self.forgot.append(share)


def test_a_forecast_of_the_predictor() -> None:
    predictor: Any = Predictor()
    plans = predictor.space.plans[:3]
    forecast = PredictorForecast(predictor, plans, load=lambda: 0.25)
    text = job().prompt
    # The fourth plan is quicker, but the engine does not run it.
    assert forecast.least_ms(text, 5, 2) == 50.0
    seen = Prompt(inputs={}, text_tokens=3, images=1, vision={"low": 2, "high": 6})
    assert forecast.least_ms(seen, 5, 0) == 50.0
    assert predictor.asked == [
        {"text_tokens": text.text_tokens, "images": 0, "batch": 3, "load": 0.25},
        {"text_tokens": 3, "images": 0.25, "batch": 1, "load": 0.25},
    ]
    # What could be kept if nobody were there: others are no fault of the request.
    forecast.least_ms(text, 5, None)
    assert (predictor.asked[-1]["batch"], predictor.asked[-1]["load"]) == (1, 0.0)
    asked = job(prompt=seen, max_new_tokens=5, beside=1, load=0.5)
    assert forecast.of(plans[0], asked) == (35.0, 70.0)
    # The tier does not matter without images.
    assert forecast.of(replace(plans[0], tier=None), job(max_new_tokens=5, beside=1)) == (35.0, 70.0)
    # A job's own load counts, not that of the end.
    assert [each["load"] for each in predictor.asked[-2:]] == [0.5, 0.0]
    forecast.observe(asked, finished(plan=plans[0]))
    ((ask, measured_ms, prefill_ms),) = predictor.observed
    assert (ask.load, ask.images) == (0.5, 0.25)
    assert (ask.new_tokens, ask.queued_ms, ask.batch, measured_ms, prefill_ms) == (2, 2.0, 2, 11.0, 5.0)
    with pytest.raises(InputError, match="no plans"):
        PredictorForecast(predictor, [])
    with pytest.raises(InputError, match="not among the plans"):
        PredictorForecast(predictor, [replace(plans[0], top_k=1)])


def test_a_forecast_that_keeps_everybody_out_is_given_up_bit_by_bit() -> None:
    predictor: Any = Predictor()
    plans, text = predictor.space.plans, job().prompt
    now, idle = [0.0], [True]
    forecast = PredictorForecast(predictor, plans, idle=lambda: idle[0], clock=lambda: now[0])

    def come(many: int, seconds: float) -> int:
        before = len(predictor.forgot)
        for _ in range(many):
            forecast.least_ms(text, 5, 0)
            now[0] += seconds / many
        return len(predictor.forgot) - before

    assert come(100, 1.9) == 0, "not for long enough"
    assert come(100, 4.2) == 2
    forecast.observe(job(), finished(plan=replace(plans[0], tier=None)))
    assert come(5, 60.0) == 0, "too few to say"
    idle[0] = False
    assert come(100, 60.0) == 0, "something runs"
    idle[0] = True
    assert come(100, 1.0) == 0, "counted from when nothing ran"
    # Where requests are let in and end, all is well.
    for _ in range(50):
        assert come(2, 1.0) == 0
        forecast.observe(job(), finished(plan=replace(plans[0], tier=None)))
    # Who says nothing of it is never taken for idle.
    forecast = PredictorForecast(predictor, plans, clock=lambda: now[0])
    assert come(100, 60.0) == 0


def test_plans_that_leave_a_request_no_room_are_no_forecast() -> None:
    predictor: Any = Predictor()
    low, cheap, _, high = predictor.space.plans
    forecast = PredictorForecast(predictor, [low, high], max_tokens=10)
    seen = Prompt(inputs={}, text_tokens=3, images=1, vision={"low": 2, "high": 6})
    assert forecast.least_ms(seen, 2, 0) == 24.0
    # The last token is never run: 3 + 6 + 2 - 1 is 10, and 11 is too much.
    assert forecast.least_ms(seen, 3, 0) == 66.0
    # Without images there are no tiers; and where no plan fits, an error will say so.
    assert forecast.least_ms(Prompt(inputs={}, text_tokens=5), 3, 0) == 26.0
    assert forecast.least_ms(seen, 40, 0) == 100.0
    assert PredictorForecast(predictor, [low, cheap, high]).least_ms(seen, 40, 0) == 100.0


def test_a_profile_of_one_load_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    idle: Any = Predictor(loads=(0.0,))
    busy: Any = Predictor()
    PredictorForecast(busy, busy.space.plans)
    assert not caplog.records
    PredictorForecast(idle, idle.space.plans)
    assert "one load only (0)" in caplog.text and "--load 0 --load 0.7" in caplog.text


def test_what_was_measured_eagerly_on_a_gpu_is_no_forecast_of_an_engine() -> None:
    eager: Any = Predictor("eager")
    with pytest.raises(InputError, match=r"eager runner.*--runner engine"):
        PredictorForecast(eager, eager.space.plans)
    on_cpu: Any = Predictor("eager", "cpu")
    # A profile of the eager runner knows no sizes of engines.
    PredictorForecast(on_cpu, on_cpu.space.plans, max_batch=4, max_tokens=64)


def test_what_an_engine_of_other_sizes_took_is_no_forecast() -> None:
    predictor: Any = Predictor("engine", max_batch=8, max_tokens=64)
    PredictorForecast(predictor, predictor.space.plans)
    PredictorForecast(predictor, predictor.space.plans, max_batch=8, max_tokens=64)
    with pytest.raises(InputError, match=r"`max_batch` 8, and this one has 4.*serve with 8.*or profile anew"):
        PredictorForecast(predictor, predictor.space.plans, max_batch=4)
    with pytest.raises(InputError, match="`max_tokens` 64, and this one has 128"):
        PredictorForecast(predictor, predictor.space.plans, max_batch=8, max_tokens=128)


def test_a_job_that_was_let_in_is_not_refused_by_its_decider() -> None:
    asked: list[dict[str, Any]] = []
    about = SimpleNamespace(images=lambda tokens: tokens / 24)
    chooser: Any = SimpleNamespace(
        decider=lambda **how: asked.append(how), predictor=SimpleNamespace(about=about)
    )
    of = deciding(chooser)
    for mode in ("reject", "best_effort", "truncate"):
        of(job(on_infeasible=mode, beside=2, load=0.5))
    assert [how["on_infeasible"] for how in asked] == ["best_effort", "best_effort", "truncate"]
    assert all(
        (how["text_tokens"], how["images"], how["batch"], how["load"]) == (3, 0, 3, 0.5) for how in asked
    )
    assert all(torch.equal(how["input_ids"], job().prompt.inputs["input_ids"]) for how in asked)


class Letters:
    """A tokenizer of letters for the tiny models."""

    chat_template: Any = "by hand"

    def apply_chat_template(self, conversation: list[dict[str, Any]], **how: Any) -> str:
        return (
            "".join("#" if p["type"] == "image" else p["text"] for m in conversation for p in m["content"])
            + "."
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [tiny.IMAGE if sign == "#" else 3 + ord(sign) % 50 for sign in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join("#" if token == tiny.IMAGE else chr(0x410 + token) for token in token_ids)


FULL = Plan(tier="high", insertion_position=1, top_k=6, blocks=tuple(range(6)))
CHEAP = Plan(tier="low", insertion_position=1, top_k=2, blocks=(0, 1, 2, 4))


def chosen(plan: Plan, images: int) -> Plan:
    tier = plan.tier if images else None
    return Plan(tier=tier, insertion_position=plan.insertion_position, top_k=plan.top_k, blocks=plan.blocks)


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[Any, Engine]]:
    pytest.importorskip("transformers")
    model = tiny.llava_siglip()
    adapter = adapter_of(model)
    plans = [FULL, CHEAP, chosen(FULL, 0), chosen(CHEAP, 0)]
    engine = Engine(adapter, PlanRuntime(adapter), plans=plans, max_batch=3, max_tokens=160, graphs=False)
    yield adapter, engine
    engine.shutdown(drain=False)


def made_app(real: tuple[Any, Engine]) -> Any:
    adapter, engine = real
    sight = CropProcessor(
        Letters(), image_token=tiny.IMAGE, size=tiny.SIZE, tokens_per_crop=adapter.tokens_per_crop,
        mean=[0.5] * 3, std=[0.5] * 3,
    )  # fmt: skip

    def decider(job: BackendJob) -> FixedPlan:
        # A budget below a minute is a wish for the cheap plan.
        plan = CHEAP if job.until_s < time.perf_counter() + 60 else FULL
        return FixedPlan(plan=chosen(plan, job.prompt.images))

    made = EngineBackend(engine, decider=decider, forecast=Forecast(), stop=[STOP])
    made.close = lambda: None
    return create_app(
        Service(
            "tiny", made, PromptBuilder(Letters(), context=160, sight=sight, stop=[STOP]), temperature=0.0
        )
    )


def test_the_real_engine_by_openais_client(real: tuple[Any, Engine]) -> None:
    app = made_app(real)
    with serving(app) as server:
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="x", max_retries=0, timeout=60.0
        )
        with client:
            picture = data_url(Image.effect_noise((20, 12), 90.0).convert("RGB"))
            alone = {}
            for name, urls, budget_ms in (
                ("text", [], None),
                ("image", [picture], None),
                ("cheap", [picture], 50_000),
            ):
                found: Any = client.chat.completions.create(
                    model="tiny", messages=user("what is there", *urls), max_completion_tokens=6,
                    extra_body={"latency_budget_ms": budget_ms},
                )  # fmt: skip
                plan = chosen(CHEAP if budget_ms else FULL, len(urls))
                assert found.sparseflow["plan"]["id"] == plan.id
                assert found.usage.completion_tokens <= 6
                service: Service = app.state.service
                prompt = service.prompts.prompt(
                    [_message("what is there", urls)], [_pixels(url) for url in urls]
                )
                assert found.usage.prompt_tokens == prompt.at(plan.tier)
                alone[name] = found.choices[0].message.content
                request = GenerationRequest(
                    inputs=prompt.inputs, decide=FixedPlan(plan=plan), max_new_tokens=6, stop=[STOP]
                )
                alone_again = real[1].submit(request).result(60.0)
                assert alone_again.prompt_tokens == found.usage.prompt_tokens
                tokens = [token for token in alone_again.tokens if token != STOP]
                assert alone[name] == Letters().decode(tokens)

            def streamed(name: str, urls: list[str], budget_ms: int | None) -> None:
                stream = client.chat.completions.create(
                    model="tiny", messages=user("what is there", *urls), max_completion_tokens=6, stream=True,
                    extra_body={"latency_budget_ms": budget_ms},
                )  # fmt: skip
                together[name] = "".join(chunk.choices[0].delta.content or "" for chunk in stream)

            # Mixed plans at once give each what it gets alone.
            together: dict[str, str] = {}
            threads = [
                threading.Thread(target=streamed, args=each)
                for each in (("text", [], None), ("image", [picture], None), ("cheap", [picture], 50_000))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert together == alone


def test_who_goes_away_frees_a_slot_of_the_real_engine(real: tuple[Any, Engine]) -> None:
    app = made_app(real)
    with serving(app) as server:
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="x", max_retries=0, timeout=60.0
        )
        with client:
            gone = client.chat.completions.create(
                model="tiny", messages=user("a"), max_completion_tokens=150, stream=True
            )
            next(iter(gone))
            gone.close()
            eventually(lambda: real[1].snapshot().running == 0)
            found = client.chat.completions.create(model="tiny", messages=user("a"), max_completion_tokens=2)
            assert found.usage is not None
            assert found.usage.completion_tokens <= 2


def _message(text: str, urls: list[str]) -> Any:
    return Message.model_validate(user(text, *urls)[0])


def _pixels(url: str) -> torch.Tensor:
    return decode(url, RequestLimits())

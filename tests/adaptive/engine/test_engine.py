"""Scheduling, shutdown, warm-up and metrics of the engine."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparseflow.adaptive.adapters import Adapter
from sparseflow.adaptive.engine import metrics
from sparseflow.adaptive.engine.engine import Engine
from sparseflow.adaptive.engine.requests.handle import RequestHandle
from sparseflow.adaptive.engine.requests.request import (
    EngineStopped,
    GenerationRequest,
    InitialDecision,
    Rejection,
    RequestCancelled,
)
from sparseflow.adaptive.engine.requests.sampling import SamplingParams
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan
from sparseflow.errors import InputError
from tests.adaptive import tiny
from tests.adaptive.engine.serving import (
    DEEP,
    LATER,
    NARROW,
    PLANS,
    SHALLOW,
    ScriptedPolicy,
    attached,
    generate_alone,
    make_idle_engine,
    model,
    request,
    run_until_idle,
)


class TestOutput:
    def test_text_request_runs_plan_without_its_tier(self) -> None:
        with attached("llava_siglip") as both:
            full_plan = both[1].geometry.full_plan()
            engine = make_idle_engine(both, plans=[full_plan], max_tokens=96)
            handle = engine.submit(request(6, plan=replace(full_plan, tier=None), max_new_tokens=2))
            run_until_idle(engine)
            assert handle.result().plan == replace(full_plan, tier=None)

    def test_output_has_plan_reason_and_timings(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = make_idle_engine(olmoe)
        handle = engine.submit(request(6, max_new_tokens=5, budget_ms=1e6, plan=SHALLOW))
        run_until_idle(engine)
        output = handle.result()
        assert (output.plan, output.reason, output.prompt_tokens, len(output.tokens)) == (
            SHALLOW,
            "length",
            6,
            5,
        )
        assert output.budget_met and output.feasible and output.predicted_ms is None
        parts = (output.queued_ms, output.decide_ms, output.vision_ms, output.prefill_ms, output.decode_ms)
        assert min(parts) >= 0 and sum(parts) == pytest.approx(output.total_ms)
        assert handle.tokens == output.tokens

    def test_stop_token_ends_answer(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        full_tokens = generate_alone(*olmoe, request(6, max_new_tokens=12))
        stop = full_tokens[5]
        engine = make_idle_engine(olmoe)
        handle = engine.submit(request(6, max_new_tokens=12, stop=(stop, 1000)))
        first = engine.submit(request(6, max_new_tokens=12, stop=(full_tokens[0],)))
        run_until_idle(engine)
        assert handle.result().reason == "stop"
        assert handle.result().tokens == full_tokens[: full_tokens.index(stop) + 1]
        assert first.result().tokens == full_tokens[:1]

    def test_single_new_token_needs_no_decode_step(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = make_idle_engine(olmoe, max_tokens=6)
        handle = engine.submit(request(6, max_new_tokens=1))
        assert engine.step() and handle.finished and not engine.step()

    def test_request_may_fill_its_slot(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = make_idle_engine(olmoe, max_tokens=8)
        handle = engine.submit(request(5, max_new_tokens=4))
        run_until_idle(engine)
        assert handle.result().tokens == generate_alone(*olmoe, handle.request)

    def test_sampling_is_independent_of_other_requests(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = make_idle_engine(olmoe)
        samplings = [SamplingParams(temperature=1.0, seed=seed) for seed in range(3)]
        handles = [engine.submit(request(5, max_new_tokens=8, sampling=sampling)) for sampling in samplings]
        run_until_idle(engine)
        answers = [handle.result().tokens for handle in handles]
        assert (
            answers == [generate_alone(*olmoe, handle.request) for handle in handles]
            and len(set(answers)) == 3
        )


class TestScheduling:
    def test_waiting_requests_run_by_earliest_deadline(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = make_idle_engine(olmoe, max_batch=1)
        late, early, never = (
            engine.submit(request(4 + index, budget_ms=budget, max_new_tokens=2))
            for index, budget in enumerate((9e6, 1e6, None))
        )
        finished_order: list[RequestHandle] = []
        while engine.step():
            finished_order += [
                handle for handle in (late, early, never) if handle.finished and handle not in finished_order
            ]
        assert finished_order == [early, late, never]

    def test_waiting_request_is_overtaken_at_most_fairness_times(
        self, olmoe: tuple[Adapter, PlanRuntime]
    ) -> None:
        engine = make_idle_engine(olmoe, max_batch=1, fairness=2)
        patient = engine.submit(request(4, max_new_tokens=2))
        hasty = [engine.submit(request(5, budget_ms=1e6, max_new_tokens=2)) for _ in range(5)]
        while not patient.finished:
            assert engine.step()
        assert sum(handle.finished for handle in hasty) == 2
        run_until_idle(engine)

    @pytest.mark.parametrize("fairness", [1, 3])
    def test_batch_waits_at_most_fairness_steps(
        self, olmoe: tuple[Adapter, PlanRuntime], fairness: int
    ) -> None:
        engine = make_idle_engine(olmoe, fairness=fairness)
        plans = (DEEP, SHALLOW, NARROW)
        handles = [
            engine.submit(request(4, plan=plan, budget_ms=1e6 if plan is DEEP else None, max_new_tokens=30))
            for plan in plans
        ]
        for _ in range(3):
            engine.step()
        observed: list[list[int]] = []
        for _ in range(12):
            engine.step()
            observed.append([len(handle.tokens) for handle in handles])
        for index in range(3):
            lengths = [row[index] for row in observed]
            # Two batches may reach the limit at once; one of them then waits one more step.
            assert all(lengths[turn + fairness + 2] > lengths[turn] for turn in range(12 - fairness - 2))
        assert (
            observed[-1][0] - observed[0][0]
            >= max(observed[-1][index] - observed[0][index] for index in (1, 2)) - 1
        )
        run_until_idle(engine)

    def test_new_request_joins_batch_at_next_step(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = make_idle_engine(olmoe)
        first = engine.submit(request(4, max_new_tokens=20))
        for _ in range(3):
            engine.step()
        before = len(first.tokens)
        second = engine.submit(request(5, max_new_tokens=20))
        engine.step()
        assert len(first.tokens) == before + 1 and len(second.tokens) == 2
        run_until_idle(engine)


class TestShutdown:
    def test_cancel_frees_slot_at_next_step(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = make_idle_engine(olmoe, max_batch=1)
        first = engine.submit(request(4, max_new_tokens=30))
        second = engine.submit(request(5, max_new_tokens=3))
        engine.step()
        first.cancel()
        engine.step()
        with pytest.raises(RequestCancelled):
            first.result()
        assert second.tokens
        run_until_idle(engine)
        assert second.result().tokens == generate_alone(*olmoe, second.request)
        first.cancel()
        second.cancel()
        run_until_idle(engine)
        assert second.result() and engine.snapshot().ended == {"cancelled": 1, "finished": 1}

    def test_cancel_while_waiting_or_in_vision_encoder_ends_request(self) -> None:
        with attached("llava_siglip") as both:
            plan = replace(DEEP, tier="low")
            engine = make_idle_engine(both, plans=[plan, DEEP], max_tokens=96)
            waiting = engine.submit(request(4))
            waiting.cancel()
            handle: list[RequestHandle] = []

            class CancellingPolicy(ScriptedPolicy):
                def choose_initial(
                    self, request: GenerationRequest, remaining_ms: float
                ) -> InitialDecision | Rejection:
                    handle[0].cancel()
                    return super().choose_initial(request, remaining_ms)

            decide = CancellingPolicy(plan)
            handle.append(
                engine.submit(
                    GenerationRequest(inputs=tiny.make_prompt(model("llava_siglip")), decide=decide)
                )
            )
            run_until_idle(engine)
            for cancelled in (waiting, handle[0]):
                with pytest.raises(RequestCancelled):
                    cancelled.result()
            # Noticed before the second decision.
            assert [name for name, _, _ in decide.calls] == ["choose_initial"]

    def test_cancel_is_noticed_by_engine_thread(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        with Engine(*olmoe, plans=PLANS, max_batch=1, max_tokens=512) as engine:
            handles = [engine.submit(request(4, max_new_tokens=400)) for _ in range(2)]
            for handle in handles:
                handle.cancel()
            for handle in handles:
                with pytest.raises(RequestCancelled):
                    handle.result(30)

    def test_step_of_engine_with_thread_is_refused(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        with (
            Engine(*olmoe, plans=PLANS, max_tokens=48) as engine,
            pytest.raises(InputError),
        ):
            engine.step()

    def test_shutdown_with_drain_finishes_requests(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = Engine(*olmoe, plans=PLANS, max_batch=2, max_tokens=48)
        handles = [engine.submit(request(4 + index, max_new_tokens=5)) for index in range(4)]
        assert engine.shutdown()
        for handle in handles:
            assert handle.result(0.0).tokens == generate_alone(*olmoe, handle.request)
        with pytest.raises(EngineStopped):
            engine.submit(request())
        assert engine.shutdown()

    @pytest.mark.parametrize("shutdown_options", [{"drain": False}, {"timeout_s": 0.0}])
    @pytest.mark.parametrize("start", [True, False])
    def test_shutdown_without_drain_stops_requests(
        self, olmoe: tuple[Adapter, PlanRuntime], shutdown_options: dict[str, Any], start: bool
    ) -> None:
        engine = Engine(*olmoe, plans=PLANS, max_batch=1, max_tokens=512, start=start)
        handles = [engine.submit(request(4, max_new_tokens=400)) for _ in range(2)]
        assert not engine.shutdown(**shutdown_options)
        for handle in handles:
            with pytest.raises(EngineStopped):
                handle.result(0.0)

    def test_exit_with_error_does_not_drain(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        handles: list[RequestHandle] = []
        with pytest.raises(ZeroDivisionError), Engine(*olmoe, plans=PLANS, max_tokens=512) as engine:
            handles.append(engine.submit(request(4, max_new_tokens=400)))
            raise ZeroDivisionError
        with pytest.raises(EngineStopped):
            handles[0].result(0.0)


class TestWarmUp:
    @pytest.mark.parametrize("start", [True, False])
    def test_warm_up_runs_every_size_and_leaves_empty_caches(
        self, olmoe: tuple[Adapter, PlanRuntime], start: bool
    ) -> None:
        engine = Engine(
            *olmoe,
            plans=(DEEP, LATER, SHALLOW),
            max_batch=2,
            max_tokens=16,
            contexts=(8,),
            prompts=(8,),
            start=start,
        )
        fractions: list[float] = []
        engine.warm_up(progress=lambda message, fraction: fractions.append(fraction))
        # Each plan in one piece and split; two batches of two sizes and two contexts.
        assert fractions == [index / 14 for index in range(1, 15)]
        assert engine.snapshot().cache_bytes > 0
        handle = engine.submit(request(4, plan=LATER, max_new_tokens=5))
        if not start:
            run_until_idle(engine)
        assert handle.result(30).tokens == generate_alone(*olmoe, handle.request)
        engine.shutdown()

    def test_shutdown_during_warm_up_ends_it(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = Engine(*olmoe, plans=PLANS, max_batch=2, max_tokens=16, contexts=(8,), prompts=(8,))
        messages: list[str] = []

        def report(message: str, fraction: float) -> None:
            messages.append(message)
            # As after an interrupt, before the remaining steps.
            threading.Thread(target=lambda: engine.shutdown(drain=False)).start()
            while engine._stopping is None:
                time.sleep(0.001)

        with pytest.raises(EngineStopped):
            engine.warm_up(progress=report)
        assert len(messages) == 1 and messages[0].startswith("warmed up 1 of ")

    def test_warm_up_with_running_requests_is_refused(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = make_idle_engine(olmoe)
        engine.submit(request(4, max_new_tokens=9))
        engine.step()
        with pytest.raises(InputError):
            engine.warm_up()
        run_until_idle(engine)


def test_snapshot_counts_waiting_and_running_requests(olmoe: tuple[Adapter, PlanRuntime]) -> None:
    engine = make_idle_engine(olmoe, max_batch=1)
    assert engine.snapshot().load == 0.0
    for _ in range(2):
        engine.submit(request(4, max_new_tokens=6))
    engine.step()
    snapshot = engine.snapshot()
    assert (snapshot.queued, snapshot.running, snapshot.slots, snapshot.submitted) == (1, 1, 1, 2)
    assert snapshot.healthy and snapshot.captured == 0 and snapshot.uncaptured == ()
    run_until_idle(engine)
    assert engine.snapshot().ended == {"finished": 2}


class TestMetrics:
    def test_padded_sizes_are_reported(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = make_idle_engine(olmoe, max_tokens=48)
        assert (engine.prompts, engine.contexts) == ((), (48,))
        engine = make_idle_engine(olmoe, max_tokens=48, prompts=[16, 32], contexts=[8])
        assert (engine.prompts, engine.contexts) == ((16, 32), (8, 48))

    def test_load_and_busy_time_of_finished_request_are_positive(
        self, olmoe: tuple[Adapter, PlanRuntime]
    ) -> None:
        with Engine(*olmoe, plans=PLANS, max_batch=2, max_tokens=48) as engine:
            assert engine.load == engine.busy_s == 0.0
            engine.submit(request(max_new_tokens=3)).result()
        assert 0.0 < engine.load <= 1.0 and engine.busy_s > 0.0

    def test_request_during_prefill_counts_as_busy_arrival(
        self, olmoe: tuple[Adapter, PlanRuntime], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(metrics, "BUSY_S", 1e9)
        engine, loads = make_idle_engine(olmoe), []

        class SubmittingPolicy:
            """Policy that submits another request during its own prefill."""

            def choose_initial(
                self, generation_request: GenerationRequest, remaining_ms: float
            ) -> InitialDecision:
                engine.submit(request(max_new_tokens=2))
                loads.append(engine.load)
                return InitialDecision(tier=None, insertion_position=PLANS[0].insertion_position)

            def choose_plan(
                self, latency_token: torch.Tensor, generation_request: GenerationRequest, remaining_ms: float
            ) -> Plan:
                return PLANS[0]

        engine.submit(request(decide=SubmittingPolicy(), max_new_tokens=2))
        run_until_idle(engine)
        # One of two requests found the engine busy.
        assert loads[0] > 0.2

    def test_load_rises_with_queued_requests(
        self, olmoe: tuple[Adapter, PlanRuntime], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(metrics, "BUSY_S", 1e9)
        engine = make_idle_engine(olmoe)
        for _ in range(20):
            engine.submit(request(max_new_tokens=2))
        assert engine.load > 0.8

    def test_listener_is_called_for_every_token(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        token_counts: list[int] = []
        with Engine(*olmoe, plans=PLANS, max_batch=2, max_tokens=48) as engine:
            engine.submit(
                request(max_new_tokens=4), lambda handle: token_counts.append(len(handle.tokens))
            ).result()
        assert token_counts == [1, 2, 3, 4, 4]

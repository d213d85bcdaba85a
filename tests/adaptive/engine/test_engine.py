"""The engine: what a request gets alone it gets in company, and what goes wrong with one stays with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
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
    Budgeted,
    attached,
    driven,
    generate_alone,
    model,
    request,
    still,
)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def olmoe() -> Iterator[tuple[Adapter, PlanRuntime]]:
    with attached() as both:
        yield both


class TestAnswers:
    def test_without_image_the_tier_of_a_plan_does_not_matter(self) -> None:
        with attached("llava_siglip") as both:
            full = both[1].geometry.full_plan()
            engine = still(both, plans=[full], max_tokens=96)
            handle = engine.submit(request(6, plan=replace(full, tier=None), max_new_tokens=2))
            driven(engine)
            assert handle.result().plan == replace(full, tier=None)

    def test_finished(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = still(olmoe)
        handle = engine.submit(request(6, max_new_tokens=5, budget_ms=1e6, plan=SHALLOW))
        driven(engine)
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
        assert list(handle) == list(output.tokens)

    def test_stop_tokens(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        full_tokens = generate_alone(*olmoe, request(6, max_new_tokens=12))
        stop = full_tokens[5]
        engine = still(olmoe)
        handle = engine.submit(request(6, max_new_tokens=12, stop=(stop, 1000)))
        first = engine.submit(request(6, max_new_tokens=12, stop=(full_tokens[0],)))
        driven(engine)
        assert handle.result().reason == "stop"
        assert handle.result().tokens == full_tokens[: full_tokens.index(stop) + 1]
        assert first.result().tokens == full_tokens[:1]

    def test_one_token_needs_no_step(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = still(olmoe, max_tokens=6)
        handle = engine.submit(request(6, max_new_tokens=1))
        assert engine.step() and handle.finished and not engine.step()

    def test_a_slot_may_be_filled_to_the_last_place(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = still(olmoe, max_tokens=8)
        handle = engine.submit(request(5, max_new_tokens=4))
        driven(engine)
        assert handle.result().tokens == generate_alone(*olmoe, handle.request)

    def test_sampling_does_not_depend_on_company(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = still(olmoe)
        ways = [SamplingParams(temperature=1.0, seed=seed) for seed in range(3)]
        handles = [engine.submit(request(5, max_new_tokens=8, sampling=sampling)) for sampling in ways]
        driven(engine)
        answers = [handle.result().tokens for handle in handles]
        assert (
            answers == [generate_alone(*olmoe, handle.request) for handle in handles]
            and len(set(answers)) == 3
        )


class TestOrder:
    def test_the_earliest_deadline_first(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = still(olmoe, max_batch=1)
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

    def test_who_waits_is_not_overtaken_for_ever(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = still(olmoe, max_batch=1, fairness=2)
        patient = engine.submit(request(4, max_new_tokens=2))
        hasty = [engine.submit(request(5, budget_ms=1e6, max_new_tokens=2)) for _ in range(5)]
        while not patient.finished:
            assert engine.step()
        assert sum(handle.finished for handle in hasty) == 2
        driven(engine)

    @pytest.mark.parametrize("fairness", [1, 3])
    def test_batches_wait_no_longer_than_fairness(
        self, olmoe: tuple[Adapter, PlanRuntime], fairness: int
    ) -> None:
        engine = still(olmoe, fairness=fairness)
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
            # Two may have waited as long as they may at once: then one of them waits a turn more.
            assert all(lengths[turn + fairness + 2] > lengths[turn] for turn in range(12 - fairness - 2))
        assert (
            observed[-1][0] - observed[0][0]
            >= max(observed[-1][index] - observed[0][index] for index in (1, 2)) - 1
        )
        driven(engine)

    def test_joins_at_the_next_step(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = still(olmoe)
        first = engine.submit(request(4, max_new_tokens=20))
        for _ in range(3):
            engine.step()
        before = len(first.tokens)
        second = engine.submit(request(5, max_new_tokens=20))
        engine.step()
        assert len(first.tokens) == before + 1 and len(second.tokens) == 2
        driven(engine)


class TestEnding:
    def test_cancel_frees_the_slot_at_once(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = still(olmoe, max_batch=1)
        first = engine.submit(request(4, max_new_tokens=30))
        second = engine.submit(request(5, max_new_tokens=3))
        engine.step()
        first.cancel()
        engine.step()
        with pytest.raises(RequestCancelled):
            first.result()
        assert second.tokens
        driven(engine)
        assert second.result().tokens == generate_alone(*olmoe, second.request)
        first.cancel()
        second.cancel()
        driven(engine)
        assert second.result() and engine.snapshot().ended == {"cancelled": 1, "finished": 1}

    def test_cancelled_while_it_waits_or_sees(self) -> None:
        with attached("llava_siglip") as both:
            plan = replace(DEEP, tier="low")
            engine = still(both, plans=[plan, DEEP], max_tokens=96)
            waiting = engine.submit(request(4))
            waiting.cancel()
            handle: list[RequestHandle] = []

            class Hook(Budgeted):
                def choose_initial(
                    self, request: GenerationRequest, remaining_ms: float
                ) -> InitialDecision | Rejection:
                    handle[0].cancel()
                    return super().choose_initial(request, remaining_ms)

            decide = Hook(plan)
            handle.append(
                engine.submit(
                    GenerationRequest(inputs=tiny.make_prompt(model("llava_siglip")), decide=decide)
                )
            )
            driven(engine)
            for item in (waiting, handle[0]):
                with pytest.raises(RequestCancelled):
                    item.result()
            # It was seen before the second controller was asked.
            assert [item[0] for item in decide.calls] == ["first"]

    def test_cancel_wakes_a_thread_that_sleeps(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        with Engine(*olmoe, plans=PLANS, max_batch=1, max_tokens=512) as engine:
            handles = [engine.submit(request(4, max_new_tokens=400)) for _ in range(2)]
            for handle in handles:
                handle.cancel()
            for handle in handles:
                with pytest.raises(RequestCancelled):
                    handle.result(30)

    def test_turns_are_the_threads(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        with (
            Engine(*olmoe, plans=PLANS, max_tokens=48) as engine,
            pytest.raises(InputError),
        ):
            engine.step()

    def test_drain(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
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
    def test_no_time_to_drain(
        self, olmoe: tuple[Adapter, PlanRuntime], shutdown_options: dict[str, Any], start: bool
    ) -> None:
        engine = Engine(*olmoe, plans=PLANS, max_batch=1, max_tokens=512, start=start)
        handles = [engine.submit(request(4, max_new_tokens=400)) for _ in range(2)]
        assert not engine.shutdown(**shutdown_options)
        for handle in handles:
            with pytest.raises(EngineStopped):
                handle.result(0.0)

    def test_an_error_in_the_block_does_not_drain(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        handles: list[RequestHandle] = []
        with pytest.raises(ZeroDivisionError), Engine(*olmoe, plans=PLANS, max_tokens=512) as engine:
            handles.append(engine.submit(request(4, max_new_tokens=400)))
            raise ZeroDivisionError
        with pytest.raises(EngineStopped):
            handles[0].result(0.0)


class TestWarming:
    @pytest.mark.parametrize("start", [True, False])
    def test_leaves_nothing_behind(self, olmoe: tuple[Adapter, PlanRuntime], start: bool) -> None:
        engine = Engine(
            *olmoe,
            plans=(DEEP, LATER, SHALLOW),
            max_batch=2,
            max_tokens=16,
            contexts=(8,),
            prompts=(8,),
            start=start,
        )
        messages: list[tuple[int, int]] = []
        engine.warm_up(progress=lambda completed, total: messages.append((completed, total)))
        # Whole and in parts for each plan; two batches of two sizes and two contexts.
        assert messages == [(index, 14) for index in range(1, 15)]
        assert engine.snapshot().cache_bytes > 0
        handle = engine.submit(request(4, plan=LATER, max_new_tokens=5))
        if not start:
            driven(engine)
        assert handle.result(30).tokens == generate_alone(*olmoe, handle.request)
        engine.shutdown()

    def test_who_does_not_want_to_wait_ends_it(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = Engine(*olmoe, plans=PLANS, max_batch=2, max_tokens=16, contexts=(8,), prompts=(8,))
        finished_order: list[int] = []

        def report(completed: int, total: int) -> None:
            finished_order.append(completed)
            # As after an interrupt, while the rest is still to be done.
            threading.Thread(target=lambda: engine.shutdown(drain=False)).start()
            while engine._stopping is None:
                time.sleep(0.001)

        with pytest.raises(EngineStopped):
            engine.warm_up(progress=report)
        assert finished_order == [1]

    def test_not_while_requests_run(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = still(olmoe)
        engine.submit(request(4, max_new_tokens=9))
        engine.step()
        with pytest.raises(InputError):
            engine.warm_up()
        driven(engine)


def test_snapshot_of_who_waits(olmoe: tuple[Adapter, PlanRuntime]) -> None:
    engine = still(olmoe, max_batch=1)
    assert engine.snapshot().oldest_wait_ms == 0.0 and engine.snapshot().load == 0.0
    query = request(4, max_new_tokens=6)
    engine.submit(query)
    engine.submit(replace(query, received_s=query.received_s - 5.0))
    engine.step()
    snapshot = engine.snapshot()
    assert (snapshot.queued, snapshot.running, snapshot.slots, snapshot.submitted) == (1, 1, 1, 2)
    assert snapshot.oldest_wait_ms >= 5_000.0 and snapshot.tokens == 2 and snapshot.tokens_per_s > 0.0
    assert snapshot.healthy and snapshot.captured == 0 and snapshot.uncaptured == ()
    driven(engine)
    assert engine.snapshot().ended == {"finished": 2}


class TestWhatItTells:
    def test_sizes(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = still(olmoe, max_tokens=48)
        assert (engine.prompts, engine.contexts) == ((), (48,))
        engine = still(olmoe, max_tokens=48, prompts=[16, 32], contexts=[8])
        assert (engine.prompts, engine.contexts) == ((16, 32), (8, 48))

    def test_load_is_the_share_of_time_that_it_works(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        with Engine(*olmoe, plans=PLANS, max_batch=2, max_tokens=48) as engine:
            assert engine.load == engine.busy_s == 0.0
            engine.submit(request(max_new_tokens=3)).result()
        assert 0.0 < engine.load <= 1.0 and engine.busy_s > 0.0

    def test_whose_prompt_is_run_is_met_too(
        self, olmoe: tuple[Adapter, PlanRuntime], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(metrics, "BUSY_S", 1e9)
        engine, loads = still(olmoe), []

        class Meeting:
            """While its prompt is run, another request comes."""

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

        engine.submit(request(decide=Meeting(), max_new_tokens=2))
        driven(engine)
        # One of two met another.
        assert loads[0] > 0.2

    def test_load_is_what_requests_meet(
        self, olmoe: tuple[Adapter, PlanRuntime], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(metrics, "BUSY_S", 1e9)
        engine = still(olmoe)
        for _ in range(20):
            engine.submit(request(max_new_tokens=2))
        assert engine.load > 0.8

    def test_a_listener_hears_of_every_token(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        token_counts: list[int] = []
        with Engine(*olmoe, plans=PLANS, max_batch=2, max_tokens=48) as engine:
            engine.submit(
                request(max_new_tokens=4), lambda handle: token_counts.append(len(handle.tokens))
            ).result()
        assert token_counts == [1, 2, 3, 4, 4]

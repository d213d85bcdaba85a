"""Running requests as they are served: sizes that were asked for, others beside them, groups of plans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.engine.batch import DecodeBatch
from sparseflow.adaptive.engine.requests.request import GenerationRequest
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan, PlanSpace
from sparseflow.adaptive.profile import (
    EngineRunner,
    PlanProfile,
    ProfileRunner,
    RequestMix,
    collect_profile_by_group,
    compute_model_id,
)
from sparseflow.adaptive.profile import background_traffic as beside
from sparseflow.errors import InputError, RunError
from tests.adaptive import tiny

FLOAT = torch.float32
MAX_ENGINE_PLANS = RequestMix(lengths=(3, 5), new_tokens=6)
TEXT = Plan(tier=None, insertion_position=1, top_k=2, blocks=(0, 2, 5))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build_llava_siglip(dtype=FLOAT)


@pytest.fixture
def runtime(model: Any) -> Iterator[PlanRuntime]:
    runtime = PlanRuntime(get_adapter(model))
    yield runtime
    runtime.remove()


def plans(runtime: PlanRuntime) -> tuple[Plan, ...]:
    space = PlanSpace.from_importance(runtime.geometry, [6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    return (space.plans[0], space.plans[-1], TEXT)


def make_runner(runtime: PlanRuntime, **options: Any) -> EngineRunner:
    example = tiny.make_prompt(runtime.adapter.model)
    defaults: dict[str, Any] = {"example": example, "max_batch": 4, "max_tokens": 96, "mix": MAX_ENGINE_PLANS}
    return EngineRunner(runtime, plans(runtime), **(defaults | options))


@pytest.fixture
def started_requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[GenerationRequest, int]]:
    """Requests as they begin, and how many decode by then."""
    from sparseflow.adaptive.engine.admission import RequestAdmission

    collected: list[tuple[GenerationRequest, int]] = []
    inner = RequestAdmission.prefill

    def prefill(self: RequestAdmission, handles: Any) -> Any:
        batches: dict[int, DecodeBatch] = {id(self._batch(plan)): self._batch(plan) for plan in self._plans}
        running = sum(len(item.rows) for item in batches.values())
        collected.extend((handle.request, running) for handle in handles)
        return inner(self, handles)

    monkeypatch.setattr(RequestAdmission, "prefill", prefill)
    return collected


def test_run_returns_times_of_requested_size(
    runtime: PlanRuntime, started_requests: list[tuple[GenerationRequest, int]]
) -> None:
    with make_runner(runtime) as runner:
        for plan in plans(runtime):
            timed = runner.run(plan, 17, steps=4)
            request, running = started_requests.pop()
            # Of the highest tier, as a server gets it; the engine reduces it.
            assert request.tokens == 17 + (runner.vision_tokens["high"] if plan.tier else 0)
            assert (request.max_new_tokens, running) == (5, 0)
            assert len(timed.steps_ms) == 4 and timed.prefill_ms > 0.0
        assert runner.run(TEXT, 5, steps=0).steps_ms == () and not started_requests[:-1]
        _protocol: ProfileRunner = runner
        assert _protocol.model_id == compute_model_id(runtime.adapter.model) and runner.device == "cpu"
        assert runner.vision_tokens == {"low": 4, "medium": 20, "high": 56}


def test_run_batch_has_concurrent_requests(
    runtime: PlanRuntime, started_requests: list[tuple[GenerationRequest, int]]
) -> None:
    with make_runner(runtime) as runner:
        for batch in (1, 3, 4):
            num_running: list[int] = []
            for _ in range(20):
                started_requests.clear()
                runner.run(TEXT, 9, steps=3, batch=batch)
                num_running = [running for request, running in started_requests if request.tokens == 9]
                # Others end meanwhile where this process is held up before it asks.
                if num_running[0] >= batch - 2:
                    break
            # One beside it may have ended in the turn before.
            assert len(num_running) == 1 and batch - 2 <= num_running[0] <= batch - 1
            traffic = [request for request, _ in started_requests if request.tokens != 9]
            assert len(traffic) >= batch - 1
            assert all(2 <= request.max_new_tokens - (batch - 1) <= 6 for request in traffic)
            assert {request.tokens - 56 * (request.tokens > 50) for request in traffic} <= {3, 5}
        assert runner._engine is not None
        snapshot = runner._engine.snapshot()
        assert (snapshot.running, snapshot.queued) == (0, 0), "others outlive the request"


def test_apply_load_submits_background_requests(
    runtime: PlanRuntime,
    started_requests: list[tuple[GenerationRequest, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # How near a load comes to what was wanted depends on what else the machine does, and so does how many
    # come in so short a time: time for some, whatever a request takes, and the first rate is taken.
    for name in ("_TARGET_ERROR", "_MAX_ERROR"):
        monkeypatch.setattr(beside, name, float("inf"))
    with make_runner(runtime, settle_s=2.0) as runner:
        with runner.apply_load(0.2):
            runner.run(TEXT, 9, steps=3)
            engine = runner._engine
            assert engine is not None
            before = engine.snapshot().submitted
            for _ in range(20):
                runner.run(TEXT, 9, steps=3, batch=2)
            assert engine.snapshot().submitted > before + 20
            with pytest.raises(InputError, match=r"0\.2"), runner.apply_load(0.1):
                pass
        started_requests.clear()
        runner.run(TEXT, 9, steps=3)
        assert len(started_requests) == 1
        with pytest.raises(InputError, match=r"0\.95"), runner.apply_load(0.95):
            runner.run(TEXT, 9, steps=3)


def test_groups_use_separate_engines(runtime: PlanRuntime, tmp_path: Path) -> None:
    runner, messages = make_runner(runtime, plans_per_group=2), []
    assert sorted(map(len, runner.groups)) == [1, 2]
    assert {plan for group in runner.groups for plan in group} == set(plans(runtime))
    space = PlanSpace.from_importance(runtime.geometry, [6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    with runner:
        profile = collect_profile_by_group(
            runner,
            space,
            tmp_path / "p.parquet",
            text_tokens=(5, 9),
            batch_sizes=(1, 2),
            rounds=1,
            decode_steps=2,
            warmup_runs=0,
            progress=lambda message, fraction: messages.append((message, fraction)),
        )
        assert runner._engine is not None and runner._engine.plans == runner.groups[1]
    assert len(profile.successful) == len(plans(runtime)) * 4
    assert messages[0][0].startswith("group 1/2, round 1/1") and messages[-1][1] == 1.0
    metadata = PlanProfile.load(tmp_path / "p.parquet").metadata
    metadata.check(compute_model_id(runtime.adapter.model), "cpu")
    assert metadata.config["runner"] == "engine" and metadata.config["contexts"] == [96]
    assert metadata.config["prompts"] == [] and not metadata.config["graphs"]


def test_run_with_invalid_argument_raises(runtime: PlanRuntime) -> None:
    with make_runner(runtime) as runner:
        for size in ({"text_tokens": 0}, {"steps": -1}, {"batch": 0}, {"batch": 5}):
            with pytest.raises(InputError, match=f"`{next(iter(size))}`"):
                runner.run(**{"plan": TEXT, "text_tokens": 3, "steps": 1} | size)  # pyright: ignore[reportArgumentType]
        other = Plan(tier=None, insertion_position=2, top_k=2, blocks=(0, 1, 5))
        with pytest.raises(InputError, match="3 plans"):
            runner.run(other, 3, steps=1)
        with pytest.raises(InputError, match="limit of 96"):
            runner.run(TEXT, 96, steps=9)
    with pytest.raises(InputError, match="`example`"):
        make_runner(runtime, example=None).run(plans(runtime)[0], 5, steps=1)
    with pytest.raises(InputError, match="`plans`"):
        EngineRunner(runtime, [])
    with pytest.raises(InputError, match="`new_tokens`"):
        RequestMix(new_tokens=1)


def test_collect_into_profile_of_other_engine_raises(runtime: PlanRuntime, tmp_path: Path) -> None:
    space = PlanSpace.from_importance(runtime.geometry, [6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    options: dict[str, Any] = {"text_tokens": (5,), "rounds": 1, "decode_steps": 2, "warmup_runs": 0}
    with make_runner(runtime, plans_per_group=3) as runner:
        profile = collect_profile_by_group(runner, space, tmp_path / "p.parquet", **options)
    for size in ({"max_batch": 2}, {"max_tokens": 80}):
        with make_runner(runtime, **size) as runner, pytest.raises(InputError, match="config"):
            collect_profile_by_group(runner, space, tmp_path / "p.parquet", **options)
    assert PlanProfile.load(tmp_path / "p.parquet") == profile


def test_run_fitting_tiers_succeeds_when_highest_does_not_fit(runtime: PlanRuntime) -> None:
    low = PlanSpace.from_importance(runtime.geometry).plans[0]
    assert low.tier == "low"
    example = tiny.make_prompt(runtime.adapter.model)
    with EngineRunner(
        runtime, [low], example=example, max_batch=3, max_tokens=40, mix=MAX_ENGINE_PLANS
    ) as runner:
        assert len(runner.run(low, 9, steps=4, batch=3).steps_ms) == 4
        assert runner._traffic is not None
        # What room others have is by their tier, too.
        assert runner._traffic._submit(extra_tokens=9).request.max_new_tokens > 9


def test_run_after_failed_request_succeeds(runtime: PlanRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_runner(runtime) as runner:
        runner.run(TEXT, 3, steps=1)

        def fails(*args: Any, **named: Any) -> Any:
            raise torch.OutOfMemoryError("out of memory")

        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
            patch.setattr(DecodeBatch, "step", fails)
            patch.setattr("sparseflow.adaptive.engine.prefill.prefill.PrefillRunner.run", fails)
            runner.run(TEXT, 3, steps=1)
        assert len(runner.run(TEXT, 3, steps=1).steps_ms) == 1


def threads() -> int:
    return sum(item.name == "sparseflow-engine" for item in threading.enumerate())


def test_config_does_not_start_engine(runtime: PlanRuntime) -> None:
    with make_runner(runtime) as runner:
        before = threads()
        assert runner.config["contexts"] == [96] and runner.config["prompts"] == []
        assert runner._engine is None and threads() == before


def test_failed_warm_up_closes_engine(runtime: PlanRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threads()

    def fails(*args: Any, **named: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    with make_runner(runtime) as runner:
        with monkeypatch.context() as patch:
            patch.setattr("sparseflow.adaptive.profile.engine_runner.BackgroundTraffic", fails)
            for _ in range(2):
                with pytest.raises(torch.OutOfMemoryError):
                    runner.run(TEXT, 3, steps=1)
                assert runner._engine is None and threads() == before
        assert len(runner.run(TEXT, 3, steps=1).steps_ms) == 1


def test_failed_stream_raises(runtime: PlanRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_runner(runtime) as runner:
        runner.run(TEXT, 3, steps=1)
        traffic = runner._traffic
        assert traffic is not None
        traffic._rates[0.5] = 1000.0
        inner, failed = traffic._submit, threading.Event()

        def submit(extra_tokens: int = 0) -> Any:
            if threading.current_thread().name == "sparseflow-background":
                failed.set()
                raise ValueError("no prompt")
            return inner(extra_tokens)

        monkeypatch.setattr(traffic, "_submit", submit)
        with pytest.raises(RunError, match="no prompt"), runner.apply_load(0.5):
            runner._get_engine(TEXT)
            assert failed.wait(30.0)
        with pytest.raises(RunError, match="no prompt"), traffic.run_stream(0.5):
            while traffic._stream_error is None:
                failed.wait(0.001)
            traffic.hold_concurrency(1)
        assert not runner._load and len(runner.run(TEXT, 3, steps=1).steps_ms) == 1


def test_missed_load_raises(runtime: PlanRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_runner(runtime, settle_s=100.0) as runner:
        runner.run(TEXT, 3, steps=1)
        traffic, rates = runner._traffic, []
        assert traffic is not None
        monkeypatch.setattr(traffic, "_measure_load", lambda rate: rates.append(rate) or 0.1)
        with pytest.raises(RunError, match=r"0\.5.* 4 .*0\.10"):
            traffic._find_rate(0.5)
        assert rates == pytest.approx([rates[0] * 2**index for index in range(4)])
        shares = iter([0.1, 0.45, 0.8, 0.3])
        attempts: list[float] = []
        monkeypatch.setattr(traffic, "_measure_load", lambda rate: attempts.append(rate) or next(shares))
        assert traffic._find_rate(0.5) == attempts[1], "the nearest of those that were measured"


def test_hold_concurrency_times_out(runtime: PlanRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_runner(runtime) as runner:
        runner.run(TEXT, 3, steps=1)
        traffic = runner._traffic
        assert traffic is not None
        monkeypatch.setattr(beside, "_CONCURRENCY_TIMEOUT_S", 0.02)
        monkeypatch.setattr(type(traffic), "num_running", 3)
        with pytest.raises(RunError, match=r"expected 1 .*3 are"):
            traffic.hold_concurrency(1)
        monkeypatch.undo()

"""Attaching plan selection to a model, generation and detaching."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from sparseflow import adaptive
from sparseflow.adaptive import api as attached_module
from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.engine.generate import generate
from sparseflow.adaptive.engine.requests.handle import RequestHandle
from sparseflow.adaptive.engine.requests.request import RequestRejected
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan, PlanSpace
from sparseflow.adaptive.profile import (
    EagerRunner,
    EngineRunner,
    collect_profile,
    compute_weights_id,
    select_representative_plans,
)
from sparseflow.adaptive.profile.plan_quality import PlanQuality
from sparseflow.errors import InputError, ModelError
from tests.adaptive import tiny
from tests.adaptive.questions import folders

IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build_olmoe()


def profiled(model: Any, folder: Path, runner_of: Callable[[PlanRuntime, Sequence[Plan]], Any]) -> Path:
    """Profile of some plans of the model."""
    file, runtime = folder / "profile.parquet", PlanRuntime(get_adapter(model))
    try:
        space = PlanSpace.from_importance(runtime.geometry, [6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
        plans = select_representative_plans(space, 6)
        with runner_of(runtime, plans) as runner:
            collect_profile(
                runner, space, file, text_tokens=[4, 8], plans=plans, rounds=2, decode_steps=2, warmup_runs=1
            )
    finally:
        runtime.remove()
    return file


@pytest.fixture(scope="module")
def measured(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Profile of the model's own forward."""
    folder = tmp_path_factory.mktemp("profile")
    return profiled(model, folder, lambda runtime, plans: nullcontext(EagerRunner(runtime, device="cpu")))


@pytest.fixture(scope="module")
def measured_by_an_engine(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Profile of the model on an engine with two slots."""
    folder = tmp_path_factory.mktemp("profile")
    return profiled(
        model, folder, lambda runtime, plans: EngineRunner(runtime, plans, max_batch=2, max_tokens=48)
    )


def test_profile_model_leaves_model_ready_to_attach(tmp_path: Path) -> None:
    folder = adaptive.open_folder(folders.model_folder(tmp_path / "model", "olmoe"))
    config = adaptive.ModelProfileConfig(
        num_plans=4, text_tokens=[4, 8], runner="eager", rounds=2, decode_steps=2
    )
    result = adaptive.profile_model(folder, str(tmp_path / "profile.parquet"), config)
    with adaptive.attach(folder.model, profile=result.predictor) as attached:
        assert attached.generate(input_ids=IDS, latency_budget_ms=1e9, max_new_tokens=2).budget_met


def test_generate_meets_budget_and_detach_restores_model(model: Any, measured: Path) -> None:
    with torch.no_grad():
        before = model(IDS).logits
    with adaptive.attach(model, profile=measured) as attached:
        result = attached.generate(input_ids=IDS, latency_budget_ms=1e5, max_new_tokens=4)
        assert result.budget_met and result.feasible and result.new_tokens.shape == (1, 4)
        assert result.predicted_ms is not None and 0.0 < result.measured_ms < 1e5
        unlimited = attached.generate(input_ids=IDS, max_new_tokens=4)
        assert unlimited.plan == attached.runtime.geometry.full_plan() and unlimited.budget_met is None
    assert not any("forward" in vars(module) for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, before)
    attached.detach()  # a second call does nothing


def test_infeasible_budget_is_rejected_or_run_best_effort(model: Any, measured: Path) -> None:
    with adaptive.attach(model, profile=measured) as attached:
        with pytest.raises(RequestRejected) as refused:
            attached.generate(input_ids=IDS, latency_budget_ms=1e-3, on_infeasible="reject")
        assert refused.value.least_ms is not None and refused.value.least_ms > 1e-3
        late = attached.generate(input_ids=IDS, latency_budget_ms=1e-3, max_new_tokens=2)
        assert late.budget_met is False and not late.feasible


def test_generate_updates_predictor(model: Any, measured: Path) -> None:
    with adaptive.attach(model, profile=measured) as attached:
        assert attached.selector is not None
        before = attached.selector.predictor.to_dict()
        attached.generate(input_ids=IDS, latency_budget_ms=1e5, max_new_tokens=3)
        assert attached.selector.predictor.to_dict() != before


def test_attach_with_controllers_selects_plan(model: Any, measured: Path, tmp_path: Path) -> None:
    with adaptive.attach(model, profile=measured) as attached:
        assert attached.selector is not None
        space = attached.selector.predictor.space
    file = tmp_path / "controllers.safetensors"
    Controllers(space, width=tiny.WIDTH, model_id=compute_weights_id(model)).save(file)
    with adaptive.attach(model, profile=measured, controller=file) as attached:
        result = attached.generate(input_ids=IDS, latency_budget_ms=1e5, max_new_tokens=2)
        assert result.plan in space.plans and result.budget_met
    Controllers(space, width=tiny.WIDTH, model_id="another").save(file)
    with pytest.raises(InputError):
        adaptive.attach(model, profile=measured, controller=file)
    assert not any("forward" in vars(module) for module in model.modules())


def test_attach_with_plan_quality_selects_best_plan(model: Any, measured: Path, tmp_path: Path) -> None:
    with adaptive.attach(model, profile=measured) as attached:
        assert attached.selector is not None
        space = attached.selector.predictor.space
    best = space.plans[len(space) // 2]
    plan_quality = PlanQuality(
        model_id=compute_weights_id(model), space=space, samples=400, task="t",
        accuracy=tuple(1.0 if plan == best else 0.5 for plan in space.plans),
    )  # fmt: skip
    file = tmp_path / "plan_quality.json"
    plan_quality.save(file)
    for case in (file, plan_quality, plan_quality.accuracy):
        with adaptive.attach(model, profile=measured, plan_quality=case) as attached:
            result = attached.generate(input_ids=IDS, latency_budget_ms=1e5, max_new_tokens=2)
            assert result.plan == best
    with pytest.raises(InputError):
        adaptive.attach(
            model, profile=measured, plan_quality=plan_quality.model_copy(update={"model_id": "another"})
        )
    assert not any("forward" in vars(module) for module in model.modules())


def test_fixed_plan_needs_no_profile(model: Any) -> None:
    with adaptive.attach(model) as attached:
        plan = select_representative_plans(
            PlanSpace.from_importance(attached.runtime.geometry, [0.0] * 6), 3
        )[0]
        assert attached.generate(input_ids=IDS, plan=plan, max_new_tokens=2).plan == plan
        with pytest.raises(InputError):
            attached.generate(input_ids=IDS, latency_budget_ms=100.0)
        with pytest.raises(ModelError):
            adaptive.attach(model)


def test_attach_mismatched_parts_are_refused(model: Any, measured: Path) -> None:
    with pytest.raises(InputError):
        adaptive.attach(model, plan_quality=[1.0])
    with pytest.raises(InputError):
        adaptive.attach(tiny.build_olmoe(depth=7), profile=measured)
    with pytest.raises(InputError):
        adaptive.attach(model, profile=measured.with_name("absent.parquet"))
    assert not any("forward" in vars(module) for module in model.modules())


def test_engine_profile_runs_requests_on_engine(model: Any, measured_by_an_engine: Path) -> None:
    with torch.no_grad():
        before = model(IDS).logits
    with adaptive.attach(model, profile=measured_by_an_engine) as attached:
        assert attached.engine is None
        attached.warm_up(input_ids=IDS)
        engine = attached.engine
        assert engine is not None and (engine.max_batch, engine.max_tokens) == (2, 48)
        assert 1 <= len(engine.plans) <= 12
        result = attached.generate(input_ids=IDS, latency_budget_ms=1e5, max_new_tokens=4)
        # The warm-up also counts.
        assert engine.snapshot().ended["finished"] == 2 and result.plan in engine.plans
        assert result.budget_met and result.feasible and result.predicted_ms is not None
        assert 0.0 < result.timings.decode_ms < result.measured_ms
        single = generate(
            attached.adapter, attached.runtime, {"input_ids": IDS}, result.plan, max_new_tokens=4
        )
        assert torch.equal(result.sequences, single.sequences)
        with pytest.raises(RequestRejected):
            attached.generate(input_ids=IDS, latency_budget_ms=1e-3, on_infeasible="reject", max_new_tokens=2)
        with pytest.raises(InputError):
            attached.generate(input_ids=IDS, max_new_tokens=64)
        # The model's own forward runs other plans and several rows.
        ended = engine.snapshot().ended
        narrow = replace(attached.runtime.geometry.full_plan(), top_k=1)
        assert attached.generate(input_ids=IDS, plan=narrow, max_new_tokens=2).plan == narrow
        rows = attached.generate(input_ids=IDS.repeat(2, 1), plan=result.plan, max_new_tokens=2)
        assert len(rows.new_tokens) == 2 and engine.snapshot().ended == ended
    with pytest.raises(InputError):
        attached.generate(input_ids=IDS, latency_budget_ms=1e5)
    assert attached.engine is None and not any("forward" in vars(module) for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize("runner", ["forward", "engine"])
def test_waiting_time_does_not_update_predictor(
    model: Any, measured: Path, measured_by_an_engine: Path, runner: str
) -> None:
    file = measured if runner == "forward" else measured_by_an_engine
    with adaptive.attach(model, profile=file) as attached:
        attached.warm_up(input_ids=IDS)
        assert attached.selector is not None
        for _ in range(4):
            late = time.perf_counter() - 60.0
            result = attached.generate(
                input_ids=IDS, latency_budget_ms=1e9, max_new_tokens=4, received_s=late
            )
            assert result.measured_ms > 6e4 and result.predicted_ms is not None and result.predicted_ms > 6e4
        p50, _ = attached.selector.predictor.predict_all(text_tokens=5, images=0, new_tokens=4)
        assert p50.max() < 1e4


def test_threads_share_the_engine(model: Any, measured_by_an_engine: Path) -> None:
    prompts = [torch.arange(4 + index, 9 + index)[None] for index in range(4)]
    with adaptive.attach(model, profile=measured_by_an_engine) as attached, ThreadPoolExecutor(4) as pool:
        results = list(
            pool.map(
                lambda ids: attached.generate(input_ids=ids, latency_budget_ms=1e5, max_new_tokens=6), prompts
            )
        )
        for ids, result in zip(prompts, results, strict=True):
            single = generate(
                attached.adapter, attached.runtime, {"input_ids": ids}, result.plan, max_new_tokens=6
            )
            assert torch.equal(result.sequences, single.sequences)


def test_prompt_that_fits_lower_tiers_only_runs_those(tmp_path: Path) -> None:
    exact = torch.float64
    model_folder = folders.opened(
        folders.model_folder(tmp_path / "model", "llava_siglip", dtype=exact), exact
    )
    (tmp_path / "0.png").write_bytes(folders.picture(0))
    inputs = model_folder.prompt("w7 w8", [tmp_path / "0.png"]).inputs
    with adaptive.attach(model_folder.model, profile=folders.profile_of(model_folder)) as attached:
        assert attached.selector is not None
        attached.selector = replace(attached.selector, max_total_tokens=32)
        attached.warm_up(**inputs)
        for budget_ms in (None, 1e6):
            result = attached.generate(**inputs, latency_budget_ms=budget_ms, max_new_tokens=3)
            assert result.plan.tier == "medium"
        with pytest.raises(InputError):
            attached.generate(**inputs, max_new_tokens=32)


def test_interrupted_generate_cancels_request(
    model: Any, measured_by_an_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with adaptive.attach(model, profile=measured_by_an_engine) as attached:
        attached.warm_up(input_ids=IDS)

        def interrupted(self: RequestHandle) -> None:
            raise KeyboardInterrupt

        engine, cancel_called, cancel = attached.engine, threading.Event(), RequestHandle.cancel
        assert engine is not None
        step = engine._schedule.step

        def cancelled(self: RequestHandle) -> None:
            cancel(self)
            cancel_called.set()

        # The engine continues after the cancellation, so that the request cannot finish before it.
        monkeypatch.setattr(engine._schedule, "step", lambda: cancel_called.wait(60.0) and step())
        monkeypatch.setattr(RequestHandle, "cancel", cancelled)
        monkeypatch.setattr(RequestHandle, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            attached.generate(input_ids=IDS, max_new_tokens=40)
        engine.shutdown()
        assert engine.snapshot().ended["cancelled"] == 1


def test_engine_that_fails_to_warm_up_is_shut_down(
    model: Any, measured_by_an_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []

    class FullEngine:
        """Engine on a device without free memory."""

        graphs = SimpleNamespace(enabled=True)

        def __init__(self, *parts: Any, **sizes: Any) -> None:
            pass

        def warm_up(self, example: Any, progress: Any) -> None:
            raise torch.OutOfMemoryError("no memory")

        def shutdown(self, *, drain: bool) -> None:
            ended.append(drain)

    monkeypatch.setattr(attached_module, "Engine", FullEngine)
    with adaptive.attach(model, profile=measured_by_an_engine) as attached:
        with pytest.raises(torch.OutOfMemoryError):
            attached.generate(input_ids=IDS, latency_budget_ms=1e5)
        assert attached.engine is None and ended == [False]


def test_generate_invalid_inputs_are_refused(model: Any) -> None:
    with adaptive.attach(model) as attached:
        with pytest.raises(InputError):
            attached.generate(input_ids=IDS, latency_budget=5)  # pyright: ignore[reportArgumentType]
        with pytest.raises(InputError):
            attached.generate(input_ids=IDS, do_sample=True, temperature=2.0)  # pyright: ignore[reportArgumentType]
        for without in (attached.warm_up, attached.generate):
            with pytest.raises(InputError, match="`input_ids`"):
                without()
        with pytest.raises(InputError):
            attached.generate(input_ids=IDS, latency_budget_ms="180")  # pyright: ignore[reportArgumentType]
        with pytest.raises(InputError):
            attached.generate(input_ids=torch.tensor([[5, 64]]))
        max_context = attached.adapter.context
        assert max_context is not None
        with pytest.raises(InputError, match=str(max_context)):
            attached.generate(input_ids=IDS, max_new_tokens=max_context)
        assert attached.generate(input_ids=IDS, plan=None, max_new_tokens=2).new_tokens.shape == (1, 2)


def test_request_longer_than_profile_is_refused(model: Any, measured: Path) -> None:
    with adaptive.attach(model, profile=measured) as attached:
        assert attached.selector is not None
        attached.selector = replace(attached.selector, max_total_tokens=12)
        assert attached.generate(input_ids=IDS, max_new_tokens=8).new_tokens.shape == (1, 8)
        with pytest.raises(InputError):
            attached.generate(input_ids=IDS, max_new_tokens=9)


@pytest.mark.parametrize(
    "name", ["past_key_values", "use_cache", "position_ids", "inputs_embeds", "labels", "output_attentions"]
)
def test_generate_argument_that_it_sets_itself_raises(model: Any, name: str) -> None:
    argument: Any = {name: object()}
    with adaptive.attach(model) as attached, pytest.raises(InputError, match=f"`{name}` is not an input"):
        attached.generate(input_ids=IDS, **argument)


def test_generate_kwargs_is_unknown(model: Any) -> None:
    with adaptive.attach(model) as attached, pytest.raises(InputError, match="unknown arguments 'kwargs'"):
        attached.generate(input_ids=IDS, kwargs=IDS)


def test_generate_padding_without_mask_raises(model: Any) -> None:
    with adaptive.attach(model) as attached:
        plan = attached.runtime.geometry.full_plan(images=False)
        for ids in ([[5, 6, 7], [8, 9, 0]], [[0, 6, 7], [8, 9, 5]], [[5, 6, 0]]):
            with pytest.raises(InputError, match="padding token 0"):
                attached.generate(input_ids=torch.tensor(ids), plan=plan)


def test_generate_default_length_is_64_or_what_fits(model: Any, measured_by_an_engine: Path) -> None:
    with adaptive.attach(model) as attached:
        assert attached.generate(input_ids=IDS).new_tokens.shape == (1, 64)
    with adaptive.attach(model, measured_by_an_engine) as attached:
        # The engine has 48 tokens, and the last one of the answer needs no room.
        assert attached.generate(input_ids=IDS).new_tokens.shape == (1, 44)

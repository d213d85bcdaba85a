"""Attaching: a model keeps budgets while it is attached, and is what it was afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from sparseflow import adaptive
from sparseflow.adaptive.adapters import adapter_of
from sparseflow.adaptive.controllers import Controllers
from sparseflow.adaptive.knobs import Knobs
from sparseflow.adaptive.plan import PlanSpace
from sparseflow.adaptive.profile import EagerRunner, profile, spread, weights_id
from sparseflow.adaptive.runtime.requests import Refused
from sparseflow.adaptive.worth import Worth
from sparseflow.errors import InputError, ModelError
from tests.adaptive import tiny

IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.olmoe()


@pytest.fixture(scope="module")
def measured(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of the model."""
    file = tmp_path_factory.mktemp("profile") / "profile.parquet"
    knobs = Knobs(adapter_of(model))
    try:
        space = PlanSpace.of(knobs.geometry, [6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
        runner = EagerRunner(knobs, device="cpu")
        profile(runner, space, file, buckets=[4, 8], plans=spread(space, 6), repeats=2, steps=2, warmup=1)
    finally:
        knobs.remove()
    return file


def test_a_budget_is_kept_and_the_model_is_what_it_was(model: Any, measured: Path) -> None:
    with torch.no_grad():
        before = model(IDS).logits
    with adaptive.attach(model, profile=measured) as attached:
        found = attached.generate(input_ids=IDS, latency_budget_ms=1e5, max_new_tokens=4)
        assert found.budget_met and found.feasible and found.new_tokens.shape == (1, 4)
        assert found.predicted_ms is not None and 0.0 < found.measured_ms < 1e5
        full = attached.generate(input_ids=IDS, max_new_tokens=4)
        assert full.plan == attached.knobs.geometry.full() and full.budget_met is None
    assert not any("forward" in vars(module) for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, before)
    attached.detach()  # again does nothing


def test_what_no_plan_keeps(model: Any, measured: Path) -> None:
    with adaptive.attach(model, profile=measured) as attached:
        with pytest.raises(Refused, match=r"needs at least .* ms") as refused:
            attached.generate(input_ids=IDS, latency_budget_ms=1e-3, on_infeasible="reject")
        assert refused.value.least_ms is not None and refused.value.least_ms > 1e-3
        late = attached.generate(input_ids=IDS, latency_budget_ms=1e-3, max_new_tokens=2)
        assert late.budget_met is False and not late.feasible


def test_what_it_took_is_learnt_from(model: Any, measured: Path) -> None:
    with adaptive.attach(model, profile=measured) as attached:
        assert attached.chooser is not None
        before = attached.chooser.predictor.to_dict()
        attached.generate(input_ids=IDS, latency_budget_ms=1e5, max_new_tokens=3)
        assert attached.chooser.predictor.to_dict() != before


def test_controllers_choose(model: Any, measured: Path, tmp_path: Path) -> None:
    with adaptive.attach(model, profile=measured) as attached:
        assert attached.chooser is not None
        space = attached.chooser.predictor.space
    file = tmp_path / "controllers.safetensors"
    Controllers(space, width=tiny.WIDTH, model_id=weights_id(model)).save(file)
    with adaptive.attach(model, profile=measured, controller=file) as attached:
        found = attached.generate(input_ids=IDS, latency_budget_ms=1e5, max_new_tokens=2)
        assert found.plan in space.plans and found.budget_met
    Controllers(space, width=tiny.WIDTH, model_id="another").save(file)
    with pytest.raises(InputError, match=r"controllers of the model another, not of"):
        adaptive.attach(model, profile=measured, controller=file)
    assert not any("forward" in vars(module) for module in model.modules())


def test_worth_chooses(model: Any, measured: Path, tmp_path: Path) -> None:
    with adaptive.attach(model, profile=measured) as attached:
        assert attached.chooser is not None
        space = attached.chooser.predictor.space
    best = space.plans[len(space) // 2]
    worth = Worth(
        model_id=weights_id(model), space=space, samples=4, task="t",
        accuracy=tuple(1.0 if plan == best else 0.5 for plan in space.plans),
    )  # fmt: skip
    file = tmp_path / "worth.json"
    worth.save(file)
    for given in (file, worth, worth.accuracy):
        with adaptive.attach(model, profile=measured, worth=given) as attached:
            found = attached.generate(input_ids=IDS, latency_budget_ms=1e5, max_new_tokens=2)
            assert found.plan == best
    with pytest.raises(InputError, match=r"worth of plans of another model \(id another; yours is"):
        adaptive.attach(model, profile=measured, worth=replace(worth, model_id="another"))
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_plan_by_hand_needs_no_profile(model: Any) -> None:
    with adaptive.attach(model) as attached:
        plan = spread(PlanSpace.of(attached.knobs.geometry, [0.0] * 6), 3)[0]
        assert attached.generate(input_ids=IDS, plan=plan, max_new_tokens=2).plan == plan
        with pytest.raises(InputError, match=r"a budget needs a profile: attach\(model, profile=\.\.\.\)"):
            attached.generate(input_ids=IDS, latency_budget_ms=100.0)
        with pytest.raises(ModelError, match=r"has knobs already"):
            adaptive.attach(model)


def test_parts_that_do_not_fit_are_refused(model: Any, measured: Path) -> None:
    with pytest.raises(InputError, match=r"controllers, plans and worth need a profile"):
        adaptive.attach(model, worth=[1.0])
    with pytest.raises(InputError, match=r"of another model"):
        adaptive.attach(tiny.olmoe(depth=7), profile=measured)
    with pytest.raises(InputError, match=r"there is no profile"):
        adaptive.attach(model, profile=measured.with_name("absent.parquet"))
    assert not any("forward" in vars(module) for module in model.modules())

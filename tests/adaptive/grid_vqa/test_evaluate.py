"""Evaluation of plans against greedy decoding, and the blind baseline."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.controllers.language_features import mean_text_embedding
from sparseflow.adaptive.grid_vqa import evaluate
from sparseflow.adaptive.grid_vqa.config import KINDS, Kind
from sparseflow.adaptive.grid_vqa.dataset import VqaDataset
from sparseflow.adaptive.grid_vqa.evaluate import (
    VqaScorer,
    check_answers,
    evaluate_plans,
    measure_blind_baseline,
    measure_block_drops,
)
from sparseflow.adaptive.grid_vqa.learner import VqaLearner
from sparseflow.adaptive.grid_vqa.question_generator import QuestionBatch, sample_questions
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan, PlanSpace
from sparseflow.core.training.distributed import init_distributed
from sparseflow.errors import InputError, PlanError
from tests.adaptive.grid_vqa.little import bank, quick

SETTINGS = quick(**{"train.shares": {"left": 1.0, "list": 1.0}, "test_shares": {"left": 1.0, "list": 1.0}})
DATA = VqaDataset(SETTINGS, bank=bank())
PLANS = (
    Plan(tier="high", insertion_position=1, top_k=3, blocks=(0, 1, 2, 3)),
    Plan(tier="high", insertion_position=2, top_k=3, blocks=(0, 1, 2, 3)),
    Plan(tier="high", insertion_position=1, top_k=1, blocks=(0, 2, 3)),
    Plan(tier="medium", insertion_position=2, top_k=2, blocks=(0, 1, 3)),
    Plan(tier="low", insertion_position=1, top_k=3, blocks=(0,)),
    Plan(tier="low", insertion_position=3, top_k=2, blocks=(0, 1, 2, 3)),
)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """A model after a short training: it answers yes or no and ends its answers."""
    settings = SETTINGS.model_copy(
        update={
            "train": SETTINGS.train.model_copy(
                update={"vision_steps": 0, "steps": 40, "batch_size": 16, "rate": 1e-2, "ema": 0.0}
            )
        }
    )
    with init_distributed("cpu") as context:
        run = VqaLearner(settings, VqaDataset(settings, bank=bank()), context)
        for _ in range(run.num_steps):
            run.train_step()
    return run.model.eval()


def test_evaluate_plans_matches_greedy_decoding(model) -> None:
    outcomes = evaluate_plans(model, DATA, PLANS, split="test", count=12, batch_size=5)
    adapter = get_adapter(model)
    runtime = PlanRuntime(adapter)
    try:
        expected = torch.zeros(12, len(PLANS))
        for index, sample in enumerate(DATA.iterate_samples("test", 12)):
            assert KINDS[outcomes.kinds[index]] == sample.kind
            for number, plan in enumerate(PLANS):
                inputs = adapter.reduce_to_tier(sample.inputs, plan.tier)
                with torch.no_grad(), runtime.use_plan(plan):
                    ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)
                answer = ids[0, inputs["input_ids"].shape[1] :].tolist()
                has_end = bool(answer) and answer[-1] == DATA.vocabulary.eos
                expected[index, number] = has_end and DATA.vocabulary.text(answer) == sample.answer
    finally:
        runtime.remove()
    assert torch.equal(outcomes.correct, expected)
    assert 0.1 < expected.mean() < 0.9


def test_evaluate_plans_features_match_requests(model) -> None:
    outcomes = evaluate_plans(model, DATA, PLANS, split="test", count=6, batch_size=4)
    adapter = get_adapter(model)
    assert outcomes.tokens.shape == (6, 3, 3, 16) and outcomes.language.shape == (6, 16)
    for index, sample in enumerate(DATA.iterate_samples("test", 6)):
        language = mean_text_embedding(adapter, sample.inputs["input_ids"], sample.inputs["attention_mask"])
        torch.testing.assert_close(outcomes.language[index], language[0])
        for number, tier in enumerate(("low", "medium", "high")):
            with torch.no_grad():
                hidden_states = model(
                    **adapter.reduce_to_tier(sample.inputs, tier), output_hidden_states=True
                ).hidden_states
            for position in (1, 2, 3):
                torch.testing.assert_close(
                    outcomes.tokens[index, number, position - 1],
                    hidden_states[position][0, -1],
                    rtol=1e-4,
                    atol=1e-5,
                )


def test_check_answers_does_not_depend_on_other_plans(model) -> None:
    combined = check_answers(model, DATA, PLANS, split="val", count=40)
    single = [check_answers(model, DATA, [plan], split="val", count=40, batch_size=7) for plan in PLANS]
    assert torch.equal(combined, torch.cat(single, 1))
    outcomes = evaluate_plans(model, DATA, PLANS, split="val", count=40)
    assert torch.equal(outcomes.correct, combined)
    scorer = VqaScorer(model, DATA, split="val", count=40, batch_size=13)
    assert torch.equal(torch.cat([scorer([plan]) for plan in PLANS], 1), combined)
    kinds = outcomes.accuracy_by_kind(0, KINDS)
    fractions = {kind: float((outcomes.kinds == KINDS.index(kind)).float().mean()) for kind in kinds}
    assert set(kinds) == {"left", "list"}
    assert sum(kinds[kind] * fractions[kind] for kind in kinds) == pytest.approx(float(combined[:, 0].mean()))


def test_measure_block_drops_and_evaluate_full_space(model) -> None:
    drops = measure_block_drops(model, DATA, count=16)
    assert len(drops) == 4 and drops[0] == 1.0
    full = check_answers(model, DATA, [PLANS[0]], split="val", count=16).mean()
    without = Plan(tier="high", insertion_position=1, top_k=3, blocks=(0, 1, 3))
    assert drops[2] == pytest.approx(
        float(full - check_answers(model, DATA, [without], split="val", count=16).mean())
    )
    space = PlanSpace.from_importance(get_adapter(model).geometry, drops)
    messages: list[float] = []
    outcomes = evaluate_plans(
        model, DATA, space, count=16, batch_size=8, progress=lambda _, share: messages.append(share)
    )
    assert (
        outcomes.plans == space.plans
        and outcomes.correct.shape == (16, len(space))
        and messages == [0.5, 1.0]
    )


def test_check_answers_restores_training_mode(model) -> None:
    model.train()
    check_answers(model, DATA, PLANS[:1], split="val", count=2)
    assert model.training
    model.eval()


def test_evaluate_plans_with_invalid_arguments_raises(model) -> None:
    with pytest.raises(InputError, match="0 plans and 3 samples"):
        evaluate_plans(model, DATA, [], count=3)
    with pytest.raises(InputError, match="1 plans and 0 samples"):
        evaluate_plans(model, DATA, PLANS[:1], count=0)
    with pytest.raises(InputError, match="has no tier"):
        evaluate_plans(model, DATA, [Plan(tier=None, insertion_position=1, top_k=3, blocks=(0,))], count=1)
    with pytest.raises(PlanError):
        evaluate_plans(model, DATA, [Plan(tier="low", insertion_position=1, top_k=4, blocks=(0,))], count=1)


BLIND_DATA = VqaDataset(quick(**{"scene.grid": 3}), bank=bank(6))


def test_blind_baseline_is_at_chance() -> None:
    baseline = measure_blind_baseline(BLIND_DATA, count=20_000)
    num_answers: dict[Kind, int] = {"at": 6, "count": 4, "where": 3, "left": 2, "small": 4}
    for kind, count in num_answers.items():
        # Four standard deviations of the number of guesses of a kind.
        assert baseline.by_kind[kind] == pytest.approx(1 / count, abs=0.035), kind
    assert baseline.by_kind["list"] < 0.01
    assert baseline.accuracy == pytest.approx(baseline.chance, abs=0.02)
    shares = BLIND_DATA.config.test_shares
    assert baseline.chance == pytest.approx(
        sum(shares[kind] / count for kind, count in num_answers.items()), abs=0.01
    )


def test_blind_baseline_detects_leaked_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def leak_answers(*args: Any) -> QuestionBatch:
        sampled = sample_questions(*args)
        index = sampled.kinds == KINDS.index("at")
        sampled.slots[index, 0] = sampled.text[np.arange(len(sampled)), sampled.prompts][index]
        return sampled

    monkeypatch.setattr(evaluate, "sample_questions", leak_answers)
    monkeypatch.setattr("sparseflow.adaptive.grid_vqa.dataset.sample_questions", leak_answers)
    baseline = measure_blind_baseline(VqaDataset(quick(), bank=bank()), count=2000)
    assert baseline.by_kind["at"] == 1.0 and baseline.accuracy > baseline.chance + 0.1

"""Judging: one forward says what greedy decoding gives, for every plan; and sharing changes nothing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.controllers.language_features import mean_text_embedding
from sparseflow.adaptive.grid_vqa.config import KINDS
from sparseflow.adaptive.grid_vqa.dataset import VqaDataset
from sparseflow.adaptive.grid_vqa.evaluate import (
    VqaScorer,
    check_answers,
    evaluate_plans,
    measure_block_drops,
)
from sparseflow.adaptive.grid_vqa.learner import VqaLearner
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
    """A model that has learnt a little: it answers yes or no, and ends answers."""
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


def test_right_answers_are_those_that_greedy_decoding_gives(model) -> None:
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
                full = answer and answer[-1] == DATA.vocabulary.eos
                expected[index, number] = bool(full) and DATA.vocabulary.text(answer) == sample.answer
    finally:
        runtime.remove()
    assert torch.equal(outcomes.correct, expected)
    assert 0.1 < expected.mean() < 0.9, "a test of use has both"


def test_latency_tokens_and_language_are_those_of_a_request(model) -> None:
    outcomes = evaluate_plans(model, DATA, PLANS, split="test", count=6, batch_size=4)
    adapter = get_adapter(model)
    assert outcomes.tokens.shape == (6, 3, 3, 16) and outcomes.language.shape == (6, 16)
    for index, sample in enumerate(DATA.iterate_samples("test", 6)):
        language = mean_text_embedding(adapter, sample.inputs["input_ids"], sample.inputs["attention_mask"])
        torch.testing.assert_close(outcomes.language[index], language[0])
        for number, tier in enumerate(("low", "medium", "high")):
            with torch.no_grad():
                actual = model(
                    **adapter.reduce_to_tier(sample.inputs, tier), output_hidden_states=True
                ).hidden_states
            for position in (1, 2, 3):
                torch.testing.assert_close(
                    outcomes.tokens[index, number, position - 1],
                    actual[position][0, -1],
                    rtol=1e-4,
                    atol=1e-5,
                )


def test_plans_alone_and_together_are_the_same(model) -> None:
    combined = check_answers(model, DATA, PLANS, split="val", count=40)
    single = [check_answers(model, DATA, [plan], split="val", count=40, batch_size=7) for plan in PLANS]
    assert torch.equal(combined, torch.cat(single, 1))
    outcomes = evaluate_plans(model, DATA, PLANS, split="val", count=40)
    assert torch.equal(outcomes.correct, combined)
    scorer = VqaScorer(model, DATA, split="val", count=40, batch_size=13)
    assert torch.equal(torch.cat([scorer([plan]) for plan in PLANS], 1), combined)
    kinds = outcomes.accuracy_by_kind(0, KINDS)
    shares = {kind: float((outcomes.kinds == KINDS.index(kind)).float().mean()) for kind in kinds}
    assert set(kinds) == {"left", "list"}
    assert sum(kinds[kind] * shares[kind] for kind in kinds) == pytest.approx(float(combined[:, 0].mean()))


def test_the_whole_space(model) -> None:
    lost = measure_block_drops(model, DATA, count=16)
    assert len(lost) == 4 and lost[0] == 1.0
    full = check_answers(model, DATA, [PLANS[0]], split="val", count=16).mean()
    without = Plan(tier="high", insertion_position=1, top_k=3, blocks=(0, 1, 3))
    assert lost[2] == pytest.approx(
        float(full - check_answers(model, DATA, [without], split="val", count=16).mean())
    )
    space = PlanSpace.from_importance(get_adapter(model).geometry, lost)
    messages: list[float] = []
    outcomes = evaluate_plans(
        model, DATA, space, count=16, batch_size=8, progress=lambda _, share: messages.append(share)
    )
    assert (
        outcomes.plans == space.plans
        and outcomes.correct.shape == (16, len(space))
        and messages == [0.5, 1.0]
    )


def test_the_model_is_as_before(model) -> None:
    model.train()
    check_answers(model, DATA, PLANS[:1], split="val", count=2)
    assert model.training
    model.eval()


def test_what_cannot_be_judged(model) -> None:
    with pytest.raises(InputError, match="0 plans and 3 samples"):
        evaluate_plans(model, DATA, [], count=3)
    with pytest.raises(InputError, match="1 plans and 0 samples"):
        evaluate_plans(model, DATA, PLANS[:1], count=0)
    with pytest.raises(InputError, match="has no tier"):
        evaluate_plans(model, DATA, [Plan(tier=None, insertion_position=1, top_k=3, blocks=(0,))], count=1)
    with pytest.raises(PlanError):
        evaluate_plans(model, DATA, [Plan(tier="low", insertion_position=1, top_k=4, blocks=(0,))], count=1)

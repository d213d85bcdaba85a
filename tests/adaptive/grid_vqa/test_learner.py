"""Steps of a training: which plans run, what gets gradients, and that all of it learns."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

pytest.importorskip("transformers")

from sparseflow.adaptive.grid_vqa.config import VqaStageConfig
from sparseflow.adaptive.grid_vqa.dataset import VqaDataset
from sparseflow.adaptive.grid_vqa.learner import VqaLearner, sample_plan
from sparseflow.adaptive.grid_vqa.stack import get_block_steps
from sparseflow.adaptive.plan.space import TIERS, ModelGeometry, Tier
from sparseflow.core.training.distributed import DistributedContext
from sparseflow.errors import RunError
from tests.adaptive.grid_vqa.little import bank, quick

ALONE = DistributedContext(rank=0, world_size=1, device=torch.device("cpu"))


def learning(**changes: Any) -> VqaLearner:
    settings = quick(**changes)
    return VqaLearner(settings, VqaDataset(settings, bank=bank()), ALONE)


def weights(run: VqaLearner) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def test_sample_plan_covers_all_settings() -> None:
    geometry = ModelGeometry(depth=16, top_k=8)
    random = np.random.default_rng(0)
    plans = [sample_plan(geometry, tier, random) for _ in range(1000) for tier in TIERS]
    for plan in plans:
        geometry.check(plan)
        assert len(plan.blocks) in geometry.block_counts(plan.insertion_position)
    assert len({(plan.insertion_position, len(plan.blocks)) for plan in plans}) == 15
    count = Counter(plan.top_k for plan in plans)
    assert len(count) == 5 and min(count.values()) > 0.8 * 3000 / len(count)
    assert [plan.tier for plan in plans[:3]] == list(TIERS)
    skipped = Counter(block for plan in plans for block in range(16) if block not in plan.blocks)
    assert set(skipped) == set(range(1, 16)), "every block but the first is skipped at times"


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_sampled_plans_of_stage_have_its_tiers(count: int, tier: Tier) -> None:
    run = learning()
    stage = VqaStageConfig(share=1.0, tier=tier, drawn_plans=count)
    sampled = [run._sample_plans(stage, np.random.default_rng(seed)) for seed in range(100)]
    assert {len(plans) for plans in sampled} == {count}
    all_items = [plan for plans in sampled for plan in plans]
    assert {plan.tier for plan in all_items} == (set(TIERS[: TIERS.index(tier) + 1]) if count else set())
    smallest = [plan for plan in all_items if plan.top_k == 1 and len(plan.blocks) == 3]
    assert 0.25 * len(all_items) <= len(smallest) <= 0.6 * len(all_items)


def test_get_stage_follows_shares() -> None:
    shares = {"low": 2.0, "medium": 1.0, "high": 1.0}
    stages = [{"share": share, "tier": tier, "drawn_plans": 0} for tier, share in shares.items()]
    run = learning(**{"train.stages": stages, "train.steps": 8})
    assert [run.get_stage(step).tier for step in range(3, 11)] == [
        *["low"] * 4,
        *["medium"] * 2,
        *["high"] * 2,
    ]
    crops = []
    for _ in range(11):
        batch = run._get_batch(run.step)
        crops.append(batch.crops.shape[1])
        run.train_step()
    assert crops == [14, 14, 14, 1, 1, 1, 1, 5, 5, 14, 14]


def test_stage_overrides_batch_size() -> None:
    stages = [{"share": 0.5, "tier": "low"}, {"share": 0.5, "tier": "high", "batch_size": 2}]
    run = learning(**{"train.stages": stages, "train.steps": 4})
    assert [len(run._get_batch(step).crops) for step in range(3, 7)] == [4, 4, 2, 2]
    for _ in range(7):
        run.train_step()


def test_vision_part_trains_on_sampled_crops() -> None:
    run = learning(**{"train.vision_crops": [1, 1, 2]})
    features, see = [], run.stack.encode_crops
    run.stack.encode_crops = lambda crops: (features.append(crops.shape[1]), see(crops))[1]  # type: ignore[method-assign]
    for _ in range(4):
        run.train_step()
    assert features == [4, 4, 4, 1]


def test_vision_part_changes_vision_tower_only() -> None:
    run = learning()
    before = weights(run)
    for _ in range(3):
        numbers = run.train_step()
        assert {"naming", "named_low", "named_high", "rate_vision"} <= set(numbers) and "full" not in numbers
    changed = {name for name, value in run.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all("vision_tower" in name for name in changed)
    numbers = run.train_step()
    assert {"full", "plans", "naming", "cells", "contents", "locations", "balance", "accuracy"} <= set(
        numbers
    ) and numbers["rate_text"] > 0.0
    run.train_step()
    still = {name for name, value in run.model.state_dict().items() if torch.equal(value, before[name])}
    # Nothing looks at the norm behind the vision tower's last block.
    assert all("post_layernorm" in name for name in still)


def test_gradients_equal_those_of_total_loss() -> None:
    """Plans go backward one by one; here they do at once."""
    run = learning(**{"train.vision_steps": 0})
    batch = run.data.make_train_batch(0)
    stage = VqaStageConfig(share=1.0, tier="high", drawn_plans=2)
    plans = run._sample_plans(stage, np.random.default_rng(0))
    torch.manual_seed(0)
    losses = run._train_answers(batch, "high", plans, train_vision=True)
    gradients = {
        name: value.grad.clone() for name, value in run.model.named_parameters() if value.grad is not None
    }
    run.model.zero_grad()

    config, stack = run.config.train, run.stack
    mask, expected = batch.answer_mask, batch.text[:, 1:]
    features = stack.encode_crops(batch.crops)
    vision, balance = stack.project(features), []
    full = stack.forward_plan(run.full, vision, batch.text, balance)[mask]
    torch.manual_seed(0)
    quizzed = run.grounding.append_quiz(batch.text)
    hidden, rotary = stack.embed(vision, quizzed, "high")
    # Names behind the text are tokens, too, which experts share.
    balance = balance[2:]
    hidden = stack.run_blocks(get_block_steps(run.full, 3)[:2], hidden, rotary, balance)
    ground = run.grounding(hidden, quizzed, batch.prompts, batch.cells).sum()
    naming = torch.stack(
        [
            functional.cross_entropy(level.flatten(0, 1), batch.cells.flatten())
            for level in run.naming(features)[0]
        ]
    ).mean()
    loss = functional.cross_entropy(full, expected[mask]) + 0.01 * sum(balance) / 4 + 0.3 * naming
    loss = loss + 0.5 * ground
    for plan in plans:
        student = stack.forward_plan(plan, vision, batch.text)[mask]
        chances = full.detach().softmax(-1)
        difference = (chances * (chances.log() - student.log_softmax(-1))).sum(-1).mean()
        loss = (
            loss
            + config.distill * difference
            + (1 - config.distill) * functional.cross_entropy(student, expected[mask])
        )
    loss.backward()
    for name, value in run.model.named_parameters():
        if value.grad is not None:
            torch.testing.assert_close(gradients[name], value.grad, rtol=1e-3, atol=1e-6)
    assert set(gradients) == {name for name, value in run.model.named_parameters() if value.grad is not None}
    assert float(losses["loss"].detach()) == pytest.approx(float(loss.detach()), rel=1e-4)


def test_load_state_dict_resumes_exactly() -> None:
    first, two = learning(), learning(**{"train.seed": 0})
    for _ in range(4):
        first.train_step()
    state = {name: value for name, value in first.state_dict().items()}
    two.load_state_dict(torch_copy(state))
    for _ in range(4):
        assert first.train_step() == two.train_step()
    torch.testing.assert_close(weights(first), weights(two), rtol=0.0, atol=0.0)
    torch.testing.assert_close(first.average.state_dict(), two.average.state_dict(), rtol=0.0, atol=0.0)


def torch_copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: torch_copy(tensor) for name, tensor in value.items()}
    return [torch_copy(tensor) for tensor in value] if isinstance(value, list) else value


def test_average_follows_model() -> None:
    run = learning(**{"train.ema": 0.5, "train.vision_steps": 0})
    expected = {name: value.clone() for name, value in run.average.named_parameters()}
    for step in range(1, 4):
        run.train_step()
        decay = min(0.5, step / (step + 10))
        for name, value in run.model.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * value.detach()
    for name, value in run.average.named_parameters():
        torch.testing.assert_close(value.detach(), expected[name])


def test_rates_rise_and_fall_in_each_part() -> None:
    run = learning(**{"train.vision_steps": 100, "train.steps": 150, "train.warm_up": 0.2})
    rates = []
    for step in range(run.num_steps):
        run.step = step
        rates.append(run._set_rates())
    vision, text = ([item[f"rate_{name}"] for item in rates] for name in ("vision", "text"))
    assert text[:100] == [0.0] * 100
    for part in (vision[:100], text[100:]):
        top = int(np.argmax(part))
        assert 0 < top < len(part) / 2 and part[-1] < 0.05 * part[top]
        assert part[0] == pytest.approx(part[top] / (0.2 * len(part)))
    assert max(text) == pytest.approx(1e-3)
    tiers = [run.get_stage(step).tier for step in range(100, 250)]
    scales = [0.3 if tier == "high" else 0.0 for tier in tiers]
    assert vision[100:] == pytest.approx(
        [scale * rate for scale, rate in zip(scales, text[100:], strict=True)]
    )


def test_vision_tower_is_frozen_below_highest_tier() -> None:
    run = learning(**{"train.vision_steps": 0})
    while run.step < run.num_steps:
        rests, before = run.get_stage(run.step).tier != "high", weights(run)
        run.train_step()
        changed = {
            name for name, value in run.model.state_dict().items() if not torch.equal(value, before[name])
        }
        assert any("language_model" in name for name in changed)
        assert any("vision_tower" in name for name in changed) != rests


@pytest.mark.parametrize("step", [1, 5])
def test_train_step_with_non_finite_loss_raises_and_keeps_weights(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = learning()
    for _ in range(step - 1):
        run.train_step()
    before = weights(run)
    see = run.stack.encode_crops
    monkeypatch.setattr(run.stack, "encode_crops", lambda crops: see(crops) * float("nan"))
    with pytest.raises(RunError, match=f"failed in step {step}: loss is nan"):
        run.train_step()
    torch.testing.assert_close(weights(run), before, rtol=0.0, atol=0.0)
    assert run.step == step - 1


@pytest.mark.slow
def test_small_model_learns_to_answer() -> None:
    """Four noises on a grid of two by two: which is where, by the full plan and by the least ones."""
    run = learning(
        **{
            "train.shares": {"at": 1.0}, "test_shares": {"at": 1.0}, "train.vision_steps": 150,
            "train.steps": 450, "train.batch_size": 32, "train.rate": 5e-3, "train.vision_rate": 5e-3,
            "train.eval_samples": 128, "train.augment": 0.0, "train.mix": 0.0, "train.ema": 0.9,
            "scene.cell_px": 16, "scene.item": [0.9, 1.0], "model.width": 32, "model.vision_width": 32,
        }
    )  # fmt: skip
    for _ in range(run.num_steps):
        run.train_step()
    results = run.evaluate()
    assert results is not None
    assert set(results) == {"full", "smallest_low", "smallest_medium", "smallest_high"}
    assert results["full"] > 0.6, results

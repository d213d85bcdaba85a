"""Steps of a training: which plans run, what gets gradients, and that all of it learns."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

pytest.importorskip("transformers")

from sparseflow.adaptive.grid_vqa.dataset import Data
from sparseflow.adaptive.grid_vqa.learning import Learning, draw_plan
from sparseflow.adaptive.plan import TIERS, Geometry
from sparseflow.core.training.ranks import Ranks
from sparseflow.errors import RunError
from tests.adaptive.grid_vqa.little import bank, quick

ALONE = Ranks(rank=0, size=1, device=torch.device("cpu"))


def learning(**changes: Any) -> Learning:
    settings = quick(**changes)
    return Learning(settings, Data(settings, bank=bank()), ALONE)


def weights(run: Learning) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in run.model.state_dict().items()}


def test_drawn_plans_cover_what_there_is() -> None:
    geometry = Geometry(depth=16, top_k=8)
    random = np.random.default_rng(0)
    plans = [draw_plan(geometry, random) for _ in range(3000)]
    for plan in plans:
        geometry.check(plan)
        assert len(plan.blocks) in geometry.totals(plan.insertion_position)
    assert len({(plan.insertion_position, len(plan.blocks)) for plan in plans}) == 15
    for count in (Counter(plan.tier for plan in plans), Counter(plan.top_k for plan in plans)):
        assert min(count.values()) > 0.8 * 3000 / len(count)
    skipped = Counter(block for plan in plans for block in range(16) if block not in plan.blocks)
    assert set(skipped) == set(range(1, 16)), "every block but the first is skipped at times"


@pytest.mark.parametrize("count", [0, 1, 3])
def test_one_drawn_plan_is_the_least_of_a_tier(count: int) -> None:
    run = learning(**{"train.drawn_plans": count})
    tiers = set()
    for seed in range(20):
        plans = run._plans(np.random.default_rng(seed))
        assert len(plans) == count
        if count:
            assert plans[0].top_k == 1 and len(plans[0].blocks) == 3
            tiers.add(plans[0].tier)
    assert not count or tiers == set(TIERS)


def test_the_vision_tower_learns_alone_at_first() -> None:
    run = learning()
    before = weights(run)
    for _ in range(3):
        numbers = run.advance()
        assert {"naming", "named_low", "named_high", "rate_vision"} <= set(numbers) and "full" not in numbers
    changed = {name for name, each in run.model.state_dict().items() if not torch.equal(each, before[name])}
    assert changed and all("vision_tower" in name for name in changed)
    numbers = run.advance()
    assert {"full", "drawn", "naming", "balance", "right"} <= set(numbers) and numbers["rate_text"] > 0.0
    run.advance()
    still = {name for name, each in run.model.state_dict().items() if torch.equal(each, before[name])}
    # Nothing looks at the norm behind the vision tower's last block.
    assert all("post_layernorm" in name for name in still)


def test_gradients_are_those_of_the_whole_loss() -> None:
    """Plans go backward one by one; here they do at once."""
    run = learning(**{"train.vision_steps": 0})
    batch = run.data.train(0)
    plans = run._plans(np.random.default_rng(0))
    found = run._answer(batch, plans)
    gradients = {
        name: each.grad.clone() for name, each in run.model.named_parameters() if each.grad is not None
    }
    run.model.zero_grad()

    told, stack = run.settings.train, run.stack
    where, wanted = batch.answered, batch.text[:, 1:]
    seen = stack.see(batch.crops)
    vision, balance = stack.project(seen), []
    full = stack.answers(run.full, vision, batch.text, balance)[where]
    naming = torch.stack(
        [functional.cross_entropy(level.flatten(0, 1), batch.cells.flatten()) for level in run.naming(seen)]
    ).mean()
    loss = functional.cross_entropy(full, wanted[where]) + 0.01 * sum(balance) / 4 + 0.3 * naming
    for plan in plans:
        student = stack.answers(plan, vision, batch.text)[where]
        chances = full.detach().softmax(-1)
        apart = (chances * (chances.log() - student.log_softmax(-1))).sum(-1).mean()
        loss = (
            loss
            + told.distill * apart
            + (1 - told.distill) * functional.cross_entropy(student, wanted[where])
        )
    loss.backward()
    for name, each in run.model.named_parameters():
        if each.grad is not None:
            torch.testing.assert_close(gradients[name], each.grad, rtol=1e-3, atol=1e-6)
    assert set(gradients) == {name for name, each in run.model.named_parameters() if each.grad is not None}
    assert float(found["loss"].detach()) == pytest.approx(float(loss.detach()), rel=1e-4)


def test_a_state_says_all() -> None:
    one, two = learning(), learning(**{"train.seed": 0})
    for _ in range(4):
        one.advance()
    state = {name: each for name, each in one.state().items()}
    two.restore(torch_copy(state))
    for _ in range(4):
        assert one.advance() == two.advance()
    torch.testing.assert_close(weights(one), weights(two), rtol=0.0, atol=0.0)
    torch.testing.assert_close(one.average.state_dict(), two.average.state_dict(), rtol=0.0, atol=0.0)


def torch_copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: torch_copy(each) for name, each in value.items()}
    return [torch_copy(each) for each in value] if isinstance(value, list) else value


def test_the_average_follows_the_model() -> None:
    run = learning(**{"train.ema": 0.5, "train.vision_steps": 0})
    wanted = {name: each.clone() for name, each in run.average.named_parameters()}
    for step in range(1, 4):
        run.advance()
        decay = min(0.5, step / (step + 10))
        for name, each in run.model.named_parameters():
            wanted[name] = decay * wanted[name] + (1 - decay) * each.detach()
    for name, each in run.average.named_parameters():
        torch.testing.assert_close(each.detach(), wanted[name])


def test_rates_rise_and_fall_in_each_part() -> None:
    run = learning(**{"train.vision_steps": 20, "train.steps": 30, "train.warm_up": 0.2})
    rates = []
    for step in range(run.steps):
        run.step = step
        rates.append(run._set_rates())
    vision, text = ([each[f"rate_{name}"] for each in rates] for name in ("vision", "text"))
    assert text[:20] == [0.0] * 20
    for part in (vision[:20], vision[20:], text[20:]):
        top = int(np.argmax(part))
        assert 0 < top < len(part) / 2 and part[0] < 0.05 * part[top] and part[-1] < 0.05 * part[top]
    assert max(text) == pytest.approx(1e-3) and max(vision[20:]) == pytest.approx(3e-4)


@pytest.mark.parametrize("step", [1, 5])
def test_a_loss_that_is_not_finite_leaves_the_model_as_it_was(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = learning()
    for _ in range(step - 1):
        run.advance()
    before = weights(run)
    see = run.stack.see
    monkeypatch.setattr(run.stack, "see", lambda crops: see(crops) * float("nan"))
    with pytest.raises(RunError, match=f"failed in step {step}: its loss is nan"):
        run.advance()
    torch.testing.assert_close(weights(run), before, rtol=0.0, atol=0.0)
    assert run.step == step - 1


@pytest.mark.slow
def test_a_small_model_learns_to_look() -> None:
    """Four noises on a grid of two by two: which is where, by the full plan and by the least ones."""
    run = learning(
        **{
            "train.shares": {"at": 1.0}, "test_shares": {"at": 1.0}, "train.vision_steps": 150,
            "train.steps": 450, "train.batch_size": 32, "train.rate": 5e-3, "train.vision_rate": 5e-3,
            "train.judge_samples": 128, "train.augment": 0.0, "train.mix": 0.0, "train.ema": 0.9,
            "scene.cell_px": 16, "scene.item": [0.9, 1.0], "model.width": 32, "model.vision_width": 32,
        }
    )  # fmt: skip
    for _ in range(run.steps):
        run.advance()
    found = run.judge()
    assert set(found) == {"full", "least_low", "least_medium", "least_high"}
    assert found["full"] > 0.6, found

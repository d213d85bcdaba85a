"""Gates: gradients against differences, what closes, and what the drive does to a network that learns."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sparseflow.pruning import ASTConfig, VideoViT
from sparseflow.pruning.model.gates import UnitGates, drive, soft_mask
from sparseflow.pruning.selectors.tokens import best
from tests.pruning.models import awake, clips, tiny

ALL = {"head": 0.5, "channel": 0.25, "block": 0.75}


def made(keep: dict[str, float], **others: Any) -> UnitGates:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = ASTConfig(keep=keep, **others)
        return UnitGates(config, depth=3, heads=4, channels=6).double()


def test_first_gates_are_at_their_value_and_open() -> None:
    gates = made(ALL, gate_init=0.8)
    assert {name: tuple(each.shape) for name, each in gates.logits.items()} == {
        "head": (3, 4), "channel": (3, 6), "block": (3,),
    }  # fmt: skip
    for hard in (False, True):
        for gate in gates.values(hard=hard).values():
            assert (gate - 0.8).abs().max() < 0.05
    assert not any(gates.sparsity().values())
    assert set(gates.sparsity()) == set(ALL)
    assert set(made({"head": 0.5}).logits) == set(made({"head": 0.5}).sparsity()) == {"head"}


def test_hard_gates_below_the_threshold_are_zero_and_others_keep_their_value() -> None:
    gates = made({"head": 0.5, "block": 0.5}, threshold=0.4)
    with torch.no_grad():
        gates.logits["head"].copy_(torch.tensor([[-1, 1, -2, 3], [-1, -3, -2, -4], [1, 1, 1, 1]]))
        gates.logits["block"].copy_(torch.tensor([-1.0, -1.0, 2.0]))
    hard, soft = gates.values(hard=True), gates.values(hard=False)
    # In the second block all are below; the widest stays.
    open_heads = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    assert torch.equal(hard["head"] != 0.0, open_heads)
    assert torch.equal(hard["head"][open_heads], soft["head"][open_heads])
    # Blocks may all close.
    assert (hard["block"] != 0.0).tolist() == [False, False, True]
    found = gates.sparsity()
    assert found["head"] == pytest.approx(5 / 12) and found["block"] == pytest.approx(2 / 3)


def test_the_threshold_itself_is_open() -> None:
    gates = made({"block": 0.5}, threshold=0.5)
    with torch.no_grad():
        gates.logits["block"].copy_(torch.tensor([0.0, -1e-6, 1e-6]))
    assert (gates.values(hard=True)["block"] != 0.0).tolist() == [True, False, True]


def test_gradients_pass_through_closed_gates_as_through_open_ones() -> None:
    gates = made({"head": 0.5, "block": 0.5}, threshold=0.4)
    with torch.no_grad():
        gates.logits["block"].copy_(torch.tensor([-1.0, -2.0, 2.0]))
    (found,) = torch.autograd.grad(gates.values(hard=True)["block"].sum(), [gates.logits["block"]])
    (soft,) = torch.autograd.grad(gates.values(hard=False)["block"].sum(), [gates.logits["block"]])
    assert torch.equal(found, soft) and (found > 0.0).all()


def test_hard_gates_in_training_give_what_is_judged() -> None:
    model = awake({"keep": {"block": 0.5, "head": 0.5}, "stages": {}}).train()
    seen = []
    for model.hard_gates in (False, True):
        seen.append(model(clips(model)))
    assert not torch.allclose(*seen)
    assert torch.equal(seen[1], model.eval()(clips(model)))


@pytest.mark.parametrize("keep", [{"head": 0.3}, ALL])
def test_the_drive_is_differentiable_in_logits(keep: dict[str, float]) -> None:
    gates = made(keep, strength=3.0)
    names, values = zip(*gates.logits.items(), strict=True)

    loss = drive(gates, {}, gates.config)
    gradients = torch.autograd.grad(loss, values)
    for name, each, gradient in zip(names, values, gradients, strict=True):
        gate = torch.sigmoid(each)
        widest = sorted(gate.flatten().tolist())[-round(keep[name] * gate.numel()) :]
        target = torch.tensor([float(g in widest) for g in gate.flatten().tolist()]).view(gate.shape)
        by_hand = 3.0 * 2.0 * (gate - target) * gate * (1.0 - gate) / gate.numel()
        torch.testing.assert_close(gradient, by_hand)
        flat = each.detach().view(-1)
        for at in (0, len(flat) - 1):
            moved = []
            for step in (1e-6, -1e-6):
                flat[at] += step
                moved.append(drive(gates, {}, gates.config).item())
                flat[at] -= step
            assert gradient.view(-1)[at].item() == pytest.approx((moved[0] - moved[1]) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("kept", [1, 3, 6])
def test_soft_masks_are_differentiable_in_scores_and_their_threshold(kept: int) -> None:
    g = torch.Generator().manual_seed(0)
    score = torch.randn(2, 6, generator=g, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda score: soft_mask(score, kept, 0.3), (score,))
    weight, bias = soft_mask(score, kept, 0.3)
    assert ((weight >= 0.5).sum(1) == kept).all()
    torch.testing.assert_close(weight.log(), bias)
    # Moving all scores moves the threshold, too: only differences count.
    torch.testing.assert_close(soft_mask(score + 5.0, kept, 0.3)[0], weight)
    (gradient,) = torch.autograd.grad(weight.square().sum(), score)
    torch.testing.assert_close(gradient.sum(1), torch.zeros(2, dtype=torch.float64))


def test_the_threshold_is_halfway_to_the_next() -> None:
    score = torch.tensor([[1.0, 5.0, 2.0, 4.0]], dtype=torch.float64)
    for kept, threshold in ((1, 4.5), (2, 3.0), (3, 1.5)):
        torch.testing.assert_close(soft_mask(score, kept, 0.7)[0], torch.sigmoid((score - threshold) / 0.7))
    # Where no next is left, all have the upper half.
    for each in (score, score.masked_fill(score == 5.0, -torch.inf)):
        left = each.isfinite()
        weight, _ = soft_mask(each, int(left.sum()), 0.7)
        assert torch.equal(weight > 0.5, left)


@pytest.mark.parametrize("kept", range(1, 10))
def test_a_narrow_step_is_the_hard_mask(kept: int) -> None:
    score = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    hard = torch.zeros_like(score).scatter(1, best(score, kept), 1.0)
    weight, bias = soft_mask(score, kept, 1e-6)
    assert torch.equal(weight, hard) and torch.equal(bias.exp(), hard)


def test_soft_masks_leave_what_is_gone() -> None:
    score = torch.tensor([[1.0, -torch.inf, 3.0, 2.0]], requires_grad=True)
    weight, bias = soft_mask(score, 2, 0.5)
    assert weight[0, 1] == 0.0 and bias[0, 1] == -torch.inf
    (gradient,) = torch.autograd.grad(weight.sum(), score)
    assert gradient.isfinite().all() and gradient[0, 1] == 0.0


def test_at_its_target_the_drive_is_zero() -> None:
    gates = made({"head": 0.5, "channel": 0.25})
    with torch.no_grad():
        for each in gates.logits.values():
            each.fill_(-50.0)
        gates.logits["head"][:, 1:3] = gates.logits["channel"][0, :5] = 50.0  # 6 of 12, and 4.5 of 18 is 4.
    assert gates.loss().item() == pytest.approx(1.0 / 18.0)
    with torch.no_grad():
        gates.logits["channel"][0, 4] = -50.0
    config = ASTConfig(keep={"head": 0.5, "channel": 0.25}, stages={0: 0.75, 2: 0.5}, strength=7.0)
    masks = {0: torch.tensor([[1.0, 1.0, 0.5, 0.5]]), 2: torch.tensor([[1.0, 0.0, 1.0, 0.0]])}
    assert drive(gates, masks, config).item() == pytest.approx(0.0, abs=1e-12)
    assert drive(None, {}, config).item() == 0.0
    masks[2] = masks[2] * 0.5
    assert drive(gates, masks, config).item() == pytest.approx(7.0 * 0.25**2)


def test_strength_is_a_factor() -> None:
    masks = {0: torch.tensor([[1.0, 0.2]])}
    weak, strong = (
        drive(made(ALL), masks, ASTConfig(keep=ALL, stages={0: 0.5}, strength=s)) for s in (1.0, 10.0)
    )
    assert strong.item() == pytest.approx(10.0 * weak.item())
    assert drive(made(ALL), masks, ASTConfig(keep=ALL, stages={0: 0.5}, strength=0.0)).item() == 0.0


def test_gradients_of_the_whole_loss_against_differences() -> None:
    model = awake({"stages": {0: 0.5}, "keep": ALL, "strength": 0.7}).double().train()
    x, y = clips(model, 3), torch.tensor([0, 3, 1])

    def loss() -> Tensor:
        logits, info = model(x, return_intermediate=True)
        return functional.cross_entropy(logits, y) + info["ast_stats"]["L_AST"]

    assert model.gates is not None
    logits = dict(model.gates.logits)
    gradients = torch.autograd.grad(loss(), list(logits.values()))
    for (name, each), gradient in zip(logits.items(), gradients, strict=True):
        flat = each.detach().view(-1)
        assert gradient.abs().min() > 0.0, name
        for at in (0, len(flat) // 2, len(flat) - 1):
            moved = []
            for step in (1e-6, -1e-6):
                flat[at] += step
                with torch.no_grad():
                    moved.append(loss().item())
                flat[at] -= step
            expected = (moved[0] - moved[1]) / 2e-6
            assert gradient.view(-1)[at].item() == pytest.approx(expected, rel=1e-5, abs=1e-9), (name, at)


STRENGTHS = (0.0, 0.1, 1.0, 10.0, 100.0)
KEEPS = (0.3, 0.5, 0.75)


@cache
def trained(strength: float, keep: float) -> VideoViT:
    """A small network that learned random clips by heart."""
    ast = {"stages": {}, "keep": {"head": keep, "channel": keep}, "strength": strength}
    model = tiny(ast, depth=2, img_size=8, num_frames=2, num_classes=3).train()
    x, y = clips(model, 12), torch.arange(12) % 3
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(36):
        logits, info = model(x, return_intermediate=True)
        loss = functional.cross_entropy(logits, y) + info["ast_stats"]["L_AST"]
        adam.zero_grad()
        loss.backward()
        adam.step()
    return model


@pytest.mark.parametrize("keep", KEEPS)
def test_a_stronger_drive_never_closes_less(keep: float) -> None:
    found: dict[str, list[float]] = {"sparsity_head": [], "sparsity_ch": []}
    for strength in STRENGTHS:
        model = trained(strength, keep)
        _, info = model(clips(model), return_intermediate=True)
        for name, each in found.items():
            each.append(info["ast_stats"][name].item())
    for name, each in found.items():
        assert each == sorted(each) and each[0] == 0.0 < each[-1], name


@pytest.mark.parametrize("strength", [10.0, 100.0])
@pytest.mark.parametrize("keep", KEEPS)
def test_a_strong_drive_closes_the_share_that_is_asked_for(keep: float, strength: float) -> None:
    model = trained(strength, keep)
    assert model.gates is not None
    gates, found = model.gates.values(hard=False), model.gates.sparsity()
    for grain, gate in gates.items():
        left = round(keep * gate.numel())
        assert int((gate >= 0.5).sum()) == left
        # Away from the threshold, to either side: noise does not decide.
        assert ((gate < 0.4) | (gate > 0.9)).all()
        forced = int((gate.amax(1) < 0.5).sum())
        assert found[grain].item() == pytest.approx(1.0 - (left + forced) / gate.numel())
        assert forced <= int(grain == "head")
    assert found["head"].item() == pytest.approx(1.0 - keep, abs=1 / 8 + 1e-6)
    assert found["channel"].item() == pytest.approx(1.0 - keep, abs=1 / 64)

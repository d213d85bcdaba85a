"""Gates: gradients against finite differences, hard gates, and the effect of the loss."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sparseflow.pruning import ASTConfig, VideoViT
from sparseflow.pruning.model.gates import UnitGates, compute_sparsity_loss, make_soft_mask
from sparseflow.pruning.selectors.tokens import select_top_tokens
from tests.pruning.models import awake, clips, tiny

ALL = {"head": 0.5, "channel": 0.25, "block": 0.75}


def make_gates(keep: dict[str, float], **arguments: Any) -> UnitGates:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = ASTConfig(keep=keep, **arguments)
        return UnitGates(config, depth=3, heads=4, channels=6).double()


def test_initial_gates_are_open() -> None:
    gates = make_gates(ALL, gate_init=0.8)
    assert {name: tuple(logits.shape) for name, logits in gates.logits.items()} == {
        "head": (3, 4), "channel": (3, 6), "block": (3,),
    }  # fmt: skip
    for hard in (False, True):
        for gate_values in gates.compute_gates(hard=hard).values():
            assert (gate_values - 0.8).abs().max() < 0.05
    assert not any(gates.compute_sparsity().values())
    assert set(gates.compute_sparsity()) == set(ALL)
    assert (
        set(make_gates({"head": 0.5}).logits) == set(make_gates({"head": 0.5}).compute_sparsity()) == {"head"}
    )


def test_hard_gates_below_the_threshold_are_zero_and_others_keep_their_value() -> None:
    gates = make_gates({"head": 0.5, "block": 0.5}, threshold=0.4)
    with torch.no_grad():
        gates.logits["head"].copy_(torch.tensor([[-1, 1, -2, 3], [-1, -3, -2, -4], [1, 1, 1, 1]]))
        gates.logits["block"].copy_(torch.tensor([-1.0, -1.0, 2.0]))
    hard, soft = gates.compute_gates(hard=True), gates.compute_gates(hard=False)
    # All heads of the second block are below the threshold; the widest stays open.
    open_heads = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    assert torch.equal(hard["head"] != 0.0, open_heads)
    assert torch.equal(hard["head"][open_heads], soft["head"][open_heads])
    # Blocks may all close.
    assert (hard["block"] != 0.0).tolist() == [False, False, True]
    hard_gates = gates.compute_sparsity()
    assert hard_gates["head"] == pytest.approx(5 / 12) and hard_gates["block"] == pytest.approx(2 / 3)


def test_gate_at_threshold_is_open() -> None:
    gates = make_gates({"block": 0.5}, threshold=0.5)
    with torch.no_grad():
        gates.logits["block"].copy_(torch.tensor([0.0, -1e-6, 1e-6]))
    assert (gates.compute_gates(hard=True)["block"] != 0.0).tolist() == [True, False, True]


def test_gradients_pass_through_closed_gates_as_through_open_ones() -> None:
    gates = make_gates({"head": 0.5, "block": 0.5}, threshold=0.4)
    with torch.no_grad():
        gates.logits["block"].copy_(torch.tensor([-1.0, -2.0, 2.0]))
    (hard_gates,) = torch.autograd.grad(
        gates.compute_gates(hard=True)["block"].sum(), [gates.logits["block"]]
    )
    (soft,) = torch.autograd.grad(gates.compute_gates(hard=False)["block"].sum(), [gates.logits["block"]])
    assert torch.equal(hard_gates, soft) and (hard_gates > 0.0).all()


def test_hard_gates_in_training_match_evaluation() -> None:
    model = awake({"keep": {"block": 0.5, "head": 0.5}, "stages": {}}).train()
    block_outputs = []
    for model.hard_gates in (False, True):
        block_outputs.append(model(clips(model)))
    assert not torch.allclose(*block_outputs)
    assert torch.equal(block_outputs[1], model.eval()(clips(model)))


@pytest.mark.parametrize("keep", [{"head": 0.3}, ALL])
def test_gate_loss_is_differentiable_in_logits(keep: dict[str, float]) -> None:
    gates = make_gates(keep, strength=3.0)
    names, values = zip(*gates.logits.items(), strict=True)

    loss = compute_sparsity_loss(gates, {}, gates.config)
    gradients = torch.autograd.grad(loss, values)
    for name, logits, gradient in zip(names, values, gradients, strict=True):
        gate_values = torch.sigmoid(logits)
        widest = sorted(gate_values.flatten().tolist())[-round(keep[name] * gate_values.numel()) :]
        target = torch.tensor([float(g in widest) for g in gate_values.flatten().tolist()]).view(
            gate_values.shape
        )
        by_hand = 3.0 * 2.0 * (gate_values - target) * gate_values * (1.0 - gate_values) / gate_values.numel()
        torch.testing.assert_close(gradient, by_hand)
        flat = logits.detach().view(-1)
        for index in (0, len(flat) - 1):
            moved = []
            for step in (1e-6, -1e-6):
                flat[index] += step
                moved.append(compute_sparsity_loss(gates, {}, gates.config).item())
                flat[index] -= step
            assert gradient.view(-1)[index].item() == pytest.approx((moved[0] - moved[1]) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("retained", [1, 3, 6])
def test_soft_mask_is_differentiable_in_scores(retained: int) -> None:
    g = torch.Generator().manual_seed(0)
    score = torch.randn(2, 6, generator=g, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda score: make_soft_mask(score, retained, 0.3), (score,))
    weight, bias = make_soft_mask(score, retained, 0.3)
    assert ((weight >= 0.5).sum(1) == retained).all()
    torch.testing.assert_close(weight.log(), bias)
    # Shifting all scores shifts the threshold, too.
    torch.testing.assert_close(make_soft_mask(score + 5.0, retained, 0.3)[0], weight)
    (gradient,) = torch.autograd.grad(weight.square().sum(), score)
    torch.testing.assert_close(gradient.sum(1), torch.zeros(2, dtype=torch.float64))


def test_soft_mask_threshold_is_halfway_to_next_score() -> None:
    score = torch.tensor([[1.0, 5.0, 2.0, 4.0]], dtype=torch.float64)
    for retained, threshold in ((1, 4.5), (2, 3.0), (3, 1.5)):
        torch.testing.assert_close(
            make_soft_mask(score, retained, 0.7)[0], torch.sigmoid((score - threshold) / 0.7)
        )
    # Without a next score all weights are above 0.5.
    for logits in (score, score.masked_fill(score == 5.0, -torch.inf)):
        open_share = logits.isfinite()
        weight, _ = make_soft_mask(logits, int(open_share.sum()), 0.7)
        assert torch.equal(weight > 0.5, open_share)


@pytest.mark.parametrize("retained", range(1, 10))
def test_soft_mask_with_small_softness_equals_hard_mask(retained: int) -> None:
    score = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    hard = torch.zeros_like(score).scatter(1, select_top_tokens(score, retained), 1.0)
    weight, bias = make_soft_mask(score, retained, 1e-6)
    assert torch.equal(weight, hard) and torch.equal(bias.exp(), hard)


def test_soft_mask_keeps_dropped_tokens_at_zero() -> None:
    score = torch.tensor([[1.0, -torch.inf, 3.0, 2.0]], requires_grad=True)
    weight, bias = make_soft_mask(score, 2, 0.5)
    assert weight[0, 1] == 0.0 and bias[0, 1] == -torch.inf
    (gradient,) = torch.autograd.grad(weight.sum(), score)
    assert gradient.isfinite().all() and gradient[0, 1] == 0.0


def test_gate_loss_at_target_is_zero() -> None:
    gates = make_gates({"head": 0.5, "channel": 0.25})
    with torch.no_grad():
        for logits in gates.logits.values():
            logits.fill_(-50.0)
        gates.logits["head"][:, 1:3] = gates.logits["channel"][0, :5] = 50.0  # 6 of 12, and 4.5 of 18 is 4.
    assert gates.loss().item() == pytest.approx(1.0 / 18.0)
    with torch.no_grad():
        gates.logits["channel"][0, 4] = -50.0
    config = ASTConfig(keep={"head": 0.5, "channel": 0.25}, stages={0: 0.75, 2: 0.5}, strength=7.0)
    masks = {0: torch.tensor([[1.0, 1.0, 0.5, 0.5]]), 2: torch.tensor([[1.0, 0.0, 1.0, 0.0]])}
    assert compute_sparsity_loss(gates, masks, config).item() == pytest.approx(0.0, abs=1e-12)
    assert compute_sparsity_loss(None, {}, config).item() == 0.0
    masks[2] = masks[2] * 0.5
    assert compute_sparsity_loss(gates, masks, config).item() == pytest.approx(7.0 * 0.25**2)


def test_strength_scales_the_loss() -> None:
    masks = {0: torch.tensor([[1.0, 0.2]])}
    weak, strong = (
        compute_sparsity_loss(make_gates(ALL), masks, ASTConfig(keep=ALL, stages={0: 0.5}, strength=s))
        for s in (1.0, 10.0)
    )
    assert strong.item() == pytest.approx(10.0 * weak.item())
    assert (
        compute_sparsity_loss(
            make_gates(ALL), masks, ASTConfig(keep=ALL, stages={0: 0.5}, strength=0.0)
        ).item()
        == 0.0
    )


def test_gradients_match_finite_differences() -> None:
    model = awake({"stages": {0: 0.5}, "keep": ALL, "strength": 0.7}).double().train()
    x, y = clips(model, 3), torch.tensor([0, 3, 1])

    def loss() -> Tensor:
        logits, info = model(x, return_intermediate=True)
        return functional.cross_entropy(logits, y) + info["ast_stats"]["L_AST"]

    assert model.gates is not None
    logits = dict(model.gates.logits)
    gradients = torch.autograd.grad(loss(), list(logits.values()))
    for (name, parameter), gradient in zip(logits.items(), gradients, strict=True):
        flat = parameter.detach().view(-1)
        assert gradient.abs().min() > 0.0, name
        for index in (0, len(flat) // 2, len(flat) - 1):
            moved = []
            for step in (1e-6, -1e-6):
                flat[index] += step
                with torch.no_grad():
                    moved.append(loss().item())
                flat[index] -= step
            expected = (moved[0] - moved[1]) / 2e-6
            assert gradient.view(-1)[index].item() == pytest.approx(expected, rel=1e-5, abs=1e-9), (
                name,
                index,
            )


STRENGTHS = (0.0, 1.0, 10.0, 100.0)
KEEPS = (0.3, 0.75)


@cache
def trained(strength: float, keep: float) -> VideoViT:
    """A small network that overfits random clips."""
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
def test_stronger_sparsity_loss_never_closes_fewer_gates(keep: float) -> None:
    hard_gates: dict[str, list[float]] = {"sparsity_head": [], "sparsity_ch": []}
    for strength in STRENGTHS:
        model = trained(strength, keep)
        _, info = model(clips(model), return_intermediate=True)
        for name, logits in hard_gates.items():
            logits.append(info["ast_stats"][name].item())
    for name, logits in hard_gates.items():
        assert logits == sorted(logits) and logits[0] == 0.0 < logits[-1], name


@pytest.mark.parametrize("strength", [10.0, 100.0])
@pytest.mark.parametrize("keep", KEEPS)
def test_strong_sparsity_loss_reaches_target_share(keep: float, strength: float) -> None:
    model = trained(strength, keep)
    assert model.gates is not None
    gates, hard_gates = model.gates.compute_gates(hard=False), model.gates.compute_sparsity()
    for grain, gate_values in gates.items():
        open_share = round(keep * gate_values.numel())
        assert int((gate_values >= 0.5).sum()) == open_share
        # All gates are far from the threshold.
        assert ((gate_values < 0.4) | (gate_values > 0.9)).all()
        forced = int((gate_values.amax(1) < 0.5).sum())
        assert hard_gates[grain].item() == pytest.approx(1.0 - (open_share + forced) / gate_values.numel())
        assert forced <= int(grain == "head")
    assert hard_gates["head"].item() == pytest.approx(1.0 - keep, abs=1 / 8 + 1e-6)
    assert hard_gates["channel"].item() == pytest.approx(1.0 - keep, abs=1 / 64)

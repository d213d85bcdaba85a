"""Tests of `codesign.hardware.slots`."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from torch import Tensor

from sparseflow.codesign.hardware.chips import ChipType
from sparseflow.codesign.hardware.slots import EMPTY, ChipSlotConfig, ExpectedSpecs
from sparseflow.errors import InputError
from tests.codesign.nodes import set_chips

SPECS = [field.name for field in fields(ExpectedSpecs)]


def chips(count: int = 3) -> list[ChipType]:
    """Types whose figures all differ, as large as real ones."""
    return [
        ChipType(
            name=f"type-{index}", peak_flops={"float32": 1e12 * 3**index}, peak_bw=1e10 * 5**index,
            mem_gb=2.0**index, area_mm2=10.0 + 7 * index, tdp_w=3.0 + 2 * index * index,
        )
        for index in range(count)
    ]  # fmt: skip


def figure(chip: ChipType, name: str) -> float:
    """A specification of a chip; FLOP/s at its fastest precision."""
    return max(chip.peak_flops.values()) if name == "peak_flops" else getattr(chip, name)


def leaning(logits: list[list[float]], **overrides: Any) -> ChipSlotConfig:
    """Slots with these logits."""
    config = ChipSlotConfig(chips(len(logits[0]) - 1), len(logits), **overrides)
    with torch.no_grad():
        config.logits.copy_(torch.tensor(logits))
    return config


def draw_slots(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_shapes_of_alpha_and_specs() -> None:
    config = ChipSlotConfig(chips(), 5)
    alpha, specs = config(draw_slots(0))
    assert config.logits.shape == alpha.shape == (5, 4) and alpha.dtype == torch.float32
    assert all(getattr(specs, name).shape == (5,) for name in SPECS)
    assert config.count_loss(alpha).shape == config.area_loss(alpha).shape == ()
    assert [name for name, _ in config.named_parameters()] == ["logits"]


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("tau", [0.01, 0.3, 1.0, 10.0])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_alpha_rows_sum_to_one(hard: bool, tau: float, seed: int | None) -> None:
    config = ChipSlotConfig(chips(), 40, tau=tau, hard=hard, initial_chip="type-1")
    alpha, _ = config(None if seed is None else draw_slots(seed))
    assert (alpha >= 0.0).all()
    torch.testing.assert_close(alpha.sum(-1), torch.ones(40))


@pytest.mark.parametrize("seed", range(3))
def test_hard_sample_is_one_hot(seed: int) -> None:
    config = ChipSlotConfig(chips(), 200, hard=True)
    alpha, _ = config(draw_slots(seed))
    assert set(alpha.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(alpha.sum(-1), torch.ones(200))


def test_hard_sample_is_argmax_of_soft_sample() -> None:
    hard, soft = ChipSlotConfig(chips(), 50, hard=True), ChipSlotConfig(chips(), 50, hard=False)
    for seed in (None, 0, 7):
        first, large = (config(None if seed is None else draw_slots(seed))[0] for config in (hard, soft))
        assert torch.equal(first.argmax(-1), large.argmax(-1))


def test_alpha_without_noise_is_softmax() -> None:
    logits = [[0.0, 1.0, 2.0, -1.0], [5.0, 0.0, 0.0, 0.0]]
    for tau in (0.5, 1.0, 4.0):
        alpha, _ = leaning(logits, hard=False, tau=tau)(None)
        torch.testing.assert_close(alpha, torch.softmax(torch.tensor(logits) / tau, -1))


def test_samples_are_deterministic_for_a_generator() -> None:
    config = ChipSlotConfig(chips(), 6, hard=False)
    before = torch.random.get_rng_state()
    first, second = config(draw_slots(3))[0], config(draw_slots(3))[0]
    assert torch.equal(first, second)
    assert not torch.equal(first, config(draw_slots(4))[0])
    same = draw_slots(3)
    assert torch.equal(config(same)[0], first) and not torch.equal(config(same)[0], first)
    assert torch.equal(torch.random.get_rng_state(), before)  # the global one is left alone


def test_slots_have_independent_noise() -> None:
    alpha, _ = ChipSlotConfig(chips(), 30, hard=False)(draw_slots(0))
    assert len(alpha.unique(dim=0)) == 30


@pytest.mark.parametrize("tau", [0.2, 1.0, 5.0])
def test_sample_frequencies_match_probabilities(tau: float) -> None:
    logits = [1.0, -0.5, 0.0, 2.0]
    # The largest of logits and Gumbel noise is drawn by softmax(logits), whatever the temperature.
    alpha, _ = leaning([logits] * 20_000, tau=tau)(draw_slots(1))
    expected = torch.softmax(torch.tensor(logits), -1)
    deviation = (expected * (1 - expected) / 20_000).sqrt()
    assert ((alpha.mean(0) - expected).abs() < 4.5 * deviation).all()


def test_lower_temperature_is_closer_to_one_hot() -> None:
    largest = [
        ChipSlotConfig(chips(), 200, tau=tau, hard=False)(draw_slots(2))[0].amax(-1).mean().item()
        for tau in (10.0, 1.0, 0.1, 0.001)
    ]
    assert largest == sorted(largest) and largest[0] < 0.4 and largest[-1] > 0.99


def test_samples_are_finite_at_extremes() -> None:
    for hard in (False, True):
        config = leaning([[1e4, -1e4, 0.0], [0.0, 0.0, 0.0]], tau=1e-6, hard=hard)
        alpha, specs = config(draw_slots(0))
        (alpha.sum() + config.area_loss(alpha)).backward()
        assert config.logits.grad is not None and torch.isfinite(config.logits.grad).all()
        assert torch.isfinite(alpha).all() and torch.isfinite(specs.peak_flops).all()


@pytest.mark.parametrize("extreme", [0.0, 1.0 - 2.0**-53])
def test_noise_of_extreme_uniforms_is_finite(extreme: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch, "rand", lambda size, *, dtype, **_: torch.full(tuple(size), extreme, dtype=dtype)
    )
    alpha, _ = ChipSlotConfig(chips(), 2, hard=False)(draw_slots(0))
    torch.testing.assert_close(alpha, torch.full((2, 4), 0.25))


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("seed", [None, 0])
def test_gradients_reach_all_logits(hard: bool, seed: int | None) -> None:
    config = ChipSlotConfig(chips(), 4, hard=hard)
    alpha, _ = config(None if seed is None else draw_slots(seed))
    for loss in (config.count_loss(alpha), config.area_loss(alpha), config.expected_specs(alpha).tdp_w.sum()):
        (gradient,) = torch.autograd.grad(loss, config.logits, retain_graph=True)
        assert (gradient != 0.0).all() and torch.isfinite(gradient).all()


@pytest.mark.parametrize("tau", [0.5, 2.0])
def test_hard_gradients_equal_soft_gradients(tau: float) -> None:
    cost = torch.tensor([[3.0, -1.0, 2.0, 0.5]] * 5)
    gradients = []
    for hard in (False, True):
        config = ChipSlotConfig(chips(), 5, tau=tau, hard=hard, initial_chip="type-0")
        (config(draw_slots(9))[0] * cost).sum().backward()
        gradients.append(config.logits.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_soft_gradients_match_finite_differences() -> None:
    def loss(logits: Tensor) -> Tensor:
        alpha = torch.func.functional_call(config, {"logits": logits}, (draw_slots(5),))[0]
        return config.area_loss(alpha) + 3.0 * config.count_loss(alpha)

    config = ChipSlotConfig(chips(), 2, hard=False, tau=0.7).double()
    assert torch.autograd.gradcheck(
        loss, (torch.randn(2, 4, generator=draw_slots(0)).double().requires_grad_(),)
    )


def test_gradient_descent_selects_cheaper_type() -> None:
    config = ChipSlotConfig(chips(2), 3, hard=True)
    generator = draw_slots(0)
    optimizer = torch.optim.Adam(config.parameters(), lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        alpha, _ = config(generator)
        (alpha @ torch.tensor([5.0, 1.0, 9.0])).sum().backward()
        optimizer.step()
    assert [chip.name if chip else None for chip in config.decode()] == ["type-1"] * 3


@given(
    st.lists(st.lists(st.floats(-8, 8, width=32), min_size=4, max_size=4), min_size=1, max_size=5),
    st.booleans(),
)
@budget(max_examples=30, deadline=None)
def test_specs_are_expectations(logits: list[list[float]], hard: bool) -> None:
    config = leaning(logits, hard=hard)
    alpha, specs = config(draw_slots(0))
    repeated = config.expected_specs(alpha)
    for name in SPECS:
        values = [figure(chip, name) for chip in config.chips]
        expected = [sum(a * v for a, v in zip(row, values, strict=False)) for row in alpha.tolist()]
        torch.testing.assert_close(getattr(specs, name), torch.tensor(expected), rtol=1e-5, atol=0.0)
        assert torch.equal(getattr(specs, name), getattr(repeated, name))
        assert (getattr(specs, name) <= max(values) * (1 + 1e-6)).all()
    assert config.area_loss(alpha).item() == pytest.approx(specs.area_mm2.sum().item())
    assert config.count_loss(alpha).item() == pytest.approx(alpha[:, :-1].sum().item(), abs=1e-5)


def test_empty_slots_count_zero() -> None:
    config = ChipSlotConfig(chips(), 3)
    set_chips(config, [None, "type-2", None])
    alpha, specs = config(None)
    for name in SPECS:
        result = getattr(specs, name)
        assert result[0] == result[2] == 0.0, name
        assert result[1].item() == pytest.approx(figure(config.chips[2], name)), name
    assert config.count_loss(alpha).item() == pytest.approx(1.0)
    assert config.area_loss(alpha).item() == pytest.approx(config.chips[2].area_mm2)
    set_chips(config, [None] * 3)
    alpha, _ = config(None)
    assert config.count_loss(alpha) == config.area_loss(alpha) == 0.0


def test_losses_of_full_slots() -> None:
    config = ChipSlotConfig(chips(), 3)
    set_chips(config, ["type-0", "type-1", "type-2"])
    alpha, _ = config(None)
    assert config.count_loss(alpha).item() == pytest.approx(3.0)
    assert config.area_loss(alpha).item() == pytest.approx(sum(chip.area_mm2 for chip in config.chips))


def test_state_dict_round_trip() -> None:
    config, other = ChipSlotConfig(chips(), 3), ChipSlotConfig(chips(), 3)
    set_chips(config, ["type-1", None, "type-0"])
    other.load_state_dict(config.state_dict())
    # The sample without noise is the decoded one.
    assert config(None)[0].argmax(-1).tolist() == [1, 3, 0]
    assert other.decode() == config.decode() == [config.chips[1], None, config.chips[0]]


@pytest.mark.parametrize("first", ["type-0", "type-2", EMPTY])
def test_initial_chip_sets_logits(first: str) -> None:
    config = ChipSlotConfig(chips(), 4, initial_chip=first, initial_logit=3.0)
    name = None if first == EMPTY else first
    assert [chip.name if chip else None for chip in config.decode()] == [name] * 4
    assert config.logits.amax().item() == 3.0 and config.logits.sum().item() == 12.0


def test_default_logits_are_zero() -> None:
    assert not ChipSlotConfig(chips(), 4).logits.any()


@pytest.mark.parametrize("tau", [0.0, -1.0, math.nan, math.inf])
def test_invalid_temperature_is_refused(tau: float) -> None:
    with pytest.raises(InputError, match=r"`tau` \(="):
        ChipSlotConfig(chips(), 2, tau=tau)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(InputError, match=r"`num_chips` \(=0\)"):
        ChipSlotConfig([], 2)
    for slots in (0, -1):
        with pytest.raises(InputError, match=rf"`num_slots` \(={slots}\)"):
            ChipSlotConfig(chips(), slots)
    with pytest.raises(InputError, match=r"`initial_chip` \(='a100'\)"):
        ChipSlotConfig(chips(), 2, initial_chip="a100")


@pytest.mark.parametrize("tau", [0.2, 5.0])
def test_probabilities_match_sample_frequencies(tau: float) -> None:
    config = leaning([[0.0, 1.0, 2.0, -1.0]] * 4000, tau=tau)
    alpha, _ = config(draw_slots(0))
    assert config.probabilities.shape == (4000, 4)
    torch.testing.assert_close(alpha.mean(0), config.probabilities[0], atol=0.03, rtol=0.0)

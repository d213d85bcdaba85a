"""Learning-rate schedule, weight-decay groups, finite check."""

from __future__ import annotations

import math

import pytest
import torch

from sparseflow.core.training.optimizer import (
    check_finite,
    lr_factor,
    set_learning_rate,
    split_weight_decay,
)
from sparseflow.errors import RunError


def test_lr_factor_with_cosine_decay_rises_and_falls() -> None:
    factors = [lr_factor(step, 100, warmup=0.1) for step in range(100)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[55] == pytest.approx(0.5) and max(factors) == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True) and 0.0 < factors[-1] < 0.01


def test_lr_factor_with_cooldown_is_constant_in_between() -> None:
    factors = [lr_factor(step, 100, warmup=0.1, cooldown=0.2) for step in range(100)]
    assert factors[9:81] == pytest.approx([1.0] * 72)
    assert factors[80:] == pytest.approx([(100 - step) / 20 for step in range(80, 100)])
    assert lr_factor(50, 100, warmup=0.1, cooldown=0.0) == 1.0


@pytest.mark.parametrize("warmup", [0.0, 0.5, 1.0])
def test_lr_factor_of_one_step_is_1(warmup: float) -> None:
    assert lr_factor(0, 1, warmup=warmup) == 1.0


def test_split_weight_decay_spares_vectors() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    decayed, not_decayed = split_weight_decay(model.parameters(), 0.1)
    assert decayed["params"] == [model[0].weight] and decayed["weight_decay"] == 0.1
    assert not_decayed["params"] == [model[0].bias, model[1].weight, model[1].bias]
    assert not_decayed["weight_decay"] == 0.0


def test_set_learning_rate_scales_groups() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": [weights[0]]}, {"params": [weights[1]], "lr_scale": 10.0}])
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 5.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_check_finite_names_what_is_not_finite(value: float) -> None:
    check_finite({"loss": 1.0, "gradient": 0.0}, step=3)
    with pytest.raises(RunError, match=rf"step 3: gradient is {value}.*`rate` \(=2\)"):
        check_finite({"loss": 1.0, "gradient": value}, step=3, hint="lower `rate` (=2)")

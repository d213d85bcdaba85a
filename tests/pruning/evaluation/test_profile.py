"""Profiles: what is compared, and that it is the same model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from sparseflow.errors import InputError
from sparseflow.pruning import compact
from sparseflow.pruning.compaction.flops import flops
from sparseflow.pruning.evaluation.profile import COMPACT, DENSE, MASKED, SOFT, dense, profile
from tests.pruning.models import awake, clips, far

ALL: dict[str, Any] = {"stages": {1: 0.5}, "keep": {"head": 0.5, "channel": 0.5, "block": 0.5}}
QUICK: dict[str, Any] = {"batch": 2, "rounds": 2, "warmup": 1}


def test_a_profile() -> None:
    model = awake(ALL).train()
    before = copy.deepcopy(model.state_dict())
    told: list[tuple[str, float]] = []
    found = profile(model, **QUICK, progress=lambda message, fraction: told.append((message, fraction)))
    assert list(found.flops) == [DENSE, SOFT, MASKED, COMPACT]
    assert found.flops[DENSE] == flops(dense(model))["total"]
    assert found.flops[MASKED] == found.flops[SOFT] == flops(model)["total"]
    assert found.flops[COMPACT] == flops(compact(model))["total"] < found.flops[DENSE]
    assert found.error < 1e-5
    assert (found.batch, found.dtype, found.compiled) == (2, "float32", False)
    assert found.comparison.baseline == DENSE and found.comparison.rounds == 2
    for name in found.flops:
        samples = found.comparison.samples(name)
        assert len(samples.to_rows()) == 2
        assert found.clips_per_s(name) == pytest.approx(2e3 / samples.median_ms)
    assert told[-1] == ("round 2 of 2", 1.0)
    # The model is what it was.
    assert model.training
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0.0, atol=0.0)


def test_others_stand_beside() -> None:
    model, other = awake(ALL), awake({"stages": {1: 0.5}, "selector": "tome"})
    found = profile(model, **QUICK, others={"ToMe": other})
    assert list(found.flops)[-1] == "ToMe" and found.flops["ToMe"] == flops(other)["total"]
    assert found.clips_per_s("ToMe") > 0.0


def test_half_precision() -> None:
    found = profile(awake({"stages": {1: 0.5}, "selector": "uniform"}), **QUICK, dtype=torch.bfloat16)
    assert found.dtype == "bfloat16" and found.error < 0.05


def test_models_that_prune_nothing_are_refused() -> None:
    for model in (awake(), awake({"stages": {}}), compact(awake(ALL))):
        with pytest.raises(InputError, match="must be one that prunes and is not compact"):
            profile(model, **QUICK)


@pytest.mark.parametrize("name", [DENSE, SOFT, MASKED, COMPACT])
def test_others_may_not_take_the_names_of_what_is_compared(name: str) -> None:
    with pytest.raises(InputError, match=f"`others` must have names of their own: {name}"):
        profile(awake(ALL), **QUICK, others={name: awake()})


@pytest.mark.parametrize("selector", ["ast", "random"])
def test_dense_is_the_same_with_nothing_pruned(selector: str) -> None:
    model = awake({"stages": {0: 1.0}, "selector": selector, "keep": {"head": 0.5, "block": 0.5}}).double()
    assert model.gates is not None
    with torch.no_grad():
        for logits in model.gates.logits.values():
            logits.fill_(50.0)
    found = dense(model)
    assert found.ast is None and not found.training
    assert far(found(clips(model)), model(clips(model))) < 1e-12

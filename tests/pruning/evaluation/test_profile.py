"""Profiles: candidates, errors and the dense model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from sparseflow.errors import InputError
from sparseflow.pruning import compact
from sparseflow.pruning.compaction.flops import count_flops
from sparseflow.pruning.evaluation.profile import COMPACT, DENSE, MASKED, SOFT, make_dense, profile_video_vit
from tests.pruning.models import awake, clips, far

ALL: dict[str, Any] = {"stages": {1: 0.5}, "keep": {"head": 0.5, "channel": 0.5, "block": 0.5}}
QUICK: dict[str, Any] = {"batch_size": 2, "rounds": 2, "warmup": 1}


def test_profile_reports_all_candidates() -> None:
    model = awake(ALL).train()
    before = copy.deepcopy(model.state_dict())
    messages: list[tuple[str, float]] = []
    profile = profile_video_vit(
        model, **QUICK, progress=lambda message, fraction: messages.append((message, fraction))
    )
    assert list(profile.flops) == [DENSE, SOFT, MASKED, COMPACT]
    assert profile.flops[DENSE] == count_flops(make_dense(model))["total"]
    assert profile.flops[MASKED] == profile.flops[SOFT] == count_flops(model)["total"]
    assert profile.flops[COMPACT] == count_flops(compact(model))["total"] < profile.flops[DENSE]
    assert profile.error < 1e-5
    assert profile.comparison.baseline == DENSE and profile.comparison.rounds == 2
    for name in profile.flops:
        samples = profile.comparison.samples(name)
        assert len(samples.to_rows()) == 2
        assert profile.clips_per_s(name) == pytest.approx(2e3 / samples.median_ms)
    assert messages[-1] == ("round 2 of 2", 1.0)
    # The model is unchanged.
    assert model.training
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0.0, atol=0.0)


def test_extra_models_are_timed() -> None:
    model, other = awake(ALL), awake({"stages": {1: 0.5}, "selector": "tome"})
    profile = profile_video_vit(model, **QUICK, extra_models={"ToMe": other})
    assert list(profile.flops)[-1] == "ToMe" and profile.flops["ToMe"] == count_flops(other)["total"]
    assert profile.clips_per_s("ToMe") > 0.0


def test_profile_without_softness_has_no_soft_masks() -> None:
    profile = profile_video_vit(awake({"stages": {1: 0.5}, "softness": 0.0}), **QUICK)
    assert list(profile.flops) == [DENSE, MASKED, COMPACT]


def test_profile_of_half_precision_has_small_error() -> None:
    profile = profile_video_vit(
        awake({"stages": {1: 0.5}, "selector": "uniform"}), **QUICK, dtype=torch.bfloat16
    )
    assert profile.error < 0.05


def test_profile_of_dense_or_compact_model_raises() -> None:
    for model in (awake(), awake({"stages": {}}), compact(awake(ALL))):
        with pytest.raises(InputError, match="prune"):
            profile_video_vit(model, **QUICK)


@pytest.mark.parametrize("selector", ["ast", "random"])
def test_make_dense_removes_pruning(selector: str) -> None:
    model = awake({"stages": {0: 1.0}, "selector": selector, "keep": {"head": 0.5, "block": 0.5}}).double()
    assert model.gates is not None
    with torch.no_grad():
        for logits in model.gates.logits.values():
            logits.fill_(50.0)
    dense = make_dense(model)
    assert dense.ast is None and not dense.training
    assert far(dense(clips(model)), model(clips(model))) < 1e-12

"""Latency, FLOPs and budgets of patched models."""

from __future__ import annotations

import copy

import pytest
import torch

from sparseflow.core.timing import Samples
from sparseflow.errors import InputError
from sparseflow.pruning import patch, unpatch
from sparseflow.pruning.patching import profile
from sparseflow.pruning.patching.profile import DENSE, PATCHED, profile_patch
from tests.pruning.patching.zoo import CASES


def test_profile_counts_the_flops_of_the_kept_tokens() -> None:
    case = CASES["vit"]
    model = case.build().float()
    patch(model, stages={0: 0.5}, selector="uniform")
    result = profile_patch(model, batch_size=2, rounds=2)
    dim, channels, blocks = 24, 40, 4

    def count(num_tokens: int) -> int:
        return blocks * num_tokens * (2 * dim * (4 * dim + 2 * channels) + 4 * num_tokens * dim)

    outside = 2 * 16 * 3 * 64 * dim + 2 * dim * dim  # patches and pooler
    with_pooler = hasattr(model.vit, "pooler") and model.vit.pooler is not None
    outside -= 0 if with_pooler else 2 * dim * dim
    assert result.gflops[DENSE] * 1e9 == pytest.approx(count(17) + outside)
    assert result.gflops[PATCHED] * 1e9 == pytest.approx(count(9) + outside)
    assert list(result.comparison.times_ms) == [DENSE, PATCHED] and result.comparison.rounds == 2
    assert model.vit.token_pruner.positions == {}


@pytest.fixture
def latency_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure 1 ms for each token of the last block, and no time outside."""

    def measure(call: object, **_: object) -> Samples:
        tokens = call().last_hidden_state.shape[1] - 1  # pyright: ignore
        return Samples(times_ms=(float(tokens),), timer="perf_counter", device="cpu", warmup=0)

    monkeypatch.setattr(profile, "measure", measure)


@pytest.mark.usefixtures("latency_of_tokens")
def test_budget_selects_the_largest_share_that_meets_it() -> None:
    case = CASES["vit"]
    model = case.build()
    result = patch(model.train(), budget_ms=8.4)
    assert model.training
    # 16 tokens: a share of 0.55 keeps 9 of them.
    assert result.stages == {1: pytest.approx(0.5)} and result.latency_ms == 8.0
    result = patch(model, stages={1: 0.5, 2: 0.25}, budget_ms=4.0)
    assert result.tokens == (16, 8, 4, 4)
    assert patch(model, budget_ms=16.0).stages == {}


@pytest.mark.usefixtures("latency_of_tokens")
def test_budget_that_no_share_meets_is_refused_with_the_smallest_latency() -> None:
    case = CASES["vit"]
    model = case.build()
    expected = case.run(model)
    with pytest.raises(InputError, match=r"0\.5.*1 ms"):
        patch(model, budget_ms=0.5)
    assert torch.equal(case.run(model), expected)
    with pytest.raises(InputError, match="below 1"):
        patch(model, keep=1.0, budget_ms=2.0)


def test_budget_accepts_the_arguments_of_the_model() -> None:
    case = CASES["vit"]
    model, original = case.build(), case.build()
    assert patch(model, budget_ms=1e6, inputs=case.make_input()).stages == {}
    assert torch.equal(case.run(model), case.run(original))
    unpatch(copy.deepcopy(model))

"""FLOPs against those that torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sparseflow.pruning import VideoViT, compact
from sparseflow.pruning.compaction.flops import count_flops
from sparseflow.pruning.evaluation.profile import make_dense
from sparseflow.pruning.model.config import ATTENTION_SELECTORS, SELECTORS
from sparseflow.pruning.selectors.ast import EntropyScore
from tests.pruning.models import awake, clips

TWO: dict[str, Any] = {"stages": {1: 0.5, 3: 0.25}}
WIDE: dict[str, Any] = {"embed_dim": 64}


def count_with_torch(model: VideoViT) -> int:
    """FLOPs that torch counts for one clip."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(clips(model, 1))
    return counter.get_total_flops()


def without_attention(model: VideoViT) -> int:
    """FLOPs without attention; torch does not count fused attention on a CPU."""
    flops = count_flops(model)
    return flops["total"] - flops["attention"]


@pytest.mark.parametrize("pool", ["mean", "cls"])
@pytest.mark.parametrize("tubelet", [1, 2])
def test_dense_model_matches_torch(pool: str, tubelet: int) -> None:
    model = awake(pool=pool, tubelet_size=tubelet, **WIDE)
    assert count_with_torch(model) == without_attention(model)
    tokens = 64 // tubelet + (pool == "cls")
    assert count_flops(model)["attention"] == 4 * 2 * 2 * tokens**2 * 64
    assert count_flops(model)["total"] == sum(
        value for name, value in count_flops(model).items() if name != "total"
    )


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize(("pool", "merge"), [("mean", False), ("mean", True), ("cls", True)])
@pytest.mark.parametrize("cut", [False, True])
def test_pruned_model_matches_torch(selector: str, pool: str, merge: bool, cut: bool) -> None:
    keep = {} if selector in ATTENTION_SELECTORS else {"head": 0.5, "block": 0.5}
    ast = TWO | {"selector": selector, "merge": merge, "keep": keep | {"channel": 0.5}}
    model = awake(ast, pool=pool, seed=1, **WIDE)
    model = compact(model) if cut else model
    # Torch counts weighted sums as products, which `count_flops` excludes: means of merged tokens,
    merges = merge and selector != "tome"
    summed = [64, 32 if cut else 64] if merges else []
    # pooling of tokens with weights or sizes,
    if pool == "mean" and (selector == "tome" or not cut):
        summed.append(16 if selector == "tome" else 64)
    more = sum(2 * num_summed * 64 for num_summed in summed)
    # the mean over queries at the second stage,
    if selector == "attention" and pool == "mean" and not cut:
        more += 2 * (64 + merges) ** 2
    # and at both stages, sizes of windows and cells, means of token entropies, maps to tokens, and regions.
    if isinstance(model.score, EntropyScore):
        windows, cells, regions = (
            len(model.score.get_buffer(num_summed)) for num_summed in ("windows", "cells", "regions")
        )
        more += 2 * 64 * 6 * (windows + cells + regions)
    assert count_with_torch(model) == without_attention(model) + more


def test_dropped_tokens_are_not_counted() -> None:
    model = awake(TWO | {"keep": {"channel": 0.5}, "merge": True}, **WIDE)
    masked, cut, plain = (count_flops(other) for other in (model, compact(model), make_dense(model)))
    assert cut["total"] < plain["total"] < masked["total"]
    # Blocks get 64 tokens, 32 and one merged token twice, and 16 and two merged tokens.
    assert cut["attention"] == 2 * 2 * 64 * (64**2 + 2 * 33**2 + 18**2)
    # With masks, blocks get all 64 tokens and the merged ones.
    assert masked["attention"] == 2 * 2 * 64 * (64**2 + 2 * 65**2 + 66**2)
    assert plain["stage"] == 0 and masked["patch"] == plain["patch"]


def test_removed_blocks_cost_nothing() -> None:
    model = awake({"stages": {}, "keep": {"block": 0.5}}, **WIDE)
    assert model.gates is not None
    with torch.no_grad():
        model.gates.logits["block"].fill_(-1.0)
    flops = count_flops(compact(model))
    assert flops["linear"] == flops["attention"] == flops["mlp"] == 0
    assert flops["total"] == flops["patch"] + flops["head"]

"""Compact models: equal to masked models, smaller, and trainable."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch

from sparseflow.pruning import VideoViT, compact
from sparseflow.pruning.compaction.compact import list_units, resize_blocks
from sparseflow.pruning.model.blocks import TransformerBlock
from sparseflow.pruning.model.config import ATTENTION_SELECTORS, SELECTORS
from tests.pruning.models import awake, clips, far, tiny

GRAINS = ((), ("head",), ("channel",), ("block",), ("head", "channel", "block"))
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Largest error, as a fraction of the largest score."""

CASES = [
    (selector, grains)
    for selector, grains in product(SELECTORS, GRAINS)
    if selector not in ATTENTION_SELECTORS or not {"head", "block"} & set(grains)
]


def make_model(selector: str, grains: tuple[str, ...], *, merge: bool, pool: str, seed: int = 0) -> VideoViT:
    ast = {
        "stages": {0: 0.8, 1: 0.5, 3: 0.3}, "selector": selector, "merge": merge,
        "keep": dict.fromkeys(grains, 0.5),
    }  # fmt: skip
    return awake(ast, pool=pool, seed=seed)


@pytest.mark.parametrize(("selector", "grains"), CASES)
@pytest.mark.parametrize(
    ("dtype", "pool", "merge"),
    [
        (torch.float64, "mean", False), (torch.float64, "cls", True), (torch.float32, "mean", True),
        (torch.float32, "cls", False),
    ],
)  # fmt: skip
def test_compact_equals_the_model(
    dtype: torch.dtype, pool: str, merge: bool, selector: str, grains: tuple[str, ...]
) -> None:
    model = make_model(selector, grains, merge=merge, pool=pool, seed=int(dtype == torch.float64)).to(dtype)
    cut, x = compact(model), clips(model, 3)
    with torch.no_grad():
        assert far(cut(x), model(x)) <= TOLERANCE[dtype]
    assert model.gates is None or all(model.gates.compute_sparsity()[grain] > 0.0 for grain in grains)
    smaller = sum(parameter.numel() for parameter in cut.parameters()) < sum(
        parameter.numel() for parameter in model.parameters()
    )
    assert smaller == bool(grains)


def test_list_units_counts_open_gates() -> None:
    model = make_model("ast", GRAINS[-1], merge=False, pool="mean")
    assert model.gates is not None
    gates = model.gates.compute_gates(hard=True)
    expected = [
        (0, 0) if block == 0.0 else (int((head > 0.0).sum()), int((channel > 0.0).sum()))
        for head, channel, block in zip(gates["head"], gates["channel"], gates["block"], strict=True)
    ]
    compacted = compact(model)
    assert list_units(compacted) == expected and (0, 0) in expected and len(set(expected)) > 1
    assert list_units(model) == [(4, 32)] * 4
    assert compacted.gates is None and not any("gates" in name for name in compacted.state_dict())


@pytest.mark.parametrize("merge", [False, True])
def test_compact_with_all_gates_closed(merge: bool) -> None:
    torch.manual_seed(0)
    model = make_model("ast", GRAINS[-1], merge=merge, pool="mean")
    assert model.gates is not None
    with torch.no_grad():
        for logits in model.gates.logits.values():
            logits.fill_(-5.0).add_(0.1 * torch.randn(logits.shape))
    compacted, x = compact(model), clips(model)
    assert list_units(compacted) == [(0, 0)] * 4
    assert far(compacted(x), model(x)) <= 1e-5
    # In open blocks only the widest head and channel stay open.
    with torch.no_grad():
        model.gates.logits["block"].fill_(3.0)
    compacted = compact(model)
    assert list_units(compacted) == [(1, 1)] * 4
    assert far(compacted(x), model(x)) <= 1e-5


def test_compact_does_not_modify_the_model() -> None:
    model = make_model("ast", GRAINS[-1], merge=True, pool="cls").train()
    before = copy.deepcopy(model.state_dict())
    compacted = compact(model)
    assert model.training and not compacted.training and not model.compacted and compacted.compacted
    assert all(not module.training for module in compacted.modules())
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0.0, atol=0.0)
    with torch.no_grad():
        for parameter in compacted.parameters():
            parameter.zero_()
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("ast", [None, {"stages": {1: 0.5}}, {"stages": {1: 0.5}, "keep": {"head": 0.5}}])
def test_compact_of_compact_is_a_copy(ast: dict[str, Any] | None) -> None:
    once = compact(awake(ast))
    second, x = compact(once), clips(once)
    assert torch.equal(once(x), second(x)) and once is not second
    torch.testing.assert_close(dict(second.state_dict()), dict(once.state_dict()), rtol=0.0, atol=0.0)


def test_compact_without_pruning_is_equal() -> None:
    model = awake()
    assert torch.equal(compact(model)(clips(model)), model(clips(model)))


def test_compact_model_can_be_trained() -> None:
    model = make_model("ast", GRAINS[-1], merge=True, pool="mean")
    compacted = compact(model).train()
    x, y = clips(compacted, 6), torch.arange(6) % 5
    adam = torch.optim.Adam(compacted.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        logits, info = compacted(x, return_intermediate=True)
        assert info["ast_stats"]["L_AST"] == 0.0
        loss = torch.nn.functional.cross_entropy(logits, y)
        adam.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in compacted.parameters())
        adam.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    # It drops the same tokens in training and in evaluation.
    assert torch.equal(compacted(x), compacted.eval()(x))


def test_compact_keeps_dropout() -> None:
    sizes: dict[str, Any] = {"drop_rate": 0.1, "attn_drop": 0.2, "drop_path_rate": 0.3}
    compacted = compact(awake({"stages": {}, "keep": {"head": 0.5, "channel": 0.5}}, **sizes))
    for index, block in enumerate(compacted.blocks):
        assert isinstance(block, TransformerBlock) and block.attention is not None and block.mlp is not None
        assert block.attention.dropout == 0.2 and block.attention.out_dropout.p == 0.1
        assert block.mlp.dropout.p == 0.1 and block.drop_path == pytest.approx(0.1 * index)


def test_resize_blocks_loads_compact_weights() -> None:
    model = make_model("ast", GRAINS[-1], merge=False, pool="mean")
    compacted = compact(model)
    skeleton = resize_blocks(VideoViT(**model.to_dict()), list_units(compacted))
    skeleton.load_state_dict(compacted.state_dict())
    assert torch.equal(skeleton(clips(model)), compacted(clips(model)))


def test_dropped_tokens_are_not_computed() -> None:
    model = compact(tiny({"stages": {0: 0.01}, "selector": "uniform"}, depth=1))
    lengths: list[int] = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    model(clips(model))
    assert lengths == [1]

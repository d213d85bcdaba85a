"""Tests of `codesign.execution.rewrite`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.codesign.random_plan import random_plan
from sparseflow.codesign.execution.rewrite import (
    ConcatSplit,
    SplitModule,
    SumSplit,
    apply_rewrite,
    split_module,
)
from sparseflow.codesign.workload.splits import LayerSplit, RewritePlan, compute_transfer_bytes
from sparseflow.core.layers import LayerNode
from sparseflow.errors import InputError
from sparseflow.pruning import VideoViT, compact
from sparseflow.pruning.compaction.layered_model import LayeredVideoViT
from sparseflow.pruning.model.config import SELECTORS
from tests.pruning.models import awake, clips

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest difference of logits, over the largest of them or 1."""


def scores(steps: LayeredVideoViT, samples: Tensor) -> Tensor:
    with torch.no_grad():
        state = steps.initial_state(samples)
        for layer in range(len(steps.describe_layers(1))):
            state = steps.run_layer(layer, state)
        return state["logits"]


def compute_error(first: Tensor, other: Tensor) -> float:
    return float((first - other).abs().max() / max(1.0, float(other.abs().max())))


def a_split(layer: int = 1, units: int = 4, sizes: tuple[int, ...] = (1, 3), **overrides: Any) -> LayerSplit:
    slots = overrides.pop("slots", tuple(range(len(sizes))))
    order = overrides.pop("permutation", tuple(reversed(range(units))))
    return LayerSplit(layer=layer, permutation=order, sizes=sizes, slots=slots)


def plan_of(*splits: LayerSplit) -> RewritePlan:
    return RewritePlan(splits=splits)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_rewrite_keeps_logits_and_undo_restores_weights(dtype: torch.dtype, seed: int, slots: int) -> None:
    model = awake(seed=seed, depth=6).to(dtype)
    steps, x = LayeredVideoViT(model), clips(model, seed=seed)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modules = [steps.get_layer(layer) for layer in range(14)]
    expected = scores(steps, x)
    _, plan = random_plan(steps.describe_layers(2), slots, seed=seed, share=0.8)
    rewrite = apply_rewrite(steps, plan)
    assert plan.splits and set(rewrite.split_modules) == {split.layer for split in plan.splits}
    for layer, form in rewrite.split_modules.items():
        assert steps.get_layer(layer) is form and isinstance(
            form, ConcatSplit if layer in (0, 13) else SumSplit
        )
    assert compute_error(scores(steps, x), expected) <= TOLERANCE[dtype]
    with torch.no_grad():
        # Parts have weights of their own.
        for form in rewrite.split_modules.values():
            for parameter in form.parameters():
                parameter.zero_()
    rewrite.undo()
    assert [steps.get_layer(layer) for layer in range(14)] == modules
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(scores(steps, x), expected)


@pytest.mark.parametrize("selector", SELECTORS)
def test_rewrite_of_pruned_models(selector: str) -> None:
    model = compact(awake({"stages": {1: 0.5, 3: 0.3}, "selector": selector, "merge": True}, pool="cls"))
    steps = LayeredVideoViT(model.double())
    x = clips(model)
    expected = scores(steps, x)
    for seed in range(4):
        _, plan = random_plan(steps.describe_layers(2), 3, seed=seed, share=1.0)
        with apply_rewrite(steps, plan):
            assert compute_error(scores(steps, x), expected) <= TOLERANCE[torch.float64]
        assert torch.equal(scores(steps, x), expected)


def test_concatenated_columns_are_exact() -> None:
    g = torch.Generator().manual_seed(0)
    full = nn.Linear(7, 11).double()
    with torch.no_grad():
        # Sums of small whole numbers are exact in any order.
        for parameter in full.parameters():
            parameter.copy_(torch.randint(-8, 9, parameter.shape, generator=g))
    x = torch.randint(-8, 9, (5, 7), generator=g).double()
    for seed in range(20):
        order = torch.randperm(11, generator=torch.Generator().manual_seed(seed)).tolist()
        form = split_module(full, a_split(units=11, sizes=(2, 8, 1), permutation=tuple(order)))
        assert torch.equal(form(x), full(x))
        assert not torch.equal(torch.cat([part(x) for part in form.parts], -1), full(x))
    bare = nn.Linear(7, 11, bias=False)
    assert all(part.bias is None for part in split_module(bare, a_split(units=11, sizes=(4, 7))).parts)


def test_final_bias_is_in_first_part() -> None:
    steps = LayeredVideoViT(awake())
    rewrite = apply_rewrite(steps, plan_of(a_split(1), a_split(2, 32, (3, 9, 20))))
    for layer, last in ((1, "proj"), (2, "down")):
        parts: Any = rewrite.split_modules[layer].parts
        assert [getattr(part, last).bias is not None for part in parts] == [
            index == 0 for index in range(len(parts))
        ]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"permutation": (0, 1, 2, 2)}, "1.*`permutation`.*once"),
        ({"permutation": (1, 2, 3, 4)}, "0, 4"),
        ({"sizes": (4, 0)}, r"layer 1.*`sizes` \(=\[4, 0\]\)"),
        ({"sizes": (1, 2)}, "add up to 4"),
        ({"sizes": (), "slots": ()}, "add up to 4"),
        ({"slots": (0, 0)}, "2"),
        ({"slots": (0, 1, 2)}, "2"),
        ({"slots": (0, -1)}, "0"),
        ({"layer": -1}, "0"),
        ({"layer": 1.0}, None),
        ({"slots": (0, True)}, None),
    ],
)
def test_invalid_split_is_refused(changes: dict[str, Any], match: str | None) -> None:
    with pytest.raises(InputError, match=match):
        a_split(**changes)


def test_layer_split_twice_is_refused() -> None:
    with pytest.raises(InputError, match="1"):
        plan_of(a_split(), a_split(2), a_split())


def test_rewrite_of_rewritten_model_is_refused() -> None:
    steps = LayeredVideoViT(awake())
    plan = plan_of(a_split())
    rewrite = apply_rewrite(steps, plan)
    form = steps.get_layer(1)
    with pytest.raises(InputError, match="1"):
        apply_rewrite(steps, plan_of(a_split(3), a_split(1)))
    assert steps.get_layer(1) is form and not isinstance(steps.get_layer(3), SplitModule)
    rewrite.undo()
    with pytest.raises(InputError):
        rewrite.undo()
    with apply_rewrite(steps, plan) as repeated:
        repeated.undo()
    with apply_rewrite(steps, plan) as repeated:
        original = steps.get_layer(1)
        steps.replace_layer(1, nn.Identity())
        with pytest.raises(InputError, match="1"):
            repeated.undo()
        steps.replace_layer(1, original)
    assert not isinstance(steps.get_layer(1), SplitModule)


@pytest.mark.parametrize(
    ("split", "match"),
    [
        (a_split(10), "9.*another"),
        (a_split(1, 5, (2, 3)), "4.*another"),
        (a_split(2), "32"),
    ],
)
def test_plan_of_other_model_is_refused(split: LayerSplit, match: str) -> None:
    steps = LayeredVideoViT(awake())
    with pytest.raises(InputError, match=match):
        apply_rewrite(steps, plan_of(a_split(3), split))
    assert not any(isinstance(module, SplitModule) for module in steps.model.modules())


def test_unsplittable_layer_is_refused() -> None:
    steps = LayeredVideoViT(compact(awake({"stages": {1: 0.5}, "selector": "attention"})))
    with pytest.raises(InputError, match=r"blocks\.1\.attention.*cannot"):
        apply_rewrite(steps, plan_of(a_split(3)))
    with pytest.raises(InputError):
        split_module(nn.Tanh(), a_split())
    with pytest.raises(InputError, match="4"):
        split_module(nn.Linear(2, 3), a_split())


def nodes() -> tuple[LayerNode, ...]:
    return LayeredVideoViT(awake()).describe_layers(3)


def test_compute_transfer_bytes_by_hand() -> None:
    layers = nodes()
    assignment = [0, 0, 0, 2, 2, 1, 1, 0, 0, 0]
    state = 3 * 64 * 16 * 4
    assert compute_transfer_bytes(layers, assignment) == {(0, 2): state, (2, 1): state, (1, 0): state}
    assert compute_transfer_bytes(layers, [4] * 10) == {}
    plan = plan_of(a_split(1, sizes=(2, 1, 1), slots=(0, 1, 2)), a_split(9, 5, (2, 1, 2), slots=(0, 3, 1)))
    assert compute_transfer_bytes(layers, assignment, plan) == {
        (0, 2): 2 * state, (2, 0): state, (2, 1): state, (0, 1): state + 3 * 16 * 4,
        (1, 0): 2 * state + 3 * 2 * 4, (0, 3): 3 * 16 * 4, (3, 0): 3 * 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("assignment", "split", "match"),
    [
        ([0] * 9, a_split(), "10"),
        ([0] * 9 + [-1], a_split(), "0"),
        ([0] * 9 + [0.5], a_split(), "0"),
        ([1] * 10, a_split(), "0"),
        ([0] * 10, a_split(20), "another model"),
    ],
)
def test_invalid_assignment_is_refused(assignment: list[Any], split: LayerSplit, match: str) -> None:
    with pytest.raises(InputError, match=match):
        compute_transfer_bytes(nodes(), assignment, plan_of(split))


def test_empty_plan_changes_nothing() -> None:
    steps = LayeredVideoViT(awake())
    with apply_rewrite(steps, plan_of()) as rewrite:
        assert not rewrite.split_modules
    assert isinstance(steps.model, VideoViT)

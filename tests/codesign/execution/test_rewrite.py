"""Splits: the same logits, the very weights back, and bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.codesign.random_plan import random_plan
from sparseflow.codesign.execution.rewrite import Form, Joined, Summed, apply, split_form
from sparseflow.codesign.workload.splits import RewritePlan, Split, plan_bytes
from sparseflow.core.layers import LayerNode
from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning import VideoViT, compact
from sparseflow.pruning.config import SELECTORS
from sparseflow.pruning.steps import Steps
from tests.pruning.models import awake, clips

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest difference of logits, over the largest of them or 1."""


def scores(steps: Steps, samples: Tensor) -> Tensor:
    with torch.no_grad():
        state = steps.initial_state(samples)
        for layer in range(len(steps.describe_layers(1))):
            state = steps.run_layer(layer, state)
        return state["logits"]


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / max(1.0, float(other.abs().max())))


def a_split(layer: int = 1, units: int = 4, sizes: tuple[int, ...] = (1, 3), **others: Any) -> Split:
    slots = others.pop("slots", tuple(range(len(sizes))))
    order = others.pop("permutation", tuple(reversed(range(units))))
    return Split(layer=layer, permutation=order, sizes=sizes, slots=slots)


def plan_of(*splits: Split) -> RewritePlan:
    return RewritePlan(splits=splits)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_logits_stay_and_weights_come_back(dtype: torch.dtype, seed: int, slots: int) -> None:
    model = awake(seed=seed, depth=6).to(dtype)
    steps, x = Steps(model), clips(model, seed=seed)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modules = [steps.get_layer(layer) for layer in range(14)]
    expected = scores(steps, x)
    _, plan = random_plan(steps.describe_layers(2), slots, seed=seed, share=0.8)
    rewrite = apply(steps, plan)
    assert plan.splits and set(rewrite.forms) == {split.layer for split in plan.splits}
    for layer, form in rewrite.forms.items():
        assert steps.get_layer(layer) is form and isinstance(form, Joined if layer in (0, 13) else Summed)
    assert apart(scores(steps, x), expected) <= TOLERANCE[dtype]
    with torch.no_grad():
        # Parts have weights of their own.
        for form in rewrite.forms.values():
            for each in form.parameters():
                each.zero_()
    rewrite.undo()
    assert [steps.get_layer(layer) for layer in range(14)] == modules
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(scores(steps, x), expected)


@pytest.mark.parametrize("selector", SELECTORS)
def test_pruned_models(selector: str) -> None:
    model = compact(awake({"stages": {1: 0.5, 3: 0.3}, "selector": selector, "merge": True}, pool="cls"))
    steps = Steps(model.double())
    x = clips(model)
    expected = scores(steps, x)
    for seed in range(4):
        _, plan = random_plan(steps.describe_layers(2), 3, seed=seed, share=1.0)
        with apply(steps, plan):
            assert apart(scores(steps, x), expected) <= TOLERANCE[torch.float64]
        assert torch.equal(scores(steps, x), expected)


def test_columns_are_put_back_to_the_bit() -> None:
    g = torch.Generator().manual_seed(0)
    whole = nn.Linear(7, 11).double()
    with torch.no_grad():
        # Sums of small whole numbers are exact in any order.
        for each in whole.parameters():
            each.copy_(torch.randint(-8, 9, each.shape, generator=g))
    x = torch.randint(-8, 9, (5, 7), generator=g).double()
    for seed in range(20):
        order = torch.randperm(11, generator=torch.Generator().manual_seed(seed)).tolist()
        form = split_form(whole, a_split(units=11, sizes=(2, 8, 1), permutation=tuple(order)))
        assert torch.equal(form(x), whole(x))
        assert not torch.equal(torch.cat([part(x) for part in form.parts], -1), whole(x))
    bare = nn.Linear(7, 11, bias=False)
    assert all(part.bias is None for part in split_form(bare, a_split(units=11, sizes=(4, 7))).parts)


def test_the_last_bias_is_in_the_first_group_alone() -> None:
    steps = Steps(awake())
    rewrite = apply(steps, plan_of(a_split(1), a_split(2, 32, (3, 9, 20))))
    for layer, last in ((1, "proj"), (2, "down")):
        parts: Any = rewrite.forms[layer].parts
        assert [getattr(part, last).bias is not None for part in parts] == [
            at == 0 for at in range(len(parts))
        ]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"permutation": (0, 1, 2, 2)}, r"layer 1.*`permutation`.*once; see 3"),
        ({"permutation": (1, 2, 3, 4)}, "see 0, 4"),
        ({"sizes": (4, 0)}, r"layer 1.*`sizes` \(=\[4, 0\]\)"),
        ({"sizes": (1, 2)}, "add up to 4"),
        ({"sizes": (), "slots": ()}, "add up to 4"),
        ({"slots": (0, 0)}, "2 different"),
        ({"slots": (0, 1, 2)}, "2 different"),
        ({"slots": (0, -1)}, "numbered from 0"),
        ({"layer": -1}, "numbered from 0"),
        ({"layer": 1.0}, "whole numbers"),
        ({"slots": (0, True)}, "whole numbers"),
    ],
)
def test_splits_that_cannot_be(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        a_split(**changes)


def test_a_layer_is_split_once() -> None:
    with pytest.raises(InputError, match="1"):
        plan_of(a_split(), a_split(2), a_split())


def test_plans_as_json() -> None:
    plan = plan_of(a_split(), a_split(3, sizes=(2, 1, 1), slots=(7, 0, 2)))
    assert RewritePlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert RewritePlan.from_dict(plan_of().to_dict()) == plan_of()


@pytest.mark.parametrize(
    ("content", "error", "match"),
    [
        (None, FileFormatError, "dictionary"),
        ({}, FileFormatError, "splits"),
        ({"splits": [], "more": 1}, FileFormatError, "more"),
        ({"splits": [{"layer": 1}]}, FileFormatError, r"splits\.0\.permutation"),
        ({"splits": [{"layer": "1", "permutation": [0], "sizes": [1], "slots": [0]}]}, FileFormatError,
         r"splits\.0\.layer"),
        ({"splits": [{"layer": 5, "permutation": [0, 0], "sizes": [1, 1], "slots": [0, 1]}]}, InputError,
         "layer 5"),
    ],
)  # fmt: skip
def test_json_that_is_no_plan(content: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        RewritePlan.from_dict(content)


def test_rewriting_twice() -> None:
    steps = Steps(awake())
    plan = plan_of(a_split())
    rewrite = apply(steps, plan)
    form = steps.get_layer(1)
    with pytest.raises(InputError, match="1"):
        apply(steps, plan_of(a_split(3), a_split(1)))
    assert steps.get_layer(1) is form and not isinstance(steps.get_layer(3), Form)
    rewrite.undo()
    with pytest.raises(InputError):
        rewrite.undo()
    with apply(steps, plan) as again:
        again.undo()
    with apply(steps, plan) as again:
        original = steps.get_layer(1)
        steps.replace_layer(1, nn.Identity())
        with pytest.raises(InputError, match="1"):
            again.undo()
        steps.replace_layer(1, original)
    assert not isinstance(steps.get_layer(1), Form)


@pytest.mark.parametrize(
    ("split", "match"),
    [
        (a_split(10), "layer 10 and the last is 9.*another model"),
        (a_split(1, 5, (2, 3)), "5 units and the layer 4.*another model"),
        (a_split(2), "4 units and the layer 32"),
    ],
)
def test_plans_for_other_models(split: Split, match: str) -> None:
    steps = Steps(awake())
    with pytest.raises(InputError, match=match):
        apply(steps, plan_of(a_split(3), split))
    assert not any(isinstance(module, Form) for module in steps.model.modules())


def test_layers_that_cannot_be_split() -> None:
    steps = Steps(compact(awake({"stages": {1: 0.5}, "selector": "attention"})))
    with pytest.raises(InputError, match=r"blocks\.1\.attention.*cannot"):
        apply(steps, plan_of(a_split(3)))
    with pytest.raises(InputError, match="`part`"):
        split_form(nn.Tanh(), a_split())
    with pytest.raises(InputError, match="4"):
        split_form(nn.Linear(2, 3), a_split())


def nodes() -> tuple[LayerNode, ...]:
    return Steps(awake()).describe_layers(3)


def test_bytes_between_slots() -> None:
    layers = nodes()
    homes = [0, 0, 0, 2, 2, 1, 1, 0, 0, 0]
    state = 3 * 64 * 16 * 4
    assert plan_bytes(layers, homes) == {(0, 2): state, (2, 1): state, (1, 0): state}
    assert plan_bytes(layers, [4] * 10) == {}
    plan = plan_of(a_split(1, sizes=(2, 1, 1), slots=(0, 1, 2)), a_split(9, 5, (2, 1, 2), slots=(0, 3, 1)))
    assert plan_bytes(layers, homes, plan) == {
        (0, 2): 2 * state, (2, 0): state, (2, 1): state, (0, 1): state + 3 * 16 * 4,
        (1, 0): 2 * state + 3 * 2 * 4, (0, 3): 3 * 16 * 4, (3, 0): 3 * 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("homes", "split", "match"),
    [
        ([0] * 9, a_split(), "9 slots are given for 10 layers"),
        ([0] * 9 + [-1], a_split(), "whole numbers from 0"),
        ([0] * 9 + [0.5], a_split(), "whole numbers from 0"),
        ([1] * 10, a_split(), r"begins at slot 0 and the layer is on slot 1"),
        ([0] * 10, a_split(20), "another model"),
    ],
)
def test_slots_that_do_not_fit(homes: list[Any], split: Split, match: str) -> None:
    with pytest.raises(InputError, match=match):
        plan_bytes(nodes(), homes, plan_of(split))


def test_a_plan_of_nothing() -> None:
    steps = Steps(awake())
    with apply(steps, plan_of()) as rewrite:
        assert not rewrite.forms
    assert isinstance(steps.model, VideoViT)

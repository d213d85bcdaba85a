"""Tests of `codesign.execution.local`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.codesign.random_plan import random_plan
from sparseflow.codesign.execution import LocalExecutor
from sparseflow.codesign.workload.splits import compute_transfer_bytes
from sparseflow.errors import InputError
from sparseflow.pruning import compact
from sparseflow.pruning.compaction.layered_model import LayeredVideoViT
from sparseflow.pruning.model.config import ATTENTION_SELECTORS, SELECTORS
from tests.codesign.execution.test_rewrite import TOLERANCE, compute_error
from tests.pruning.models import awake, clips


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("back", [False, True])
def test_local_executor_matches_logits_and_bytes(dtype: torch.dtype, slots: int, back: bool) -> None:
    model = awake(depth=12, seed=slots).to(dtype)
    steps = LayeredVideoViT(model)
    batches = [clips(model, 3, seed=seed) for seed in range(2)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for seed in range(2):
        assignment, plan = random_plan(steps.describe_layers(3), slots, seed=seed, back=back)
        executor = LocalExecutor(steps, assignment, plan)
        outputs = executor.run(batches)
        with torch.no_grad():
            for x, logits in zip(batches, outputs, strict=True):
                assert compute_error(logits, model(x)) <= TOLERANCE[dtype]
        planned = compute_transfer_bytes(steps.describe_layers(3), assignment, plan)
        assert dict(executor.moved_bytes) == {pair: 2 * size for pair, size in planned.items()}
        assert executor.num_batches == 2 and planned
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_local_executor_of_pruned_models(selector: str, pool: str) -> None:
    keep = {"channel": 0.5} | ({} if selector in ATTENTION_SELECTORS else {"head": 0.7, "block": 0.7})
    ast: dict[str, Any] = {"stages": {1: 0.5, 3: 0.25}, "selector": selector, "merge": True, "keep": keep}
    steps = LayeredVideoViT(compact(awake(ast, pool=pool, depth=6)).double())
    x = clips(steps.model)
    for seed in range(3):
        assignment, plan = random_plan(steps.describe_layers(2), 3, seed=seed, share=0.7, back=seed == 2)
        executor = LocalExecutor(steps, assignment, plan)
        with torch.no_grad():
            assert compute_error(executor.run([x])[0], steps.model(x)) <= TOLERANCE[torch.float64]
        assert dict(executor.moved_bytes) == compute_transfer_bytes(
            steps.describe_layers(2), assignment, plan
        )


def test_local_executor_on_one_slot_moves_nothing() -> None:
    model = awake()
    executor = LocalExecutor(LayeredVideoViT(model), [5] * 10, devices={5: "cpu"})
    with torch.no_grad():
        assert torch.equal(executor.run([clips(model)])[0], model(clips(model)))
    assert not executor.moved_bytes


def test_slot_without_device_is_refused() -> None:
    steps = LayeredVideoViT(awake())
    with pytest.raises(InputError, match="1"):
        LocalExecutor(steps, [0] * 5 + [1] * 5, devices=["cpu"])
    LocalExecutor(steps, [0] * 5 + [1] * 5, devices=["cpu", "cpu"])


@pytest.mark.gpu
def test_local_executor_on_gpu() -> None:
    model = awake(depth=6).double()
    steps, x = LayeredVideoViT(model), clips(model)
    assignment, plan = random_plan(steps.describe_layers(2), 3, seed=1)
    executor = LocalExecutor(steps, assignment, plan, devices=["cuda:0", "cpu", "cuda:0"])
    with torch.no_grad():
        assert compute_error(executor.run([x])[0].cpu(), model(x)) <= TOLERANCE[torch.float64]
    assert dict(executor.moved_bytes) == compute_transfer_bytes(steps.describe_layers(2), assignment, plan)

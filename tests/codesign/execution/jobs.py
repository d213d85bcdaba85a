"""Jobs of test processes, importable by other processes."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from benchmarks.codesign.link_probe import probe
from benchmarks.codesign.random_plan import random_plan
from sparseflow.codesign.execution import PipelineTiming, RankExecutor
from sparseflow.errors import InputError
from sparseflow.pruning import compact
from sparseflow.pruning.compaction.layered_model import LayeredVideoViT
from tests.pruning.models import awake, clips

AST: dict[str, Any] = {"stages": {1: 0.5, 2: 0.3}, "merge": True}
MODELS: tuple[tuple[str | None, torch.dtype], ...] = (
    (None, torch.float64), (None, torch.float32), ("ast", torch.float64), ("tome", torch.float64),
)  # fmt: skip
"""Pairs (selector, dtype)."""

Ran = dict[str, Any]


def make_model(case: int) -> LayeredVideoViT:
    """Create a model of `MODELS`."""
    selector, dtype = MODELS[case % len(MODELS)]
    model = awake(depth=4, seed=case) if selector is None else compact(awake(AST | {"selector": selector}))
    return LayeredVideoViT(model.to(dtype))


def batches(steps: LayeredVideoViT, count: int = 6, size: int = 2) -> list[Tensor]:
    return [clips(steps.model, size, seed=seed) for seed in range(count)]


def planned(case: int, slots: int) -> tuple[list[int], Any]:
    return random_plan(make_model(case).describe_layers(2), slots, seed=case, back=case % 2 == 1)


def run_all(device: torch.device, *, slots: int, cases: int) -> list[Ran]:
    """Run random plans one after the other, each with batches of two sizes."""
    rows = []
    for case in range(cases):
        steps = make_model(case)
        assignment, plan = planned(case, slots)
        with RankExecutor(steps, assignment, plan, device=device, timeout_s=60.0) as executor:
            logits = executor.run([parameter.to("meta") if executor.slot != assignment[0] else parameter
                                   for parameter in batches(steps)])  # fmt: skip
            moved = dict(executor.moved_bytes)
            more = executor.run(batches(steps, 2, size=3))
            modules = [executor._model.model, *executor._parts.values()]  # pyright: ignore
            contents = sum(
                parameter.numel() * parameter.element_size()
                for module in modules
                for parameter in module.parameters()
            )
            own_part: Ran = {
                "slot": executor.slot, "logits": [parameter.cpu() for parameter in logits],
                "more": [parameter.cpu() for parameter in more], "moved": moved, "held": contents,
            }  # fmt: skip
            if case == 0:
                own_part["measured"] = executor.measure(
                    batches(steps, 1)[0], repeats=3, num_batches=4, warmup=2
                )
                executor.close()
        rows.append(own_part)
    return rows


def measured(ran: Ran) -> PipelineTiming:
    return ran["measured"]


def broken(device: torch.device, *, mode: str) -> None:
    """Let one of two processes fail: before it joins, within a layer, or by exiting."""
    steps = make_model(0)
    assignment = [0] * 5 + [1] * 5
    own_part = int(os.environ["RANK"])
    if mode == "early" and own_part == 1:
        raise ValueError("it could not be made")
    with RankExecutor(steps, assignment, device=device, timeout_s=60.0) as executor:
        if mode == "died" and own_part == 1:
            os._exit(7)
        if mode == "layer" and own_part == 1:
            executor._model.replace_layer(8, torch.nn.Linear(3, 3).double())
        executor.run(batches(steps))


def refused(device: torch.device) -> list[str]:
    """Check what both processes refuse."""
    steps = make_model(0)
    record = []
    with RankExecutor(steps, [0] * 5 + [1] * 5, device=device, timeout_s=60.0) as executor:
        for call in (
            lambda: executor.run([*batches(steps, 1, 2), *batches(steps, 1, 3)]),
            lambda: executor.measure(batches(steps, 1)[0], num_batches=1),
            lambda: RankExecutor(steps, [0] * 5 + [1] * 3 + [2] * 2, device=device),
        ):
            try:
                call()
            except InputError as error:
                record.append(str(error))
        assert executor.run([]) == []
    return record


Link = tuple[dict[str, Any], dict[int, list[float]]]


def two(device: torch.device, *, cases: int) -> tuple[list[Ran], list[str], Link]:
    """Run all checks of two processes at once, because starting processes takes longer."""
    link, samples = probe(device, sizes=(1 << 10, 1 << 16), repeats=3, trips=2)
    return run_all(device, slots=2, cases=cases), refused(device), (link.model_dump(), samples)

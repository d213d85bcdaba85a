"""Tests of `codesign.execution.ranks`."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.codesign.link_probe import probe
from sparseflow.codesign.execution import LocalExecutor, RankExecutor, join_processes, launch
from sparseflow.codesign.execution.rewrite import split_module
from sparseflow.codesign.workload.splits import RewritePlan, compute_transfer_bytes
from sparseflow.errors import InputError, RunError
from sparseflow.pruning.compaction.layered_model import LayeredVideoViT
from tests.codesign.execution import jobs
from tests.codesign.execution.test_rewrite import TOLERANCE, compute_error
from tests.pruning.models import awake


def size(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def holds(steps: LayeredVideoViT, assignment: list[int], plan: RewritePlan) -> list[int]:
    """Bytes of each slot's weights: of its layers, and of those that are split of its part."""
    result = Counter[int]()
    for layer, home in zip(steps.describe_layers(2), assignment, strict=True):
        result[home] += layer.weight_bytes
    for split in plan.splits:
        module = steps.get_layer(split.layer)
        result[split.slots[0]] -= size(module)
        for slot, part in zip(split.slots, split_module(module, split).parts, strict=True):
            result[slot] += size(part)
    return [result[slot] for slot in sorted(result)]


def check(ran: list[list[jobs.Ran]], slots: int, cases: int, timer: str = "perf_counter") -> None:
    assert len(ran) == slots
    for case in range(cases):
        steps, (assignment, plan) = jobs.make_model(case), jobs.planned(case, slots)
        own_part = [point[case] for point in ran]
        assert [point["slot"] for point in own_part] == list(range(slots))
        local = LocalExecutor(steps, assignment, plan)
        for name, batches in (("logits", jobs.batches(steps)), ("more", jobs.batches(steps, 2, 3))):
            record = [point[name] for point in own_part if point[name]]
            assert len(record) == 1 and own_part[assignment[-1]][name] is record[0]
            for samples, logits, same in zip(batches, record[0], local.run(batches), strict=True):
                with torch.no_grad():
                    full = steps.model(samples)
                assert compute_error(logits, full) <= TOLERANCE[full.dtype]
                assert compute_error(logits, same) <= TOLERANCE[full.dtype]
        moved = sum((Counter(point["moved"]) for point in own_part), Counter())
        planned = compute_transfer_bytes(steps.describe_layers(2), assignment, plan)
        assert dict(moved) == {pair: 6 * size for pair, size in planned.items()}
        assert [point["held"] for point in own_part] == holds(steps, assignment, plan)
    measured = [jobs.measured(point[0]) for point in ran]
    first = measured[0]
    assert all(point == first for point in measured)
    assert len(first.latency_ms) == 3 and len(first.period_ms) == 3 and first.batch_size == 2
    assert min(*first.latency_ms, *first.period_ms) > 0.0 and first.token_ms >= 0.0
    assert first.timer == timer and first.warmup == 2
    assignment, plan = jobs.planned(0, slots)
    assert first.moved_bytes == compute_transfer_bytes(
        jobs.make_model(0).describe_layers(2), assignment, plan
    )


def test_two_processes_match_reference() -> None:
    results = launch(partial(jobs.two, cases=4), 2, timeout_s=60.0)
    check([ran for ran, *_ in results], 2, 4)
    first, other = (refused for _, refused, _ in results)
    assert first == other and len(first) == 3
    assert "(3, 4, 3, 16, 16)" in first[0] and "`num_batches` (=1)" in first[1]
    assert "2 processes, but the plan uses 3 slots (0, 1, 2)" in first[2]
    (link, samples), same = (result for *_, result in results)
    assert same == (link, samples)
    assert link["name"] == link["source"] == "measured" and link["bandwidth"] > 0.0 <= link["latency_us"]
    assert {size: len(times) for size, times in samples.items()} == {1 << 10: 3, 1 << 16: 3}
    assert min(min(times) for times in samples.values()) > 0.0


@pytest.mark.slow
def test_three_processes_match_reference() -> None:
    check(launch(partial(jobs.run_all, slots=3, cases=8), 3, timeout_s=60.0), 3, 8)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_match_reference() -> None:
    results = launch(partial(jobs.two, cases=8), 2, device="cuda", timeout_s=60.0)
    check([ran for ran, *_ in results], 2, 8, "cuda_event")


@pytest.mark.parametrize(
    ("mode", "match"),
    [
        pytest.param(
            "early", "process 1 of 2 failed: ValueError: it could not be made", marks=pytest.mark.slow
        ),
        ("layer", r"process 1 of 2 failed: TypeError: Linear\.forward"),
        ("died", "exit code 7"),
    ],
)
def test_failing_process_ends_all(mode: str, match: str) -> None:
    with pytest.raises(RunError, match=match):
        launch(partial(jobs.broken, mode=mode), 2, timeout_s=60.0)


@pytest.mark.parametrize(
    "wrong", [{"sizes": (1024,)}, {"sizes": (64, 64)}, {"sizes": (0, 1)}, {"repeats": 0}, {"trips": 0}]
)
def test_link_probe_with_invalid_arguments_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="`sizes`"):
        probe("cpu", **wrong)
    with pytest.raises(InputError):
        probe("cpu")


def test_missing_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="torchrun"), join_processes():
        pass
    with pytest.raises(InputError):
        RankExecutor(LayeredVideoViT(awake()), [0] * 10)
    with pytest.raises(InputError, match="`processes`"):
        launch(jobs.refused, 0)

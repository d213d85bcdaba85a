"""A plan in several processes."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.codesign.link_probe import probe
from sparseflow.codesign.execution import LocalExecutor, RankExecutor, joined, launch
from sparseflow.codesign.execution.rewrite import split_form
from sparseflow.codesign.workload.splits import RewritePlan, plan_bytes
from sparseflow.errors import InputError, RunError
from sparseflow.pruning.steps import Steps
from tests.codesign.execution import jobs
from tests.codesign.execution.test_rewrite import TOLERANCE, apart
from tests.pruning.models import awake


def size(module: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in module.parameters())


def holds(steps: Steps, homes: list[int], plan: RewritePlan) -> list[int]:
    """Bytes of each slot's weights: of its layers, and of those that are split of its part."""
    found = Counter[int]()
    for layer, home in zip(steps.describe_layers(2), homes, strict=True):
        found[home] += layer.weight_bytes
    for split in plan.splits:
        module = steps.get_layer(split.layer)
        found[split.slots[0]] -= size(module)
        for slot, part in zip(split.slots, split_form(module, split).parts, strict=True):
            found[slot] += size(part)
    return [found[slot] for slot in sorted(found)]


def check(ran: list[list[jobs.Ran]], slots: int, cases: int, timer: str = "perf_counter") -> None:
    assert len(ran) == slots
    for case in range(cases):
        steps, (homes, plan) = jobs.made(case), jobs.planned(case, slots)
        mine = [each[case] for each in ran]
        assert [each["slot"] for each in mine] == list(range(slots))
        local = LocalExecutor(steps, homes, plan)
        for name, batches in (("logits", jobs.batches(steps)), ("more", jobs.batches(steps, 2, 3))):
            told = [each[name] for each in mine if each[name]]
            assert len(told) == 1 and mine[homes[-1]][name] is told[0]
            for samples, logits, same in zip(batches, told[0], local.run(batches), strict=True):
                with torch.no_grad():
                    whole = steps.model(samples)
                assert apart(logits, whole) <= TOLERANCE[whole.dtype]
                assert apart(logits, same) <= TOLERANCE[whole.dtype]
        moved = sum((Counter(each["moved"]) for each in mine), Counter())
        planned = plan_bytes(steps.describe_layers(2), homes, plan)
        assert dict(moved) == {pair: 6 * size for pair, size in planned.items()}
        assert [each["held"] for each in mine] == holds(steps, homes, plan)
    measured = [jobs.measured(each[0]) for each in ran]
    first = measured[0]
    assert all(each == first for each in measured)
    assert len(first.latency_ms) == 3 and len(first.period_ms) == 3 and first.samples == 2
    assert min(*first.latency_ms, *first.period_ms) > 0.0 and first.token_ms >= 0.0
    assert first.timer == timer and first.warmup == 2
    homes, plan = jobs.planned(0, slots)
    assert first.moved_bytes == plan_bytes(jobs.made(0).describe_layers(2), homes, plan)


def test_two_processes() -> None:
    told = launch(partial(jobs.two, cases=4), 2, timeout_s=60.0)
    check([ran for ran, *_ in told], 2, 4)
    one, other = (refused for _, refused, _ in told)
    assert one == other and len(one) == 3
    assert "expected one" in one[0] and "`batches` (=1)" in one[1]
    assert "2 processes, and the plan uses 3 slots (0, 1, 2)" in one[2]
    (link, samples), same = (found for *_, found in told)
    assert same == (link, samples)
    assert link["name"] == link["source"] == "measured" and link["bandwidth"] > 0.0 <= link["latency_us"]
    assert {size: len(times) for size, times in samples.items()} == {1 << 10: 3, 1 << 16: 3}
    assert min(min(times) for times in samples.values()) > 0.0


@pytest.mark.slow
def test_three_processes() -> None:
    check(launch(partial(jobs.run_all, slots=3, cases=8), 3, timeout_s=60.0), 3, 8)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus() -> None:
    told = launch(partial(jobs.two, cases=8), 2, device="cuda", timeout_s=60.0)
    check([ran for ran, *_ in told], 2, 8, "cuda_event")


@pytest.mark.parametrize(
    ("how", "match"),
    [
        pytest.param(
            "early", "process 1 of 2 failed: ValueError: it could not be made", marks=pytest.mark.slow
        ),
        ("layer", r"process 1 of 2 failed: TypeError: Linear\.forward"),
        ("died", "process 1 terminated with exit code 7"),
    ],
)
def test_one_that_fails_ends_all(how: str, match: str) -> None:
    with pytest.raises(RunError, match=match):
        launch(partial(jobs.broken, how=how), 2, timeout_s=60.0)


@pytest.mark.parametrize(
    "wrong", [{"sizes": (1024,)}, {"sizes": (64, 64)}, {"sizes": (0, 1)}, {"repeats": 0}, {"trips": 0}]
)
def test_what_tells_nothing_of_a_link(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="`sizes`"):
        probe("cpu", **wrong)
    with pytest.raises(InputError):
        probe("cpu")


def test_processes_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="torchrun"), joined():
        pass
    with pytest.raises(InputError):
        RankExecutor(Steps(awake()), [0] * 10)
    with pytest.raises(InputError, match="`processes`"):
        launch(jobs.refused, 0)

"""Tests of `benchmarks/codesign/random_plan.py`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.codesign.random_plan import random_plan
from sparseflow.codesign.workload.splits import check_rewrite_plan
from sparseflow.errors import InputError
from tests.codesign.nodes import made_layers

LAYERS = made_layers(6, seed=0)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 4, 14])
def test_random_plans_fit(slots: int, back: bool) -> None:
    groups, changes = set(), set()
    for seed in range(20):
        assignment, plan = random_plan(LAYERS, slots, seed=seed, back=back)
        check_rewrite_plan(LAYERS, plan, assignment)
        assert (assignment, plan) == random_plan(LAYERS, slots, seed=seed, back=back)
        assert back or set(assignment) == set(range(slots))
        groups |= {len(split.sizes) for split in plan.splits}
        changes.add(sum(first != other for first, other in pairwise(assignment)))
    assert groups == set(range(2, min(slots, max(groups, default=0)) + 1))
    assert back or changes == {slots - 1}


def test_random_plans_cover_splittable_layers() -> None:
    _, plan = random_plan(LAYERS, 2, seed=0, share=1.0)
    assert [split.layer for split in plan.splits] == [layer.id for layer in LAYERS if layer.splittable]


def test_single_unit_is_not_split() -> None:
    layers = [replace(item, units=1) if item.id == 2 else item for item in LAYERS]
    assignment, plan = random_plan(layers, 3, seed=0, share=1.0)
    check_rewrite_plan(layers, plan, assignment)
    assert 2 not in {split.layer for split in plan.splits} and len(plan.splits) > 5


@pytest.mark.parametrize("slots", [0, 15])
def test_random_plan_slots(slots: int) -> None:
    with pytest.raises(InputError, match="`slots`"):
        random_plan(LAYERS, slots, seed=0)

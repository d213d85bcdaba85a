"""Plans, model geometries and plan spaces."""

from __future__ import annotations

import json
import math
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.adaptive.plan.space import (
    OPTIONS,
    POSITIONS,
    TIERS,
    ModelGeometry,
    Plan,
    PlanAction,
    PlanSpace,
)
from sparseflow.errors import FileFormatError, InputError, PlanError

MOLMOE = ModelGeometry(depth=16, top_k=8)
WHOLE: dict[str, Any] = {"tier": "high", "insertion_position": 2, "top_k": 8, "blocks": (0, 1, 2, 3)}
WHOLE_TEXT: dict[str, Any] = WHOLE | {"tier": None}

geometries = st.builds(
    ModelGeometry,
    depth=st.integers(2, 70),
    top_k=st.integers(1, 12),
    tiers=st.sampled_from([TIERS, (), ("low", "high"), ("medium",)]),
)


def test_geometry_of_16_blocks_has_documented_options() -> None:
    assert MOLMOE.positions == (1, 2, 3, 4, 5)
    assert MOLMOE.top_ks == (4, 5, 6, 7, 8)
    assert {position: MOLMOE.block_counts(position) for position in POSITIONS} == {
        1: (12, 13, 14, 15, 16),
        2: (13, 14, 15, 16),
        3: (14, 15, 16),
        4: (15, 16),
        5: (16,),
    }


def test_space_of_16_blocks_has_225_plans_and_masks_invalid_options() -> None:
    space = PlanSpace.from_importance(MOLMOE, [0.5] + [0.1] * 15)
    assert (
        len(space)
        == len(space.plans)
        == len(set(space.plans))
        == len({plan.id for plan in space.plans})
        == 225
    )
    assert space.option_mask() == (
        (True, True, True, True, True),
        (True, True, True, True, False),
        (True, True, True, False, False),
        (True, True, False, False, False),
        (True, False, False, False, False),
    )
    for position, row in enumerate(space.option_mask()):
        for option, is_valid in enumerate(row):
            action = PlanAction(tier=0, position=position, top_k=0, option=option)
            if is_valid:
                assert space.action(space.plan(action)) == action
            else:
                with pytest.raises(PlanError):
                    space.plan(action)


def test_least_important_blocks_after_insertion_are_skipped_first() -> None:
    importance = [0.0, 0.9, 0.1, 0.2, 0.05, 0.3, 0.05, 0.4, 0.5, 0.6, 0.7, 0.8, 0.15, 0.25, 0.35, 0.45]
    space = PlanSpace.from_importance(MOLMOE, importance)
    # Of two equally important blocks, the earlier is kept longer.
    assert set(range(16)) - set(space.sets[1, 15]) == {6}
    assert set(range(16)) - set(space.sets[1, 12]) == {6, 4, 2, 12}
    assert set(range(16)) - set(space.sets[3, 14]) == {6, 4}
    assert space.sets[5, 16] == tuple(range(16))


@given(geometries)
def test_block_counts_of_any_depth_are_proportional(geometry: ModelGeometry) -> None:
    for position in geometry.positions:
        totals = geometry.block_counts(position)
        assert list(totals) == sorted(set(totals)) and totals[-1] == geometry.depth
        assert 1 <= len(totals) <= OPTIONS and totals[0] >= position
        # The skipped fraction is that of 16 blocks, within half a block.
        assert abs((geometry.depth - totals[0]) - (5 - position) * geometry.depth / 16) <= 0.5
    assert geometry.top_ks == tuple(range(max(1, geometry.top_k - 4), geometry.top_k + 1))


@settings(deadline=None, max_examples=30)
@given(geometries, st.randoms(use_true_random=False))
def test_plans_of_any_space_are_valid_and_round_trip(geometry: ModelGeometry, random: Any) -> None:
    space = PlanSpace.from_importance(geometry, [random.random() for _ in range(geometry.depth)])
    counts = sum(len(geometry.block_counts(position)) for position in geometry.positions)
    assert len(space) == max(1, len(geometry.tiers)) * len(geometry.top_ks) * counts
    for plan in space.plans:
        geometry.check(plan)
        assert space.plan(space.action(plan)) == plan
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
        assert set(range(plan.insertion_position)) <= set(plan.blocks)
    reloaded = PlanSpace.from_dict(json.loads(json.dumps(space.to_dict())))
    assert reloaded.plans == space.plans and reloaded.geometry == geometry
    # Plans are sorted by tier, smallest first.
    ranks = [0 if plan.tier is None else TIERS.index(plan.tier) for plan in space.plans]
    assert ranks == sorted(ranks)


@settings(deadline=None, max_examples=30)
@given(geometries, st.lists(st.floats(0.0, 1.0), min_size=70, max_size=70))
def test_kept_blocks_are_most_important(geometry: ModelGeometry, values: list[float]) -> None:
    importance = values[: geometry.depth]
    space = PlanSpace.from_importance(geometry, importance)
    for (position, total), kept_blocks in space.sets.items():
        assert len(kept_blocks) == total and kept_blocks[:position] == tuple(range(position))
        removed_blocks = set(range(geometry.depth)) - set(kept_blocks)
        for lost, stays in product(removed_blocks, kept_blocks[position:]):
            assert importance[lost] <= importance[stays]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda child: st.lists(child), max_leaves=5
    )
)
def test_from_dict_of_junk_is_refused(junk: Any) -> None:
    record = {"tier": "high", "insertion_position": 1, "top_k": 1, "blocks": [0, 1]}
    for name in record:
        if junk != record[name]:
            try:
                Plan.from_dict(record | {name: junk})
            except FileFormatError:
                continue
    for read in (Plan.from_dict, ModelGeometry.from_dict, PlanSpace.from_dict):
        with pytest.raises(FileFormatError):
            read(junk)


@pytest.mark.parametrize(
    "change",
    [
        {"tier": "huge"},
        {"tier": 3},
        {"insertion_position": 0},
        {"insertion_position": 6},
        {"insertion_position": 2.0},
        {"insertion_position": True},
        {"top_k": 0},
        {"top_k": "8"},
        {"blocks": (0, 1, 3, 2)},
        {"blocks": (0, 1, 1)},
        {"blocks": (-1, 0, 1)},
        {"blocks": (0, 1, 2.0)},
        {"blocks": 3},
        {"blocks": (1, 2, 3)},
        {"blocks": ()},
        {"blocks": (0, 2, 3)},
    ],
)
def test_invalid_plan_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        Plan(**(WHOLE | change))


@pytest.mark.parametrize(
    "change",
    [
        {"tier": "low"},
        {"top_k": 9},
        {"blocks": (0, 1, 2, 4)},
        {"insertion_position": 4},
    ],
)
def test_geometry_check_plan_out_of_range_is_refused(change: dict[str, Any]) -> None:
    geometry = ModelGeometry(depth=4, top_k=8, tiers=("medium", "high"))
    geometry.check(Plan(**WHOLE))
    geometry.check(Plan(**WHOLE_TEXT))
    with pytest.raises(PlanError):
        geometry.check(Plan(**(WHOLE | change)))


def test_text_model_has_no_tiers() -> None:
    with pytest.raises(PlanError):
        ModelGeometry(depth=4, top_k=8, tiers=()).check(Plan(**WHOLE))
    assert ModelGeometry(depth=4, top_k=8, tiers=()).full_plan().tier is None
    assert MOLMOE.full_plan().tier == "high" and MOLMOE.full_plan(images=False).tier is None
    assert MOLMOE.full_plan().blocks == tuple(range(16)) and MOLMOE.full_plan().top_k == 8


def test_expert_calls_count_blocks_before_and_after_insertion() -> None:
    assert MOLMOE.expert_calls(MOLMOE.full_plan()) == 16 * 8
    plan = Plan(tier="low", insertion_position=2, top_k=5, blocks=(0, 1, 4, 7))
    assert MOLMOE.expert_calls(plan) == 2 * 8 + 2 * 5


@pytest.mark.parametrize(
    "change",
    [
        {"depth": 1},
        {"depth": 4.0},
        {"top_k": 0},
        {"top_k": True},
        {"tiers": ("high", "low")},
        {"tiers": ("vast",)},
    ],
)
def test_invalid_geometry_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        arguments: dict[str, Any] = {"depth": 4, "top_k": 2} | change
        ModelGeometry(**arguments)


def test_invalid_space_or_action_is_refused() -> None:
    with pytest.raises(InputError):
        PlanSpace.from_importance(MOLMOE, [0.0] * 15)
    with pytest.raises(InputError):
        PlanSpace.from_importance(MOLMOE, [math.nan] * 16)
    space = PlanSpace.from_importance(MOLMOE, [0.0] * 16)
    for blocks in (None, tuple(range(11)), (0, *range(5, 16))):
        sets = {**space.sets, (1, 13): blocks} if blocks else {key: space.sets[key] for key in [(1, 12)]}
        with pytest.raises(InputError):
            PlanSpace(geometry=MOLMOE, sets=sets)
    with pytest.raises(PlanError):
        PlanSpace(geometry=MOLMOE, sets={**space.sets, (3, 15): (0, 1, *range(3, 16))})
    with pytest.raises(PlanError):
        space.action(Plan(tier=None, insertion_position=1, top_k=8, blocks=tuple(range(16))))
    for name in ("tier", "position", "top_k"):
        for value in (-1, 9):
            with pytest.raises(PlanError, match=name):
                space.plan(
                    PlanAction(**({"tier": 0, "position": 0, "top_k": 0, "option": 0} | {name: value}))
                )


def test_plan_ids_are_stable() -> None:
    assert Plan(**WHOLE).id == "high-p2-k8-b0.1.2.3"
    assert Plan(**WHOLE_TEXT).id == "text-p2-k8-b0.1.2.3"
    listed: dict[str, Any] = WHOLE | {"blocks": [0, 1, 2, 3]}
    assert Plan(**listed) == Plan(**WHOLE)


def test_default_importance_skips_every_second_late_block() -> None:
    space = PlanSpace.from_importance(MOLMOE)
    removed_blocks = {
        key: tuple(sorted(set(range(16)) - set(kept_blocks))) for key, kept_blocks in space.sets.items()
    }
    assert [removed_blocks[1, total] for total in (16, 15, 14, 13, 12)] == [
        (), (12,), (10, 12), (10, 12, 14), (8, 10, 12, 14),
    ]  # fmt: skip
    assert removed_blocks[4, 15] == (12,)
    # Of three blocks, only the last one lies after position 2.
    assert PlanSpace.from_importance(ModelGeometry(depth=3, top_k=2)).sets[2, 2] == (0, 1)


@given(geometries)
def test_default_importance_keeps_first_and_last_block(geometry: ModelGeometry) -> None:
    depth = geometry.depth
    for (position, _), kept_blocks in PlanSpace.from_importance(geometry).sets.items():
        removed_blocks = sorted(set(range(depth)) - set(kept_blocks))
        assert 0 in kept_blocks and (depth - 1 in kept_blocks or position == depth - 1)
        if depth >= 12:
            assert all(block >= depth // 2 for block in removed_blocks)
            # At most a quarter is skipped, within half a block, so two skipped blocks may be adjacent.
            assert sum(later - sooner < 2 for sooner, later in pairwise(removed_blocks)) <= 2


@pytest.mark.parametrize("depth", [-1, 1, 10_001, 10**30, 2.0, True])
def test_geometry_of_an_impossible_depth_is_refused(depth: object) -> None:
    with pytest.raises(InputError, match="depth"):
        ModelGeometry(depth=depth, top_k=2)  # pyright: ignore[reportArgumentType]

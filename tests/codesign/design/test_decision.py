"""Tests of `codesign.design.decision`."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from sparseflow.codesign.design.decision import HardwareDecision
from sparseflow.codesign.workload.splits import LayerSplit, RewritePlan
from sparseflow.core.layers import LayerNode
from sparseflow.errors import InputError
from tests.codesign.toys import chain, hardware

LAYERS = chain()
NAMES = tuple(layer.name for layer in LAYERS)
"""Embed, two blocks of an attention and a perceptron, head."""


def split(layer: int, slots: tuple[int, ...] = (0, 1)) -> LayerSplit:
    return LayerSplit(layer=layer, permutation=(2, 0, 1), sizes=(1,) * (len(slots) - 1) + (4 - len(slots),),
                 slots=slots)  # fmt: skip


def decision(**changes: Any) -> HardwareDecision:
    full: dict[str, Any] = {
        "chips": ("npu-m", None, "npu-s"), "segments": (NAMES[:2], NAMES[2:3], NAMES[3:]),
        "mapping": (0, 2, 0), "positions_mm": ((0.0, 1.5), (-2.0, 0.1), (1e-3, 7.0)),
        "rewrite_plan": RewritePlan(splits=(split(2, (2, 0)), split(4, (0, 2)))),
    }  # fmt: skip
    return HardwareDecision(**full | changes)


def without(*positions: int) -> list[LayerNode]:
    remaining = [layer for layer in LAYERS if layer.id not in positions]
    return [replace(layer, id=index) for index, layer in enumerate(remaining)]


def test_assign_layers_by_name() -> None:
    result = decision()
    assert result.assign_layers(LAYERS) == (0, 0, 2, 0, 0, 0)
    assert {index: item.slots for index, item in result.select_splits(LAYERS).items()} == {
        2: (2, 0),
        4: (0, 2),
    }
    assert decision(rewrite_plan=None).select_splits(LAYERS) == {}


def test_assign_layers_without_removed_layers() -> None:
    result = decision()
    assert result.assign_layers(without(1)) == (0, 2, 0, 0, 0)
    assert {index: item.slots for index, item in result.select_splits(without(1)).items()} == {
        1: (2, 0),
        3: (0, 2),
    }
    assert result.assign_layers(without(2)) == (0,) * 5
    assert {index: item.slots for index, item in result.select_splits(without(2)).items()} == {3: (0, 2)}


def test_assign_layers_places_unknown_layers_with_predecessor() -> None:
    result = decision(segments=(NAMES[:1], NAMES[2:3], NAMES[5:]), mapping=(1, 2, 0), rewrite_plan=None)
    assert result.assign_layers(LAYERS) == (1, 1, 2, 2, 2, 0)
    assert decision(segments=(NAMES[3:],), mapping=(2,), rewrite_plan=None).assign_layers(LAYERS) == (2,) * 6


SLOT = st.integers(0, 3)
PLACE = st.floats(-1e3, 1e3)
DECISIONS = st.builds(
    HardwareDecision,
    chips=st.lists(st.sampled_from(["npu-s", "npu-m", None]), min_size=4, max_size=4).map(tuple),
    segments=st.just(tuple((name,) for name in NAMES)),
    mapping=st.lists(SLOT, min_size=6, max_size=6).map(tuple),
    positions_mm=st.lists(st.tuples(PLACE, PLACE), min_size=4, max_size=4).map(tuple),
    rewrite_plan=st.one_of(
        st.none(),
        st.lists(st.integers(0, 5), unique=True, max_size=3).map(
            lambda layers: RewritePlan(splits=tuple(split(layer) for layer in layers))
        ),
    ),
)


@given(DECISIONS)
@budget(max_examples=30, deadline=None)
def test_decision_json_round_trip(full: HardwareDecision) -> None:
    assert HardwareDecision.from_dict(json.loads(json.dumps(full.to_dict()))) == full


def test_decision_of_planner_json_round_trip() -> None:
    hw = hardware(hardware={"link": "ucie"})
    first = hw.initial_decision(LAYERS)
    used = hw.remap(LAYERS, first, use_fine_split=True)
    assert used is not None and used.rewrite_plan is not None
    assert HardwareDecision.from_dict(json.loads(json.dumps(used.to_dict()))) == used


def change(record: Any, location: tuple[Any, ...], value: Any) -> Any:
    result = copy.deepcopy(record)
    index = result
    for name in location[:-1]:
        index = index[name]
    index[location[-1]] = value
    return result


DAMAGE = [
    (("chips",), None), (("chips",), 3), (("chips",), "npu"), (("chips", 0), 3), (("segments",), None),
    (("segments", 0), None), (("segments", 0), "embed"), (("segments", 0, 0), 7), (("mapping",), None),
    (("mapping", 0), None), (("mapping", 0), "x"), (("mapping", 0), 1.5), (("mapping", 0), -1),
    (("mapping",), [0]), (("mapping",), [0, 0, 9]), (("positions_mm",), 1), (("positions_mm", 0), [1.0]),
    (("positions_mm", 0), [1.0, "x"]), (("positions_mm", 0), [1.0, float("nan")]),
    (("positions_mm",), [[0.0, 0.0]]), (("rewrite_plan",), 3), (("rewrite_plan", "splits"), None),
    (("rewrite_plan", "splits", 0, "sizes"), [9]), (("rewrite_plan", "more"), 1),
    (("rewrite_plan", "splits", 0), {"layer": 2}), (("rewrite_plan", "splits", 0, "layer"), "2"),
    (("rewrite_plan", "splits", 0, "layer"), True), (("rewrite_plan", "splits", 0, "layer"), 4),
    (("rewrite_plan", "splits", 0, "slots"), [1, 1]), (("mapping", 0), "0"), (("mapping", 0), True),
]  # fmt: skip


@pytest.mark.parametrize(("location", "value"), DAMAGE)
def test_from_dict_with_invalid_value_is_refused(location: tuple[Any, ...], value: Any) -> None:
    with pytest.raises(InputError):
        HardwareDecision.from_dict(change(decision().to_dict(), location, value))


@pytest.mark.parametrize("name", ["chips", "segments", "mapping", "positions_mm", "rewrite_plan"])
def test_from_dict_with_missing_part_is_refused(name: str) -> None:
    record = decision().to_dict()
    del record[name]
    with pytest.raises(InputError, match=rf".*{name}"):
        HardwareDecision.from_dict(record)
    for full in (None, [], "decision", 3):
        with pytest.raises(InputError):
            HardwareDecision.from_dict(full)  # pyright: ignore[reportArgumentType]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"mapping": (0, 2)}, "3 segments with 2 slots"),
    ({"positions_mm": ((0.0, 0.0),)}, "3"),
    ({"mapping": (0, 3, 0)}, r"`mapping` \(=\[0, 3, 0\]\)"),
    ({"mapping": (0, -1, 0)}, "0"),
    ({"rewrite_plan": RewritePlan(splits=(split(6),))}, "6"),
    (
        {"rewrite_plan": RewritePlan(splits=(split(2, (2, 5)),))},
        "5",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_inconsistent_decision_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        decision(**changes)


def test_assign_layers_without_segments_is_refused() -> None:
    with pytest.raises(InputError):
        decision(segments=(), mapping=(), rewrite_plan=None).assign_layers(LAYERS)


def test_restrict_to_remaining_layers() -> None:
    result = decision(rewrite_plan=None)
    assert result.restrict_to(LAYERS) is result
    removed = result.restrict_to(without(1, 2))
    assert removed.segments == ((NAMES[0], *NAMES[3:]),) and removed.mapping == (0,)
    # Splits of other units are dropped; those of three units are of no layer here.
    assert decision().restrict_to(LAYERS) == result
    assert decision().select_splits(LAYERS, same_units=True) == {}
    narrow = [replace(layer, units=3) for layer in LAYERS]
    assert decision().restrict_to(narrow) == decision()
    assert set(decision().select_splits(narrow, same_units=True)) == {2, 4}

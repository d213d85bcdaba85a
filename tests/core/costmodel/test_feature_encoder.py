"""Features become the same columns every time, and what cannot be a column is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.core.costmodel.feature_encoder import FeatureEncoder
from sparseflow.errors import FileFormatError, InputError

ROWS = [
    {"op": "Conv", "flops": 2.0, "bytes": 8, "type": "float32"},
    {"op": "Add", "flops": 1.5, "bytes": 4, "type": "float32"},
]


def test_numbers_come_first_and_each_text_has_a_column_a_value() -> None:
    space = FeatureEncoder.fit(ROWS)
    assert space.columns == ("bytes", "flops", "op=Add", "op=Conv", "type=float32")
    matrix = space.transform(ROWS)
    assert matrix.dtype == np.float32
    assert matrix.tolist() == [[8.0, 2.0, 0.0, 1.0, 1.0], [4.0, 1.5, 1.0, 0.0, 1.0]]


def test_the_order_of_rows_and_of_their_names_does_not_matter() -> None:
    turned = [dict(reversed(row.items())) for row in reversed(ROWS)]
    assert FeatureEncoder.fit(turned) == FeatureEncoder.fit(ROWS)
    assert np.array_equal(
        FeatureEncoder.fit(ROWS).transform(turned)[::-1], FeatureEncoder.fit(ROWS).transform(ROWS)
    )


def test_a_category_that_was_not_seen_leaves_its_columns_0() -> None:
    space = FeatureEncoder.fit(ROWS)
    unseen, absent = space.transform(
        [{"op": "Softmax", "flops": 1.0, "bytes": 1.0, "type": "float32"}, {"flops": 1.0, "bytes": 1.0}]
    )
    assert unseen.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert absent.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_a_category_that_is_absent_or_a_number_is_not_the_text_that_reads_alike() -> None:
    space = FeatureEncoder.fit([{"op": "None"}, {"op": "1"}])
    assert space.transform([{}, {"op": 1}]).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_features_that_the_space_does_not_know_are_left_out() -> None:
    space = FeatureEncoder.fit(ROWS)
    assert np.array_equal(space.transform([{**ROWS[0], "new": 5.0, "other": "x"}]), space.transform(ROWS[:1]))


def test_no_rows_give_a_matrix_without_rows() -> None:
    assert FeatureEncoder.fit(ROWS).transform([]).shape == (0, 5)


def test_a_space_needs_a_row() -> None:
    with pytest.raises(InputError, match="at least one row"):
        FeatureEncoder.fit([])


def test_a_feature_is_a_number_in_every_row_or_a_text_in_every_row() -> None:
    with pytest.raises(InputError, match=r"\['op'\].*numbers in some rows and texts in others"):
        FeatureEncoder.fit([*ROWS, {"op": 3.0, "flops": 1.0, "bytes": 1.0}])


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -float("inf"), "12", 1e39])
def test_a_number_that_is_missing_or_that_float32_cannot_hold_is_refused(value: Any) -> None:
    space = FeatureEncoder.fit(ROWS)
    with pytest.raises(InputError, match="`flops` must be a finite number, and is"):
        space.transform([ROWS[0], {**ROWS[1], "flops": value}])


def test_a_row_without_one_of_the_numbers_is_refused() -> None:
    with pytest.raises(InputError, match="`bytes` must be a finite number, and is None"):
        FeatureEncoder.fit(ROWS).transform([{"op": "Conv", "flops": 1.0, "type": "float32"}])


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="="), max_size=4)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"size": st.floats(-1e30, 1e30), "count": st.integers(-1000, 1000), "op": TEXTS},
            optional={"type": TEXTS},
        ),
        min_size=1,
        max_size=6,
    )
)
def test_a_space_read_back_from_json_gives_the_same_matrix(rows: list[dict[str, Any]]) -> None:
    space = FeatureEncoder.fit(rows)
    again = FeatureEncoder.from_dict(json.loads(json.dumps(space.to_dict())))
    matrix = space.transform(rows)
    assert again == space and again.columns == space.columns
    assert np.array_equal(again.transform(rows), matrix)
    texts = matrix[:, len(space.numbers) :]
    assert texts.sum(axis=1).tolist() == [sum(name in row for name in ("op", "type")) for row in rows]


@pytest.mark.parametrize(
    "record",
    [
        None,
        [],
        "space",
        {},
        {"numbers": ["a"]},
        {"numbers": None, "categories": {}},
        {"numbers": ["a"], "categories": ["op"]},
        {"numbers": ["a"], "categories": {"op": 3}},
        {"numbers": "flops", "categories": {}},
        {"numbers": ["a"], "categories": {"op": "Conv"}},
    ],
)
def test_what_is_not_a_space_is_refused(record: Any) -> None:
    with pytest.raises(FileFormatError, match="a space of features cannot be read"):
        FeatureEncoder.from_dict(record)

"""Feature encoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sparseflow.errors import InputError
from sparseflow.latency.model.features import FeatureEncoder

ROWS = [
    {"op": "Conv", "flops": 2.0, "bytes": 8, "type": "float32"},
    {"op": "Add", "flops": 1.5, "bytes": 4, "type": "float32"},
]


def test_transform_puts_numbers_first_and_one_hot_columns_after() -> None:
    encoder = FeatureEncoder.fit(ROWS)
    assert encoder.columns == ("bytes", "flops", "op=Add", "op=Conv", "type=float32")
    matrix = encoder.transform(ROWS)
    assert matrix.dtype == np.float32
    assert matrix.tolist() == [[8.0, 2.0, 0.0, 1.0, 1.0], [4.0, 1.5, 1.0, 0.0, 1.0]]


def test_fit_ignores_the_order_of_rows_and_names() -> None:
    reversed_rows = [dict(reversed(row.items())) for row in reversed(ROWS)]
    assert FeatureEncoder.fit(reversed_rows) == FeatureEncoder.fit(ROWS)
    assert np.array_equal(
        FeatureEncoder.fit(ROWS).transform(reversed_rows)[::-1], FeatureEncoder.fit(ROWS).transform(ROWS)
    )


def test_transform_unknown_category_is_all_zeros() -> None:
    encoder = FeatureEncoder.fit(ROWS)
    unseen, absent = encoder.transform(
        [{"op": "Softmax", "flops": 1.0, "bytes": 1.0, "type": "float32"}, {"flops": 1.0, "bytes": 1.0}]
    )
    assert unseen.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert absent.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_transform_does_not_convert_values_to_strings() -> None:
    encoder = FeatureEncoder.fit([{"op": "None"}, {"op": "1"}])
    assert encoder.transform([{}, {"op": 1}]).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_transform_ignores_unknown_features() -> None:
    encoder = FeatureEncoder.fit(ROWS)
    assert np.array_equal(
        encoder.transform([{**ROWS[0], "new": 5.0, "other": "x"}]), encoder.transform(ROWS[:1])
    )


def test_transform_without_rows_is_empty() -> None:
    assert FeatureEncoder.fit(ROWS).transform([]).shape == (0, 5)


def test_fit_without_rows_raises() -> None:
    with pytest.raises(InputError, match="at least one"):
        FeatureEncoder.fit([])


def test_fit_with_mixed_types_raises() -> None:
    with pytest.raises(InputError, match=r"\['op'\]"):
        FeatureEncoder.fit([*ROWS, {"op": 3.0, "flops": 1.0, "bytes": 1.0}])


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -float("inf"), "12", 1e39])
def test_transform_with_a_number_outside_float32_raises(value: Any) -> None:
    encoder = FeatureEncoder.fit(ROWS)
    with pytest.raises(InputError, match="`flops`"):
        encoder.transform([ROWS[0], {**ROWS[1], "flops": value}])


def test_transform_without_a_numeric_feature_raises() -> None:
    with pytest.raises(InputError, match=r"`bytes`.*None"):
        FeatureEncoder.fit(ROWS).transform([{"op": "Conv", "flops": 1.0, "type": "float32"}])


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="="), max_size=4)


@settings(max_examples=30)
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
def test_encoder_survives_json(rows: list[dict[str, Any]]) -> None:
    encoder = FeatureEncoder.fit(rows)
    restored = FeatureEncoder.model_validate_json(encoder.model_dump_json())
    matrix = encoder.transform(rows)
    assert restored == encoder and restored.columns == encoder.columns
    assert np.array_equal(restored.transform(rows), matrix)
    one_hot = matrix[:, len(encoder.numbers) :]
    assert one_hot.sum(axis=1).tolist() == [sum(name in row for name in ("op", "type")) for row in rows]


@pytest.mark.parametrize(
    "record",
    [
        None,
        [],
        "encoder",
        {},
        {"numbers": ["a"]},
        {"numbers": None, "categories": {}},
        {"numbers": ["a"], "categories": ["op"]},
        {"numbers": ["a"], "categories": {"op": 3}},
        {"numbers": "flops", "categories": {}},
        {"numbers": ["a"], "categories": {"op": "Conv"}},
    ],
)
def test_encoder_of_a_malformed_record_raises(record: Any) -> None:
    with pytest.raises(ValidationError):
        FeatureEncoder.model_validate(record)

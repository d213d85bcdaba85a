"""Features of kernels and their encoder."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

pytest.importorskip("onnx")

from sparseflow.errors import InputError
from sparseflow.latency.graph.kernels import KernelSpec
from sparseflow.latency.model.features import FeatureEncoder, Features, make_features
from tests.latency.synthetic import make_kernel, make_matmul

extents = st.integers(1, 9)


def number(kernel: KernelSpec, name: str) -> float:
    """Return a logarithmic feature as a size."""
    value = make_features(kernel)[name]
    assert isinstance(value, float)
    return 2.0**value - 1.0


def conv(
    batch: int = 1, groups: int = 1, read: int = 3, written: int = 8, side: int = 6, window: int = 3
) -> KernelSpec:
    """Build a convolution; `read` and `written` are channels per group."""
    image = (batch, groups * read, side + window - 1, side + window - 1)
    weight = (groups * written, read, window, window)
    return make_kernel(
        "Conv", [image, weight], (batch, groups * written, side, side), constants=(1,), group=groups,
        kernel_shape=[window, window], strides=[1, 1],
    )  # fmt: skip


@st.composite
def any_kernels(draw: Any) -> KernelSpec:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    same = draw(
        st.sampled_from(["Relu", "Add", "Softmax", "Reshape", "Unheard", "Slice", "Pad", "ReduceMean"])
    )
    given_axis = draw(st.sampled_from([{}, {"axis": -1}, {"axis": 7}, {"axes": [0, 1]}, {"perm": [0]}]))
    return draw(
        st.sampled_from(
            [
                make_kernel(same, [shape] * draw(st.integers(0, 3)), shape, **given_axis),
                make_kernel(same, [shape], shape, values={0: (0, 1, -1)}, dtype="int64"),
                conv(*draw(st.tuples(*[extents] * 6))),
                make_matmul(*draw(st.tuples(extents, extents, extents))),
            ]
        )
    )


@given(any_kernels())
def test_features_same_names_and_finite(kernel: KernelSpec) -> None:
    features_of_kernel = make_features(kernel)
    usual = make_features(make_matmul(2, 3, 4))
    assert {name: type(value) for name, value in features_of_kernel.items()} == {
        n: type(v) for n, v in usual.items()
    }
    assert all(math.isfinite(value) for value in features_of_kernel.values() if not isinstance(value, str))


@given(extents, extents, extents, extents, extents, extents)
def test_convolution_contraction(
    batch: int, groups: int, read: int, written: int, side: int, window: int
) -> None:
    kernel = conv(batch, groups, read, written, side, window)
    expected = {
        "rows": batch * side * side, "depth": read * window * window, "columns": written, "groups": groups,
    }  # fmt: skip
    assert {name: number(kernel, name) for name in expected} == pytest.approx(expected)
    assert 2 * math.prod(expected.values()) == pytest.approx(kernel.flops)
    assert make_features(kernel)["window"] == window * window


@given(extents, extents, extents, extents, st.booleans())
def test_shared_matrix_folds_batch(batch: int, rows: int, depth: int, columns: int, shared: bool) -> None:
    second = (depth, columns) if shared else (batch, depth, columns)
    kernel = make_kernel("MatMul", [(batch, rows, depth), second], (batch, rows, columns))
    assert number(kernel, "rows") == pytest.approx(rows * batch if shared else rows)
    assert number(kernel, "groups") == pytest.approx(1 if shared else batch)
    product = math.prod(number(kernel, name) for name in ("rows", "depth", "columns", "groups"))
    assert 2 * product == pytest.approx(kernel.flops)


def test_transposed_operands_same_contraction() -> None:
    plain = make_matmul(2, 30, 4)
    turned = make_kernel("Gemm", [(30, 2), (30, 4)], (2, 4), constants=(1,), transA=1)
    fused = make_kernel("FusedMatMul", [(30, 2), (30, 4)], (2, 4), domain="com.microsoft", transA=1)
    for name in ("rows", "depth", "columns", "groups"):
        assert make_features(plain)[name] == make_features(turned)[name] == make_features(fused)[name]


def test_elementwise_has_no_contraction() -> None:
    features_of_kernel = make_features(make_kernel("Relu", [(4, 8)], (4, 8)))
    assert not any(features_of_kernel[name] for name in ("rows", "depth", "columns", "groups", "aligned_8"))


def test_alignment_features() -> None:
    features_of_kernel = make_features(make_matmul(4, 4, 24))
    assert (
        features_of_kernel["aligned_8"],
        features_of_kernel["aligned_16"],
        features_of_kernel["aligned_32"],
    ) == (1.0, 0.75, 0.75)


@pytest.mark.parametrize(
    ("kernel", "extent", "distance"),
    [
        (make_kernel("Softmax", [(2, 3, 50)], (2, 3, 50), axis=-1), 50, 1),
        (make_kernel("Softmax", [(2, 3, 50)], (2, 3, 50), axis=1), 3, 2),
        (make_kernel("ReduceMean", [(2, 3, 50), (2,)], (2, 1, 1), values={1: (1, 2)}), 150, 1),
        (make_kernel("ReduceMean", [(2, 3, 50)], (1, 3, 50), axes=[0]), 2, 3),
        (make_kernel("Slice", [(2, 3, 50), (1,), (1,), (1,)], (2, 3, 9), values={3: (2,)}), 50, 1),
        (make_kernel("Pad", [(2, 3, 50), (6,)], (2, 5, 50), values={1: (0, 1, 0, 0, 1, 0)}), 3, 2),
        (make_kernel("Concat", [(2, 3, 50), (2, 1, 50)], (2, 4, 50), axis=1), 3, 2),
        (make_kernel("Relu", [(2, 3, 50)], (2, 3, 50)), 1, 0),
        (make_kernel("Softmax", [()], (), axis=-1), 1, 0),
    ],
)  # fmt: skip
def test_axes_of_attributes_and_inputs(kernel: KernelSpec, extent: int, distance: int) -> None:
    assert number(kernel, "axis") == pytest.approx(extent)
    assert make_features(kernel)["axis_place"] == distance


def test_transpose_innermost_axis() -> None:
    moves = make_kernel("Transpose", [(2, 3, 4)], (2, 4, 3), perm=[0, 2, 1])
    keeps = make_kernel("Transpose", [(2, 3, 4)], (3, 2, 4), perm=[1, 0, 2])
    assert (make_features(moves)["moved_inner"], make_features(keeps)["moved_inner"]) == (1.0, 0.0)


def test_weights_separated_from_activations() -> None:
    kernel = make_matmul(2, 3, 5)
    sizes = {"weight_bytes": 60, "read_bytes": 24, "written_bytes": 40, "bytes": 124}
    assert {name: number(kernel, name) for name in sizes} == pytest.approx(sizes)
    assert make_features(kernel)["flowing_inputs"] == 1.0
    both = make_kernel("MatMul", [(2, 3), (3, 5)], (2, 5))
    assert number(both, "weight_bytes") == 0.0 and make_features(both)["flowing_inputs"] == 2.0


def test_operator_category_has_domain_and_dtype() -> None:
    operators = [
        make_kernel("Gelu", [(4,)], (4,), dtype=dtype, domain=domain)
        for dtype in ("float32", "float16")
        for domain in ("", "com.microsoft")
    ]
    assert len({make_features(kernel)["operator"] for kernel in operators}) == 4
    assert {make_features(kernel)["op"] for kernel in operators} == {"Gelu"}


# The encoder.

ROWS: list[Features] = [
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
            {"size": st.floats(-1e30, 1e30), "count": st.integers(-1000, 1000), "op": TEXTS, "type": TEXTS}
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
    assert one_hot.sum(axis=1).tolist() == [2.0] * len(rows)


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

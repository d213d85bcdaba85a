"""Features: what a regressor is told of a kernel, from shapes and attributes alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("onnx")

from sparseflow.latency.features import features
from sparseflow.latency.kernels import Kernel
from tests.latency.synthetic import make_kernel, make_matmul

extents = st.integers(1, 9)


def number(kernel: Kernel, name: str) -> float:
    """A feature that is a size, as the size."""
    value = features(kernel)[name]
    assert isinstance(value, float)
    return 2.0**value - 1.0


def conv(
    batch: int = 1, groups: int = 1, read: int = 3, written: int = 8, side: int = 6, window: int = 3
) -> Kernel:
    """`read` and `written` channels are those of one group."""
    image = (batch, groups * read, side + window - 1, side + window - 1)
    weight = (groups * written, read, window, window)
    return make_kernel(
        "Conv", [image, weight], (batch, groups * written, side, side), constants=(1,), group=groups,
        kernel_shape=[window, window], strides=[1, 1],
    )  # fmt: skip


@st.composite
def any_kernels(draw: Any) -> Kernel:
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


@settings(deadline=None)
@given(any_kernels())
def test_every_kernel_has_the_same_names_and_finite_numbers(kernel: Kernel) -> None:
    found = features(kernel)
    usual = features(make_matmul(2, 3, 4))
    assert {name: type(value) for name, value in found.items()} == {n: type(v) for n, v in usual.items()}
    assert all(math.isfinite(value) for value in found.values() if not isinstance(value, str))


@settings(deadline=None)
@given(extents, extents, extents, extents, extents, extents)
def test_a_convolution_is_a_product_in_parts(
    batch: int, groups: int, read: int, written: int, side: int, window: int
) -> None:
    kernel = conv(batch, groups, read, written, side, window)
    wanted = {
        "rows": batch * side * side, "depth": read * window * window, "columns": written, "groups": groups,
    }  # fmt: skip
    assert {name: number(kernel, name) for name in wanted} == pytest.approx(wanted)
    assert 2 * math.prod(wanted.values()) == pytest.approx(kernel.flops)
    assert features(kernel)["window"] == window * window


@settings(deadline=None)
@given(extents, extents, extents, extents, st.booleans())
def test_a_batch_folds_into_the_rows_where_one_matrix_serves_all(
    batch: int, rows: int, depth: int, columns: int, shared: bool
) -> None:
    second = (depth, columns) if shared else (batch, depth, columns)
    kernel = make_kernel("MatMul", [(batch, rows, depth), second], (batch, rows, columns))
    assert number(kernel, "rows") == pytest.approx(rows * batch if shared else rows)
    assert number(kernel, "groups") == pytest.approx(1 if shared else batch)
    product = math.prod(number(kernel, name) for name in ("rows", "depth", "columns", "groups"))
    assert 2 * product == pytest.approx(kernel.flops)


def test_transposed_operands_give_the_same_product() -> None:
    plain = make_matmul(2, 30, 4)
    turned = make_kernel("Gemm", [(30, 2), (30, 4)], (2, 4), constants=(1,), transA=1)
    fused = make_kernel("FusedMatMul", [(30, 2), (30, 4)], (2, 4), domain="com.microsoft", transA=1)
    for name in ("rows", "depth", "columns", "groups"):
        assert features(plain)[name] == features(turned)[name] == features(fused)[name]


def test_what_is_no_product_has_none() -> None:
    found = features(make_kernel("Relu", [(4, 8)], (4, 8)))
    assert not any(found[name] for name in ("rows", "depth", "columns", "groups", "aligned_8"))


def test_idle_lanes_are_told() -> None:
    found = features(make_matmul(4, 4, 24))
    assert (found["aligned_8"], found["aligned_16"], found["aligned_32"]) == (1.0, 0.75, 0.75)


@pytest.mark.parametrize(
    ("kernel", "extent", "place"),
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
def test_the_axes_of_the_work_are_found_wherever_they_are_listed(
    kernel: Kernel, extent: int, place: int
) -> None:
    assert number(kernel, "axis") == pytest.approx(extent)
    assert features(kernel)["axis_place"] == place


def test_a_transposition_tells_whether_it_moves_the_innermost_extent() -> None:
    moves = make_kernel("Transpose", [(2, 3, 4)], (2, 4, 3), perm=[0, 2, 1])
    keeps = make_kernel("Transpose", [(2, 3, 4)], (3, 2, 4), perm=[1, 0, 2])
    assert (features(moves)["moved_inner"], features(keeps)["moved_inner"]) == (1.0, 0.0)


def test_weights_are_told_apart_from_what_flows() -> None:
    kernel = make_matmul(2, 3, 5)
    sizes = {"weight_bytes": 60, "read_bytes": 24, "written_bytes": 40, "bytes": 124}
    assert {name: number(kernel, name) for name in sizes} == pytest.approx(sizes)
    assert features(kernel)["flowing_inputs"] == 1.0
    both = make_kernel("MatMul", [(2, 3), (3, 5)], (2, 5))
    assert number(both, "weight_bytes") == 0.0 and features(both)["flowing_inputs"] == 2.0


def test_operators_of_other_types_and_domains_are_others() -> None:
    made = [
        make_kernel("Gelu", [(4,)], (4,), dtype=dtype, domain=domain)
        for dtype in ("float32", "float16")
        for domain in ("", "com.microsoft")
    ]
    assert len({features(kernel)["operator"] for kernel in made}) == 4
    assert {features(kernel)["op"] for kernel in made} == {"Gelu"}

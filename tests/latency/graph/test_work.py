"""Operations and bytes, compared with manual counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from sparseflow.latency.graph import work
from sparseflow.latency.graph.kernels import UNDEFINED, Body, TensorSpec
from sparseflow.latency.graph.work import SCALAR, count_bytes_moved, count_flops
from tests.latency.synthetic import make_kernel, make_matmul


def t(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name="t", dtype=dtype, shape=shape)


NONE = TensorSpec(name="", dtype=UNDEFINED, shape=())
RELU = {"activation": "Relu"}
HEADS = {"num_heads": 2}
Q_HEADS = {"q_num_heads": 2, "kv_num_heads": 2}


@pytest.mark.parametrize(
    ("op", "attributes", "inputs", "outputs", "count"),
    [
        ("Conv", {}, (t(1, 3, 8, 8), t(16, 3, 3, 3)), (t(1, 16, 6, 6),), 2 * 16 * 36 * 27),
        ("Conv", {}, (t(1, 3, 8, 8), t(16, 3, 3, 3), t(16)), (t(1, 16, 6, 6),), 16 * 36 * (2 * 27 + 1)),
        # Depthwise: each output channel reads one input channel.
        ("Conv", {"group": 8}, (t(2, 8, 4, 4), t(8, 1, 3, 3)), (t(2, 8, 4, 4),), 2 * 8 * 16 * 18),
        ("Conv", RELU, (t(1, 8, 4, 4), t(8, 8, 1, 1), t(8), t(1, 8, 4, 4)), (t(1, 8, 4, 4),), 128 * 19),
        ("FusedConv", RELU, (t(1, 8, 4, 4), t(8, 8, 1, 1), NONE, t(1, 8, 4, 4)), (t(1, 8, 4, 4),), 128 * 18),
        ("ConvTranspose", {}, (t(1, 4, 5, 5), t(4, 6, 2, 2)), (t(1, 6, 10, 10),), 2 * 100 * 24),
        ("Gemm", {}, (t(4, 7), t(7, 5), t(5)), (t(4, 5),), 20 * 15),
        ("Gemm", {"transA": 1}, (t(7, 4), t(7, 5)), (t(4, 5),), 20 * 14),
        ("MatMul", {}, (t(2, 3, 4, 7), t(2, 3, 7, 5)), (t(2, 3, 4, 5),), 120 * 14),
        ("MatMul", {}, (t(7), t(7)), (t(),), 14),
        ("FusedMatMul", {"transA": 1, "alpha": 0.5}, (t(7, 4), t(7, 5)), (t(4, 5),), 20 * 15),
        ("MaxPool", {"kernel_shape": [3, 3]}, (t(1, 4, 8, 8),), (t(1, 4, 4, 4),), 64 * 9),
        ("GlobalAveragePool", {}, (t(1, 4, 8, 8),), (t(1, 4, 1, 1),), 256),
        ("ReduceMean", {}, (t(4, 8), t(1, dtype="int64")), (t(4, 1),), 32),
        ("Add", {}, (t(4, 8), t(8)), (t(4, 8),), 32),
        ("Softmax", {}, (t(4, 8),), (t(4, 8),), 256),
        ("Reshape", {}, (t(4, 8), t(1, dtype="int64")), (t(32),), 0),
        ("Resize", {"mode": "linear"}, (t(1, 2, 4, 4),), (t(1, 2, 8, 8),), 128 * 8),
        ("TopK", {"axis": 1}, (t(2, 50, 3), t(1, dtype="int64")), (t(2, 8, 3), t(2, 8, 3)), 300 * 3),
        ("TopK", {}, (t(2, 50), t(1, dtype="int64")), (t(2, 1), t(2, 1)), 100),
        ("Attention", HEADS, (t(1, 5, 8), t(8, 24)), (t(1, 5, 8),), 80 * 24 + 50 * 16 + 16 * 25),
        ("MultiHeadAttention", HEADS, (t(1, 5, 8), t(1, 7, 8), t(1, 7, 8)), (t(1, 5, 8),), 70 * 16 + 16 * 35),
        ("MultiHeadAttention", HEADS, (t(1, 5, 2, 3, 4),), (t(1, 5, 8),), 50 * 16 + 16 * 25),
        # ONNX's own attention: three axes, and four with 3 keys of earlier steps.
        ("Attention", Q_HEADS, (t(1, 5, 8), t(1, 7, 8), t(1, 7, 8)), (t(1, 5, 8),), 70 * 16 + 16 * 35),
        ("Attention", {}, (t(1, 2, 5, 4), t(1, 2, 7, 4)), (t(1, 2, 5, 4), t(1, 2, 10, 4)), 2400),
        # Four heads of queries for two of keys, of which 9 are from earlier steps.
        (
            "GroupQueryAttention", {"num_heads": 4, "kv_num_heads": 2},
            (t(1, 1, 32), t(1, 1, 16), t(1, 1, 16), t(1, 2, 9, 8)), (t(1, 1, 32), t(1, 2, 10, 8)),
            2 * 10 * 64 + 8 * 4 * 10,
        ),
        ("LSTM", {}, (t(5, 2, 3), t(2, 24, 3), t(2, 24, 6)), (t(5, 2, 2, 6),), 10 * (864 + 384)),
        ("GRU", {}, (t(5, 2, 3), t(1, 18, 3), t(1, 18, 6)), (t(5, 1, 2, 6),), 10 * (324 + 144)),
        ("MatMulNBits", {"K": 64, "N": 10, "bits": 4}, (t(3, 64), t(10, 2, 16)), (t(3, 10),), 128 * 40),
        ("QLinearMatMul", {}, (t(4, 7), t(), t(), t(7, 5)), (t(4, 5),), 20 * 14),
        ("Einsum", {"equation": "bij, bjk -> bik"}, (t(2, 3, 4), t(2, 4, 5)), (t(2, 3, 5),), 2 * 2 * 60),
        ("Einsum", {"equation": "...ij,jk"}, (t(2, 3, 4), t(4, 5)), (t(2, 3, 5),), 2 * 2 * 60),
        ("DeformConv", {}, (t(1, 2, 5, 5), t(3, 2, 3, 3), t(1, 18, 3, 3)), (t(1, 3, 3, 3),), 972 + 64 * 162),
        ("NonZero", {}, (t(4, 8),), (t(2, 5, dtype="int64"),), 32 * SCALAR),
        ("Resize", {"mode": "cubic"}, (t(1, 2, 4, 4),), (t(1, 2, 8, 8),), 128 * 32 * SCALAR),
        ("LRN", {"size": 5}, (t(1, 2, 4, 4),), (t(1, 2, 4, 4),), 32 * (10 + 4 * SCALAR)),
        (
            "NonMaxSuppression", {}, (t(1, 30, 4), t(1, 4, 30)), (t(8, 3, dtype="int64"),),
            120 * (5 * SCALAR + 24),
        ),
    ],
)  # fmt: skip
def test_flops_match_manual_count(op: str, attributes: Any, inputs: Any, outputs: Any, count: float) -> None:
    assert count_flops(op, attributes, inputs, outputs) == (count, True)


def test_flops_without_rule_marked() -> None:
    assert count_flops("NeverHeardOf", {}, (t(9),), (t(4, 8),)) == (32.0, False)
    assert count_flops("NeverHeardOf", {}, (), ()) == (0.0, False)
    # An operator with the name of an ONNX operator.
    assert count_flops("Conv", {}, (t(9),), (t(4, 8),)) == (32.0, False)
    assert count_flops("Attention", {}, (t(9), t(8, 24)), (t(4, 8),)) == (32.0, False)
    assert count_flops("Resize", {"mode": "other"}, (t(1, 2, 4, 4),), (t(1, 2, 8, 8),)) == (128.0, False)


def test_operators_of_onnx_have_rules() -> None:
    onnx = pytest.importorskip("onnx")
    operators = {schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}
    # Their work depends on strings or files, except for SequenceMap, which a runtime replaces by its body.
    unknown = {"ImageDecoder", "RegexFullMatch", "SequenceMap", "StringConcat", "StringNormalizer"}
    unknown |= {"StringSplit", "TfIdfVectorizer"}
    rules = (*work._RULES, *work.FLOPS_PER_ELEMENT, *work.FLOPS_PER_INPUT_ELEMENT)
    counts = Counter((*rules, *work.DATA_MOVEMENT_OPS, *work.CONTROL_FLOW_OPS))
    assert operators - unknown <= counts.keys() and unknown.isdisjoint(counts)
    assert max(counts.values()) == 1


def test_work_of_bodies() -> None:
    product = make_matmul(4, 7, 5)
    bodies = (Body(name="body", trips=3, kernels=(product, product)),)
    shapes = (t(4, 7),), (t(4, 5),)
    assert count_flops("Loop", {}, *shapes, bodies) == (6 * product.flops, True)
    assert count_bytes_moved("Loop", *shapes, bodies) == 6 * product.bytes_moved
    assert count_flops("Loop", {}, *shapes) == (20.0, False)
    unknown = make_kernel("NeverHeardOf", [(4,)], (4,))
    bodies = (Body(name="body", trips=3, kernels=(product, unknown)),)
    assert count_flops("Loop", {}, *shapes, bodies) == (20.0, False)


def test_bytes_moved() -> None:
    assert count_bytes_moved("Add", (t(4, 8), t(8)), (t(4, 8),)) == 4 * (32 + 8 + 32)
    assert count_bytes_moved("Gather", (t(30000, 8), t(5, dtype="int64")), (t(5, 8),)) == 160 + 40 + 160
    assert count_bytes_moved("Conv", (t(1, 3, 4, 4), NONE), (t(1, 3, 4, 4),)) == 2 * 192

"""Operations and bytes, compared with manual counts."""

from __future__ import annotations

from typing import Any

import pytest

from sparseflow.latency.graph.kernels import UNDEFINED, TensorSpec
from sparseflow.latency.graph.work import count_bytes_moved, count_flops


def t(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name="t", dtype=dtype, shape=shape)


NONE = TensorSpec(name="", dtype=UNDEFINED, shape=())
RELU = {"activation": "Relu"}
HEADS = {"num_heads": 2}


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
    # Implementations that are hundreds of times slower than their work suggests.
    assert not count_flops("Resize", {"mode": "cubic"}, (t(1, 2, 4, 4),), (t(1, 2, 8, 8),))[1]
    assert not count_flops("LRN", {}, (t(1, 2, 4, 4),), (t(1, 2, 4, 4),))[1]
    # ONNX's own attention reads query, key and value.
    assert count_flops("Attention", HEADS, (t(1, 5, 8), t(1, 7, 8), t(1, 7, 8)), (t(1, 5, 8),)) == (
        40.0,
        False,
    )


def test_bytes_moved() -> None:
    assert count_bytes_moved("Add", (t(4, 8), t(8)), (t(4, 8),)) == 4 * (32 + 8 + 32)
    assert count_bytes_moved("Gather", (t(30000, 8), t(5, dtype="int64")), (t(5, 8),)) == 160 + 40 + 160
    assert count_bytes_moved("Conv", (t(1, 3, 4, 4), NONE), (t(1, 3, 4, 4),)) == 2 * 192

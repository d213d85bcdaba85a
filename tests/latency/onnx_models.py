"""Small ONNX models for the latency wing's tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import nn

FLOAT = TensorProto.FLOAT


def model(
    nodes: Sequence[Any],
    inputs: Sequence[tuple[str, int, Sequence[Any] | None]],
    outputs: Sequence[tuple[str, int, Sequence[Any] | None]],
    weights: dict[str, np.ndarray] | None = None,
    opset: int = 17,
    extra_domains: Sequence[str] = (),
) -> onnx.ModelProto:
    """Build a model of nodes; inputs and outputs are (name, type, shape)."""
    graph = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(*entry) for entry in inputs],
        [helper.make_tensor_value_info(*entry) for entry in outputs],
        initializer=[numpy_helper.from_array(value, name) for name, value in (weights or {}).items()],
    )
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in extra_domains)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def save(built: onnx.ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(built.SerializeToString())
    return path


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def convnet(
    prefix: str = "", batch: int | str = 1, size: int | str = 12, width: int = 8, seed: int = 0
) -> onnx.ModelProto:
    """Build a network of Conv-Relu, Conv-Add-Relu, pooling and Gemm; names start with `prefix`."""
    p = prefix
    node = helper.make_node
    pads: dict[str, Any] = {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}
    return model(
        [
            node("Conv", [p + "x", p + "w1", p + "b1"], [p + "c1"], **pads),
            node("Relu", [p + "c1"], [p + "r1"]),
            node("Conv", [p + "r1", p + "w2", p + "b1"], [p + "c2"], **pads),
            node("Add", [p + "c2", p + "r1"], [p + "s"]),
            node("Relu", [p + "s"], [p + "r2"]),
            node("GlobalAveragePool", [p + "r2"], [p + "g"]),
            node("Flatten", [p + "g"], [p + "f"]),
            node("Gemm", [p + "f", p + "w3", p + "b3"], [p + "y"], transB=1),
        ],
        [(p + "x", FLOAT, [batch, 3, size, size])],
        [(p + "y", FLOAT, None)],
        {
            p + "w1": values(width, 3, 3, 3, seed=seed),
            p + "b1": values(width, seed=seed + 1),
            p + "w2": values(width, width, 3, 3, seed=seed + 2),
            p + "w3": values(5, width, seed=seed + 3),
            p + "b3": values(5, seed=seed + 4),
        },
    )


def lookup(rows: int = 5, tokens: int = 7, width: int = 6) -> onnx.ModelProto:
    """Build a table lookup with computed indices, which must be below `rows`."""
    node = helper.make_node
    return model(
        [
            node("MatMul", ["x", "w"], ["scores"]),
            node("ArgMax", ["scores"], ["index"], axis=-1, keepdims=0),
            node("Gather", ["table", "index"], ["rows"], axis=0),
            node("Pow", ["rows", "two"], ["squares"]),
            node("ReduceMean", ["squares"], ["mean"], axes=[-1], keepdims=1),
            node("Add", ["mean", "eps"], ["m"]),
            node("Sqrt", ["m"], ["root"]),
            node("Div", ["rows", "root"], ["y"]),
        ],
        [("x", FLOAT, [tokens, width])],
        [("y", FLOAT, None)],
        {
            "w": values(width, rows),
            "table": values(rows, width, seed=1),
            "two": np.array(2.0, np.float32),
            "eps": np.array(1e-3, np.float32),
        },
    )


def branching() -> onnx.ModelProto:
    """Build an If whose branches read a tensor of the outer graph."""
    node, info = helper.make_node, helper.make_tensor_value_info
    branch = [
        helper.make_graph([node(op, ["h"], [op])], op, [], [info(op, FLOAT, [4])]) for op in ("Exp", "Neg")
    ]
    return model(
        [
            node("Relu", ["x"], ["h"]),
            node("If", ["flag"], ["y"], then_branch=branch[0], else_branch=branch[1]),
        ],
        [("x", FLOAT, [4]), ("flag", TensorProto.BOOL, [])],
        [("y", FLOAT, [4])],
    )


def looping(trips: int, width: int = 8) -> onnx.ModelProto:
    """Build a Loop of matrix products."""
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("MatMul", ["s", "w"], ["s_out"]), helper.make_node("Identity", ["c"], ["c_out"])],
        "body",
        [info("i", TensorProto.INT64, []), info("c", TensorProto.BOOL, []), info("s", FLOAT, [width, width])],
        [info("c_out", TensorProto.BOOL, []), info("s_out", FLOAT, [width, width])],
    )
    return model(
        [helper.make_node("Loop", ["trips", "", "x"], ["y"], body=body)],
        [("x", FLOAT, [width, width])],
        [("y", FLOAT, [width, width])],
        {"w": values(width, width), "trips": np.array(trips)},
    )


class Tiny(nn.Module):
    """Network for zoos; `wide` is the number of channels."""

    def __init__(self, wide: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, wide, 3, padding=1)
        self.head = nn.Linear(wide * 8 * 8, 5)

    def forward(self, x: Any) -> Any:
        return self.head(self.conv(x).relu().flatten(1))


def tiny(wide: int = 4) -> nn.Module:
    return Tiny(wide)


def not_a_network() -> object:
    return object()


class Huge(nn.Module):
    """Network with 4 GB of weights that take no memory."""

    def __init__(self) -> None:
        super().__init__()
        import torch

        self.weight = nn.Parameter(torch.zeros(1).expand(2**30), requires_grad=False)

    def forward(self, x: Any) -> Any:
        raise AssertionError("it must be refused before it runs")


def huge() -> nn.Module:
    return Huge()

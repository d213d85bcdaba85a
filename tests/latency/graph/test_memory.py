"""Memory of graphs: weights once, and the peak of live tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import helper

from sparseflow.latency.graph.analysis import analyze
from sparseflow.latency.graph.memory import MemoryEstimate, estimate_memory
from tests.latency.onnx_models import FLOAT, convnet, model, save

KB = 1024


def estimate(folder: Path, nodes: Sequence[Any], **weights: np.ndarray) -> MemoryEstimate:
    """Estimate a model of nodes that map `x`, [256] of float32 and 1 KB, to `y`, as they are."""
    built = model(nodes, [("x", FLOAT, [256])], [("y", FLOAT, None)], weights)
    return estimate_memory(analyze(save(built, folder), level="disable"))


def node(op: str, inputs: str, output: str, **attributes: Any) -> Any:
    return helper.make_node(op, inputs.split(), [output], **attributes)


def test_chain_needs_two_buffers_beside_input_and_output(tmp_path: Path) -> None:
    # Softmax does not write over its input.
    ops = [node("Softmax", a, b) for a, b in ("xa", "ab", "bc", "cd", "dy")]
    assert estimate(tmp_path, ops) == MemoryEstimate(weight_bytes=0, activation_bytes=4 * KB)


def test_elementwise_chain_needs_one_buffer(tmp_path: Path) -> None:
    ops = [node("Relu", a, b) for a, b in ("xa", "ab", "bc", "cd", "dy")]
    assert estimate(tmp_path, ops).activation_bytes == 3 * KB
    # The second reader of `a` still needs it.
    ops = [node("Softmax", "x", "a"), node("Relu", "a", "b"), node("Add", "a b", "y")]
    assert estimate(tmp_path, ops).activation_bytes == 4 * KB


def test_residual_lives_until_it_is_read(tmp_path: Path) -> None:
    ops = [node("Softmax", a, b) for a, b in ("xa", "ab", "bc", "cd")]
    assert estimate(tmp_path, [*ops, node("Softmax", "d", "y")]).activation_bytes == 4 * KB
    assert estimate(tmp_path, [*ops, node("Add", "a d", "y")]).activation_bytes == 5 * KB


def test_view_shares_memory_and_keeps_it_alive(tmp_path: Path) -> None:
    shape = np.array([16, 16], np.int64)
    ops = [node("Softmax", "x", "a"), node("Reshape", "a shape", "b"), node("Softmax", "b", "c")]
    result = estimate(tmp_path, [*ops, node("Softmax", "c", "y")], shape=shape)
    assert result == MemoryEstimate(weight_bytes=shape.nbytes, activation_bytes=4 * KB)


def test_weights_count_once(tmp_path: Path) -> None:
    w = np.ones(256, np.float32)
    result = estimate(tmp_path, [node("Mul", "x w", "a"), node("Add", "a w", "y")], w=w)
    assert result.weight_bytes == KB and result.peak_bytes == result.activation_bytes + KB


def test_activations_grow_with_the_batch_and_weights_do_not(tmp_path: Path) -> None:
    path = save(convnet(batch="N", size=12), tmp_path)
    small, large = (estimate_memory(analyze(path, shapes={"x": (batch, 3, 12, 12)})) for batch in (1, 8))
    assert large.weight_bytes == small.weight_bytes > 0
    assert large.activation_bytes == pytest.approx(8 * small.activation_bytes, rel=0.01)

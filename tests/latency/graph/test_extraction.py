"""Extraction: standalone kernels compute the tensors of the graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")
pytest.importorskip("yaml")

import onnx
from onnx import helper

from sparseflow.errors import FileFormatError, InputError
from sparseflow.latency.graph import extraction, session
from sparseflow.latency.graph.analysis import Graph, analyze
from sparseflow.latency.graph.extraction import (
    compute_relative_error,
    extract,
    make_dummy_inputs,
    read_kernel,
)
from tests.latency.onnx_models import FLOAT, branching, convnet, lookup, model, save


@pytest.mark.parametrize(
    ("name", "level", "nodes"),
    [
        ("resnet18_b1_64", "all", 25),
        ("resnet18_b1_64", "extended", 40),
        ("mobilenet_v2_b1_64", "all", 50),
        ("swin_b1_32", "all", 60),
    ],
)
def test_extract_all_nodes_match(zoo: Path, tmp_path: Path, name: str, level: str, nodes: int) -> None:
    graph = analyze(zoo / f"{name}.onnx", level=level, out_dir=tmp_path)
    fractions: list[float] = []
    results = extract(
        graph, tmp_path, threads=1, progress=lambda message, fraction: fractions.append(fraction)
    )
    assert sum(r.matched for r in results) == sum(r.nodes for r in results) == len(graph.nodes) >= nodes
    assert all(r.ok for r in results)
    assert {r.kernel_id for r in results} == {k.id for k in graph.kernels}
    assert fractions == [(i + 1) / len(graph.nodes) for i in range(len(graph.nodes))]


def test_extracted_kernel_runs(tmp_path: Path) -> None:
    results = extract(save(lookup(), tmp_path), tmp_path / "out")
    for result in results:
        assert result.ok and result.path is not None
        kernel = read_kernel(result.path)
        assert result.path == tmp_path / "out" / "kernels" / f"{kernel.file_stem}.onnx"
        assert kernel.id == result.kernel_id
        feeds = make_dummy_inputs(result.path)
        assert len(onnx.load(str(result.path)).graph.node) == 1
        opened = session.open_session(result.path, "cpu", "disable", threads=1)
        outputs = session.run(opened, [value.name for value in opened.get_outputs()], feeds)
        assert [value.shape for value in outputs] == [t.shape for t in kernel.outputs]
        assert all(np.isfinite(value).all() for value in outputs)


def test_integer_inputs_recorded(tmp_path: Path) -> None:
    """The table has five rows, and the graph computes the indices."""
    results = extract(save(lookup(rows=5), tmp_path), tmp_path / "out", check=False)
    gather = next(r for r in results if r.op == "Gather")
    assert gather.path is not None and gather.checked == 0 and gather.relative_error is None
    recorded = make_dummy_inputs(gather.path, seed=1)["input_1"]
    assert recorded.dtype == np.int64 and recorded.max() > 1 and recorded.min() >= 0 and recorded.max() < 5
    assert np.array_equal(recorded, make_dummy_inputs(gather.path, seed=2)["input_1"])
    other_paths = [r.path for r in results if r.op != "Gather" and r.path is not None]
    assert not any(path.with_suffix(".npz").exists() for path in other_paths)


def test_dummy_inputs_depend_on_seed(tmp_path: Path) -> None:
    results = extract(save(convnet(), tmp_path), tmp_path / "out", check=False)
    path = results[0].path
    assert path is not None
    first, repeated, other = (make_dummy_inputs(path, seed=seed)["input_0"] for seed in (0, 0, 1))
    assert np.array_equal(first, repeated) and not np.array_equal(first, other)
    assert first.dtype == np.float32


def test_extract_branches_match(tmp_path: Path) -> None:
    results = extract(save(branching(), tmp_path), tmp_path / "out")
    assert {r.op: r.ok for r in results} == {"Relu": True, "If": True}


def test_extract_nondeterministic_node_reported(tmp_path: Path) -> None:
    """Random numbers of onnxruntime depend on the node's position in the graph."""
    built = model(
        [
            helper.make_node("Relu", ["x"], ["h"]),
            helper.make_node("RandomNormalLike", ["h"], ["r"]),
            helper.make_node("Add", ["h", "r"], ["y"]),
        ],
        [("x", FLOAT, [64])],
        [("y", FLOAT, [64])],
    )
    by_op = {r.op: r for r in extract(save(built, tmp_path), tmp_path / "out")}
    assert by_op["Add"].ok
    bad = by_op["RandomNormalLike"]
    assert not bad.ok and bad.matched == 0 and bad.checked == 1
    assert bad.problem is not None and "differs from the tensor inside the graph" in bad.problem


def test_extract_wrong_weight_mismatches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = extraction.make_kernel_model

    def spoilt(*arguments: object) -> object:
        kernel_model = original(*arguments)  # type: ignore[arg-type]
        for weight in kernel_model.graph.initializer:
            if weight.raw_data:
                value = onnx.numpy_helper.to_array(weight) * np.float32(1.001)
                weight.raw_data = value.tobytes()
        return kernel_model

    monkeypatch.setattr(extraction, "make_kernel_model", spoilt)
    results = extract(save(convnet(), tmp_path), tmp_path / "out")
    assert {r.op for r in results if not r.ok} == {"Conv_Relu", "Conv_Add_Relu", "Gemm"}


def test_extract_insufficient_memory_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "_read_free_bytes", lambda: 100.0)
    results = extract(save(convnet(), tmp_path), tmp_path / "out")
    assert all(not r.ok and r.path is not None and "GB of memory" in str(r.problem) for r in results)


def test_extract_chunks_cover_all_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "CHUNK_BYTES", 3000)
    path = save(convnet(), tmp_path)
    results = extract(path, tmp_path / "out")
    assert all(r.ok for r in results)
    assert sum(r.checked for r in results) == len(Graph.load(tmp_path / "out").nodes)


def test_extract_single_kernel(tmp_path: Path) -> None:
    graph = analyze(save(convnet(), tmp_path), out_dir=tmp_path / "a")
    kernel = graph.kernels[1]
    (only,) = extract(tmp_path / "a" / "kernels" / f"{kernel.file_stem}.json", tmp_path / "b")
    assert only.kernel_id == kernel.id and only.ok
    assert {p.name for p in (tmp_path / "b" / "kernels").iterdir()} == {
        f"{kernel.file_stem}.json",
        f"{kernel.file_stem}.onnx",
    }
    (same,) = extract(tmp_path / "a", tmp_path / "c", kernel_ids=[kernel.id])
    assert same.kernel_id == kernel.id
    with pytest.raises(InputError, match=r"Conv_0"):
        extract(tmp_path / "a", tmp_path / "c", kernel_ids=["Conv_0"])


def test_extract_unusable_graph_raises(tmp_path: Path) -> None:
    path = save(convnet(), tmp_path)
    with pytest.raises(InputError):
        extract(analyze(path), tmp_path / "a")
    analyze(path, out_dir=tmp_path / "b")
    (tmp_path / "b" / "optimized.onnx").write_bytes(lookup().SerializeToString())
    with pytest.raises(FileFormatError):
        extract(tmp_path / "b", tmp_path / "c")
    (tmp_path / "b" / "optimized.onnx").unlink()
    with pytest.raises(InputError):
        extract(tmp_path / "b", tmp_path / "c")


def test_read_kernel_foreign_file_raises(tmp_path: Path) -> None:
    path = save(convnet(), tmp_path)
    with pytest.raises(FileFormatError):
        read_kernel(path)
    kernel = extract(path, tmp_path / "out")[0].path
    assert kernel is not None
    kernel.with_suffix(".npz").write_bytes(b"PK damaged")
    with pytest.raises(FileFormatError, match="damaged"):
        make_dummy_inputs(kernel)
    np.savez(kernel.with_suffix(".npz"), x=np.zeros(3))
    with pytest.raises(FileFormatError, match="does not fit"):
        make_dummy_inputs(kernel)


def test_relative_error_values() -> None:
    a = np.array([1.0, -4.0, np.nan, np.inf], np.float32)
    assert compute_relative_error(a, a) == 0
    assert compute_relative_error(a + np.float32(0.5), a) == 0.125
    for other in (np.zeros(4, np.float32), a[:3], a.astype(np.float64)):
        assert compute_relative_error(other, a) == float("inf")
    assert compute_relative_error(np.array([np.inf]), np.array([1.0])) == float("inf")
    assert compute_relative_error(np.array([1]), np.array([1])) == 0
    assert compute_relative_error(np.array([1]), np.array([2])) == float("inf")
    assert compute_relative_error(np.zeros(0), np.zeros(0)) == 0
    assert compute_relative_error(np.array([1e-3]), np.array([0.0])) == 1e-3

"""Graphs: nodes, identities, edges and records."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")
pytest.importorskip("yaml")

import numpy as np
import onnx
from onnx import helper

from sparseflow.errors import FileFormatError, InputError, ModelError
from sparseflow.latency.graph import onnx_file, session
from sparseflow.latency.graph.analysis import Graph, analyze, iter_nodes
from sparseflow.latency.graph.optimization import (
    describe_tensors,
    expose_tensors,
    list_written_tensors,
    observe_shapes,
    optimize,
)
from tests.conformance import check_artifact_file
from tests.latency.onnx_models import FLOAT, branching, convnet, lookup, looping, model, save, values


def facts(path: Path, level: str = "all") -> list[tuple[str, str]]:
    """Return (id, identity) of every node; the identity comes from a run of the optimized graph."""
    optimised, inputs = optimize(path, "cpu", level)
    feeds = next(inputs.iter_draws(seed=0))
    names = list_written_tensors(optimised)
    opened = session.open_session(expose_tensors(optimised, names).SerializeToString(), "cpu", "disable")
    values = dict(zip(names, session.run(opened, names, feeds), strict=True)) | feeds
    weights = {w.name: onnx.numpy_helper.to_array(w) for w in optimised.graph.initializer}

    def spell(name: str) -> Any:
        if name in weights:
            value = weights[name]
            small = value.dtype.kind == "i" and value.size <= 64
            return ("weight", str(value.dtype), value.shape, value.tolist() if small else None)
        return ("flows", str(values[name].dtype), values[name].shape) if name else None

    node_facts = []
    tensors, _ = describe_tensors(optimised, inputs, "cpu")
    for node, read in zip(optimised.graph.node, iter_nodes(optimised, tensors), strict=True):
        attributes = sorted((a.name, str(helper.get_attribute_value(a))) for a in node.attribute)
        pattern = [list(node.input).index(name) for name in node.input]
        own_facts = (node.op_type, node.domain, attributes, pattern)
        node_facts.append(
            (read.kernel_id, repr((own_facts, [*map(spell, node.input)], [*map(spell, node.output)])))
        )
    return node_facts


def test_kernel_ids_of_models_are_unique(zoo: Path, tmp_path: Path) -> None:
    paths = [*sorted(zoo.glob("*.onnx"))]
    paths += [
        save(convnet(batch=b, size=s), tmp_path, f"c{b}_{s}.onnx") for b in (1, 2) for s in (12, 16, 20)
    ]
    paths += [save(lookup(tokens=n), tmp_path, f"l{n}.onnx") for n in (3, 7)]
    by_id, by_identity = defaultdict(set), defaultdict(set)
    for path in paths:
        for identifier, identity in facts(path):
            by_id[identifier].add(identity)
            by_identity[identity].add(identifier)
    assert len(by_id) > 60
    assert not {i: sorted(s) for i, s in by_id.items() if len(s) > 1}
    assert all(len(ids) == 1 for ids in by_identity.values())


def test_analyze_resnet18_canonical_names(zoo: Path) -> None:
    fused = analyze(zoo / "resnet18_b1_64.onnx")
    counts = fused.count_ops()
    assert (counts["Conv_Relu"], counts["Conv_Add_Relu"], counts["Conv"]) == (9, 8, 3)
    assert "Add" not in counts and "Relu" not in counts and len(fused.nodes) == 25
    assert list(counts)[:2] == ["Conv_Relu", "Conv_Add_Relu"]
    assert (fused.provider, fused.level) == ("CPUExecutionProvider", "all")
    # Less fusion, but equal names of fused kernels: FusedConv instead of the blocked Conv.
    less = analyze(zoo / "resnet18_b1_64.onnx", "cpu", "extended").count_ops()
    assert (less["Conv_Relu"], less["Conv"], less["Add"], less["Relu"]) == (9, 11, 8, 8)
    raw = analyze(zoo / "resnet18_b1_64.onnx", level="disable").count_ops()
    assert (raw["Conv"], raw["Add"], raw["Relu"]) == (20, 8, 17)


def test_flops_do_not_depend_on_fusion(zoo: Path) -> None:
    path = zoo / "resnet18_b1_64.onnx"
    fused, raw = analyze(path), analyze(path, level="disable")
    assert fused.flops == pytest.approx(raw.flops, rel=0.01)
    # Manual count of ResNet-18 at 64 x 64.
    maps = {64: (16, 4, 64), 128: (8, 3, 128), 256: (4, 3, 256), 512: (2, 3, 512)}
    by_hand = 64 * 32**2 * 147
    for channels, (side, convs, _) in maps.items():
        by_hand += side**2 * channels * channels * 9 * convs
        if channels > 64:
            by_hand += side**2 * channels * (channels // 2) * (9 + 1)
    assert raw.flops == pytest.approx(2 * by_hand, rel=0.02)


@pytest.mark.parametrize("name", ["resnet18_b1_64", "vit_b2_32"])
def test_inferred_shapes_equal_observed(zoo: Path, name: str) -> None:
    optimised, inputs = optimize(zoo / f"{name}.onnx")
    tensors, _ = describe_tensors(optimised, inputs, "cpu")
    _, observed = observe_shapes(optimised, inputs, "cpu", list_written_tensors(optimised))
    assert {name: tensors[name].shape for name in observed} == observed and len(observed) > 20


def test_equal_kernels_of_models_share_id(tmp_path: Path) -> None:
    first = analyze(save(convnet(), tmp_path, "a.onnx"))
    second = analyze(save(convnet(prefix="other/", seed=9), tmp_path, "b.onnx"))
    assert [n.name for n in first.nodes] != [n.name for n in second.nodes]
    assert {k.id: k for k in first.kernels} == {k.id: k for k in second.kernels}
    # Newer opsets without changes of the operator make no difference.
    newer = convnet()
    newer.opset_import[0].version = 18
    convolutions = {k.id for k in first.kernels if k.op.startswith("Conv")}
    assert convolutions <= {k.id for k in analyze(save(newer, tmp_path, "c.onnx")).kernels}
    assert not convolutions & {k.id for k in analyze(save(convnet(batch=2), tmp_path, "d.onnx")).kernels}


def test_edges_match_tensors(tmp_path: Path) -> None:
    graph = analyze(save(convnet(), tmp_path), level="disable")
    names = {node.kernel.op + str(i): node.name for i, node in enumerate(graph.nodes)}
    edges = {(a, b) for a, b in graph.edges}
    op = {name: key for key, name in names.items()}
    assert {(op[a], op[b]) for a, b in edges} == {
        ("Conv0", "Relu1"), ("Relu1", "Conv2"), ("Conv2", "Add3"), ("Relu1", "Add3"), ("Add3", "Relu4"),
        ("Relu4", "GlobalAveragePool5"), ("GlobalAveragePool5", "Flatten6"), ("Flatten6", "Gemm7"),
    }  # fmt: skip
    first = graph.nodes[0]
    assert first.inputs == () and first.reads == ("x", "w1", "b1") and first.writes == ("c1",)
    assert first.kernel.constants == (1, 2)
    assert graph.kernels[0].inputs[0].name == "input_0" and graph.inputs[0].name == "x"


def test_nodes_are_topologically_sorted(zoo: Path) -> None:
    graph = analyze(zoo / "vit_b1_32.onnx")
    names: set[str] = set()
    for node in graph.nodes:
        assert names.issuperset(node.inputs)
        names.add(node.name)
    assert len(names) == len(graph.nodes)
    assert {"Gelu", "LayerNormalization", "Softmax", "MatMul_Mul"} <= set(graph.count_ops())


def test_small_integer_constants_change_id(tmp_path: Path) -> None:
    def sums(axis: int, name: str) -> Graph:
        import numpy as np

        built = model(
            [helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)],
            [("x", FLOAT, [4, 4])],
            [("y", FLOAT, None)],
            {"axes": np.array([axis])},
        )
        return analyze(save(built, tmp_path, name))

    # Equal shapes, but contiguous and strided access.
    first, second = sums(0, "a.onnx"), sums(1, "b.onnx")
    assert first.kernels[0].values == {1: (0,)} and second.kernels[0].values == {1: (1,)}
    assert first.kernels[0].id != second.kernels[0].id


def test_exponent_changes_id(tmp_path: Path) -> None:
    import numpy as np

    def power(exponent: float) -> str:
        weights = {"e": np.array(exponent, np.float32)}
        built = model(
            [helper.make_node("Pow", ["x", "e"], ["y"])],
            [("x", FLOAT, [4])],
            [("y", FLOAT, [4])],
            weights,
        )
        return analyze(save(built, tmp_path), level="disable").kernels[0].id

    assert len({power(2.0), power(3.0), power(0.5)}) == 3


def test_tensor_read_twice_keeps_first_name(tmp_path: Path) -> None:
    def product(second: str) -> str:
        inputs = [(name, FLOAT, [4]) for name in dict.fromkeys(("a", second))]
        built = model([helper.make_node("Mul", ["a", second], ["y"])], inputs, [("y", FLOAT, [4])])
        return analyze(save(built, tmp_path)).kernels[0].id

    assert product("a") != product("b")


def test_unknown_operators_marked(tmp_path: Path) -> None:
    lookup_node = helper.make_node(
        "TfIdfVectorizer", ["x"], ["y"], mode="TF", min_gram_length=1, max_gram_length=1, max_skip_count=0,
        ngram_counts=[0], ngram_indexes=[0, 1, 2], pool_int64s=[0, 1, 2],
    )  # fmt: skip
    built = model([lookup_node], [("x", onnx.TensorProto.INT64, [6])], [("y", FLOAT, [3])])
    kernel = analyze(save(built, tmp_path)).kernels[0]
    assert not kernel.flops_known and kernel.flops == 3


def test_bodies_of_loops_and_branches(tmp_path: Path) -> None:
    int64, boolean = onnx.TensorProto.INT64, onnx.TensorProto.BOOL
    value = helper.make_tensor_value_info
    # Iterations 0 and 1 of four take the first branch, since a loop runs as often as its condition allows.
    branches: dict[str, Any] = {
        name: helper.make_graph([helper.make_node(op, ["s"], [op])], name, [], [value(op, FLOAT, [4, 4])])
        for name, op in (("then_branch", "Tanh"), ("else_branch", "Exp"))
    }
    inner = helper.make_graph(
        [helper.make_node("MatMul", ["s", "w"], ["p"]), helper.make_node("Identity", ["c"], ["c_out"])],
        "inner",
        [value("j", int64, []), value("c", boolean, []), value("t", FLOAT, [4, 4])],
        [value("c_out", boolean, []), value("p", FLOAT, [4, 4])],
    )
    outer = helper.make_graph(
        [
            helper.make_node("If", ["go_on"], ["branch"], **branches),
            helper.make_node("Loop", ["three", "", "branch"], ["s_out"], body=inner),
            helper.make_node("Less", ["i", "one"], ["go_on_out"]),
        ],
        "outer",
        [value("i", int64, []), value("go_on", boolean, []), value("s", FLOAT, [4, 4])],
        [value("go_on_out", boolean, []), value("s_out", FLOAT, [4, 4])],
    )
    step = helper.make_graph(
        [helper.make_node("Add", ["sum", "row"], ["sum_out"])],
        "step",
        [value("sum", FLOAT, [4]), value("row", FLOAT, [4])],
        [value("sum_out", FLOAT, [4])],
    )
    built = model(
        [
            helper.make_node("Loop", ["four", "", "x"], ["looped"], body=outer),
            helper.make_node("ReduceMax", ["looped"], ["first"], axes=[0], keepdims=0),
            helper.make_node("Scan", ["first", "looped"], ["y"], body=step, num_scan_inputs=1,
                             scan_input_axes=[1]),
        ],
        [("x", FLOAT, [4, 4])],
        [("y", FLOAT, [4])],
        {"w": values(4, 4), "four": np.array(4), "three": np.array(3), "one": np.array(1)},
    )  # fmt: skip
    graph = analyze(save(built, tmp_path))
    loop, scan = (n.kernel for n in graph.nodes if n.kernel.bodies)
    (body,) = loop.bodies
    assert body.trips == 2 and [k.op for k in body.kernels] == ["If", "Loop", "Less"]
    executed, skipped = body.kernels[0].bodies
    assert (executed.trips, skipped.trips) == (1, 0)
    assert (executed.kernels[0].op, skipped.kernels[0].op) == ("Tanh", "Exp")
    assert body.kernels[1].bodies[0].trips == 3
    assert loop.flops == 2 * (executed.kernels[0].flops + 3 * 2 * 64 + 1) and loop.flops_known
    assert scan.bodies[0].trips == 4 and scan.flops == 16
    assert Graph.from_dict(json.loads(json.dumps(graph.to_dict())), "graph.json") == graph


def test_trip_count_changes_id(tmp_path: Path) -> None:
    def kernel_id(trips: int) -> str:
        return analyze(save(looping(trips), tmp_path)).kernels[0].id

    assert kernel_id(2) == kernel_id(2) != kernel_id(3)


def test_data_dependent_shapes_observed(tmp_path: Path) -> None:
    built = model(
        [
            helper.make_node("NonZero", ["x"], ["where"]),
            helper.make_node("Transpose", ["where"], ["pairs"]),
            helper.make_node("GatherND", ["x", "pairs"], ["y"]),
        ],
        [("x", FLOAT, [3, 4])],
        [("y", FLOAT, None)],
    )
    graph = analyze(save(built, tmp_path))
    assert graph.outputs[0].shape == (12,)
    assert [node.kernel.outputs[0].shape for node in graph.nodes] == [(2, 12), (12, 2), (12,)]


def test_captured_tensors_of_branches(tmp_path: Path) -> None:
    graph = analyze(save(branching(), tmp_path))
    node = next(n for n in graph.nodes if n.kernel.node_op == "If")
    assert node.inputs == (graph.nodes[0].name,)
    assert set(node.reads) == {"flag", "h"} and set(node.kernel.attributes) == {"then_branch", "else_branch"}


def test_unnamed_nodes_get_unique_names(tmp_path: Path) -> None:
    built = convnet()
    assert not any(node.name for node in built.graph.node)
    built.graph.node[1].name = "Conv_2"
    graph = analyze(save(built, tmp_path), level="disable")
    assert len({node.name for node in graph.nodes}) == len(graph.nodes) == 8


def test_dtype_changes_id(tmp_path: Path) -> None:
    kinds = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
    kernels = [
        analyze(
            save(
                model([helper.make_node("Relu", ["x"], ["y"])], [("x", kind, [4])], [("y", kind, [4])]),
                tmp_path,
            )
        ).kernels[0]
        for kind in kinds
    ]
    assert kernels[0].id != kernels[1].id
    assert [k.outputs[0].dtype for k in kernels] == ["float32", "float64"]
    assert kernels[1].bytes_moved == 2 * kernels[0].bytes_moved


def test_graph_round_trip(tmp_path: Path) -> None:
    graph = analyze(save(lookup(), tmp_path), out_dir=tmp_path / "out")
    assert Graph.from_dict(json.loads(json.dumps(graph.to_dict())), "graph.json") == graph
    assert Graph.load(tmp_path / "out") == Graph.load(tmp_path / "out" / "graph.json") == graph
    files = {path.stem for path in (tmp_path / "out" / "kernels").glob("*.json")}
    assert files == {kernel.file_stem for kernel in graph.kernels}
    (tmp_path / "out").rename(tmp_path / "moved")
    moved = Graph.load(tmp_path / "moved")
    assert moved.optimized_path is not None and Path(moved.optimized_path).is_file()
    assert onnx_file.load_model(moved.optimized_path).graph.node


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ({"format": "other"}, "'other'"),
        ({"version": 99}, "99"),
        ({"surprise": 1}, "surprise"),
        ({"nodes": 3}, "not iterable"),
        ({"kernels": []}, "kernel is unknown"),
        ({"inputs": [{"name": "x", "dtype": "float33", "shape": [1]}]}, "float33"),
    ],
)
def test_graph_invalid_record_raises(tmp_path: Path, change: dict[str, Any], value: str) -> None:
    graph = analyze(save(convnet(), tmp_path))
    with pytest.raises(FileFormatError, match=value):
        Graph.from_dict({**graph.to_dict(), **change}, "graph.json")


def test_graph_damaged_file_raises(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=str(tmp_path)):
        Graph.load(tmp_path)
    analyze(save(convnet(), tmp_path), out_dir=tmp_path)
    check_artifact_file(Graph.load, tmp_path / "graph.json", "run `sparseflow latency analyze` again")


def test_graph_unsorted_nodes_raises(tmp_path: Path) -> None:
    record = analyze(save(convnet(), tmp_path)).to_dict()
    record["nodes"].reverse()
    with pytest.raises(FileFormatError, match=record["nodes"][0]["name"]):
        Graph.from_dict(record, "graph.json")


def test_analyze_rejected_model_raises(tmp_path: Path) -> None:
    built = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [("x", FLOAT, [2, 3])],
        [("y", FLOAT, None)],
        {"w": values(4, 5)},
    )
    with pytest.raises(ModelError):
        analyze(save(built, tmp_path))
    with pytest.raises(InputError, match="'utmost'"):
        analyze(save(convnet(), tmp_path), level="utmost")

"""Graphs: what is read from an optimised model, its identities, its edges and its record."""

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

import onnx
from onnx import helper

from sparseflow.errors import FileFormatError, InputError, ModelError
from sparseflow.latency import onnx_file, session
from sparseflow.latency.graph import Graph, analyze, read_nodes
from sparseflow.latency.optimised import describe_tensors, expose, optimise, random_inputs, written
from sparseflow.latency.zoo import ZooConfig, export
from tests.latency.onnx_models import FLOAT, branching, convnet, lookup, model, save, values

SMALL_VIT = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 48, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """resnet18 and a small vision transformer at batches 1 and 2."""
    folder = tmp_path_factory.mktemp("zoo")
    config = ZooConfig.model_validate(
        {
            "models": ["resnet18", {"name": "vit", "config": SMALL_VIT, "sizes": [32]}],
            "batches": [1, 2],
            "sizes": [64],
        }
    )
    assert all(result.problem is None for result in export(config, folder))
    return folder


def facts(path: Path, level: str = "all") -> list[tuple[str, str]]:
    """(id, identity) of every node, the identity spelt out from a real run of the optimised graph."""
    optimised = optimise(path, "cpu", level)
    feeds = random_inputs(optimised, 0)
    names = written(optimised)
    opened = session.open_session(expose(optimised, names).SerializeToString(), "cpu", "disable")
    seen = dict(zip(names, session.run(opened, names, feeds), strict=True)) | feeds
    weights = {w.name: onnx.numpy_helper.to_array(w) for w in optimised.graph.initializer}

    def spell(name: str) -> Any:
        if name in weights:
            value = weights[name]
            small = value.dtype.kind == "i" and value.size <= 64
            return ("weight", str(value.dtype), value.shape, value.tolist() if small else None)
        return ("flows", str(seen[name].dtype), seen[name].shape) if name else None

    found = []
    for node, read in zip(
        optimised.graph.node, read_nodes(optimised, describe_tensors(optimised, "cpu")), strict=True
    ):
        attributes = sorted((a.name, str(helper.get_attribute_value(a))) for a in node.attribute)
        pattern = [list(node.input).index(name) for name in node.input]
        own = (node.op_type, node.domain, attributes, pattern)
        found.append((read.kernel_id, repr((own, [*map(spell, node.input)], [*map(spell, node.output)]))))
    return found


def test_no_two_kernels_share_an_id(zoo: Path, tmp_path: Path) -> None:
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


def test_resnet18_is_named_as_it_is_fused(zoo: Path) -> None:
    fused = analyze(zoo / "resnet18_b1_64.onnx")
    counts = fused.counts()
    assert (counts["Conv_Relu"], counts["Conv_Add_Relu"], counts["Conv"]) == (9, 8, 3)
    assert "Add" not in counts and "Relu" not in counts and len(fused.nodes) == 25
    assert list(counts)[:2] == ["Conv_Relu", "Conv_Add_Relu"]
    assert (fused.provider, fused.level) == ("CPUExecutionProvider", "all")
    # Fused less, the same name for what is fused all the same: FusedConv in place of the blocked Conv.
    less = analyze(zoo / "resnet18_b1_64.onnx", "cpu", "extended").counts()
    assert (less["Conv_Relu"], less["Conv"], less["Add"], less["Relu"]) == (9, 11, 8, 8)
    raw = analyze(zoo / "resnet18_b1_64.onnx", level="disable").counts()
    assert (raw["Conv"], raw["Add"], raw["Relu"]) == (20, 8, 17)


def test_the_same_work_whatever_the_fusion(zoo: Path) -> None:
    path = zoo / "resnet18_b1_64.onnx"
    fused, raw = analyze(path), analyze(path, level="disable")
    assert fused.flops == pytest.approx(raw.flops, rel=0.01)
    # By hand: the multiplications of ResNet-18 at 64 x 64.
    maps = {64: (16, 4, 64), 128: (8, 3, 128), 256: (4, 3, 256), 512: (2, 3, 512)}
    by_hand = 64 * 32**2 * 147
    for channels, (side, convs, _) in maps.items():
        by_hand += side**2 * channels * channels * 9 * convs
        if channels > 64:
            by_hand += side**2 * channels * (channels // 2) * (9 + 1)
    assert raw.flops == pytest.approx(2 * by_hand, rel=0.02)


@pytest.mark.parametrize("name", ["resnet18_b2_64", "vit_b2_32"])
def test_inferred_shapes_are_those_of_a_run(zoo: Path, name: str) -> None:
    optimised = optimise(zoo / f"{name}.onnx")
    inferred, seen = (describe_tensors(optimised, "cpu", always_run=run) for run in (False, True))
    assert inferred == seen and len(seen) > 30


def test_one_kernel_in_two_models_has_one_id(tmp_path: Path) -> None:
    first = analyze(save(convnet(), tmp_path, "a.onnx"))
    second = analyze(save(convnet(prefix="other/", seed=9), tmp_path, "b.onnx"))
    assert [n.name for n in first.nodes] != [n.name for n in second.nodes]
    assert {k.id: k for k in first.kernels} == {k.id: k for k in second.kernels}
    # Newer operator sets in which the operator did not change make no difference either.
    newer = convnet()
    newer.opset_import[0].version = 18
    convolutions = {k.id for k in first.kernels if k.op.startswith("Conv")}
    assert convolutions <= {k.id for k in analyze(save(newer, tmp_path, "c.onnx")).kernels}
    assert not convolutions & {k.id for k in analyze(save(convnet(batch=2), tmp_path, "d.onnx")).kernels}


def test_edges_follow_the_tensors(tmp_path: Path) -> None:
    graph = analyze(save(convnet(), tmp_path), level="disable")
    names = {node.kernel.op + str(i): node.name for i, node in enumerate(graph.nodes)}
    found = {(a, b) for a, b in graph.edges}
    op = {name: key for key, name in names.items()}
    assert {(op[a], op[b]) for a, b in found} == {
        ("Conv0", "Relu1"), ("Relu1", "Conv2"), ("Conv2", "Add3"), ("Relu1", "Add3"), ("Add3", "Relu4"),
        ("Relu4", "GlobalAveragePool5"), ("GlobalAveragePool5", "Flatten6"), ("Flatten6", "Gemm7"),
    }  # fmt: skip
    first = graph.nodes[0]
    assert first.inputs == () and first.reads == ("x", "w1", "b1") and first.writes == ("c1",)
    assert first.kernel.constants == (1, 2)
    assert graph.kernels[0].inputs[0].name == "input_0" and graph.inputs[0].name == "x"


def test_nodes_come_after_what_they_read(zoo: Path) -> None:
    graph = analyze(zoo / "vit_b1_32.onnx")
    seen: set[str] = set()
    for node in graph.nodes:
        assert seen.issuperset(node.inputs)
        seen.add(node.name)
    assert len(seen) == len(graph.nodes)
    assert {"Gelu", "LayerNormalization", "Softmax", "MatMul_Mul"} <= set(graph.counts())


def test_small_integer_constants_belong_to_a_kernel(tmp_path: Path) -> None:
    def sums(axis: int, name: str) -> Graph:
        import numpy as np

        built = model(
            [helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)],
            [("x", FLOAT, [4, 4])],
            [("y", FLOAT, None)],
            {"axes": np.array([axis])},
        )
        return analyze(save(built, tmp_path, name))

    # Equal in every shape; one walks along memory and the other across it.
    first, second = sums(0, "a.onnx"), sums(1, "b.onnx")
    assert first.kernels[0].values == {1: (0,)} and second.kernels[0].values == {1: (1,)}
    assert first.kernels[0].id != second.kernels[0].id


def test_a_power_is_not_a_square(tmp_path: Path) -> None:
    import numpy as np

    def power(of: float) -> str:
        weights = {"e": np.array(of, np.float32)}
        built = model(
            [helper.make_node("Pow", ["x", "e"], ["y"])],
            [("x", FLOAT, [4])],
            [("y", FLOAT, [4])],
            weights,
        )
        return analyze(save(built, tmp_path), level="disable").kernels[0].id

    assert len({power(2.0), power(3.0), power(0.5)}) == 3


def test_one_tensor_read_twice(tmp_path: Path) -> None:
    def product(second: str) -> str:
        inputs = [(name, FLOAT, [4]) for name in dict.fromkeys(("a", second))]
        built = model([helper.make_node("Mul", ["a", second], ["y"])], inputs, [("y", FLOAT, [4])])
        return analyze(save(built, tmp_path)).kernels[0].id

    assert product("a") != product("b")


def test_unknown_operators_are_counted_and_marked(tmp_path: Path) -> None:
    built = model([helper.make_node("Det", ["x"], ["y"])], [("x", FLOAT, [5, 3, 3])], [("y", FLOAT, [5])])
    kernel = analyze(save(built, tmp_path)).kernels[0]
    assert not kernel.flops_known and kernel.flops == 5


def test_shapes_that_only_a_run_knows(tmp_path: Path) -> None:
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


def test_branches_capture_what_they_read(tmp_path: Path) -> None:
    graph = analyze(save(branching(), tmp_path))
    node = next(n for n in graph.nodes if n.kernel.node_op == "If")
    assert node.inputs == (graph.nodes[0].name,)
    assert set(node.reads) == {"flag", "h"} and set(node.kernel.attributes) == {"then_branch", "else_branch"}


def test_nodes_without_names_are_told_apart(tmp_path: Path) -> None:
    built = convnet()
    assert not any(node.name for node in built.graph.node)
    built.graph.node[1].name = "Conv_2"
    graph = analyze(save(built, tmp_path), level="disable")
    assert len({node.name for node in graph.nodes}) == len(graph.nodes) == 8


def test_half_precision_is_another_kernel(tmp_path: Path) -> None:
    kinds = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
    found = [
        analyze(
            save(
                model([helper.make_node("Relu", ["x"], ["y"])], [("x", kind, [4])], [("y", kind, [4])]),
                tmp_path,
            )
        ).kernels[0]
        for kind in kinds
    ]
    assert found[0].id != found[1].id
    assert [k.outputs[0].dtype for k in found] == ["float32", "float64"]
    assert found[1].bytes_moved == 2 * found[0].bytes_moved


def test_a_graph_is_read_back(tmp_path: Path) -> None:
    graph = analyze(save(lookup(), tmp_path), out=tmp_path / "out")
    assert Graph.from_dict(json.loads(json.dumps(graph.to_dict()))) == graph
    assert Graph.load(tmp_path / "out") == Graph.load(tmp_path / "out" / "graph.json") == graph
    files = {path.stem for path in (tmp_path / "out" / "kernels").glob("*.json")}
    assert files == {kernel.id for kernel in graph.kernels}
    (tmp_path / "out").rename(tmp_path / "moved")
    moved = Graph.load(tmp_path / "moved")
    assert moved.optimised_path is not None and Path(moved.optimised_path).is_file()
    assert onnx_file.load(moved.optimised_path).graph.node


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "other"}, "not the record of an analysed graph"),
        ({"version": 99}, "version 99"),
        ({"surprise": 1}, "surprise"),
        ({"nodes": 3}, "damaged"),
        ({"kernels": []}, "contradicts itself"),
        ({"inputs": [{"name": "x", "dtype": "float33", "shape": [1]}]}, "float33"),
    ],
)
def test_wrong_records_are_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    graph = analyze(save(convnet(), tmp_path))
    with pytest.raises(FileFormatError, match=says):
        Graph.from_dict({**graph.to_dict(), **change})


def test_records_that_are_absent_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no graph"):
        Graph.load(tmp_path)
    (tmp_path / "graph.json").write_text('{"format": "spa')
    with pytest.raises(FileFormatError, match="not JSON"):
        Graph.load(tmp_path)
    (tmp_path / "graph.json").write_text("[]")
    with pytest.raises(FileFormatError, match="not the record"):
        Graph.load(tmp_path)


def test_a_node_order_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    record = analyze(save(convnet(), tmp_path)).to_dict()
    record["nodes"].reverse()
    with pytest.raises(FileFormatError, match="behind it"):
        Graph.from_dict(record)


def test_what_onnxruntime_refuses(tmp_path: Path) -> None:
    built = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [("x", FLOAT, [2, 3])],
        [("y", FLOAT, None)],
        {"w": values(4, 5)},
    )
    with pytest.raises(ModelError, match="onnxruntime refuses"):
        analyze(save(built, tmp_path))
    with pytest.raises(InputError, match="'utmost'"):
        analyze(save(convnet(), tmp_path), level="utmost")

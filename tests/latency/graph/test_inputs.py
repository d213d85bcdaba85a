"""Inputs of models: shapes, requested values, and values that follow from operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper

from sparseflow.errors import FileFormatError, InputError, RunError
from sparseflow.latency.graph.analysis import analyze
from sparseflow.latency.graph.extraction import extract
from sparseflow.latency.graph.inputs import load_values, read_value, resolve_inputs, save_values
from sparseflow.latency.graph.kernels import TensorSpec
from sparseflow.latency.measure.overlap import measure_overlap
from sparseflow.latency.measure.runner import Runner
from tests.latency.onnx_models import FLOAT, model, save, values

INT64, BOOL, STRING = TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING
node = helper.make_node


def expand() -> Any:
    """Build a model whose shapes depend on the value of an input."""
    return model(
        [node("Expand", ["x", "size"], ["h"]), node("Relu", ["h"], ["y"])],
        [("x", FLOAT, [3, 1]), ("size", INT64, [2])],
        [("y", FLOAT, None)],
    )


def sampling_rate() -> Any:
    """Build an If on the value of an input, one branch of which contradicts the shape of `x`."""
    info = helper.make_tensor_value_info
    branches = [
        helper.make_graph(
            [node("MatMul", ["x", weight], [weight + "_y"])], weight, [], [info(weight + "_y", FLOAT, None)]
        )
        for weight in ("w16", "w8")
    ]
    built = model(
        [
            node("Equal", ["rate", "wide"], ["is_wide"]),
            node("If", ["is_wide"], ["h"], then_branch=branches[0], else_branch=branches[1]),
            node("Relu", ["h"], ["y"]),
        ],
        [("x", FLOAT, [1, "samples"]), ("rate", INT64, [])],
        [("y", FLOAT, None)],
        {"w16": values(16, 4), "w8": values(8, 4), "wide": np.array(16000)},
    )
    return built


def test_values_select_shapes_in_all_steps(tmp_path: Path) -> None:
    path = save(expand(), tmp_path)
    sizes = ([3, 5], np.array([3, 5]), "3,5")
    assert {analyze(path, inputs={"size": size}).outputs[0].shape for size in sizes} == {(3, 5)}
    assert analyze(path).outputs[0].shape == (3, 1)
    results = extract(path, tmp_path / "out", inputs={"size": [3, 5]})
    assert all(result.ok and result.matched for result in results)
    # The directory of the analyzed graph contains the values.
    results = extract(tmp_path / "out", tmp_path / "again", seed=5)
    assert all(result.ok and result.matched for result in results)
    assert results[0].path is not None and Runner(results[0].path).run_once()[0].shape == (3, 5)
    assert Runner(path, inputs={"size": [3, 5]}).run_once()[0].shape == (3, 5)
    assert measure_overlap(path, inputs={"size": [3, 5]}, num_runs=1).nodes
    analyze(path, out_dir=tmp_path / "out")
    assert Runner(path).run_once()[0].shape == (3, 1)
    with pytest.raises(InputError, match="analyze the model again"):
        extract(tmp_path / "out", tmp_path / "again", inputs={"size": [3, 5]})


@pytest.mark.parametrize(
    ("op", "data", "control", "output", "expected"),
    [
        ("Reshape", [2, 3, 4], {"s": (INT64, [3])}, [4, 2, 3], {"s": [4, 2, 3]}),
        ("Reshape", [2, 3], {"s": (INT64, [3])}, None, {"s": [-1, 1, 1]}),
        ("Slice", [4, 6], {"a": (INT64, [1]), "b": (INT64, [1])}, None, {"a": [0], "b": [2**31 - 1]}),
        ("Tile", [2, 3], {"r": (INT64, [2])}, [2, 9], {"r": [1, 3]}),
        ("Pad", [2, 3], {"p": (INT64, [4])}, [2, 6], {"p": [0, 1, 0, 2]}),
        ("TopK", [2, 8], {"k": (INT64, [1])}, [2, 3], {"k": [3]}),
        ("Unsqueeze", [2, 8], {"a": (INT64, [2])}, None, {"a": [0, 1]}),
        ("Squeeze", [2, 1, 8, 1], {"a": (INT64, [2])}, None, {"a": [1, 3]}),
        ("Dropout", [2, 8], {"r": (FLOAT, [])}, None, {"r": 0.5}),
        ("Div", [2, 8], {"d": (FLOAT, [])}, None, {}),
    ],
)  # fmt: skip
def test_values_follow_operators(
    tmp_path: Path, op: str, data: Any, control: dict[str, Any], output: Any, expected: dict[str, Any]
) -> None:
    outputs = ["y", "z"] if op == "TopK" else ["y"]
    built = model(
        [node(op, ["x", *control], outputs)],
        [("x", FLOAT, data), *((name, *entry) for name, entry in control.items())],
        [("y", FLOAT, output), *((name, INT64, None) for name in outputs[1:])],
    )
    inputs = resolve_inputs(built)
    draws = list(inputs.iter_draws(seed=0))
    assert {name: draws[0][name].tolist() for name in expected} == expected
    assert (len(draws) > 1) == bool(expected)
    assert all(result.ok for result in extract(save(built, tmp_path), tmp_path / "out"))


def test_other_values_are_tried(tmp_path: Path) -> None:
    """The index must be 0, which the second fallback is."""
    built = model(
        [node("Add", ["i", "i"], ["j"]), node("Gather", ["table", "j"], ["y"])],
        [("i", INT64, [8])],
        [("y", FLOAT, None)],
        {"table": values(1, 3)},
    )
    assert all(result.ok and result.matched for result in extract(save(built, tmp_path), tmp_path / "out"))
    assert Runner(save(built, tmp_path)).run_once()[0].shape == (8, 3)


def test_shapes_that_contradict_a_branch(tmp_path: Path) -> None:
    path = save(sampling_rate(), tmp_path)
    for samples, rate in ((16, 16000), (8, 8000)):
        shapes = {"x": (1, samples)}
        for inputs in (None, {"rate": rate}):
            graph = analyze(path, shapes=shapes, inputs=inputs)
            assert graph.count_ops() == {"Equal": 1, "If": 1, "Relu": 1}
            assert graph.outputs[0].shape == (1, 4) and graph.inputs[0].shape == (1, samples)
            results = extract(path, tmp_path / "out", shapes=shapes, inputs=inputs)
            assert sum(result.matched for result in results) == 3
            assert all(Runner(result.path or "").run_once() for result in results)
            assert Runner(path, shapes=shapes, inputs=inputs).run_once()[0].shape == (1, 4)
    with pytest.raises(RunError, match=r"rate \(int64 \[\]\)"):
        analyze(path, shapes={"x": (1, 5)})


def test_text_inside_and_as_input(tmp_path: Path) -> None:
    inside = model(
        [node("Cast", ["x"], ["s"], to=STRING), node("Cast", ["s"], ["y"], to=FLOAT)],
        [("x", FLOAT, [3])],
        [("y", FLOAT, [3])],
    )
    results = extract(save(inside, tmp_path), tmp_path / "out")
    assert [(result.matched, result.ok) for result in results] == [(1, True), (1, True)]
    equal = model(
        [node("Equal", ["x", "z"], ["y"])],
        [("x", STRING, ["n"]), ("z", STRING, [1])],
        [("y", BOOL, None)],
        opset=19,
    )
    path = save(equal, tmp_path)
    assert analyze(path, inputs={"x": "a,b,c"}).inputs[0].shape == (3,)
    results = extract(path, tmp_path / "out", inputs={"x": ["a", "b"], "z": "a"})
    assert [(result.matched, result.ok) for result in results] == [(1, True)]
    runner = Runner(results[0].path or "")
    assert runner.run_once()[0].tolist() == [True, False]
    assert runner.measure(loops=2).mean_ms > 0


def test_values_that_are_no_tensors_are_skipped(tmp_path: Path) -> None:
    built = model(
        [
            node("Relu", ["x"], ["h"]),
            node("SplitToSequence", ["h"], ["s"], axis=0),
            node("ConcatFromSequence", ["s"], ["y"], axis=0),
        ],
        [("x", FLOAT, [4, 8])],
        [("y", FLOAT, None)],
    )
    path = save(built, tmp_path)
    graph = analyze(path, out_dir=tmp_path / "graph")
    split, concat = (entry.kernel for entry in graph.nodes[1:])
    assert split.outputs[0].dtype == concat.inputs[0].dtype == "sequence" and graph.outputs[0].shape == (4, 8)
    assert not split.flops_known and not concat.flops_known
    relu, *skipped = extract(tmp_path / "graph", tmp_path / "out")
    assert relu.matched == 1 and relu.skipped is None
    assert all(result.ok and result.path is None and result.skipped for result in skipped)
    assert len(list((tmp_path / "out" / "kernels").glob("*.onnx"))) == 1


def test_first_step_with_an_empty_cache(tmp_path: Path) -> None:
    built = model(
        [node("Concat", ["past", "new"], ["keys"], axis=2), node("ReduceMean", ["keys"], ["y"], axes=[2])],
        [("past", FLOAT, [1, 4, "p", 8]), ("new", FLOAT, [1, 4, 1, 8])],
        [("y", FLOAT, None)],
    )
    path = save(built, tmp_path)
    shapes = {"past": (1, 4, 0, 8)}
    results = extract(path, tmp_path / "out", shapes=shapes)
    assert sum(result.matched for result in results) == 2
    assert all(Runner(result.path or "").measure(loops=2).mean_ms > 0 for result in results)
    assert Runner(path, shapes=shapes).run_once()[0].shape == (1, 4, 1, 8)


def test_read_value(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    for value, expected in (
        ("0.5", 0.5), ("1,64", [1, 64]), ("[[1, 2], [3, 4]]", [[1, 2], [3, 4]]), ("true", True),
        (np.array(["a", "b"], dtype=object), ["a", "b"]),
        ("[5]", [5]), ("a,b", ["a", "b"]), (7, 7),
        (tmp_path / "a.npy", [0, 1, 2]), (str(tmp_path / "a.npy"), [0, 1, 2]),
    ):  # fmt: skip
        assert read_value(value).tolist() == expected
    (tmp_path / "b.npy").write_bytes(b"no array")
    np.save(tmp_path / "c.npy", np.array([{}], dtype=object), allow_pickle=True)
    for name in ("b.npy", "c.npy"):
        with pytest.raises(FileFormatError, match="is not an array"):
            read_value(tmp_path / name)
    for value in (str(tmp_path / "absent.npy"), [[1, 2], [3]], {"a": 1}, None, "1,[2]"):
        with pytest.raises(InputError):
            read_value(value)


def test_requested_values_are_checked(tmp_path: Path) -> None:
    built = model(
        [node("Cast", ["n"], ["y"], to=FLOAT)], [("n", TensorProto.UINT8, [2, "k"])], [("y", FLOAT, None)]
    )
    assert resolve_inputs(built, values={"n": [[1, 2, 3], [4, 5, 6]]}).specs[0].shape == (2, 3)
    inputs = resolve_inputs(built, {"n": (2, 2)}, {"n": 7})
    assert inputs.values["n"].tolist() == [[7, 7], [7, 7]] and inputs.values["n"].dtype == np.uint8
    for value, message in (
        ([1, 2, 3], "expected \\[2, 2\\] or one number"), (256, "type uint8"), (-1, "type uint8"),
        (0.5, "type uint8"), ("a", "type uint8"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            resolve_inputs(built, {"n": (2, 2)}, {"n": value})
    with pytest.raises(InputError, match="no input z"):
        resolve_inputs(built, {"n": (2, 2)}, {"z": 1})
    with pytest.raises(InputError, match="negative"):
        resolve_inputs(built, {"n": (2, -1)})


def test_saved_values_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "values.npz"
    bfloat16 = resolve_inputs(
        model([node("Relu", ["x"], ["y"])], [("x", TensorProto.BFLOAT16, [3])], [("y", FLOAT, None)]),
        values={"x": [1, 2, 3]},
    ).values["x"]
    specs = [
        TensorSpec(name="text", dtype="string", shape=(2,)),
        TensorSpec(name="x", dtype="bfloat16", shape=(3,)),
    ]
    stored = {"text": np.array(["a", "ü"], dtype=object), "x": bfloat16}
    save_values(path, stored)
    loaded = load_values(path, specs)
    assert {name: value.tolist() for name, value in loaded.items()} == {
        name: value.tolist() for name, value in stored.items()
    }
    assert all(loaded[name].dtype == value.dtype for name, value in stored.items())
    for wrong in (specs[:1], [specs[0], specs[1].model_copy(update={"shape": (4,)})]):
        with pytest.raises(FileFormatError, match="`x`"):
            load_values(path, wrong)
    save_values(path, {})
    assert not path.exists() and load_values(path, specs) == {}

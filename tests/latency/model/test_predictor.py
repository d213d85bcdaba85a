"""Predictions of known and unknown graphs under load, and the predictor file."""

from __future__ import annotations

import base64
import json
import math
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

import numpy as np
import onnx
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from sparseflow.errors import DeviceError, FileFormatError, InputError, SparseFlowError
from sparseflow.latency.graph.analysis import Graph, analyze
from sparseflow.latency.model.kernel_regressor import LEARNED, MEASURED, ROOFLINE
from sparseflow.latency.model.predictor import Prediction, Predictor
from tests.conformance import check_artifact_file
from tests.latency.conftest import MadeUp
from tests.latency.onnx_models import FLOAT, convnet, lookup, looping, model, save, values
from tests.latency.synthetic import rest_ms, slowdown

Place = Sequence[str | int]

EPSILON = 1.0 + 1e-9
SHARES = st.floats(0.0, 1.0)


@pytest.fixture(scope="module")
def unmeasured(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """Network with two operators that were never measured."""
    pads: dict[str, Any] = {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}
    built = model(
        [
            helper.make_node("Conv", ["x", "w1"], ["a"], **pads),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("Erf", ["b"], ["c"]),
            helper.make_node("Conv", ["c", "w2"], ["d"], **pads),
            helper.make_node("Relu", ["d"], ["e"]),
            helper.make_node("Softmax", ["e"], ["y"]),
        ],
        [("x", FLOAT, [1, 8, 16, 16])],
        [("y", FLOAT, None)],
        {"w1": values(8, 8, 3, 3), "w2": values(8, 8, 3, 3, seed=1)},
    )
    return analyze(save(built, tmp_path_factory.mktemp("unmeasured")))


@pytest.fixture(scope="module")
def unseen(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """Network of measured operators in other shapes."""
    # No processor's blocked layout has blocks of this width.
    return analyze(save(convnet(width=10, size=11), tmp_path_factory.mktemp("unseen")))


def width(prediction: Prediction) -> float:
    return prediction.interval[1] / prediction.interval[0]


def summarize_prediction(prediction: Prediction) -> dict[str, Any]:
    return json.loads(json.dumps(prediction.to_dict(), allow_nan=False))


def test_predict_unseen_network(made_up: MadeUp, unseen: Graph) -> None:
    # Inside a graph each kernel is slightly faster than in isolation, which the predictor must learn.
    expected = sum(rest_ms(node.kernel) for node in unseen.nodes)
    for level in (0.0, 0.4, 0.6, 0.8):
        prediction = made_up.predictor.predict(unseen, {"others": level})
        assert prediction.mean_ms == pytest.approx(expected * slowdown(level), rel=0.2)
        assert prediction.slowdown == pytest.approx(slowdown(level), rel=0.1)
    assert prediction.coverage == 1.0
    assert {kernel.source for kernel in prediction.per_kernel} == {LEARNED}


def test_predict_kernels_sum_to_mean(made_up: MadeUp, unmeasured: Graph, unseen: Graph) -> None:
    graphs = [*made_up.graphs, unmeasured, unseen]

    @settings(max_examples=30)
    @given(load=SHARES, number=st.integers(0, len(graphs) - 1))
    def holds(load: float, number: int) -> None:
        prediction = made_up.predictor.predict(graphs[number], {"others": load})
        kernels = prediction.per_kernel
        for total_ms, name in ((prediction.mean_ms, "mean_ms"), (prediction.idle_ms, "idle_ms")):
            kernels_ms = sum(k.count * getattr(k, name) for k in kernels)
            assert prediction.call_ms + kernels_ms == pytest.approx(total_ms)
        assert sum(k.count for k in kernels) == len(graphs[number].nodes)
        assert 0.0 < prediction.interval[0] <= prediction.mean_ms <= prediction.interval[1]
        for k in kernels:
            assert 0.0 <= k.low_ms <= k.idle_ms * EPSILON and k.idle_ms <= k.high_ms * EPSILON
            assert k.idle_ms <= k.mean_ms * EPSILON
        assert 0.0 < prediction.p50_ms <= prediction.p95_ms
        assert 0.0 < prediction.coverage <= 1.0 and prediction.slowdown * EPSILON >= 1.0
        costs = [k.count * k.mean_ms for k in kernels]
        assert costs == sorted(costs, reverse=True)
        assert summarize_prediction(prediction)["interval"] == list(prediction.interval)

    holds()


def test_predict_monotone_in_load(made_up: MadeUp, unseen: Graph) -> None:
    idle = made_up.predictor.predict(unseen)
    assert idle.mean_ms == pytest.approx(idle.idle_ms, rel=1e-9) and idle.load == {}

    @settings(max_examples=30)
    @given(loads=st.tuples(SHARES, SHARES))
    def holds(loads: tuple[float, float]) -> None:
        light, heavy = (made_up.predictor.predict(unseen, {"others": load}) for load in sorted(loads))
        assert idle.mean_ms <= light.mean_ms * EPSILON and light.mean_ms <= heavy.mean_ms * EPSILON
        assert light.load == {"others": min(loads)}
        if max(loads) - min(loads) > 0.01:
            assert heavy.mean_ms > light.mean_ms

    holds()


def test_predict_measured_kernels(made_up: MadeUp, unseen: Graph) -> None:
    predictor = made_up.predictor
    kernels = {k.id: k for graph in made_up.graphs for k in graph.kernels}
    estimates = predictor.estimate_kernels(kernels.values())
    assert estimates.keys() == kernels.keys() <= predictor.measured_ms.keys()
    for name, estimate in estimates.items():
        measured_ms = predictor.measured_ms[name]
        assert estimate.low_ms == estimate.ms == estimate.high_ms == measured_ms
        assert measured_ms == pytest.approx(rest_ms(kernels[name]), rel=0.05) and estimate.source == MEASURED
    for estimate in predictor.compose(unseen)[0].values():
        assert estimate.source == LEARNED and estimate.low_ms <= estimate.ms <= estimate.high_ms
        assert estimate.low_ms < estimate.high_ms and not estimate.guess_share


def test_predict_unknown_operator_widens_interval(
    made_up: MadeUp, unmeasured: Graph, unseen: Graph, tmp_path: Path
) -> None:
    prediction = made_up.predictor.predict(unmeasured)
    sources = {kernel.op: kernel.source for kernel in prediction.per_kernel}
    assert sources["Erf"] == sources["Softmax"] == ROOFLINE and sources["Conv_Relu"] == LEARNED
    guessed = sum(k.count * k.mean_ms for k in prediction.per_kernel if k.source == ROOFLINE)
    assert (
        prediction.coverage == pytest.approx(1.0 - guessed / (prediction.mean_ms - prediction.call_ms))
        and 0.0 < prediction.coverage < 1.0
    )
    assert width(prediction) > width(made_up.predictor.predict(unseen))
    assert width(prediction) < math.inf and prediction.is_guess
    assert any("is a guess" in note and "Erf, Softmax" in note for note in prediction.notes)
    known = made_up.predictor.predict(unseen)
    assert known.notes == () and not known.is_guess
    nothing_known = made_up.predictor.predict(analyze(save(lookup(), tmp_path)))
    assert nothing_known.coverage == pytest.approx(0.0, abs=1e-9)
    assert nothing_known.interval[0] <= nothing_known.mean_ms <= nothing_known.interval[1]


TERMS = helper.make_node(
    "TfIdfVectorizer", ["x"], ["y"], mode="TF", min_gram_length=1, max_gram_length=1, max_skip_count=0,
    ngram_counts=[0], ngram_indexes=[0, 1, 2], pool_int64s=[0, 1, 2],
)  # fmt: skip
BOXES = model(
    [helper.make_node("NonMaxSuppression", ["b", "s", "m", "i", "t"], ["y"])],
    [("b", FLOAT, [1, 50, 4]), ("s", FLOAT, [1, 2, 50])],
    [("y", TensorProto.INT64, [None, 3])],
    {"m": np.array([10]), "i": np.array([0.5], np.float32), "t": np.array([0.05], np.float32)},
)
RECURRENT = model(
    [helper.make_node("GRU", ["x", "w", "r"], ["y"], hidden_size=8)],
    [("x", FLOAT, [5, 1, 4])],
    [("y", FLOAT, None)],
    {"w": values(1, 24, 4), "r": values(1, 24, 8)},
)


def test_predict_unknown_work_has_no_bound(made_up: MadeUp, tmp_path: Path) -> None:
    built = model([TERMS], [("x", TensorProto.INT64, [6])], [("y", FLOAT, [3])])
    graph = analyze(save(built, tmp_path))
    for load in (None, {"others": 0.5}):
        prediction = made_up.predictor.predict(graph, load)
        assert prediction.interval[1] == math.inf and prediction.interval[0] < prediction.mean_ms
        assert prediction.is_guess and prediction.coverage < 0.01
        assert "the work of TfIdfVectorizer is unknown" in prediction.notes[1]
        record = summarize_prediction(prediction)
        assert record["interval"][1] is None and record["per_kernel"][0]["high_ms"] is None


@pytest.mark.parametrize(("built", "op"), [(looping(100), "MatMul"), (BOXES, "NonMax"), (RECURRENT, "GRU")])
def test_predict_known_work_has_wide_bounds(
    made_up: MadeUp, built: onnx.ModelProto, op: str, tmp_path: Path
) -> None:
    prediction = made_up.predictor.predict(analyze(save(built, tmp_path)))
    assert prediction.is_guess and op in prediction.notes[0]
    low, high = prediction.interval
    assert 5 * low < prediction.mean_ms < high / 5 < math.inf


def test_predict_impossible_latency_raises(made_up: MadeUp) -> None:
    graph = made_up.graphs[0]
    measured_ms = dict.fromkeys(made_up.predictor.measured_ms, 1e308)
    damaged = made_up.predictor.model_copy(update={"measured_ms": measured_ms})
    with pytest.raises(FileFormatError, match="is damaged, its latency is"):
        damaged.predict(graph, {"others": 0.5})


def test_predict_says_training_was_disturbed(made_up: MadeUp, unseen: Graph) -> None:
    disturbed = made_up.predictor.model_copy(update={"other_load": 0.97})
    (note,) = disturbed.predict(unseen).notes
    assert "other work used 97 %" in note and "p50 and p95" in note
    threads = replace(disturbed.fingerprint, threads=2)
    (note,) = disturbed.model_copy(update={"fingerprint": threads}).predict(unseen).notes
    assert "other work used 97 %" in note and "the idle latency is too high" in note
    unread = made_up.predictor.model_copy(update={"other_load": None})
    assert "did not read" in unread.predict(unseen).notes[0]


def test_predict_unknown_view_is_cheap(made_up: MadeUp, tmp_path: Path) -> None:
    reshape = helper.make_node("Reshape", ["x", "to"], ["y"])
    weights = {"to": np.array([1, 64], np.int64)}
    built = model([reshape], [("x", FLOAT, [8, 8])], [("y", FLOAT, None)], weights)
    prediction = made_up.predictor.predict(analyze(save(built, tmp_path)), {"others": 0.5})
    assert (
        0.0 < prediction.mean_ms < 0.01
        and prediction.interval[0] <= prediction.mean_ms <= prediction.interval[1]
    )
    assert [kernel.source for kernel in prediction.per_kernel] == [ROOFLINE]


def test_predict_depends_on_seed(made_up: MadeUp, unseen: Graph) -> None:
    prediction, same, other = (
        made_up.predictor.predict(unseen, {"others": 0.5}, seed=seed) for seed in (0, 0, 1)
    )
    assert prediction == same
    assert prediction.mean_ms == other.mean_ms and prediction.p95_ms == pytest.approx(other.p95_ms, rel=0.1)


@pytest.mark.parametrize("load", [{"busy": 0.5}, {}])
def test_predict_missing_metric_raises(made_up: MadeUp, unseen: Graph, load: dict[str, float]) -> None:
    with pytest.raises(DeviceError, match="`others`"):
        made_up.predictor.predict(unseen, load)


@pytest.mark.parametrize("share", [-0.1, 1.5, math.nan, math.inf])
def test_predict_invalid_share_raises(made_up: MadeUp, unseen: Graph, share: float) -> None:
    with pytest.raises(InputError, match=r"`others`.*0.*1"):
        made_up.predictor.predict(unseen, {"others": share})


def test_predictor_round_trip(made_up: MadeUp, unmeasured: Graph, unseen: Graph, tmp_path: Path) -> None:
    path = made_up.predictor.save(tmp_path / "new" / "predictor.json")
    back = Predictor.load(path)
    for graph in (*made_up.graphs, unmeasured, unseen):
        for load in (None, {"others": 0.3}, {"others": 1.0}):
            assert back.predict(graph, load) == made_up.predictor.predict(graph, load)
    assert (back.quality, back.fingerprint) == (made_up.predictor.quality, made_up.predictor.fingerprint)
    assert Predictor.load(back.save(tmp_path / "again.json")).predict(unseen) == back.predict(unseen)


@pytest.fixture(scope="module")
def record(made_up: MadeUp, tmp_path_factory: pytest.TempPathFactory) -> str:
    return made_up.predictor.save(tmp_path_factory.mktemp("file") / "predictor.json").read_text()


def loaded(text: str | bytes, folder: Path) -> Predictor:
    path = folder / "predictor.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return Predictor.load(path)


def test_predictor_damaged_file_raises(record: str, tmp_path: Path) -> None:
    path = tmp_path / "predictor.json"
    path.write_text(record)
    check_artifact_file(Predictor.load, path, "run `sparseflow latency train` again")


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_predictor_pickle_never_executed(record: str, tmp_path: Path, protocol: int) -> None:
    sprung = tmp_path / "sprung"
    trap = pickle.dumps(Trap(sprung), protocol)
    with pytest.raises(FileFormatError):
        loaded(trap, tmp_path)
    inside = json.loads(record)
    inside["regressor"]["trees"]["model"] = base64.b64encode(zlib.compress(trap)).decode()
    with pytest.raises(FileFormatError):
        loaded(json.dumps(inside), tmp_path)
    assert not sprung.exists()


def iter_paths(value: Any, path: Place = ()) -> Iterator[Place]:
    """Yield the paths of all parts of a record; of a list only the first entry."""
    inner: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = [(path, below) for path, below in enumerate(value[:1])]
    for key, below in inner:
        yield (*path, key)
        yield from iter_paths(below, (*path, key))


def get_parent(record: Any, path: Place) -> Any:
    for key in path[:-1]:
        record = record[key]
    return record


def test_predictor_missing_part_raises(record: str, tmp_path: Path) -> None:
    full_record = json.loads(record)
    for path in iter_paths(full_record | {"measured_ms": {}, "quality": {}}):
        names = (
            ("regressor", "encoder", "categories"), ("regressor", "ranges"), ("graph_corrections", "by_class")
        )  # fmt: skip
        if len(path) > 3 or isinstance(path[-1], int) or any(path[: len(n)] == n != path for n in names):
            continue
        damaged = json.loads(record)
        del get_parent(damaged, path)[path[-1]]
        with pytest.raises(FileFormatError):
            loaded(json.dumps(damaged), tmp_path)


@pytest.mark.parametrize("wrong", [None, {}, -1.0, math.nan])
def test_predictor_invalid_value_raises_or_is_plausible(
    made_up: MadeUp, record: str, tmp_path: Path, wrong: object
) -> None:
    graph = made_up.graphs[0]
    full_record = json.loads(record)
    required_parts = {name: part for name, part in full_record.items() if name != "quality"}
    required_parts["measured_ms"] = {graph.kernels[0].id: 0.0}
    for path in iter_paths(required_parts):
        damaged = json.loads(record)
        get_parent(damaged, path)[path[-1]] = wrong
        try:
            predictor = loaded(json.dumps(damaged), tmp_path)
            prediction = predictor.predict(graph, {"others": 0.5})
        except SparseFlowError:
            continue
        message = f"{path}: {prediction.mean_ms}, {prediction.interval}"
        assert math.isfinite(prediction.mean_ms) and prediction.mean_ms > 0.0, message
        assert prediction.interval[0] <= prediction.mean_ms <= prediction.interval[1], message

"""What a predictor says of graphs it knows and does not know, beside any load, and its file."""

from __future__ import annotations

import base64
import json
import math
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from sparseflow.errors import DeviceError, FileFormatError, InputError, SparseFlowError
from sparseflow.latency.graph import Graph, analyze
from sparseflow.latency.model import LEARNED, MEASURED, ROOFLINE
from sparseflow.latency.predictor import Prediction, Predictor
from tests.latency.conftest import MadeUp
from tests.latency.onnx_models import FLOAT, convnet, lookup, model, save, values
from tests.latency.synthetic import rest_ms, slowdown

Place = Sequence[str | int]

EPSILON = 1.0 + 1e-9
SHARES = st.floats(0.0, 1.0)


@pytest.fixture(scope="module")
def unmeasured(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """Two operators that were measured for nothing, between convolutions that were learned."""
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
    """A network of operators that were measured, in shapes that were not."""
    return analyze(save(convnet(width=10, size=11), tmp_path_factory.mktemp("unseen")))


def width(found: Prediction) -> float:
    return found.interval[1] / found.interval[0]


def told(found: Prediction) -> dict[str, Any]:
    return json.loads(json.dumps(found.to_dict(), allow_nan=False))


def test_a_network_that_was_not_measured_is_predicted_at_rest_and_beside_loads(
    made_up: MadeUp, unseen: Graph
) -> None:
    # Each kernel takes a little less inside a graph than alone, which the predictor has to find out.
    expected = sum(rest_ms(node.kernel) for node in unseen.nodes)
    for level in (0.0, 0.4, 0.6, 0.8):
        found = made_up.predictor.predict(unseen, {"others": level})
        assert found.mean_ms == pytest.approx(expected * slowdown(level), rel=0.2)
        assert found.slowdown == pytest.approx(slowdown(level), rel=0.1)
    assert found.coverage == 1.0
    assert {kernel.source for kernel in found.per_kernel} == {LEARNED}


def test_kernels_add_up_to_the_mean_and_the_interval_holds_it(
    made_up: MadeUp, unmeasured: Graph, unseen: Graph
) -> None:
    graphs = [*made_up.graphs, unmeasured, unseen]

    @settings(max_examples=30, deadline=None)
    @given(load=SHARES, number=st.integers(0, len(graphs) - 1))
    def holds(load: float, number: int) -> None:
        found = made_up.predictor.predict(graphs[number], {"others": load})
        kernels = found.per_kernel
        assert sum(k.count * k.mean_ms for k in kernels) == pytest.approx(found.mean_ms)
        assert sum(k.count * k.rest_ms for k in kernels) == pytest.approx(found.rest_ms)
        assert sum(k.count for k in kernels) == len(graphs[number].nodes)
        assert 0.0 < found.interval[0] <= found.mean_ms <= found.interval[1]
        for k in kernels:
            assert 0.0 <= k.low_ms <= k.rest_ms * EPSILON and k.rest_ms <= k.high_ms * EPSILON
            assert k.rest_ms <= k.mean_ms * EPSILON
        assert 0.0 < found.p50_ms <= found.p95_ms
        assert 0.0 < found.coverage <= 1.0 and found.slowdown * EPSILON >= 1.0
        costs = [k.count * k.mean_ms for k in kernels]
        assert costs == sorted(costs, reverse=True)
        assert told(found)["interval"] == list(found.interval)

    holds()


def test_more_load_is_never_quicker(made_up: MadeUp, unseen: Graph) -> None:
    calm = made_up.predictor.predict(unseen)
    assert calm.mean_ms == pytest.approx(calm.rest_ms, rel=1e-9) and calm.load == {}

    @settings(max_examples=30, deadline=None)
    @given(loads=st.tuples(SHARES, SHARES))
    def holds(loads: tuple[float, float]) -> None:
        light, heavy = (made_up.predictor.predict(unseen, {"others": load}) for load in sorted(loads))
        assert calm.mean_ms <= light.mean_ms * EPSILON and light.mean_ms <= heavy.mean_ms * EPSILON
        assert light.load == {"others": min(loads)}
        if max(loads) - min(loads) > 0.01:
            assert heavy.mean_ms > light.mean_ms

    holds()


def test_kernels_that_were_measured_come_back_as_measured(made_up: MadeUp, unseen: Graph) -> None:
    predictor = made_up.predictor
    kernels = {k.id: k for graph in made_up.graphs for k in graph.kernels}
    found = predictor.kernels_ms(kernels)
    assert found.keys() == kernels.keys() <= predictor.known_ms.keys()
    for name, entry in found.items():
        assert entry == (predictor.known_ms[name],) * 3 + (MEASURED,)
        assert entry[0] == pytest.approx(rest_ms(kernels[name]), rel=0.05)
    for ms, low, high, source in predictor.kernels_ms({k.id: k for k in unseen.kernels}).values():
        assert source == LEARNED and low <= ms <= high and low < high


def test_an_operator_that_was_never_measured_lowers_the_coverage_and_widens_the_interval(
    made_up: MadeUp, unmeasured: Graph, unseen: Graph, tmp_path: Path
) -> None:
    found = made_up.predictor.predict(unmeasured)
    sources = {kernel.op: kernel.source for kernel in found.per_kernel}
    assert sources["Erf"] == sources["Softmax"] == ROOFLINE and sources["Conv_Relu"] == LEARNED
    guessed = sum(k.count * k.mean_ms for k in found.per_kernel if k.source == ROOFLINE)
    assert found.coverage == pytest.approx(1.0 - guessed / found.mean_ms) and 0.0 < found.coverage < 1.0
    assert width(found) > width(made_up.predictor.predict(unseen))
    nothing_known = made_up.predictor.predict(analyze(save(lookup(), tmp_path)))
    assert nothing_known.coverage == pytest.approx(0.0, abs=1e-9)
    assert nothing_known.interval[0] <= nothing_known.mean_ms <= nothing_known.interval[1]


def test_a_view_that_was_never_measured_costs_next_to_nothing(made_up: MadeUp, tmp_path: Path) -> None:
    reshape = helper.make_node("Reshape", ["x", "to"], ["y"])
    weights = {"to": np.array([1, 64], np.int64)}
    built = model([reshape], [("x", FLOAT, [8, 8])], [("y", FLOAT, None)], weights)
    found = made_up.predictor.predict(analyze(save(built, tmp_path)), {"others": 0.5})
    assert 0.0 < found.mean_ms < 0.01 and found.interval[0] <= found.mean_ms <= found.interval[1]
    assert [kernel.source for kernel in found.per_kernel] == [ROOFLINE]


def test_the_same_seed_draws_the_same_runs(made_up: MadeUp, unseen: Graph) -> None:
    one, same, other = (made_up.predictor.predict(unseen, {"others": 0.5}, seed=seed) for seed in (0, 0, 1))
    assert one == same
    assert one.mean_ms == other.mean_ms and one.p95_ms == pytest.approx(other.p95_ms, rel=0.1)


@pytest.mark.parametrize("load", [{"busy": 0.5}, {}])
def test_a_load_without_the_metric_that_is_needed_is_refused(
    made_up: MadeUp, unseen: Graph, load: dict[str, float]
) -> None:
    with pytest.raises(DeviceError, match=f"needs the metric `others`.*{', '.join(load) or 'nothing'}"):
        made_up.predictor.predict(unseen, load)


@pytest.mark.parametrize("share", [-0.1, 1.5, math.nan, math.inf])
def test_a_load_that_is_no_share_is_refused(made_up: MadeUp, unseen: Graph, share: float) -> None:
    with pytest.raises(InputError, match=r"`others` .*in \[0, 1\]"):
        made_up.predictor.predict(unseen, {"others": share})


def test_a_predictor_that_was_saved_says_the_same(
    made_up: MadeUp, unmeasured: Graph, unseen: Graph, tmp_path: Path
) -> None:
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


def test_a_file_that_is_no_predictor_is_refused_with_what_to_do(record: str, tmp_path: Path) -> None:
    for text, said in (
        ("", "is not JSON"),
        ("no JSON", "is not JSON"),
        (record[: len(record) // 2], "is not JSON"),
        (b"\x00\xff\xfe", "is not JSON"),
        ("[]", "make one with: sparseflow latency train"),
        ("{}", "make one with: sparseflow latency train"),
        (json.dumps(json.loads(record) | {"format": "other"}), "make one with: sparseflow latency train"),
        (json.dumps(json.loads(record) | {"version": 99}), "version 99, and 2 is read here; train it again"),
    ):
        with pytest.raises(FileFormatError, match=said):
            loaded(text, tmp_path)
    with pytest.raises(InputError, match=r"absent.json cannot be read .*sparseflow latency train"):
        Predictor.load(tmp_path / "absent.json")
    with pytest.raises(InputError, match="cannot be read"):
        Predictor.load(tmp_path)


class Trap:
    """Unpickling it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_a_pickle_is_refused_and_never_run(record: str, tmp_path: Path, protocol: int) -> None:
    sprung = tmp_path / "sprung"
    trap = pickle.dumps(Trap(sprung), protocol)
    with pytest.raises(FileFormatError, match="is not JSON"):
        loaded(trap, tmp_path)
    inside = json.loads(record)
    inside["model"]["trees"]["model"] = base64.b64encode(zlib.compress(trap)).decode()
    with pytest.raises(FileFormatError, match="trees cannot be read"):
        loaded(json.dumps(inside), tmp_path)
    assert not sprung.exists()


def places(value: Any, path: Place = ()) -> Iterator[Place]:
    """Ways to all that a record holds; of each list only to its first entry."""
    inner: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = [(place, below) for place, below in enumerate(value[:1])]
    for key, below in inner:
        yield (*path, key)
        yield from places(below, (*path, key))


def holder_of(record: Any, place: Place) -> Any:
    for key in place[:-1]:
        record = record[key]
    return record


def test_a_predictor_with_a_part_that_is_missing_is_refused(record: str, tmp_path: Path) -> None:
    whole = json.loads(record)
    for place in places(whole | {"known_ms": {}, "quality": {}}):
        if len(place) > 3 or isinstance(place[-1], int) or place[:3] == ("model", "space", "categories"):
            continue
        damaged = json.loads(record)
        del holder_of(damaged, place)[place[-1]]
        with pytest.raises(FileFormatError, match=r"predictor\.json|cannot be read"):
            loaded(json.dumps(damaged), tmp_path)


@pytest.mark.parametrize("wrong", [None, "text", [], {}, -1.0, math.nan])
def test_a_predictor_with_a_wrong_value_is_refused_or_still_makes_sense(
    made_up: MadeUp, record: str, tmp_path: Path, wrong: object
) -> None:
    graph = made_up.graphs[0]
    whole = json.loads(record)
    kept = {name: part for name, part in whole.items() if name != "quality"}
    kept["known_ms"] = {graph.kernels[0].id: 0.0}
    for place in places(kept):
        damaged = json.loads(record)
        holder_of(damaged, place)[place[-1]] = wrong
        try:
            predictor = loaded(json.dumps(damaged), tmp_path)
            found = predictor.predict(graph, {"others": 0.5})
        except SparseFlowError:
            continue
        shown = f"{place}: {found.mean_ms}, {found.interval}"
        assert math.isfinite(found.mean_ms) and found.mean_ms > 0.0, shown
        assert found.interval[0] <= found.mean_ms <= found.interval[1], shown

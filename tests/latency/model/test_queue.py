"""Predictors of kernels that were measured in a stream: graphs are a queue of host and device."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, replace
from functools import cache
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

from sparseflow.errors import FileFormatError, InputError, SparseFlowError
from sparseflow.latency.graph.analysis import Graph, analyze
from sparseflow.latency.graph.extraction import extract, read_kernel
from sparseflow.latency.graph.kernels import KernelSpec
from sparseflow.latency.measure.overlap import CRITICAL_PATH, SUM
from sparseflow.latency.measure.plan import Target
from sparseflow.latency.model import validation
from sparseflow.latency.model.composition import QUEUE, VIEW_OPS
from sparseflow.latency.model.dataset import MIN_DEVICE_MS, LatencyDataset, load_dataset
from sparseflow.latency.model.fitting import fit_predictor
from sparseflow.latency.model.kernel_regressor import LEARNED, MEASURED, RATIO, ROOFLINE
from sparseflow.latency.model.launch_overhead import LaunchOverheadModel
from sparseflow.latency.model.predictor import Predictor
from sparseflow.latency.model.training import train
from tests.latency.conftest import MadeUp, few_tries
from tests.latency.onnx_models import FLOAT, convnet, model, save, values
from tests.latency.synthetic import (
    CALL_MS,
    NOISE,
    StreamedBench,
    device_ms,
    host_ms,
    make_collection,
    make_networks,
    queued_ms,
    slowdown,
    streamed_item_ms,
)


class Nothing(StreamedBench):
    """Device on which matrix products take no time, or even a negative time."""

    def in_stream(self, kernel: KernelSpec) -> tuple[float, float] | None:
        if kernel.node_op == "GlobalAveragePool":
            return 0.0, 0.0
        return (1e-6, host_ms(kernel)) if kernel.node_op == "Gemm" else super().in_stream(kernel)


class Partly(StreamedBench):
    """Device on which pooling is measured in isolation only."""

    def in_stream(self, kernel: KernelSpec) -> tuple[float, float] | None:
        return None if kernel.node_op == "GlobalAveragePool" else super().in_stream(kernel)


class Overtaken(StreamedBench):
    """Device whose host is too slow for pooling."""

    def measure(self, target: Target) -> dict[str, Any]:
        row = super().measure(target)
        return row | ({"overtaken": target.op == "GlobalAveragePool"} if "copies" in row else {})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Path]]:
    return make_networks(tmp_path_factory.mktemp("files"), 4)


@pytest.fixture(scope="module")
def queued(files: tuple[list[Path], list[Path]], tmp_path_factory: pytest.TempPathFactory) -> MadeUp:
    """Device with a host, with a predictor of default settings."""
    folder = tmp_path_factory.mktemp("queued")
    models, kernels = files
    idle_dir = make_collection(folder, models, kernels, out="rest", levels=[0.0], bench=StreamedBench)
    load_dir = make_collection(folder, models, [], out="load", rounds=1, bench=StreamedBench)
    with few_tries():
        predictor = train([idle_dir, load_dir])
    data = load_dataset([idle_dir, load_dir])
    return MadeUp(
        models=models, kernels=kernels, idle_dir=idle_dir, load=load_dir, data=data, predictor=predictor
    )


def test_dataset_uses_device_time(queued: MadeUp) -> None:
    data = queued.data
    assert set(data.list_kernels()) == set(data.kernels) == set(data.host_ms)
    assert data.free_ops == VIEW_OPS and data.failed == 0
    views = {name for name, kernel in data.kernels.items() if kernel.node_op in VIEW_OPS}
    assert views and set(data.list_device_kernels()) == set(data.list_kernels()) - views
    assert data.list_device_kernels() == sorted(data.list_device_kernels())
    for name, kernel in data.kernels.items():
        expected = 0.0 if name in views else device_ms(kernel)
        assert data.idle_ms[name] == pytest.approx(expected, rel=4 * NOISE)
        assert data.host_ms[name] == pytest.approx(host_ms(kernel), rel=4 * NOISE)
        # The median of two rounds.
        assert len(data.measurements_ms[name]) == 2
        assert statistics.median(data.measurements_ms[name]) == data.idle_ms[name]
    for path in queued.models:
        assert data.idle_ms[path.stem] == pytest.approx(queued_ms(data.graphs[path.stem]), rel=2 * NOISE)
        assert data.measurements_ms[path.stem] and path.stem not in data.host_ms
    assert set(data.jitter) >= set(data.idle_ms)


def test_dataset_slowdowns_relative_to_isolated(files: tuple[list[Path], list[Path]], tmp_path: Path) -> None:
    models, kernels = files
    folder = make_collection(tmp_path, models[:2], kernels[:2], rounds=2, bench=StreamedBench)
    data = load_dataset([folder])
    paths = {read_kernel(path).id: path for folder in kernels[:2] for path in folder.glob("kernels/*.onnx")}
    assert {measurement.target for measurement in data.loaded if not measurement.is_model} == set(
        data.kernels
    )
    for measurement in data.loaded:
        path = (
            models[0].parent / f"{measurement.target}.onnx"
            if measurement.is_model
            else paths[measurement.target]
        )
        isolated_ms = streamed_item_ms(str(path.resolve()), measurement.is_model, "cpu")
        assert measurement.idle_ms == pytest.approx(isolated_ms, rel=4 * NOISE)
        assert measurement.slowdown == pytest.approx(slowdown(measurement.level), rel=5 * NOISE)
        if not measurement.is_model:
            assert measurement.idle_ms > data.idle_ms[measurement.target] + 0.5 * CALL_MS
    # Streams are measured while idle only, so device times contain no load.
    assert all(
        data.idle_ms[name] == pytest.approx(device_ms(data.kernels[name]), rel=4 * NOISE)
        for name in data.list_device_kernels()
    )


def test_dataset_minimum_device_time(files: tuple[list[Path], list[Path]], tmp_path: Path) -> None:
    data = load_dataset([make_collection(tmp_path, *files, levels=[0.0], bench=Nothing)])
    ops = {name: data.kernels[name].node_op for name in data.list_kernels()}
    assert set(ops.values()) >= {"GlobalAveragePool", "Gemm", "Flatten"}
    for name, op in ops.items():
        if op in VIEW_OPS:
            assert data.measurements_ms[name] == (0.0, 0.0)
        elif op in ("GlobalAveragePool", "Gemm"):
            assert data.measurements_ms[name] == (MIN_DEVICE_MS,) * 2
            assert data.idle_ms[name] == MIN_DEVICE_MS
        else:
            assert data.idle_ms[name] > MIN_DEVICE_MS
    # The fit works, and every host time is above 0.
    with few_tries():
        predictor = fit_predictor(data)
    assert predictor.launch_overhead is not None and min(predictor.launch_overhead.measured_ms.values()) > 0.0
    for graph in data.graphs.values():
        prediction = predictor.predict(graph)
        assert math.isfinite(prediction.mean_ms) and prediction.interval[0] > 0.0


@pytest.mark.parametrize("bench", [Partly, Overtaken])
def test_dataset_omits_kernels_without_stream(
    files: tuple[list[Path], list[Path]], tmp_path: Path, bench: type[StreamedBench]
) -> None:
    folder = make_collection(tmp_path, *files, levels=[0.0], bench=bench)
    data = load_dataset([folder])
    left_out = {name for name, kernel in data.kernels.items() if kernel.node_op == "GlobalAveragePool"}
    assert left_out and set(data.list_kernels()) == set(data.kernels) - left_out == set(data.host_ms)
    assert data.list_models() == sorted(path.stem for path in files[0])
    with few_tries():
        predictor = fit_predictor(data)
    assert not left_out & predictor.measured_ms.keys()
    for graph in data.graphs.values():
        prediction = predictor.predict(graph)
        guessed = {kernel.op for kernel in prediction.per_kernel if kernel.source == ROOFLINE}
        assert guessed == {"GlobalAveragePool"} and 0.0 < prediction.coverage < 1.0
        assert prediction.interval[0] <= prediction.mean_ms <= prediction.interval[1]


def test_dataset_without_streams_unchanged(made_up: MadeUp) -> None:
    assert made_up.data.host_ms == {} and made_up.data.free_ops == frozenset()
    assert made_up.data.list_device_kernels() == made_up.data.list_kernels()
    assert made_up.predictor.composition.mode == SUM
    assert made_up.predictor.launch_overhead is None


def test_dataset_mixed_keeps_stream_kernels(
    files: tuple[list[Path], list[Path]], queued: MadeUp, tmp_path: Path
) -> None:
    models, kernels = files
    plain = make_collection(tmp_path, models, kernels, levels=[0.0])
    both = load_dataset([queued.idle_dir, plain])
    assert {name: both.idle_ms[name] for name in both.list_kernels()} == {
        name: queued.data.idle_ms[name] for name in queued.data.list_kernels()
    }
    assert both.host_ms == queued.data.host_ms


# Training and prediction.


def test_train_queue_by_default(queued: MadeUp) -> None:
    assert queued.predictor.composition.mode == QUEUE
    assert queued.predictor.predict(queued.graphs[0]).mode == QUEUE
    with few_tries():
        for mode in (SUM, CRITICAL_PATH):
            other = fit_predictor(queued.data, mode=mode)
            assert other.composition.mode == mode
            assert other.predict(queued.graphs[0]).mode == mode
            assert other.composition.call_ms == 0.0


def test_train_queue_without_streams_raises(made_up: MadeUp) -> None:
    with pytest.raises(InputError, match=r"`copies`"):
        train([made_up.idle_dir, made_up.load], mode=QUEUE)
    with pytest.raises(InputError):
        fit_predictor(made_up.data, mode=QUEUE)


def test_queue_held_out_networks_accurate(queued: MadeUp) -> None:
    quality = queued.predictor.quality
    data = queued.data
    assert quality["models"]["rest"]["count"] == len(data.list_models()) == 8
    assert quality["models"]["rest"]["mape"] < 0.04
    assert quality["models"]["rest"]["within_10"] == 1.0
    assert quality["models"]["loaded"]["mape"] < 0.06 < quality["models"]["loaded_blind"]["mape"]
    working = len(data.list_device_kernels())
    assert all(splits["by_kernel"]["count"] == working for splits in quality["kernels"].values())
    assert quality["counts"]["kernels"] == len(data.list_kernels()) > working
    assert queued.predictor.kernel_intervals.frequent.samples == working
    # Sums of device times are far off, since some kernels wait for the host.
    with few_tries():
        held_out = validation.fit_without_each_network(data, RATIO)
        summed = validation.fit_without_each_network(data, RATIO, mode=SUM)
    queue, plain = (
        validation.compute_scores(validation.predict_idle(data, prediction))["mape"]
        for prediction in (held_out, summed)
    )
    assert queue < 0.04 and queue < 0.5 * plain


def test_queue_held_out_data_unused(queued: MadeUp) -> None:
    data = queued.data
    models, exclusive = validation.list_cases(data, "net1"), validation.find_exclusive_kernels(data, ["net1"])
    assert exclusive and any(data.kernels[name].node_op not in VIEW_OPS for name in exclusive)

    def spoiled(items: set[str]) -> LatencyDataset:
        return replace(
            data,
            idle_ms={name: ms * (7.0 if name in items else 1.0) for name, ms in data.idle_ms.items()},
            host_ms={name: ms * (7.0 if name in items else 1.0) for name, ms in data.host_ms.items()},
            loaded=tuple(
                replace(measurement, ratios=())
                for measurement in data.loaded
                if measurement.target not in items
            ),
        )

    with few_tries():
        before, after = (
            validation.fit_without_each_network(spoiled(items), RATIO)
            for items in (set[str](), {*models, *exclusive})
        )
    for name in models:
        assert after["net1"].predict(data.graphs[name]) == before["net1"].predict(data.graphs[name])
    issue = before["net1"].launch_overhead
    assert issue is not None and set(issue.measured_ms) == set(data.host_ms) - exclusive
    assert set(before["net1"].measured_ms) == set(data.list_device_kernels()) - exclusive
    other = data.graphs[validation.list_cases(data, "net0")[0]]
    assert after["net0"].predict(other).mean_ms != before["net0"].predict(other).mean_ms


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", ["ratio", "xgboost", "random_forest"])
def test_queue_views_not_evaluated(queued: MadeUp, kind: str) -> None:
    data = queued.data
    for predict_held_out in (validation.predict_by_kernel, validation.predict_leaky):
        predictions = predict_held_out(data, kind)
        assert {prediction.name for prediction in predictions} == set(data.list_device_kernels())
        assert all(
            prediction.predicted_ms > 0.0 and prediction.measured_ms > 0.0 for prediction in predictions
        )
    predictions = validation.predict_by_network(data, kind)
    assert predictions and {prediction.name for prediction in predictions} <= set(data.list_device_kernels())


def test_queue_network_leaving_only_views_skipped(
    tmp_path: Path,
) -> None:
    models, kernels = [], []
    for size in (8, 10, 12, 16):
        models.append(save(convnet(width=4, size=size), tmp_path / "models", f"net_b1_{size}.onnx"))
        kernels.append(tmp_path / "graphs" / models[-1].stem)
        extract(models[-1], kernels[-1], check=False, threads=1)
        # Its other kernels were not measured.
        similar_model = model(
            [
                helper.make_node("Erf", ["x"], ["e"]),
                helper.make_node("Flatten", ["e"], ["f"], axis=1),
                helper.make_node("Softmax", ["f"], ["y"]),
            ],
            [("x", FLOAT, [1, 4, 1, 1])],
            [("y", FLOAT, None)],
        )
        models.append(save(similar_model, tmp_path / "models", f"other_b1_{size}.onnx"))
    folder = make_collection(tmp_path, models, kernels, levels=[0.0], rounds=1, bench=StreamedBench)
    data = load_dataset([folder])
    remaining = set(data.list_kernels()) - validation.find_exclusive_kernels(data, ["net"])
    assert remaining and {data.kernels[name].node_op for name in remaining} <= VIEW_OPS
    with few_tries():
        quality = train([folder], kind=RATIO).quality
    assert quality["counts"]["networks"] == 2 and quality["models"]["rest"]["count"] == 4


@cache
def of_views() -> Any:
    """Network of measured operators with unknown views between them."""
    pads: dict[str, Any] = {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}
    return model(
        [
            helper.make_node("Conv", ["x", "w"], ["a"], **pads),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("GlobalAveragePool", ["b"], ["c"]),
            helper.make_node("Reshape", ["c", "to"], ["d"]),
            helper.make_node("Gemm", ["d", "v", "u"], ["y"], transB=1),
        ],
        [("x", FLOAT, [1, 6, 10, 10])],
        [("y", FLOAT, None)],
        {
            "w": values(6, 6, 3, 3),
            "v": values(5, 3, seed=1),
            "u": values(5, seed=2),
            "to": np.array([2, 3], np.int64),
        },
    )


@pytest.fixture(scope="module")
def unseen(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return analyze(save(of_views(), tmp_path_factory.mktemp("unseen")))


@pytest.fixture(scope="module")
def unmeasured(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """Network with two operators that were never measured."""
    built = model(
        [
            helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1], kernel_shape=[3, 3]),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("Erf", ["b"], ["c"]),
            helper.make_node("Softmax", ["c"], ["y"]),
        ],
        [("x", FLOAT, [1, 8, 16, 16])],
        [("y", FLOAT, None)],
        {"w": values(8, 8, 3, 3)},
    )
    return analyze(save(built, tmp_path_factory.mktemp("unmeasured")))


def test_queue_unknown_view_has_no_device_time(queued: MadeUp, unseen: Graph) -> None:
    views = [node for node in unseen.nodes if node.kernel.node_op in VIEW_OPS]
    assert views and not {node.kernel.node_op for node in views} & {
        kernel.node_op for kernel in queued.data.kernels.values()
    }
    for load_of in (None, {"others": 0.6}):
        prediction = queued.predictor.predict(unseen, load_of)
        sources = {kernel.kernel_id: kernel.source for kernel in prediction.per_kernel}
        assert {sources[node.kernel_id] for node in views} == {MEASURED}
        assert set(sources.values()) == {MEASURED, LEARNED} and prediction.coverage == 1.0
    estimates, _ = queued.predictor.compose(unseen)
    for node in views:
        estimate = estimates[node.kernel_id]
        assert (estimate.ms, estimate.low_ms, estimate.high_ms, estimate.source) == (0.0, 0.0, 0.0, MEASURED)
    assert queued.predictor.predict(unseen).mean_ms == pytest.approx(queued_ms(unseen), rel=0.15)


def test_queue_kernels_and_call_sum_to_mean(queued: MadeUp, unseen: Graph, unmeasured: Graph) -> None:
    graphs = [*queued.graphs, unseen, unmeasured]

    @settings(max_examples=30)
    @given(load=st.floats(0.0, 1.0), number=st.integers(0, len(graphs) - 1))
    def holds(load: float, number: int) -> None:
        prediction = queued.predictor.predict(graphs[number], {"others": load})
        kernels = prediction.per_kernel
        assert prediction.call_ms == queued.predictor.composition.call_ms > 0.0
        assert prediction.call_ms + sum(k.count * k.idle_ms for k in kernels) == pytest.approx(
            prediction.idle_ms
        )
        assert prediction.call_ms + sum(k.count * k.mean_ms for k in kernels) == pytest.approx(
            prediction.mean_ms
        )
        assert sum(k.count for k in kernels) == len(graphs[number].nodes)
        assert 0.0 < prediction.interval[0] <= prediction.mean_ms <= prediction.interval[1]
        assert 0.0 < prediction.p50_ms <= prediction.p95_ms and 0.0 < prediction.coverage <= 1.0 + 1e-9
        assert prediction.slowdown >= 1.0 - 1e-9
        for k in kernels:
            assert 0.0 <= k.low_ms <= k.idle_ms * (1 + 1e-9) and k.idle_ms <= k.high_ms * (1 + 1e-9)
            assert k.idle_ms <= k.mean_ms * (1 + 1e-9)
        json.dumps(prediction.to_dict(), allow_nan=False)

    holds()


def test_queue_unknown_operator_default_host_time(queued: MadeUp, unmeasured: Graph) -> None:
    issue = queued.predictor.launch_overhead
    assert issue is not None
    host = issue.predict(unmeasured.kernels)
    of_op = {kernel.node_op: host[kernel.id] for kernel in unmeasured.kernels}
    assert of_op["Erf"] == of_op["Softmax"] == issue.default_ms
    prediction = queued.predictor.predict(unmeasured)
    sources = {kernel.op: kernel.source for kernel in prediction.per_kernel}
    assert sources["Erf"] == sources["Softmax"] == ROOFLINE and 0.0 < prediction.coverage < 1.0


def test_queue_slowdown_under_load(queued: MadeUp) -> None:
    for graph in queued.graphs:
        for level in (0.4, 0.8):
            prediction = queued.predictor.predict(graph, {"others": level})
            assert prediction.mean_ms == pytest.approx(queued_ms(graph) * slowdown(level), rel=0.1)


def test_queue_predictor_round_trip(queued: MadeUp, unseen: Graph, unmeasured: Graph, tmp_path: Path) -> None:
    path = queued.predictor.save(tmp_path / "predictor.json")
    back = Predictor.load(path)
    assert (
        isinstance(back.launch_overhead, LaunchOverheadModel)
        and back.composition == queued.predictor.composition
    )
    for graph in (*queued.graphs, unseen, unmeasured):
        for load_of in (None, {"others": 0.3}, {"others": 1.0}):
            assert back.predict(graph, load_of) == queued.predictor.predict(graph, load_of)
    assert set(back.regressor.free_ops) == VIEW_OPS
    assert path.read_bytes() == back.save(tmp_path / "again.json").read_bytes()
    with few_tries():
        refitted = fit_predictor(queued.data, queued.predictor.regressor.kind)
    assert refitted.composition == queued.predictor.composition
    assert asdict(refitted.contention) == asdict(queued.predictor.contention)


@pytest.fixture(scope="module")
def record(queued: MadeUp, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = queued.predictor.save(tmp_path_factory.mktemp("file") / "predictor.json")
    return json.loads(path.read_text())


def reloaded(record: dict[str, Any], folder: Path) -> Predictor:
    path = folder / "predictor.json"
    path.write_text(json.dumps(record))
    return Predictor.load(path)


@pytest.mark.parametrize("wrong", [[], "text", 3.0, {}, {"measured_ms": {}}])
def test_queue_predictor_damaged_host_times_raise(record: dict[str, Any], tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(FileFormatError):
        reloaded(record | {"launch_overhead": wrong}, tmp_path)
    less = {name: part for name, part in record.items() if name != "launch_overhead"}
    with pytest.raises(FileFormatError):
        reloaded(less, tmp_path)
    for name in record["launch_overhead"]:
        part = {key: value for key, value in record["launch_overhead"].items() if key != name}
        with pytest.raises(FileFormatError):
            reloaded(record | {"launch_overhead": part}, tmp_path)


def test_queue_predictor_missing_host_times_raise(record: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(FileFormatError):
        reloaded(record | {"launch_overhead": None}, tmp_path)


def check_sense(damaged: dict[str, Any], graphs: list[Graph], folder: Path) -> None:
    """Check that a record is refused, or gives plausible predictions."""
    try:
        predictor = reloaded(damaged, folder)
    except SparseFlowError:
        return
    for graph in graphs:
        try:
            prediction = predictor.predict(graph, {"others": 0.5})
        except SparseFlowError:
            continue
        assert math.isfinite(prediction.mean_ms) and prediction.mean_ms > 0.0
        assert prediction.interval[0] <= prediction.mean_ms <= prediction.interval[1]


@pytest.mark.parametrize("wrong", [None, "text", [], -1.0, 0.0, math.nan])
@pytest.mark.parametrize(
    "name", ["per_kernel_ms", "per_weight_ms", "per_activation_ms", "issue_scale", "per_issue_ms", "models"]
)
def test_queue_predictor_invalid_cost_raises_or_is_plausible(
    queued: MadeUp, record: dict[str, Any], tmp_path: Path, name: str, wrong: Any
) -> None:
    damaged = record | {"composition": record["composition"] | {name: wrong}}
    check_sense(damaged, queued.graphs, tmp_path)


@pytest.mark.parametrize("wrong", [None, "text", [], 0.0, math.nan])
def test_queue_predictor_invalid_call_cost_raises_or_is_plausible(
    queued: MadeUp, record: dict[str, Any], tmp_path: Path, wrong: Any
) -> None:
    damaged = record | {"composition": record["composition"] | {"call_ms": wrong}}
    check_sense(damaged, queued.graphs, tmp_path)


def test_queue_predictor_negative_call_cost_raises(
    queued: MadeUp, record: dict[str, Any], tmp_path: Path
) -> None:
    damaged = record | {"composition": record["composition"] | {"call_ms": -1.0}}
    check_sense(damaged, queued.graphs, tmp_path)

"""Predictions over shapes and loads."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

import numpy as np
import torch
from onnx import helper

from sparseflow.errors import InputError
from sparseflow.latency import predict, predict_loads, sweep
from tests.latency.conftest import MadeUp
from tests.latency.onnx_models import FLOAT, convnet, model, save

pytestmark = pytest.mark.usefixtures("at_home")


def test_sweep_equals_single_predictions(made_up: MadeUp, tmp_path: Path) -> None:
    path = save(convnet(batch="N", size="side"), tmp_path)
    points = sweep(path, made_up.predictor, {"batch": [1, 4], "side": [8, 12]}, load={"others": 0.5})
    assert [dict(point.sizes) for point in points] == [
        {"batch": (batch,), "side": (side,)} for batch in (1, 4) for side in (8, 12)
    ]
    for point in points:
        (batch,), (side,) = point.sizes.values()
        shapes = {"x": (batch, 3, side, side)}
        assert point.prediction is not None
        assert point.prediction == predict(path, made_up.predictor, shapes=shapes, load={"others": 0.5})
        assert point.items == batch
        assert point.items_per_s == pytest.approx(1e3 * batch / point.prediction.mean_ms)
    by_shape = sweep(path, made_up.predictor, {"x": [(1, 3, 8, 8), (4, 3, 12, 12)]}, load={"others": 0.5})
    assert [point.prediction for point in by_shape] == [points[0].prediction, points[3].prediction]


def test_sweep_module(made_up: MadeUp) -> None:
    module = torch.nn.Linear(8, 8)
    points = sweep(module, made_up.predictor, {"batch": [2, 32]}, example=torch.randn(1, 8))
    small, large = (point.prediction for point in points)
    assert small is not None and large is not None and small.mean_ms < large.mean_ms


def test_sweep_reports_points_that_fail(made_up: MadeUp, tmp_path: Path) -> None:
    path = save(convnet(batch="N", size=8), tmp_path)
    fits, exceeds = sweep(path, made_up.predictor, {"batch": [1, 10**9]})
    assert fits.problem is None and fits.prediction is not None
    assert exceeds.prediction is None and exceeds.items_per_s is None and "GB" in str(exceeds.problem)
    with pytest.raises(InputError, match="`depth`"):
        sweep(path, made_up.predictor, {"depth": [1, 2]})
    for sizes in ({}, {"batch": []}, {"batch": list(range(1, 2000))}):
        with pytest.raises(InputError, match="1 to 1000 combinations"):
            sweep(path, made_up.predictor, sizes)


def test_sweep_decoder_over_cached_tokens(made_up: MadeUp, tmp_path: Path) -> None:
    node = helper.make_node
    dims = {"x": "sequence_length", "past_key_values.0.key": "past_sequence_length"}
    decoder = model(
        [
            node("Concat", ["past_key_values.0.key", "x"], ["present.0.key"], axis=1),
            node("Transpose", ["present.0.key"], ["transposed"], perm=[0, 2, 1]),
            node("MatMul", ["x", "transposed"], ["scores"]),
            node("Unsqueeze", ["attention_mask", "axis"], ["mask"]),
            node("Add", ["scores", "mask"], ["masked"]),
            node("Softmax", ["masked"], ["weights"], axis=-1),
            node("MatMul", ["weights", "present.0.key"], ["y"]),
        ],
        [
            *((name, FLOAT, ["batch_size", dim, 32]) for name, dim in dims.items()),
            ("attention_mask", FLOAT, ["batch_size", "total_sequence_length"]),
        ],
        [("y", FLOAT, None), ("present.0.key", FLOAT, None)],
        {"axis": np.array([1], np.int64)},
    )
    path = save(decoder, tmp_path)
    predictor = made_up.predictor
    steps = sweep(path, predictor, {"past": [1, 63, 511]}, shapes={"batch": (2,), "sequence": (1,)})
    prompts = sweep(path, predictor, {"sequence": [8, 64, 256]}, shapes={"batch": (2,), "past": (1,)})
    for points in (steps, prompts):
        predictions = [point.prediction for point in points if point.prediction is not None]
        assert len(predictions) == 3
        means = [prediction.mean_ms for prediction in predictions]
        peaks = [prediction.memory.peak_bytes for prediction in predictions]
        assert means == sorted(means) and means[0] < means[-1] and peaks == sorted(peaks)
        assert [point.items for point in points] == [2, 2, 2]


def test_predict_loads_rises_from_idle(made_up: MadeUp) -> None:
    path = made_up.models[0]
    predictions = predict_loads(path, made_up.predictor, [0.0, 0.4, 0.8])
    assert predictions == [predict(path, made_up.predictor, load={"others": s}) for s in (0.0, 0.4, 0.8)]
    means = [prediction.mean_ms for prediction in predictions]
    assert (
        means == sorted(means) and means[0] == pytest.approx(predictions[0].idle_ms) and means[2] > means[0]
    )
    with pytest.raises(InputError, match="others"):
        predict_loads(path, made_up.predictor, [1.5])

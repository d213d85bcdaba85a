"""Latency prediction for ONNX files, under a given load or the current load of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sparseflow.core.telemetry.readers import open_reader
from sparseflow.errors import InputError
from sparseflow.latency.graph import onnx_file, session
from sparseflow.latency.graph.analysis import Graph, analyze
from sparseflow.latency.measure.config import TelemetryConfig
from sparseflow.latency.model.predictor import Prediction, Predictor

WINDOW_S = 1.0
"""Window over which the current load is averaged, seconds."""


def predict(
    model: Path | str,
    predictor: Predictor | Path | str,
    *,
    load: Mapping[str, float] | None = None,
    live: TelemetryConfig | None = None,
    window_s: float = WINDOW_S,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    gpu: int = 0,
    seed: int = 0,
) -> Prediction:
    """Predict the latency of a model.

    Args:
        model: ONNX file, or the directory of an analyzed model.
        predictor: A predictor or its file, of this device.
        load: Metric -> share; without `load` and `live` the device is idle.
        live: Source of the current load.
        window_s: Window over which the current load is averaged, seconds.
        shapes: Input -> shape, for inputs with open dimensions.
        gpu: Index of the GPU.
        seed: Random seed of the quantiles.

    Raises:
        InputError: A file is missing, `model` is not a path, the predictor is of another device, both loads
            are given, or one is given to a predictor that was trained on idle measurements only.
        FileFormatError, ModelError: A file is invalid.
        DeviceError: The device or the readings are not available, or lack the required metric.
    """
    if load is not None and live is not None:
        raise InputError("`load` and `live` exclude each other")
    fitted = predictor if isinstance(predictor, Predictor) else Predictor.load(predictor)
    fitted.fingerprint.check_local_device(gpu)
    if live is not None:
        fitted.contention.check_fitted()
    graph = _load_graph(model, fitted, shapes=shapes)
    if live is not None:
        # Read last, so that the reading does not contain the analysis.
        load = open_reader(**live.model_dump(), device=f"cuda:{gpu}").read(window_s).shares
    return fitted.predict(graph, load, seed=seed)


def _load_graph(
    path: Path | str, predictor: Predictor, *, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> Graph:
    """Return the graph that the predictor's provider executes; an analyzed directory is read.

    Raises:
        InputError: A file is missing, or the graph was analyzed for another provider or version.
        FileFormatError, ModelError: A file is invalid.
    """
    source = onnx_file.check_path(path)
    if source.suffix == ".onnx" or (source.is_file() and source.suffix != ".json"):
        return analyze(source, predictor.fingerprint.provider, shapes=shapes)
    if shapes:
        raise InputError(f"{source} was analyzed with fixed shapes; analyze the model again for other ones")
    graph = Graph.load(source)
    fingerprint = predictor.fingerprint
    provider, level = session.select_graph(fingerprint.provider, graph.level)
    expected = (provider, level, fingerprint.ort_version.partition(",")[0])
    if (graph.provider, graph.level, graph.ort_version) != expected:
        raise InputError(
            f"{source} was analyzed for {graph.provider} of onnxruntime {graph.ort_version} (level "
            f"{graph.level}), the predictor needs {provider} of {expected[2]} (level {level}); analyze the "
            "model again"
        )
    return graph

"""Predicting what an ONNX model takes on the device of a predictor, beside the load that is there now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sparseflow.core.telemetry.readers import open_reader
from sparseflow.errors import InputError
from sparseflow.latency.campaign import Telemetry
from sparseflow.latency.graph import Graph, analyze
from sparseflow.latency.predictor import Prediction, Predictor

WINDOW_S = 1.0
"""What live load is averaged over, seconds."""


def predict(
    model_path: Path | str,
    predictor: Predictor | Path | str,
    *,
    load: Mapping[str, float] | None = None,
    live: Telemetry | None = None,
    window_s: float = WINDOW_S,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    gpu: int = 0,
    seed: int = 0,
) -> Prediction:
    """What a model takes.

    Args:
        model_path: An ONNX file, or the folder of an analysed one.
        predictor: A predictor or its file; it must be of this device.
        load: Metric -> share to reckon with; without it and `live` the device is at rest.
        live: Where to read the load that is there now.
        window_s: What live load is averaged over, seconds.
        shapes: Input -> shape, for inputs that leave extents open.
        gpu: Number of the GPU.
        seed: What quantiles are drawn from.

    Raises:
        InputError: A file is missing, the predictor is of another device, or both loads are given.
        FileFormatError, ModelError: A file cannot be used.
        DeviceError: The device or the readings are not there, or lack the metric that is needed.
    """
    if load is not None and live is not None:
        raise InputError("give `load` or `live`, not both")
    one = predictor if isinstance(predictor, Predictor) else Predictor.load(predictor)
    one.fingerprint.check_here(gpu)
    graph = graph_of(model_path, one, shapes=shapes)
    if live is not None:
        # Read last, so that nothing of our own work is in it.
        load = read_load(live, window_s, gpu)
    return one.predict(graph, load, seed=seed)


def graph_of(
    path: Path | str, predictor: Predictor, *, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> Graph:
    """The graph that the predictor's provider runs; of an analysed folder what is there.

    Raises:
        InputError: A file is missing, or the graph was analysed for another provider or version.
        FileFormatError, ModelError: A file cannot be used.
    """
    source = Path(path)
    if source.suffix == ".onnx" or (source.is_file() and source.suffix != ".json"):
        return analyze(source, predictor.fingerprint.provider, shapes=shapes)
    if shapes:
        raise InputError(
            f"{source} was analysed with the shapes that it has; analyse the model again for others"
        )
    graph = Graph.load(source)
    wanted = (predictor.fingerprint.provider, predictor.fingerprint.ort_version)
    if (graph.provider, graph.ort_version) != wanted:
        raise InputError(
            f"{source} was analysed for {graph.provider} of onnxruntime {graph.ort_version}, and the "
            f"predictor is of {wanted[0]} of {wanted[1]}; analyse the model again"
        )
    return graph


def read_load(live: Telemetry, window_s: float = WINDOW_S, gpu: int = 0) -> dict[str, float]:
    """Metric -> share, averaged over `window_s` seconds.

    Raises:
        InputError: The source is unknown or lacks what it needs.
        DeviceError: A reading is missing, stale or impossible.
    """
    return dict(open_reader(**live.model_dump(), device=f"cuda:{gpu}").read(window_s).shares)

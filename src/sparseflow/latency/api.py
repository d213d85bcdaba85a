"""Latency prediction for models, under a given load or the current load of this machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseflow.core.telemetry.readers import open_reader
from sparseflow.errors import InputError
from sparseflow.latency.first_answer import find_predictor
from sparseflow.latency.graph import session
from sparseflow.latency.graph.analysis import Graph
from sparseflow.latency.graph.sources import AnalyzedSource, ModelSource, open_source
from sparseflow.latency.graph.torch_export import Exporter
from sparseflow.latency.measure.config import TelemetryConfig
from sparseflow.latency.model.predictor import Prediction, Predictor

if TYPE_CHECKING:
    from torch import nn

WINDOW_S = 1.0
"""Window over which the current load is averaged, seconds."""


@dataclass(frozen=True, kw_only=True)
class CoRunner:
    """A co-runner of a prediction.

    Attributes:
        model: As in `predict`.
        rate_per_s: Runs per second.
        shapes, example: As in `predict`, of the co-runner.
        cpus: CPUs that both models use, such as those of a container; by default all of the device.
    """

    model: Path | str | nn.Module
    rate_per_s: float
    shapes: Mapping[str, tuple[int, ...]] | None = None
    example: Any = None
    cpus: int | None = None

    @classmethod
    def parse(cls, text: str) -> CoRunner:
        """Parse a model with a rate, such as `detector.onnx@20/s`.

        Raises:
            InputError: The text is not `MODEL@RATE/s`.
        """
        model, _, rate = text.rpartition("@")
        try:
            rate_per_s = float(rate.removesuffix("/s"))
        except ValueError:
            rate_per_s = math.nan
        if not model or not math.isfinite(rate_per_s):
            raise InputError(f"a co-runner must be MODEL@RATE/s, such as detector.onnx@20/s; got {text!r}")
        return cls(model=model, rate_per_s=rate_per_s)


def predict(
    model: Path | str | nn.Module,
    predictor: Predictor | Path | str | None = None,
    *,
    example: Any = None,
    load: Mapping[str, float] | None = None,
    live: TelemetryConfig | None = None,
    co_runner: CoRunner | str | None = None,
    window_s: float = WINDOW_S,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    inputs: Mapping[str, Any] | None = None,
    exporter: Exporter = "torchscript",
    provider: str = "cpu",
    gpu: int = 0,
    seed: int = 0,
) -> Prediction:
    """Predict the latency of a model.

    Args:
        model: ONNX file, directory of an analyzed model, module of torch, or `hf:FOLDER`: a folder of a
            Hugging Face model with `config.json` and weights as safetensors. Modules are exported to a
            temporary ONNX file in eval mode, folders in float32.
        predictor: A predictor or its file, of this device; None selects one, see
            `sparseflow.latency.find_predictor`.
        example: Inputs of a module: a tensor, a sequence of tensors, or argument of `forward` -> tensor.
        load: Metric -> share; without `load` and `live` the device is idle.
        live: Source of the current load.
        co_runner: Model that runs at the same time on an otherwise idle device, or such a text as
            `detector.onnx@20/s`.
        window_s: Window over which the current load is averaged, seconds.
        shapes: Input -> shape, or open dimension such as `batch` -> its extent as a shape of one entry.
        inputs: Input of an ONNX file -> value: an array, a number, a list or the path of a `.npy` file; the
            other inputs are random.
        exporter: Exporter of torch for a module or folder: `"torchscript"`, or `"dynamo"`, which requires the
            package onnxscript.
        provider: Without a predictor, `"cpu"`, `"cuda"` or onnxruntime's name.
        gpu: Index of the GPU.
        seed: Random seed of the quantiles.

    Raises:
        InputError: A file is missing, `model` is of another type, a module has no example, the predictor is
            of another device, several of `load`, `live` and `co_runner` are given, or one is given to a
            predictor that was trained on idle measurements only. On a CPU a co-runner needs no others.
        FileFormatError, ModelError: A file is invalid.
        RunError: torch cannot export the module.
        DeviceError: The device or the readings are not available, or lack the required metric.
    """
    if sum(value is not None for value in (load, live, co_runner)) > 1:
        raise InputError("`load`, `live` and `co_runner` exclude each other")
    fitted = load_predictor(predictor, provider, gpu)
    if live is not None:
        fitted.contention.check_fitted()
    graph = analyze_for(fitted, open_source(model, example=example, exporter=exporter), shapes, inputs)
    if co_runner is not None:
        spec = CoRunner.parse(co_runner) if isinstance(co_runner, str) else co_runner
        source = open_source(spec.model, example=spec.example, exporter=exporter)
        other = analyze_for(fitted, source, spec.shapes)
        return fitted.predict_with_co_runner(graph, other, spec.rate_per_s, cpus=spec.cpus, seed=seed)
    if live is not None:
        # Read last, so that the reading does not contain the analysis.
        load = open_reader(**live.model_dump(), device=f"cuda:{gpu}").read(window_s).shares
    return fitted.predict(graph, load, seed=seed)


def load_predictor(
    predictor: Predictor | Path | str | None, provider: str = "cpu", gpu: int = 0
) -> Predictor:
    """Return a predictor, read it from its file, or select one, and check that it is of this device.

    Raises:
        InputError: The file is missing, or the predictor is of another device.
        FileFormatError: The file is invalid.
        DeviceError: The device is not available.
    """
    fitted = (
        predictor
        if isinstance(predictor, Predictor)
        else find_predictor(predictor, provider=provider, gpu=gpu)
    )
    fitted.fingerprint.check_local_device(gpu)
    return fitted


def analyze_for(
    predictor: Predictor,
    source: ModelSource,
    sizes: Mapping[str, tuple[int, ...]] | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> Graph:
    """Return the graph that the predictor's provider executes.

    Args:
        predictor: The predictor.
        source: The model.
        sizes, inputs: As in `ModelSource.analyze`.

    Raises:
        InputError: As `ModelSource.analyze`, or an analyzed graph is of another provider or version of
            onnxruntime.
        FileFormatError, ModelError, RunError: As `ModelSource.analyze`.
    """
    graph = source.analyze(predictor.fingerprint.provider, sizes or {}, inputs)
    if not isinstance(source, AnalyzedSource):
        return graph
    fingerprint = predictor.fingerprint
    provider, level = session.select_graph(fingerprint.provider, graph.level)
    expected = (provider, level, fingerprint.ort_version.partition(",")[0])
    if (graph.provider, graph.level, graph.ort_version) != expected:
        raise InputError(
            f"{source.name} was analyzed for {graph.provider} of onnxruntime {graph.ort_version} (level "
            f"{graph.level}), the predictor needs {provider} of {expected[2]} (level {level}); analyze the "
            "model again"
        )
    return graph

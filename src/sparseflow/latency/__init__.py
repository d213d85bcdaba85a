"""Latency: predict the latency of ONNX models on idle and loaded devices.

::

    from sparseflow.latency import predict

    predict("resnet18.onnx", "predictor.json").mean_ms

Modules, from the ground up:

- `graph`: ONNX files, the graph that onnxruntime executes, its kernels and their work, the model zoo.
- `measure`: latency of kernels and models, idle and under load; collections of measurements.
- `model`: regressors, composition and contention, trained into a `Predictor` and evaluated.
- `api`, `inference_config`: predictions from files and the current load.
- `check`, `junit`: limits of predicted latencies for continuous integration.
- `report`, `quickstart`: the report page, and all steps on a few networks.

Exports are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.core.lazy import attach

if TYPE_CHECKING:
    from sparseflow.latency.api import predict
    from sparseflow.latency.check import CheckResult, LatencyBaseline, ModelCheck, check_models
    from sparseflow.latency.graph.analysis import Graph, analyze
    from sparseflow.latency.graph.extraction import ExtractionResult, extract
    from sparseflow.latency.graph.zoo import ExportResult, export_zoo
    from sparseflow.latency.inference_config import InferenceConfig, load_inference_config
    from sparseflow.latency.measure.collection import CollectionSummary, collect
    from sparseflow.latency.measure.config import CollectionConfig, TelemetryConfig
    from sparseflow.latency.measure.exporter import Exporter
    from sparseflow.latency.measure.fanout import fan_out
    from sparseflow.latency.measure.overlap import measure_overlap
    from sparseflow.latency.measure.stress import hold_levels
    from sparseflow.latency.model.evaluation import PredictorEvaluation, evaluate
    from sparseflow.latency.model.predictor import KernelPrediction, Prediction, Predictor
    from sparseflow.latency.model.training import train
    from sparseflow.latency.quickstart import run_quickstart

__all__ = [
    "CheckResult",
    "CollectionConfig",
    "CollectionSummary",
    "ExportResult",
    "Exporter",
    "ExtractionResult",
    "Graph",
    "InferenceConfig",
    "KernelPrediction",
    "LatencyBaseline",
    "ModelCheck",
    "Prediction",
    "Predictor",
    "PredictorEvaluation",
    "TelemetryConfig",
    "analyze",
    "check_models",
    "collect",
    "evaluate",
    "export_zoo",
    "extract",
    "fan_out",
    "hold_levels",
    "load_inference_config",
    "measure_overlap",
    "predict",
    "run_quickstart",
    "train",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "api": ["predict"],
        "check": ["CheckResult", "LatencyBaseline", "ModelCheck", "check_models"],
        "graph.analysis": ["Graph", "analyze"],
        "graph.extraction": ["ExtractionResult", "extract"],
        "graph.zoo": ["ExportResult", "export_zoo"],
        "inference_config": ["InferenceConfig", "load_inference_config"],
        "measure.collection": ["CollectionSummary", "collect"],
        "measure.config": ["CollectionConfig", "TelemetryConfig"],
        "measure.exporter": ["Exporter"],
        "measure.fanout": ["fan_out"],
        "measure.overlap": ["measure_overlap"],
        "measure.stress": ["hold_levels"],
        "model.evaluation": ["PredictorEvaluation", "evaluate"],
        "model.predictor": ["KernelPrediction", "Prediction", "Predictor"],
        "model.training": ["train"],
        "quickstart": ["run_quickstart"],
    },
)

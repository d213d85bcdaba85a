"""Latency: predict the latency of ONNX models on idle and loaded devices.

::

    from sparseflow.latency import predict

    predict("resnet18.onnx", "predictor.json").mean_ms

Modules, from the ground up:

- `graph`: ONNX files, the graph that onnxruntime executes, its kernels and their work, the model zoo.
- `measure`: latency of kernels and models, idle and under load; collections of measurements.
- `model`: regressors, composition and contention, trained into a `Predictor` and evaluated.
- `first_answer`, `calibration`: predictors without a collection: shipped, from peaks, and calibrated.
- `api`, `sweeps`, `inference_config`: predictions of models, also under the current load, and over shapes
  and loads.
- `check`, `junit`: limits of predicted latencies for continuous integration.
- `report`, `quickstart`: the report page, and all steps on a few networks.

Exports are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.core.lazy import attach

if TYPE_CHECKING:
    from sparseflow.latency.api import CoRunner, predict
    from sparseflow.latency.calibration import CalibrationResult, calibrate
    from sparseflow.latency.check import CheckResult, LatencyBaseline, ModelCheck, check_models
    from sparseflow.latency.first_answer import find_predictor
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
    from sparseflow.latency.sweeps import SweepPoint, predict_loads, sweep

__all__ = [
    "CalibrationResult",
    "CheckResult",
    "CoRunner",
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
    "SweepPoint",
    "TelemetryConfig",
    "analyze",
    "calibrate",
    "check_models",
    "collect",
    "evaluate",
    "export_zoo",
    "extract",
    "fan_out",
    "find_predictor",
    "hold_levels",
    "load_inference_config",
    "measure_overlap",
    "predict",
    "predict_loads",
    "run_quickstart",
    "sweep",
    "train",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "api": ["CoRunner", "predict"],
        "calibration": ["CalibrationResult", "calibrate"],
        "check": ["CheckResult", "LatencyBaseline", "ModelCheck", "check_models"],
        "first_answer": ["find_predictor"],
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
        "sweeps": ["SweepPoint", "predict_loads", "sweep"],
    },
)

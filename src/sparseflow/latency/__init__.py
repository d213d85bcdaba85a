"""Latency: what an ONNX model will take on a loaded device.

::

    from sparseflow.latency import predict

    predict("resnet18.onnx", "predictor.json").mean_ms

The names below are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparseflow.latency.predicting import predict
    from sparseflow.latency.predictor import KernelPrediction, Prediction, Predictor

__all__ = ["KernelPrediction", "Prediction", "Predictor", "predict"]

_HOME = {
    "KernelPrediction": "sparseflow.latency.predictor",
    "Prediction": "sparseflow.latency.predictor",
    "Predictor": "sparseflow.latency.predictor",
    "predict": "sparseflow.latency.predicting",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'sparseflow.latency' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value

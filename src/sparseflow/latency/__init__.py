"""Latency: what an ONNX model will take on a loaded device.

::

    from sparseflow.latency import predict

    predict("resnet18.onnx", "predictor.json").mean_ms

The names below are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.core.lazy import attach

if TYPE_CHECKING:
    from sparseflow.latency.predicting import predict
    from sparseflow.latency.predictor import KernelPrediction, Prediction, Predictor

__all__ = ["KernelPrediction", "Prediction", "Predictor", "predict"]

__getattr__, __dir__ = attach(
    __name__,
    {
        "predicting": ["predict"],
        "predictor": ["KernelPrediction", "Prediction", "Predictor"],
    },
)

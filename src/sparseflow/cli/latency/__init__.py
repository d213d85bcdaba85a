"""`sparseflow latency`: predict the latency of ONNX models on idle and loaded devices."""

from sparseflow.cli.latency import describe, measure, predict
from sparseflow.cli.latency.base import app

__all__ = ["app", "describe", "measure", "predict"]

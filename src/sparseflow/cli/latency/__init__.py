"""`sparseflow latency`: predict the latency of ONNX models on idle and loaded devices."""

from sparseflow.cli.latency import check, describe, measure, predict
from sparseflow.cli.latency.base import app

__all__ = ["app", "check", "describe", "measure", "predict"]

"""`sparseflow latency`: the commands of the latency wing."""

from sparseflow.cli.latency import describe, measure, predict
from sparseflow.cli.latency.base import app

__all__ = ["app", "describe", "measure", "predict"]

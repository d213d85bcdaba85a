"""`sparseflow adaptive`: keep latency budgets with a multimodal mixture-of-experts model."""

from sparseflow.cli.adaptive import demo, models, profiling, requests, studies
from sparseflow.cli.adaptive.base import app

__all__ = ["app", "demo", "models", "profiling", "requests", "studies"]

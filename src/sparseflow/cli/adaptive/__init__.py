"""`sparseflow adaptive`: the commands of the adaptive wing."""

from sparseflow.cli.adaptive import models, requests, studies
from sparseflow.cli.adaptive.base import app

__all__ = ["app", "models", "requests", "studies"]

"""Configuration of predictions: the predictor, and where the current load is read.

::

    predictor: predictor.json    # relative to this file
    telemetry:
      source: prometheus
      url: http://127.0.0.1:9090
      labels: {instance: "127.0.0.1:9400"}
      metrics: [others]
      max_age_s: 30
    window_s: 5
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from sparseflow.core.config import StrictModel, load_config
from sparseflow.core.telemetry.schema import MIN_WINDOW_S
from sparseflow.latency.api import WINDOW_S
from sparseflow.latency.measure.config import TelemetryConfig


class InferenceConfig(StrictModel):
    """Settings of predictions, as `predict` takes them.

    Attributes:
        predictor: File of the predictor.
        telemetry: Source of the current load; None for an idle device.
        window_s: Window over which the current load is averaged, seconds.
    """

    predictor: Path | None = None
    telemetry: TelemetryConfig | None = None
    window_s: Annotated[float, Field(ge=MIN_WINDOW_S)] = WINDOW_S


def load_inference_config(path: Path | str) -> InferenceConfig:
    """Read the settings of predictions from a YAML file; its paths are relative to it.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file is not YAML, or a setting is unknown or out of range.
    """
    config = load_config(InferenceConfig, path, extra="latency")
    if config.predictor is None:
        return config
    return config.model_copy(update={"predictor": Path(path).parent.resolve() / config.predictor})

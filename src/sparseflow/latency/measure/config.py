"""Configuration of a collection.

::

    kernels: extracted/          # directories of kernels from `latency extract`, or single files
    models: [resnet18.onnx]      # models, or directories of them
    provider: cpu
    threads: 1
    stressor: cpu-fma            # see sparseflow.core.load
    shapes: {images: [1, 3, 224, 224]}     # for inputs with open dimensions
    inputs: {sizes: [1, 64], mask: mask.npy}
    levels: [0, 0.3, 0.6, 0.9]
    rounds: 5
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import Field

from sparseflow.core.config import StrictModel, load_config
from sparseflow.core.load.workloads import DEFAULT_KINDS, KINDS
from sparseflow.core.telemetry.schema import MIN_WINDOW_S
from sparseflow.latency.graph import session
from sparseflow.latency.graph.synthetic_kernels import SyntheticKernelsConfig

DEFAULT_COPIES = 48
"""Default number of copies on a GPU; a device time of 2 µs per copy is then distinguishable from noise."""

Level = Annotated[float, Field(ge=0.0, le=1.0)]
Paths = list[Path]
InputValue = bool | int | float | str | list[Any]


class TelemetryConfig(StrictModel):
    """Source of load readings; arguments of `core.telemetry.readers.open_reader`, except the device."""

    source: str = "host"
    metrics: list[str] | None = None
    url: str | None = None
    labels: dict[str, str] | None = None
    max_age_s: float = 30.0


class CollectionConfig(StrictModel):
    """Settings of a collection.

    Attributes:
        kernels: Files or directories of extracted kernels.
        models: Files or directories of models.
        shapes: Input -> shape, for the models that have this input with open dimensions, or open dimension
            -> its extent as a shape of one entry; MODEL:NAME -> shape for one of them, where MODEL is the
            name of its file without the ending.
        inputs: Likewise, input -> value, for the models that have this input: a number, a list or the path of
            a `.npy` file. The other inputs are random.
        synthetic: Synthetic kernels to measure, such as `{kernels: 500}`, see `graph.synthetic_kernels`; none
            by default.
        provider: `"cpu"`, `"cuda"` or `"openvino"`.
        threads: Threads within an operator; None leaves the choice to onnxruntime.
        cpus: CPUs for the measured work and a CPU load; by default all usable ones.
        gpu: Index of the GPU.
        conv_search: `cudnn_conv_algo_search` of the CUDA provider.
        stressor: Kind of load; by default `gpu-matmul` on a GPU.
        levels: Shares of the device's time that the load takes while the measured work is idle.
        steady_timeout_s: Maximum wait for a level.
        rounds: Number of measurements of each target at each level.
        copies: On a GPU, copies of a kernel in a stream, which separates device and host time (`stream.py`);
            0 disables it. Only without load.
        keep: Number of targets that stay loaded between measurements; all must fit in memory.
        warmup: Runs before the samples of a measurement.
        loops: Minimum number of samples of a measurement.
        max_samples: Approximate maximum number of samples. Short runs are timed in groups, so that the mean
            covers all runs and rows stay small.
        min_time_s: Minimum time of a measurement, several cycles of the load.
        max_time_s: Maximum time of a measurement, even with fewer than `loops` samples.
        reference: Id of the target that shows drift; by default a kernel of median work.
        reference_every: Targets between two measurements of the reference.
        telemetry: Source of load readings; by default the GPU's own counters on a GPU.
        seed: Random seed of orders and inputs.
    """

    kernels: Paths = Field(default=[])
    models: Paths = Field(default=[])
    shapes: dict[str, list[Annotated[int, Field(ge=0)]]] = Field(default={})
    inputs: dict[str, InputValue] = Field(default={})
    synthetic: SyntheticKernelsConfig | None = None
    provider: str = "cpu"
    threads: Annotated[int, Field(ge=1)] | None = 1
    cpus: list[int] | None = None
    gpu: Annotated[int, Field(ge=0)] = 0
    conv_search: str = "EXHAUSTIVE"
    stressor: str = DEFAULT_KINDS["cpu"]
    levels: list[Level] = Field(default=[0.0, 0.3, 0.6, 0.9], min_length=1)
    steady_timeout_s: Annotated[float, Field(gt=0.0)] = 30.0
    rounds: Annotated[int, Field(ge=1)] = 5
    copies: Annotated[int, Field(ge=0)] = 0
    keep: Annotated[int, Field(ge=0)] = 0
    warmup: Annotated[int, Field(ge=0)] = 5
    loops: Annotated[int, Field(ge=1)] = 20
    max_samples: Annotated[int, Field(ge=1)] = 2000
    min_time_s: Annotated[float, Field(ge=MIN_WINDOW_S)] = 0.3
    max_time_s: Annotated[float, Field(gt=0.0)] = 3.0
    reference: str | None = None
    reference_every: Annotated[int, Field(ge=1)] = 25
    telemetry: TelemetryConfig = TelemetryConfig()
    seed: int = 0

    @pydantic.field_validator("kernels", "models", mode="before")
    @classmethod
    def _wrap_single_path(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | Path) else value

    @pydantic.model_validator(mode="before")
    @classmethod
    def _set_gpu_defaults(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and settings.get("provider") in ("cuda", session.PROVIDERS["cuda"]):
            telemetry = settings.get("telemetry", {})
            if isinstance(telemetry, dict):
                telemetry = {"source": "gpm"} | telemetry
            defaults = {"copies": DEFAULT_COPIES, "stressor": DEFAULT_KINDS["cuda"]}
            return defaults | settings | {"telemetry": telemetry}
        return settings

    @pydantic.model_validator(mode="after")
    def _check_consistency(self) -> CollectionConfig:
        if not self.kernels and not self.models and self.synthetic is None:
            raise ValueError(
                "`kernels` or `models` must contain at least one file or directory, or set `synthetic`"
            )
        if self.stressor not in KINDS:
            raise ValueError(f"`stressor` (={self.stressor!r}) must be one of: {', '.join(KINDS)}")
        if len(set(self.levels)) != len(self.levels):
            raise ValueError(f"`levels` contains duplicates: {self.levels}; increase `rounds` instead")
        if self.max_time_s < self.min_time_s:
            raise ValueError(
                f"`max_time_s` (={self.max_time_s}) must be at least `min_time_s` (={self.min_time_s})"
            )
        if session.get_device_type(self.provider) == "cpu" and self.copies:
            raise ValueError(f"`copies` (={self.copies}) must be 0 on a CPU, which executes synchronously")
        return self


def load_collection_config(path: Path | str) -> CollectionConfig:
    """Read a collection's settings from a YAML file; its paths are relative to it.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file is not YAML, or a setting is unknown, missing or out of range.
    """
    config = load_config(CollectionConfig, path, extra="latency")
    parent = Path(path).parent.resolve()
    paths = {name: [parent / entry for entry in getattr(config, name)] for name in ("kernels", "models")}
    inputs = {
        name: str(parent / value) if isinstance(value, str) and value.endswith(".npy") else value
        for name, value in config.inputs.items()
    }
    return config.model_copy(update={**paths, "inputs": inputs})

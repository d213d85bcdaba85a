"""Config of a co-design: task, hardware, mapping, partitioning, placement and training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    PositiveFloat,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from sparseflow.codesign.hardware.chips import ChipLibrary, read_library
from sparseflow.codesign.partition.split_search import PartitionConfig
from sparseflow.core.config import (
    StrictModel,
    apply_overrides,
    describe_validation_error,
    list_configs,
    read_config_file,
)
from sparseflow.errors import InputError

PACKAGE = "sparseflow.codesign"


class HardwareConfig(StrictModel):
    """Available hardware."""

    library: Path | None = None
    """Chip library (YAML), relative to the working directory; the shipped one by default."""
    chips: tuple[str, ...] = ()
    """Names of the available chip types; all of the library by default."""
    slots: int = Field(default=8, ge=1)
    link: str = "interposer"
    """Link type between every two slots, unless `links` is given."""
    links: tuple[tuple[int, int, str], ...] = ()
    """All links, as (slot, slot, link type)."""
    initial_chip: str | None = None
    """Initial chip type of all slots; by default the type with the most memory."""
    batch_size: int = Field(default=8, ge=1)
    """Batch size in the pipeline."""
    proxy: Path | None = None
    """Proxy fitted by `sparseflow codesign profile`; an analytic roofline by default."""

    @field_validator("chips")
    @classmethod
    def _check_unique(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            raise ValueError(f"`chips` contains duplicates: {', '.join(duplicates)}")
        return names


class MappingConfig(StrictModel):
    """Mapping of segments to slots; see `mapping.solver`."""

    mode: Literal["balanced", "serial"] = "balanced"
    strategy: str = "auto"
    time_limit_s: float = Field(default=5.0, gt=0.0)


class WaferConfig(StrictModel):
    """Placement of chips; see `layout`."""

    radius_mm: float = Field(default=100.0, gt=0.0)
    margin_mm: float = Field(default=1.0, ge=0.0)
    sigma_mm: float = Field(default=30.0, gt=0.0)
    """Thermal interaction length, mm."""
    w_comm: float = Field(default=1.0, ge=0.0)
    w_therm: float = Field(default=0.5, ge=0.0)
    restarts: int = Field(default=4, ge=1)
    refine_steps: int = Field(default=200, ge=0)
    """Steps of the continuous refinement."""


class JointConfig(StrictModel):
    """Joint training of model and hardware."""

    alpha_steps: int = Field(default=20, ge=0)
    """Gradient steps of the slot logits after each epoch."""
    alpha_rate: float = Field(default=0.1, gt=0.0)
    tau: tuple[PositiveFloat, PositiveFloat] = (2.0, 0.3)
    """Initial and final temperature of the slots' Gumbel-Softmax."""
    plan_every: int = Field(default=1, ge=1)
    """Epochs between two plans with fine splits; other epochs only remap."""
    use_fine_split: bool = True
    hw_every: int = Field(default=1, ge=1)
    """Training steps between two evaluations of the hardware loss."""
    seed: int = Field(default=0, ge=0)


@dataclass(frozen=True, kw_only=True)
class Lambdas:
    """Dimensionless weights of the cost terms; names are those of the config.

    Attributes:
        lambda_T: Weight of latency over the reference latency.
        lambda_E: Weight of energy over the reference energy.
        lambda_mem: Weight of memory overflow: squared relative excess, summed over slots.
        lambda_area: Weight of area over the reference area.
        lambda_chip: Weight of the fraction of slots with a chip.
        lambda_layout: Weight of L_layout; see `design.placement`.

    Raises:
        InputError: A weight is negative or not finite.
    """

    lambda_T: float = 1.0
    lambda_E: float = 1.0
    lambda_mem: float = 10.0
    lambda_area: float = 0.1
    lambda_chip: float = 0.1
    lambda_layout: float = 0.1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0.0 <= value < float("inf"):
                raise InputError(f"`{name}` (={value}) must be finite and not negative")


@dataclass(frozen=True, kw_only=True)
class HwLossSchedule:
    """Schedule of the hardware-loss weight.

    Attributes:
        warmup_epochs: Epochs with weight 0.
        ramp_epochs: Epochs in which the weight increases to `max_weight`.
        max_weight: Final weight.
        epsilon: Tolerated accuracy loss, from 0 to 1.
        good_epochs: Consecutive epochs within tolerance that end a violation.
    """

    warmup_epochs: int = 5
    ramp_epochs: int = 10
    max_weight: float = 1.0
    epsilon: float = 0.01
    good_epochs: int = 2

    def __post_init__(self) -> None:
        if self.warmup_epochs < 1 or self.ramp_epochs < 0 or self.good_epochs < 1:
            raise InputError(
                f"`warmup_epochs` (={self.warmup_epochs}) and `good_epochs` (={self.good_epochs}) must be "
                f"at least 1, `ramp_epochs` (={self.ramp_epochs}) at least 0"
            )
        if not 0.0 <= self.max_weight < math.inf or not 0.0 <= self.epsilon < 1.0:
            raise InputError(
                f"`max_weight` (={self.max_weight}) must be finite and not negative, `epsilon` "
                f"(={self.epsilon}) from 0 to below 1"
            )


_DATACLASSES: Mapping[str, Any] = {"partition": PartitionConfig, "loss": Lambdas, "schedule": HwLossSchedule}
"""Config sections that are fields of a dataclass."""


class CodesignConfig(StrictModel):
    """Complete config of a co-design.

    Attributes:
        task: Config of model, data and training, in the format of its wing.
    """

    task: dict[str, Any]
    hardware: HardwareConfig = Field(default_factory=HardwareConfig)
    mapping: MappingConfig = Field(default_factory=MappingConfig)
    partition: dict[str, float] = Field(default_factory=dict)
    """Fields of `PartitionConfig`."""
    wafer: WaferConfig = Field(default_factory=WaferConfig)
    loss: dict[str, float] = Field(default_factory=dict)
    """Fields of `Lambdas`."""
    schedule: dict[str, float] = Field(default_factory=dict)
    """Fields of `HwLossSchedule`."""
    joint: JointConfig = Field(default_factory=JointConfig)

    @field_validator(*_DATACLASSES)
    @classmethod
    def _check_fields(cls, values: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        name = str(info.field_name)
        known = [field.name for field in fields(_DATACLASSES[name])]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"unknown fields: {', '.join(unknown)}; expected some of: {', '.join(known)}")
        _build_dataclass(_DATACLASSES[name], values)
        return values

    def build_partition_config(self) -> PartitionConfig:
        """Build the criteria for splits."""
        return _build_dataclass(PartitionConfig, self.partition)

    def build_lambdas(self) -> Lambdas:
        """Build the weights of the hardware loss."""
        return _build_dataclass(Lambdas, self.loss)

    def build_schedule(self) -> HwLossSchedule:
        """Build the schedule of the hardware-loss weight."""
        return _build_dataclass(HwLossSchedule, self.schedule)

    def load_library(self) -> ChipLibrary:
        """Read the chip library.

        Raises:
            InputError: The file does not exist.
            FileFormatError: The file is invalid.
        """
        return read_library(self.hardware.library)


def _build_dataclass(cls: Any, values: Mapping[str, float]) -> Any:
    """Build a dataclass from numbers, converting integral floats to int where declared."""
    arguments = {}
    for field in fields(cls):
        if field.name in values:
            value = values[field.name]
            if field.type == "int":
                if value != int(value):
                    raise InputError(f"`{field.name}` (={value}) must be an integer")
                value = int(value)
            arguments[field.name] = value
    return cls(**arguments)


def list_shipped_configs() -> list[str]:
    """Names of the shipped configs."""
    return [name for name in list_configs(PACKAGE) if name != "chips"]


def read_config(source: Path | str, overrides: Mapping[str, Any] | None = None) -> CodesignConfig:
    """Read a config.

    Args:
        source: A YAML file, or the name of a shipped config.
        overrides: Dotted field -> value that replaces the file's, such as `{"hardware.slots": 4}`.

    Raises:
        InputError: The file does not exist, or a field is missing, unknown or invalid.
        FileFormatError: The file is not YAML.
        MissingExtraError: PyYAML is missing.
    """
    content = apply_overrides(read_config_file(source, package=PACKAGE, extra="codesign"), overrides or {})
    return parse_config(content, str(source))


def parse_config(content: Mapping[str, Any], source: str = "the settings") -> CodesignConfig:
    """Build a config from the content of a file.

    Raises:
        InputError: A field is missing, unknown or invalid.
    """
    try:
        return CodesignConfig.model_validate(content)
    except ValidationError as error:
        raise InputError(f"{source}: {describe_validation_error(error)}") from error

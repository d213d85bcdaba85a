"""Config of a co-design: task, hardware, mapping, partitioning, placement and training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, field_validator, with_config

from sparseflow.codesign.partition.split_search import PartitionConfig
from sparseflow.core.checks import check_at_least, check_between, check_non_negative
from sparseflow.core.config import StrictModel, load_config

PACKAGE = "sparseflow.codesign"


class HardwareConfig(StrictModel):
    """Available hardware."""

    library: Path | None = None
    """Chip library (YAML), relative to the working directory; the shipped one by default."""
    chips: tuple[str, ...] = ()
    """Names of the available chip types; all of the library by default."""
    slots: int = Field(default=8, ge=1, le=1024)
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


@with_config(StrictModel.model_config)
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
        check_non_negative(**vars(self))


@with_config(StrictModel.model_config)
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
        check_at_least(1, warmup_epochs=self.warmup_epochs, good_epochs=self.good_epochs)
        check_at_least(0, ramp_epochs=self.ramp_epochs)
        check_non_negative(max_weight=self.max_weight)
        check_between(0.0, 1.0, epsilon=self.epsilon)


class CodesignConfig(StrictModel):
    """Complete config of a co-design.

    Attributes:
        task: Config of model, data and training, in the format of its wing; only the command line and joint
            training read it.
    """

    task: dict[str, Any] = Field(default_factory=dict)
    hardware: HardwareConfig = Field(default_factory=HardwareConfig)
    mapping: MappingConfig = Field(default_factory=MappingConfig)
    partition: PartitionConfig = Field(default_factory=PartitionConfig)
    wafer: WaferConfig = Field(default_factory=WaferConfig)
    loss: Lambdas = Field(default_factory=Lambdas)
    schedule: HwLossSchedule = Field(default_factory=HwLossSchedule)
    joint: JointConfig = Field(default_factory=JointConfig)


def read_config(source: Path | str, overrides: Mapping[str, Any] | None = None) -> CodesignConfig:
    """Read a config.

    Args:
        source: A YAML file, or the name of a shipped config.
        overrides: Dotted field -> value that replaces the file's, such as `{"hardware.slots": 4}`.

    Raises:
        InputError: The file does not exist, or an override does not fit.
        FileFormatError: The file is not YAML, or a field is missing, unknown or invalid.
        MissingExtraError: PyYAML is missing.
    """
    return load_config(CodesignConfig, source, extra="codesign", package=PACKAGE, overrides=overrides)

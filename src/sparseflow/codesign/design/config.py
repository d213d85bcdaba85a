"""A co-design in one YAML file: the task, the hardware, how it is mapped, split, placed and trained for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from sparseflow.codesign.hardware.chips import ChipLibrary, read_library
from sparseflow.codesign.partition.split_search import PartitionConfig
from sparseflow.core.config import apply_overrides, describe_validation_error, list_configs, read_config_file
from sparseflow.errors import InputError

PACKAGE = "sparseflow.codesign"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class HardwareSettings(_Part):
    """What there is to build from."""

    library: Path | None = None
    """A chip library in YAML, from where the command runs; the shipped one by default."""
    chips: tuple[str, ...] = ()
    """Names of the types that slots may hold; all of the library by default."""
    slots: int = Field(default=8, ge=1)
    link: str = "interposer"
    """Between every two slots, unless `links` says more."""
    links: tuple[tuple[int, int, str], ...] = ()
    """(slot, slot, link): the only ones there are, if there are any."""
    first: str | None = None
    """The type that all slots hold at first; by default the library's with the most memory."""
    batch: int = Field(default=8, ge=1)
    """Samples of the batches that run through the pipeline."""
    proxy: Path | None = None
    """What `sparseflow codesign profile` fitted, likewise; an analytic roofline by default."""

    @field_validator("chips")
    @classmethod
    def _differ(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} stands there more than once")
        return names


class MappingSettings(_Part):
    """How segments are mapped to slots; see `mapping`."""

    mode: Literal["balanced", "serial"] = "balanced"
    strategy: str = "auto"
    time_limit_s: float = Field(default=5.0, gt=0.0)


class WaferSettings(_Part):
    """Where chips are placed; see `layout`."""

    radius_mm: float = Field(default=100.0, gt=0.0)
    margin_mm: float = Field(default=1.0, ge=0.0)
    sigma_mm: float = Field(default=30.0, gt=0.0)
    """Over which heat reaches."""
    w_comm: float = Field(default=1.0, ge=0.0)
    w_therm: float = Field(default=0.5, ge=0.0)
    restarts: int = Field(default=4, ge=1)
    refine_steps: int = Field(default=200, ge=0)
    """Steps of the differentiable layout after the discrete one."""


class JointSettings(_Part):
    """How model and hardware are trained together."""

    alpha_steps: int = Field(default=20, ge=0)
    """Steps of the slots' logits after each epoch."""
    alpha_rate: float = Field(default=0.1, gt=0.0)
    tau: tuple[PositiveFloat, PositiveFloat] = (2.0, 0.3)
    """Temperature of the slots' draw, first and last."""
    plan_every: int = Field(default=1, ge=1)
    """Epochs from one plan with fine splits to the next; the others map anew only."""
    use_fine_split: bool = True
    hw_every: int = Field(default=1, ge=1)
    """Training steps from one with the hardware loss to the next."""
    seed: int = Field(default=0, ge=0)


@dataclass(frozen=True, kw_only=True)
class Lambdas:
    """Weights of the terms, without units; the names are those of configurations.

    Attributes:
        lambda_T: Of latency over the first plan's.
        lambda_E: Of energy, likewise.
        lambda_mem: Of what layers need beyond a slot's memory: the square of its share, summed over slots.
        lambda_area: Of area over the first plan's.
        lambda_chip: Of the share of slots that hold a chip.
        lambda_layout: Of L_layout; see `places`.

    Raises:
        InputError: One is not finite, or negative.
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
class Schedule:
    """When the hardware loss counts.

    Attributes:
        settle: Epochs in which it does not.
        ramp: Epochs in which its weight rises to `most`.
        most: Its weight from then on.
        epsilon: Accuracy that may be lost, from 0 to 1.
        good_epochs: Epochs in a row that end a violation.
    """

    settle: int = 5
    ramp: int = 10
    most: float = 1.0
    epsilon: float = 0.01
    good_epochs: int = 2

    def __post_init__(self) -> None:
        if self.settle < 1 or self.ramp < 0 or self.good_epochs < 1:
            raise InputError(
                f"`settle` (={self.settle}) and `good_epochs` (={self.good_epochs}) must be at least 1, "
                f"`ramp` (={self.ramp}) at least 0"
            )
        if not 0.0 <= self.most < math.inf or not 0.0 <= self.epsilon < 1.0:
            raise InputError(
                f"`most` (={self.most}) must be finite and not negative, `epsilon` (={self.epsilon}) from 0 "
                "to below 1"
            )


_PARTS: Mapping[str, Any] = {"partition": PartitionConfig, "loss": Lambdas, "schedule": Schedule}
"""Settings that are fields of a dataclass."""


class Settings(_Part):
    """All of it.

    Attributes:
        task: Settings of the model, its data and its training, as its own wing reads them.
    """

    task: dict[str, Any]
    hardware: HardwareSettings = Field(default_factory=HardwareSettings)
    mapping: MappingSettings = Field(default_factory=MappingSettings)
    partition: dict[str, float] = Field(default_factory=dict)
    """Fields of `PartitionConfig`."""
    wafer: WaferSettings = Field(default_factory=WaferSettings)
    loss: dict[str, float] = Field(default_factory=dict)
    """Fields of `Lambdas`."""
    schedule: dict[str, float] = Field(default_factory=dict)
    """Fields of `Schedule`."""
    joint: JointSettings = Field(default_factory=JointSettings)

    @field_validator(*_PARTS)
    @classmethod
    def _is_known(cls, values: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        name = str(info.field_name)
        there = [each.name for each in fields(_PARTS[name])]
        unknown = sorted(set(values) - set(there))
        if unknown:
            raise ValueError(f"{name} has no {', '.join(unknown)}; it has: {', '.join(there)}")
        _made(_PARTS[name], values)
        return values

    def partition_config(self) -> PartitionConfig:
        """When layers are split."""
        return _made(PartitionConfig, self.partition)

    def lambdas(self) -> Lambdas:
        """Weights of the hardware loss."""
        return _made(Lambdas, self.loss)

    def guard_schedule(self) -> Schedule:
        """When the hardware loss counts."""
        return _made(Schedule, self.schedule)

    def read_library(self) -> ChipLibrary:
        """The chip library.

        Raises:
            InputError: There is no such file.
            FileFormatError: It cannot be used.
        """
        return read_library(self.hardware.library)


def _made(kind: Any, values: Mapping[str, float]) -> Any:
    """A dataclass from numbers, whole ones where it wants them."""
    found = {}
    for each in fields(kind):
        if each.name in values:
            value = values[each.name]
            if each.type == "int":
                if value != int(value):
                    raise InputError(f"`{each.name}` (={value}) must be a whole number")
                value = int(value)
            found[each.name] = value
    return kind(**found)


def shipped() -> list[str]:
    """Names of the configurations that come with SparseFlow."""
    return [name for name in list_configs(PACKAGE) if name != "chips"]


def read_settings(source: Path | str, changes: Mapping[str, Any] | None = None) -> Settings:
    """Read a configuration.

    Args:
        source: A YAML file, or the name of a configuration that comes with SparseFlow.
        changes: `"hardware.slots"` -> a value that goes before the file's.

    Raises:
        InputError: There is no such file, or a setting is missing, unknown or of no use.
        FileFormatError: The file is not YAML, or holds something else.
        MissingExtraError: PyYAML is missing.
    """
    content = apply_overrides(read_config_file(source, package=PACKAGE, extra="codesign"), changes or {})
    return settings_of(content, str(source))


def settings_of(content: Mapping[str, Any], source: str = "the settings") -> Settings:
    """Settings from what a file holds.

    Raises:
        InputError: A setting is missing, unknown or of no use.
    """
    try:
        return Settings.model_validate(content)
    except ValidationError as error:
        raise InputError(f"{source} cannot be used: {describe_validation_error(error)}") from error

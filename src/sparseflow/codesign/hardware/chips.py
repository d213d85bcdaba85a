"""Library of chip types and links, read from YAML.

::

    chips:
      - {name: npu-m, peak_flops: {float32: 2.0e13, bfloat16: 4.0e13}, peak_bw: 4.0e11, mem_gb: 8,
         area_mm2: 100, tdp_w: 30}
    links:
      - {name: ucie, bandwidth: 6.4e10, latency_us: 0.1, pj_per_bit: 0.5}

Every entry names its source: a data sheet, a measurement, or "illustrative".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat, ValidationError, field_validator, model_validator

from sparseflow.core.config import StrictModel, describe_validation_error, read_config_file
from sparseflow.core.layers import PRECISIONS
from sparseflow.errors import FileFormatError, InputError

DEFAULT_LIBRARY = "chips"


class ChipType(StrictModel):
    """A type of chip."""

    name: str = Field(min_length=1)
    peak_flops: dict[str, PositiveFloat] = Field(min_length=1)
    """Precision of `core.layers.PRECISIONS` -> FLOP/s; the chip cannot run layers of other precisions."""
    peak_bw: float = Field(gt=0.0)
    """Memory bandwidth, bytes/s."""
    mem_gb: float = Field(gt=0.0)
    """Memory, GB (1e9 bytes)."""
    area_mm2: float = Field(gt=0.0)
    tdp_w: float = Field(gt=0.0)
    """Power at full load, W."""
    idle_w: float = Field(default=0.0, ge=0.0)
    """Idle power, W."""
    size: tuple[float, float] | None = None
    """Width and height, mm; by default a square of `area_mm2`."""
    source: str = "illustrative"
    """Source of the values."""

    @field_validator("peak_flops", mode="before")
    @classmethod
    def _check_precisions(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(
                f"must give FLOP/s for each precision, such as {{float32: 6.7e13, bfloat16: 9.89e14}}, got "
                f"{value!r:.40}"
            )
        unknown = [name for name in value if name not in PRECISIONS]
        if unknown:
            raise ValueError(f"unknown precision {unknown[0]!r:.40}; expected {', '.join(PRECISIONS)}")
        return value

    @model_validator(mode="after")
    def _check_consistency(self) -> ChipType:
        if self.idle_w > self.tdp_w:
            raise ValueError(f"idle_w (={self.idle_w}) of {self.name} exceeds tdp_w (={self.tdp_w})")
        if self.size is not None:
            width, height = self.size
            if not (width > 0.0 and height > 0.0):
                raise ValueError(f"size (={list(self.size)}) of {self.name} must be two positive numbers, mm")
            if not math.isclose(width * height, self.area_mm2, rel_tol=0.01):
                raise ValueError(
                    f"size (={list(self.size)}) of {self.name} covers {width * height:g} mm2, but area_mm2 "
                    f"is {self.area_mm2:g}; omit one or make them consistent"
                )
        return self

    @property
    def size_mm(self) -> tuple[float, float]:
        """Width and height, mm."""
        side = math.sqrt(self.area_mm2)
        return (side, side) if self.size is None else self.size


class LinkType(StrictModel):
    """A type of link between two chips."""

    name: str = Field(min_length=1)
    bandwidth: float = Field(gt=0.0)
    """Bytes/s in one direction."""
    latency_us: float = Field(ge=0.0)
    """Latency of a message of any size, µs."""
    latency_us_per_mm: float = Field(default=0.0, ge=0.0)
    """Additional latency per mm of distance, µs."""
    pj_per_bit: float = Field(default=0.0, ge=0.0)
    """Energy per bit at any distance, pJ."""
    pj_per_bit_mm: float = Field(default=0.0, ge=0.0)
    """Additional energy per bit and mm of distance, pJ."""
    source: str = "illustrative"


class ChipLibrary(StrictModel):
    """Chip types and link types by name."""

    chips: tuple[ChipType, ...] = Field(min_length=1)
    links: tuple[LinkType, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_names(self) -> ChipLibrary:
        for kind, entries in (("chips", self.chips), ("links", self.links)):
            names = [entry.name for entry in entries]
            duplicates = sorted({name for name in names if names.count(name) > 1})
            if duplicates:
                raise ValueError(f"duplicate {kind}: {', '.join(duplicates)}")
        return self

    def get_chip(self, name: str) -> ChipType:
        """Return the chip type of this name.

        Raises:
            InputError: The library has no such chip type.
        """
        return _find_by_name(self.chips, name, "chip")

    def get_link(self, name: str) -> LinkType:
        """Return the link type of this name.

        Raises:
            InputError: The library has no such link type.
        """
        return _find_by_name(self.links, name, "link")


def _find_by_name(entries: tuple[Any, ...], name: str, kind: str) -> Any:
    for entry in entries:
        if entry.name == name:
            return entry
    available = ", ".join(entry.name for entry in entries)
    raise InputError(f"unknown {kind} {name!r}; the library contains: {available}")


def read_library(source: Path | str | None = None) -> ChipLibrary:
    """Read a chip library.

    Args:
        source: A YAML file, or the name of a shipped library; the shipped one by default.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file is not YAML, or an entry has a missing, unknown or invalid field.
        MissingExtraError: PyYAML is missing.
    """
    content = read_config_file(
        DEFAULT_LIBRARY if source is None else source, package="sparseflow.codesign", extra="codesign"
    )
    return parse_library(content, str(source or "the shipped library"))


def parse_library(content: Mapping[str, Any], source: str = "the library") -> ChipLibrary:
    """Build a library from the content of a file.

    Raises:
        FileFormatError: An entry has a missing, unknown or invalid field.
    """
    try:
        return ChipLibrary.model_validate(content)
    except ValidationError as error:
        entry = _describe_entry(content, error.errors()[0]["loc"])
        raise FileFormatError(f"{source}: {describe_validation_error(error)}{entry}") from error


def _describe_entry(content: Mapping[str, Any], location: tuple[int | str, ...]) -> str:
    """Format the name of the entry at an error location, if it has one."""
    if len(location) < 2 or not isinstance(location[1], int):
        return ""
    entry = content[str(location[0])][location[1]]
    named = isinstance(entry, Mapping) and "name" in entry
    return f" ({location[0]}: {entry['name']!s:.60})" if named else ""

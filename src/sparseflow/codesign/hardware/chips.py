"""Chip types and the links between them, read from a library in YAML.

::

    chips:
      - {name: npu-m, peak_flops: 2.0e13, peak_bw: 4.0e11, mem_gb: 8, area_mm2: 100, tdp_w: 30}
    links:
      - {name: ucie, bandwidth: 6.4e10, latency_us: 0.1, pj_per_bit: 0.5}

Every figure has a source: a data sheet, a measurement, or "illustrative" where it stands for a kind of chip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sparseflow.core.config import describe_validation_error, read_config_file
from sparseflow.errors import FileFormatError, InputError

SHIPPED = "chips"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ChipType(_Entry):
    """One kind of chip that a slot can hold."""

    name: str = Field(min_length=1)
    peak_flops: float = Field(gt=0.0)
    """FLOP/s in the precision that models run in."""
    peak_bw: float = Field(gt=0.0)
    """Bytes/s of its memory."""
    mem_gb: float = Field(gt=0.0)
    """GB (1e9 bytes)."""
    area_mm2: float = Field(gt=0.0)
    tdp_w: float = Field(gt=0.0)
    """Watts at full load."""
    idle_w: float = Field(default=0.0, ge=0.0)
    """Watts when it waits."""
    size: tuple[float, float] | None = None
    """Width and height, mm; a square of `area_mm2` by default."""
    source: str = "illustrative"
    """Where its figures are from."""

    @model_validator(mode="after")
    def _fits(self) -> ChipType:
        if self.idle_w > self.tdp_w:
            raise ValueError(f"idle_w (={self.idle_w}) of {self.name} is above tdp_w (={self.tdp_w})")
        if self.size is not None:
            width, height = self.size
            if not (width > 0.0 and height > 0.0):
                raise ValueError(f"size (={list(self.size)}) of {self.name} must be two positive numbers, mm")
            if not math.isclose(width * height, self.area_mm2, rel_tol=0.01):
                raise ValueError(
                    f"size (={list(self.size)}) of {self.name} has {width * height:g} mm2, and area_mm2 is "
                    f"{self.area_mm2:g}: leave one out, or make them agree"
                )
        return self

    @property
    def size_mm(self) -> tuple[float, float]:
        """Width and height, mm."""
        side = math.sqrt(self.area_mm2)
        return (side, side) if self.size is None else self.size


class Link(_Entry):
    """How two chips are connected."""

    name: str = Field(min_length=1)
    bandwidth: float = Field(gt=0.0)
    """Bytes/s, one way."""
    latency_us: float = Field(ge=0.0)
    """Microseconds from one chip to the next, however little is sent."""
    latency_us_per_mm: float = Field(default=0.0, ge=0.0)
    """What each mm between two chips adds."""
    pj_per_bit: float = Field(default=0.0, ge=0.0)
    """Picojoules for each bit sent over, however far."""
    pj_per_bit_mm: float = Field(default=0.0, ge=0.0)
    """What each mm between two chips adds."""
    source: str = "illustrative"


class ChipLibrary(_Entry):
    """Chip types and links by name."""

    chips: tuple[ChipType, ...] = Field(min_length=1)
    links: tuple[Link, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_differ(self) -> ChipLibrary:
        for kind, entries in (("chips", self.chips), ("links", self.links)):
            names = [entry.name for entry in entries]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{kind} holds {', '.join(twice)} more than once")
        return self

    def chip(self, name: str) -> ChipType:
        """A chip type.

        Raises:
            InputError: There is none of this name.
        """
        return _named(self.chips, name, "chip")

    def link(self, name: str) -> Link:
        """A link.

        Raises:
            InputError: There is none of this name.
        """
        return _named(self.links, name, "link")


def _named(entries: tuple[Any, ...], name: str, kind: str) -> Any:
    for entry in entries:
        if entry.name == name:
            return entry
    there = ", ".join(entry.name for entry in entries)
    raise InputError(f"the library has no {kind} {name!r}; it has: {there}")


def read_library(source: Path | str | None = None) -> ChipLibrary:
    """Read a chip library.

    Args:
        source: A YAML file; the one that comes with SparseFlow by default.

    Raises:
        InputError: There is no such file.
        FileFormatError: It is not YAML, or an entry lacks a field, has one too many or one out of range; says
            which entry and which field.
        MissingExtraError: PyYAML is missing.
    """
    found = read_config_file(
        SHIPPED if source is None else source, package="sparseflow.codesign", extra="codesign"
    )
    return library_of(found, str(source or "the shipped library"))


def library_of(content: Mapping[str, Any], source: str = "the library") -> ChipLibrary:
    """A library from what a file holds.

    Raises:
        FileFormatError: An entry lacks a field, has one too many or one out of range.
    """
    try:
        return ChipLibrary.model_validate(content)
    except ValidationError as error:
        whose = _whose(content, error.errors()[0]["loc"])
        raise FileFormatError(
            f"{source} cannot be used: {describe_validation_error(error)}{whose}"
        ) from error


def _whose(content: Mapping[str, Any], where: tuple[int | str, ...]) -> str:
    """The name of the entry that something is wrong with, as far as there is one."""
    if len(where) < 2 or not isinstance(where[1], int):
        return ""
    entry = content[str(where[0])][where[1]]
    return f" ({where[0]}: {entry['name']})" if isinstance(entry, Mapping) and "name" in entry else ""

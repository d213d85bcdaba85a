"""What was decided of the hardware at some point: chips, mapping, splits and places, as traces hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from sparseflow.codesign.objective import HwStats
from sparseflow.codesign.rewrite import RewritePlan, Split
from sparseflow.core.layers import LayerNode
from sparseflow.core.validation import first_problem
from sparseflow.errors import FileFormatError


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    chips: list[str | None]
    segments: list[list[str]]
    mapping: list[int]
    positions_mm: list[tuple[float, float]]
    rewrite_plan: dict[str, Any] | None

    @model_validator(mode="after")
    def _fits(self) -> _Entry:
        slots = len(self.chips)
        if len(self.mapping) != len(self.segments) or len(self.positions_mm) != slots:
            raise ValueError(
                f"{len(self.segments)} segments with {len(self.mapping)} slots, and {slots} chips at "
                f"{len(self.positions_mm)} places: there must be as many"
            )
        if any(not 0 <= slot < slots for slot in self.mapping):
            raise ValueError(f"`mapping` (={self.mapping}) must name slots from 0 to {slots - 1}")
        return self


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Everything that is discrete, and where chips are.

    Layers are named, since which of them there are changes as blocks are pruned away.

    Attributes:
        chips: Type in each slot; None where it is empty.
        segments: Names of the layers of each segment, in order.
        mapping: Slot of each segment.
        positions_mm: Centre of each slot's chip on the wafer, from its middle.
        rewrite_plan: What is split; None where nothing is. Its layers are places among those of the plan.
    """

    chips: tuple[str | None, ...]
    segments: tuple[tuple[str, ...], ...]
    mapping: tuple[int, ...]
    positions_mm: tuple[tuple[float, float], ...]
    rewrite_plan: RewritePlan | None = None

    def homes(self, layers: Sequence[LayerNode]) -> tuple[int, ...]:
        """Slot of each layer; one that the plan did not know goes where the one before it is."""
        slots = {
            name: slot for names, slot in zip(self.segments, self.mapping, strict=True) for name in names
        }
        found: list[int] = []
        for layer in layers:
            before = found[-1] if found else self.mapping[0]
            found.append(slots.get(layer.name, before))
        return tuple(found)

    def splits(self, layers: Sequence[LayerNode]) -> dict[int, Split]:
        """Place of a layer -> its split, of those layers that are there; splits name these places."""
        if self.rewrite_plan is None:
            return {}
        names = [name for segment in self.segments for name in segment]
        places = {layer.name: at for at, layer in enumerate(layers)}
        found = {
            places[names[split.layer]]: split
            for split in self.rewrite_plan.splits
            if names[split.layer] in places
        }
        return {place: replace(split, layer=place) for place, split in found.items()}

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return {
            "chips": list(self.chips),
            "segments": [list(names) for names in self.segments],
            "mapping": list(self.mapping),
            "positions_mm": [list(place) for place in self.positions_mm],
            "rewrite_plan": None if self.rewrite_plan is None else self.rewrite_plan.to_dict(),
        }

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Decision:
        """What `to_dict` gave.

        Raises:
            FileFormatError: It is something else.
        """
        try:
            read = _Entry.model_validate(told)
        except ValidationError as error:
            raise FileFormatError(f"this is no decision: {first_problem(error)}") from error
        plan = None if read.rewrite_plan is None else RewritePlan.from_dict(read.rewrite_plan)
        count = sum(len(names) for names in read.segments)
        beyond = [split.layer for split in (() if plan is None else plan.splits) if split.layer >= count]
        if beyond:
            raise FileFormatError(f"this is no decision: it splits layer {beyond[0]}, and has {count} layers")
        return cls(
            chips=tuple(read.chips),
            segments=tuple(tuple(names) for names in read.segments),
            mapping=tuple(read.mapping),
            positions_mm=tuple(read.positions_mm),
            rewrite_plan=plan,
        )


@dataclass(frozen=True, kw_only=True)
class Priced:
    """What a decision costs.

    Attributes:
        objective: What decisions are compared by.
        stats: Of the plan.
        area_mm2: Of all chips.
        chips: How many there are.
        layout: L_layout, 1 for a plain grid.
    """

    objective: float
    stats: HwStats
    area_mm2: float
    chips: int
    layout: float

    @property
    def energy_delay(self) -> float:
        """Energy-delay product, mJ ms."""
        return self.stats.energy_delay

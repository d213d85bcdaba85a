"""What was decided of the hardware at some point: chips, mapping, splits and places, as traces hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sparseflow.codesign.partition.objective import HwStats
from sparseflow.codesign.workload.splits import RewritePlan, Split
from sparseflow.core.config import describe_validation_error
from sparseflow.core.layers import LayerNode
from sparseflow.errors import FileFormatError, InputError


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    chips: list[str | None]
    segments: list[list[str]]
    mapping: list[int]
    positions_mm: list[tuple[float, float]]
    rewrite_plan: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Everything that is discrete, and where chips are.

    Layers are named, since which of them there are changes as blocks are pruned away.

    Attributes:
        chips: Type in each slot; None where it is empty.
        segments: Names of the layers of each segment, in order.
        mapping: Slot of each segment.
        positions_mm: Centre of each slot's chip on the wafer, from its middle.
        rewrite_plan: What is split; None where nothing is. Its layers are places among those of all segments.

    Raises:
        InputError: There are not as many slots as segments or places as chips, or a slot or a layer is named
            that is not there.
    """

    chips: tuple[str | None, ...]
    segments: tuple[tuple[str, ...], ...]
    mapping: tuple[int, ...]
    positions_mm: tuple[tuple[float, float], ...]
    rewrite_plan: RewritePlan | None = None

    def __post_init__(self) -> None:
        slots, count = len(self.chips), len(self.names)
        if len(self.mapping) != len(self.segments) or len(self.positions_mm) != slots:
            raise InputError(
                f"{len(self.segments)} segments with {len(self.mapping)} slots, and {slots} chips at "
                f"{len(self.positions_mm)} places: there must be as many"
            )
        if any(not 0 <= slot < slots for slot in self.mapping):
            raise InputError(f"`mapping` (={list(self.mapping)}) must name slots from 0 to {slots - 1}")
        for split in () if self.rewrite_plan is None else self.rewrite_plan.splits:
            if split.layer >= count:
                raise InputError(f"layer {split.layer} is split, and there are {count} layers")
            if max(split.slots) >= slots:
                raise InputError(
                    f"a part of layer {split.layer} is on slot {max(split.slots)}; there are slots 0 to "
                    f"{slots - 1}"
                )

    @property
    def names(self) -> list[str]:
        """Of all layers, in order."""
        return [name for segment in self.segments for name in segment]

    def homes(self, layers: Sequence[LayerNode]) -> tuple[int, ...]:
        """Slot of each layer; one that the plan did not know goes where the one before it is.

        Raises:
            InputError: There is no segment.
        """
        if not self.mapping:
            raise InputError("this decision places no layer: it has no segments")
        slots = {
            name: slot for names, slot in zip(self.segments, self.mapping, strict=True) for name in names
        }
        found: list[int] = []
        for layer in layers:
            before = found[-1] if found else self.mapping[0]
            found.append(slots.get(layer.name, before))
        return tuple(found)

    def splits(self, layers: Sequence[LayerNode], *, same_units: bool = False) -> dict[int, Split]:
        """Place of a layer -> its split, of those layers that are there; splits name these places.

        Args:
            layers: In order.
            same_units: Leave out those that have more or fewer units than when they were split.
        """
        if self.rewrite_plan is None:
            return {}
        names = self.names
        places = {layer.name: at for at, layer in enumerate(layers)}
        found = {
            places[names[split.layer]]: split
            for split in self.rewrite_plan.splits
            if names[split.layer] in places
        }
        return {
            place: replace(split, layer=place)
            for place, split in sorted(found.items())
            if not same_units or len(split.permutation) == layers[place].units
        }

    def left(self, layers: Sequence[LayerNode]) -> Decision:
        """What is left of it for these layers; splits of layers that have other units are dropped.

        Raises:
            InputError: There is no segment.
        """
        plan, names = rewrite_of(self.splits(layers, same_units=True)), [layer.name for layer in layers]
        if names == self.names:
            return self if plan == self.rewrite_plan else replace(self, rewrite_plan=plan)
        homes = self.homes(layers)
        begins = begins_of(homes)
        segments = tuple(tuple(names[a:b]) for a, b in pairwise([*begins, len(names)]))
        return replace(
            self, segments=segments, mapping=tuple(homes[at] for at in begins), rewrite_plan=plan
        )  # fmt: skip

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
            raise FileFormatError(f"this is no decision: {describe_validation_error(error)}") from error
        try:
            return cls(
                chips=tuple(read.chips),
                segments=tuple(tuple(names) for names in read.segments),
                mapping=tuple(read.mapping),
                positions_mm=tuple(read.positions_mm),
                rewrite_plan=None if read.rewrite_plan is None else RewritePlan.from_dict(read.rewrite_plan),
            )
        except InputError as error:
            raise FileFormatError(f"this is no decision: {error}") from error


def begins_of(homes: Sequence[int]) -> list[int]:
    """Places of the layers that are on another slot than the one before, and of the first."""
    return [at for at in range(len(homes)) if at == 0 or homes[at] != homes[at - 1]]


def rewrite_of(splits: Mapping[int, Split]) -> RewritePlan | None:
    """Splits by the places of their layers as a plan; None where there are none."""
    return RewritePlan(splits=tuple(splits[at] for at in sorted(splits))) if splits else None


@dataclass(frozen=True, kw_only=True)
class Priced:
    """What a decision costs.

    Attributes:
        objective: What decisions are compared by; see `hardware`.
        stats: Of the plan.
        area_mm2: Of all chips.
        chips: How many there are.
        layout: L_layout, 1 for a plain grid; see `places`.
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


def figures(priced: Priced) -> dict[str, Any]:
    """The numbers that people ask for first."""
    return {
        "latency_ms": priced.stats.total_latency_ms, "energy_mj": priced.stats.energy_mj,
        "energy_delay_mj_ms": priced.energy_delay, "area_mm2": priced.area_mm2, "chips": priced.chips,
        "objective": priced.objective,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Frozen figures that terms are taken relative to.

    Attributes:
        latency_ms: Of a batch.
        energy_mj: Of a batch.
        area_mm2: Of all chips.

    Raises:
        InputError: One is not finite and above 0.
    """

    latency_ms: float
    energy_mj: float
    area_mm2: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0.0 < value < float("inf"):
                raise InputError(f"`{name}` (={value}) of the reference must be finite and above 0")

"""Hardware decisions: chips, mapping, splits and positions, and their cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from pydantic import StrictInt, TypeAdapter, ValidationError, with_config

from sparseflow.codesign.partition.objective import HwStats
from sparseflow.codesign.workload.splits import LayerSplit, RewritePlan
from sparseflow.core.checks import check_positive
from sparseflow.core.config import StrictModel, describe_validation_error
from sparseflow.core.layers import LayerNode
from sparseflow.errors import FileFormatError, InputError


@with_config(StrictModel.model_config)
@dataclass(frozen=True, kw_only=True)
class HardwareDecision:
    """Chips, mapping, splits and positions.

    Layers are referenced by name, because pruning removes layers.

    Attributes:
        chips: Chip type of each slot; None for an empty slot.
        segments: Layer names of each segment, in order.
        mapping: Slot of each segment.
        positions_mm: Center of each slot's chip relative to the wafer center, mm.
        rewrite_plan: Splits; None without splits. Layer indices refer to the layers of all segments.

    Raises:
        InputError: Lengths differ, or a slot or layer is missing.
    """

    chips: tuple[str | None, ...]
    segments: tuple[tuple[str, ...], ...]
    mapping: tuple[StrictInt, ...]
    positions_mm: tuple[tuple[float, float], ...]
    rewrite_plan: RewritePlan | None

    def __post_init__(self) -> None:
        slots, count = len(self.chips), len(self.layer_names)
        if len(self.mapping) != len(self.segments) or len(self.positions_mm) != slots:
            raise InputError(
                f"{len(self.segments)} segments with {len(self.mapping)} slots, and {slots} chips at "
                f"{len(self.positions_mm)} positions; expected one slot per segment and one position per chip"
            )
        if any(not 0 <= slot < slots for slot in self.mapping):
            raise InputError(f"`mapping` (={list(self.mapping)}) must contain slots from 0 to {slots - 1}")
        for split in () if self.rewrite_plan is None else self.rewrite_plan.splits:
            if split.layer >= count:
                raise InputError(f"layer {split.layer} is split, but there are only {count} layers")
            if max(split.slots) >= slots:
                raise InputError(
                    f"a part of layer {split.layer} is on slot {max(split.slots)}; expected slots 0 to "
                    f"{slots - 1}"
                )

    @property
    def layer_names(self) -> list[str]:
        """Names of all layers, in order."""
        return [name for segment in self.segments for name in segment]

    def assign_layers(self, layers: Sequence[LayerNode]) -> tuple[int, ...]:
        """Slot of each layer; unknown layers go to the slot of the previous layer.

        Raises:
            InputError: There are no segments.
        """
        if not self.mapping:
            raise InputError("the decision has no segments")
        slots = {
            name: slot for names, slot in zip(self.segments, self.mapping, strict=True) for name in names
        }
        assignment: list[int] = []
        for layer in layers:
            previous = assignment[-1] if assignment else self.mapping[0]
            assignment.append(slots.get(layer.name, previous))
        return tuple(assignment)

    def select_splits(
        self, layers: Sequence[LayerNode], *, same_units: bool = False
    ) -> dict[int, LayerSplit]:
        """Layer index -> split, for the splits of existing layers, with updated indices.

        Args:
            layers: All layers, in order.
            same_units: Omit splits of layers whose number of units has changed.
        """
        if self.rewrite_plan is None:
            return {}
        names = self.layer_names
        index_of = {layer.name: position for position, layer in enumerate(layers)}
        splits = {
            index_of[names[split.layer]]: split
            for split in self.rewrite_plan.splits
            if names[split.layer] in index_of
        }
        return {
            index: replace(split, layer=index)
            for index, split in sorted(splits.items())
            if not same_units or len(split.permutation) == layers[index].units
        }

    def restrict_to(self, layers: Sequence[LayerNode]) -> HardwareDecision:
        """Restrict the decision to these layers; splits of layers with other units are dropped.

        Raises:
            InputError: There are no segments.
        """
        plan = build_rewrite_plan(self.select_splits(layers, same_units=True))
        names = [layer.name for layer in layers]
        if names == self.layer_names:
            return self if plan == self.rewrite_plan else replace(self, rewrite_plan=plan)
        assignment = self.assign_layers(layers)
        first_layers = find_segment_starts(assignment)
        segments = tuple(tuple(names[a:b]) for a, b in pairwise([*first_layers, len(names)]))
        return replace(
            self,
            segments=segments,
            mapping=tuple(assignment[index] for index in first_layers),
            rewrite_plan=plan,
        )

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types; `from_dict` reads them."""
        return _ADAPTER.dump_python(self, mode="json")

    @classmethod
    def from_dict(cls, record: object) -> HardwareDecision:
        """Read what `to_dict` returned.

        Raises:
            FileFormatError: The record is invalid.
        """
        try:
            return _ADAPTER.validate_python(record)
        except ValidationError as error:
            raise FileFormatError(f"invalid decision: {describe_validation_error(error)}") from error


_ADAPTER = TypeAdapter(HardwareDecision)


def find_segment_starts(assignment: Sequence[int]) -> list[int]:
    """Indices of the first layer and of all layers on another slot than their predecessor."""
    return [
        index for index in range(len(assignment)) if index == 0 or assignment[index] != assignment[index - 1]
    ]


def build_rewrite_plan(splits: Mapping[int, LayerSplit]) -> RewritePlan | None:
    """Combine splits by layer index into a plan; None if there are none."""
    return RewritePlan(splits=tuple(splits[layer] for layer in sorted(splits))) if splits else None


@dataclass(frozen=True, kw_only=True)
class DecisionCost:
    """Cost of a decision.

    Attributes:
        objective: The objective that decisions are compared by; see `design.hardware`.
        stats: Cost of the plan.
        area_mm2: Total chip area, mm2.
        chips: Number of chips.
        layout: L_layout, 1 for the plain grid; see `design.placement`.
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


def summarize_cost(cost: DecisionCost) -> dict[str, Any]:
    """Select the most important values, as JSON types."""
    return {
        "latency_ms": cost.stats.total_latency_ms, "energy_mj": cost.stats.energy_mj,
        "energy_delay_mj_ms": cost.energy_delay, "area_mm2": cost.area_mm2, "chips": cost.chips,
        "objective": cost.objective,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CostReference:
    """Reference values that normalize the cost terms.

    Attributes:
        latency_ms: Latency of a batch, ms.
        energy_mj: Energy of a batch, mJ.
        area_mm2: Total chip area, mm2.

    Raises:
        InputError: A value is not finite and positive.
    """

    latency_ms: float
    energy_mj: float
    area_mm2: float

    def __post_init__(self) -> None:
        check_positive(**vars(self))

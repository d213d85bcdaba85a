"""Splits of layers over several slots, and the bytes that they move.

Notation: a layer has U units (heads, hidden channels or output columns). A split consists of a permutation pi
of the units, group sizes g_1 + ... + g_G = U and G slots, the first of which is the layer's own slot. Group j
contains the g_j units that start at pi[g_1 + ... + g_{j-1}].

Each batch moves the state between consecutive layers on different slots and, for each group but the first,
the layer's input to the group's slot and the partial output back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pydantic import StrictInt, with_config

from sparseflow.core.config import StrictModel
from sparseflow.core.layers import LayerNode
from sparseflow.errors import InputError


@with_config(StrictModel.model_config)
@dataclass(frozen=True, kw_only=True)
class LayerSplit:
    """Distribution of one layer's units over slots.

    Attributes:
        layer: Index of the layer.
        permutation: All units of the layer, group after group.
        sizes: Number of units in each group.
        slots: Slot of each group; the first is the layer's own slot.

    Raises:
        InputError: The permutation is incomplete, the sizes do not add up to it, or the slots are not
            distinct or not one per group.
    """

    layer: StrictInt
    permutation: tuple[StrictInt, ...]
    sizes: tuple[StrictInt, ...]
    slots: tuple[StrictInt, ...]

    def __post_init__(self) -> None:
        values = (self.layer, *self.permutation, *self.sizes, *self.slots)
        if any(type(value) is not int for value in values):
            raise InputError(f"the split of layer {self.layer!r} must contain integers")
        prefix, units = f"the split of layer {self.layer}", len(self.permutation)
        if self.layer < 0:
            raise InputError(f"{prefix}: the layer must be at least 0")
        wrong = sorted(set(range(units)) ^ set(self.permutation))
        if wrong:
            raise InputError(
                f"{prefix}: `permutation` has {units} units and must contain each from 0 to {units - 1} "
                f"once; wrong: {', '.join(map(str, wrong[:5]))}"
            )
        if not self.sizes or min(self.sizes) < 1 or sum(self.sizes) != units:
            raise InputError(
                f"{prefix}: `sizes` (={list(self.sizes)}) must be at least 1 each and add up to {units} units"
            )
        if (
            len(self.slots) != len(self.sizes)
            or len(set(self.slots)) != len(self.slots)
            or min(self.slots) < 0
        ):
            raise InputError(
                f"{prefix}: `slots` (={list(self.slots)}) must be {len(self.sizes)} distinct slots, "
                "one for each group"
            )

    def unit_groups(self) -> tuple[tuple[int, ...], ...]:
        """Units of each group."""
        ends = [sum(self.sizes[:index]) for index in range(len(self.sizes) + 1)]
        return tuple(self.permutation[start:end] for start, end in pairwise(ends))


@with_config(StrictModel.model_config)
@dataclass(frozen=True, kw_only=True)
class RewritePlan:
    """All splits of a model, at most one per layer.

    Raises:
        InputError: A layer is split twice.
    """

    splits: tuple[LayerSplit, ...]

    def __post_init__(self) -> None:
        counts = Counter(split.layer for split in self.splits)
        duplicates = sorted(layer for layer, times in counts.items() if times > 1)
        if duplicates:
            raise InputError(
                f"layer {duplicates[0]} is split {counts[duplicates[0]]} times; expected at most once"
            )


def compute_return_bytes(layer: LayerNode, size: int, units: int) -> int:
    """Bytes that a remote part with `size` of `units` units of a layer returns."""
    return layer.split_out_bytes * size // units if layer.split_joins else layer.split_out_bytes


def unit_mismatch_error(split: LayerSplit, units: int) -> InputError:
    return InputError(
        f"the split of layer {split.layer} has {len(split.permutation)} units, but the layer has {units}; "
        "the plan belongs to another model"
    )


def check_rewrite_plan(
    layers: Sequence[LayerNode], plan: RewritePlan, assignment: Sequence[int] | None = None
) -> None:
    """Check that a plan fits the layers.

    Args:
        layers: All layers, in order.
        plan: The splits.
        assignment: Slot of each layer.

    Raises:
        InputError: A split layer is missing, not splittable or has other units, a split does not start at the
            layer's slot, or there is not one slot per layer.
    """
    if assignment is not None:
        if len(assignment) != len(layers):
            raise InputError(f"`assignment` has {len(assignment)} slots for {len(layers)} layers")
        if any(type(slot) is not int or slot < 0 for slot in assignment):
            raise InputError(f"`assignment` (={list(assignment)}) must contain integers of at least 0")
    for split in plan.splits:
        if split.layer >= len(layers):
            raise InputError(
                f"the plan splits layer {split.layer}, but the last layer is {len(layers) - 1}; it belongs "
                "to another model"
            )
        node = layers[split.layer]
        if not node.splittable:
            raise InputError(f"layer {split.layer} ({node.name}) cannot be split")
        if node.units != len(split.permutation):
            raise unit_mismatch_error(split, node.units)
        if assignment is not None and assignment[split.layer] != split.slots[0]:
            raise InputError(
                f"the split of layer {split.layer} ({node.name}) starts at slot {split.slots[0]}, but the "
                f"layer is on slot {assignment[split.layer]}; both must be equal"
            )


def compute_transfer_bytes(
    layers: Sequence[LayerNode], assignment: Sequence[int], plan: RewritePlan | None = None
) -> dict[tuple[int, int], int]:
    """Compute the bytes that a batch moves between slots.

    Args:
        layers: All layers, in order; they determine the batch size.
        assignment: Slot of each layer.
        plan: The splits.

    Returns:
        (source slot, target slot) -> bytes; pairs without traffic are omitted.

    Raises:
        InputError: See `check_rewrite_plan`.
    """
    plan = plan or RewritePlan(splits=())
    check_rewrite_plan(layers, plan, assignment)
    traffic: Counter[tuple[int, int]] = Counter()
    for layer, source, target in zip(layers, assignment, assignment[1:], strict=False):
        if source != target:
            traffic[source, target] += layer.traffic_out_bytes
    for split in plan.splits:
        node, home = layers[split.layer], split.slots[0]
        for slot, size in zip(split.slots[1:], split.sizes[1:], strict=True):
            traffic[home, slot] += node.split_in_bytes
            traffic[slot, home] += compute_return_bytes(node, size, node.units)
    return {pair: size for pair, size in traffic.items() if size}

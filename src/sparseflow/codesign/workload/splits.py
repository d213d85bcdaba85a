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
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sparseflow.core.config import describe_validation_error
from sparseflow.core.layers import LayerNode
from sparseflow.errors import FileFormatError, InputError


@dataclass(frozen=True, kw_only=True)
class Split:
    """One layer's parts.

    Attributes:
        layer: Its place among the layers.
        permutation: All of its units, group after group.
        sizes: Units of each group.
        slots: Of each group; the first is the layer's home.

    Raises:
        InputError: Units are left out or named twice, sizes do not add up to them, or slots are not as many
            as sizes, or the same twice; says of which layer.
    """

    layer: int
    permutation: tuple[int, ...]
    sizes: tuple[int, ...]
    slots: tuple[int, ...]

    def __post_init__(self) -> None:
        whole = (self.layer, *self.permutation, *self.sizes, *self.slots)
        if any(type(each) is not int for each in whole):
            raise InputError(f"the split of layer {self.layer!r} must be made of whole numbers")
        where, units = f"the split of layer {self.layer}", len(self.permutation)
        if self.layer < 0:
            raise InputError(f"{where}: layers are numbered from 0")
        wrong = sorted(set(range(units)) ^ set(self.permutation))
        if wrong:
            raise InputError(
                f"{where}: `permutation` has {units} units and must name each from 0 to {units - 1} once; "
                f"see {', '.join(map(str, wrong[:5]))}"
            )
        if not self.sizes or min(self.sizes) < 1 or sum(self.sizes) != units:
            raise InputError(
                f"{where}: `sizes` (={list(self.sizes)}) must be at least 1 each and add up to {units} units"
            )
        if (
            len(self.slots) != len(self.sizes)
            or len(set(self.slots)) != len(self.slots)
            or min(self.slots) < 0
        ):
            raise InputError(
                f"{where}: `slots` (={list(self.slots)}) must be {len(self.sizes)} different ones, numbered "
                "from 0: one for each group"
            )

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Units of each group."""
        ends = [sum(self.sizes[:at]) for at in range(len(self.sizes) + 1)]
        return tuple(self.permutation[begin:end] for begin, end in pairwise(ends))


class _SplitEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    layer: int
    permutation: list[int]
    sizes: list[int]
    slots: list[int]


class _PlanEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    splits: list[_SplitEntry]


@dataclass(frozen=True, kw_only=True)
class RewritePlan:
    """What is split.

    Attributes:
        splits: One a layer.

    Raises:
        InputError: A layer is split twice.
    """

    splits: tuple[Split, ...]

    def __post_init__(self) -> None:
        often = Counter(split.layer for split in self.splits)
        twice = sorted(layer for layer, times in often.items() if times > 1)
        if twice:
            raise InputError(f"layer {twice[0]} is split {often[twice[0]]} times; once is all there can be")

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types; `from_dict` reads them back."""
        return {
            "splits": [
                {
                    "layer": split.layer, "permutation": list(split.permutation), "sizes": list(split.sizes),
                    "slots": list(split.slots),
                }
                for split in self.splits
            ]
        }  # fmt: skip

    @classmethod
    def from_dict(cls, content: object) -> RewritePlan:
        """What `to_dict` gave.

        Raises:
            FileFormatError: A field is missing, unknown or of another type; says which.
            InputError: A split cannot be; says of which layer.
        """
        try:
            read = _PlanEntry.model_validate(content)
        except ValidationError as error:
            raise FileFormatError(
                f"a rewrite plan cannot be read: {describe_validation_error(error)}"
            ) from error
        return cls(
            splits=tuple(
                Split(
                    layer=each.layer, permutation=tuple(each.permutation), sizes=tuple(each.sizes),
                    slots=tuple(each.slots),
                )
                for each in read.splits
            )
        )  # fmt: skip


def _other_units(split: Split, units: int) -> InputError:
    return InputError(
        f"the split of layer {split.layer} has {len(split.permutation)} units and the layer {units}: the "
        "plan is for another model"
    )


def check(layers: Sequence[LayerNode], plan: RewritePlan, homes: Sequence[int] | None = None) -> None:
    """Whether a plan is one for these layers.

    Args:
        layers: In order.
        plan: What is split.
        homes: Slot of each layer.

    Raises:
        InputError: A split is of a layer that is not there, that cannot be split or has other units, or does
            not begin at home; or slots are not as many as layers.
    """
    if homes is not None:
        if len(homes) != len(layers):
            raise InputError(f"{len(homes)} slots are given for {len(layers)} layers; expected one each")
        if any(type(slot) is not int or slot < 0 for slot in homes):
            raise InputError(f"slots (={list(homes)}) must be whole numbers from 0")
    for split in plan.splits:
        if split.layer >= len(layers):
            raise InputError(
                f"the plan splits layer {split.layer} and the last is {len(layers) - 1}: it is for another "
                "model"
            )
        node = layers[split.layer]
        if not node.splittable:
            raise InputError(f"layer {split.layer} ({node.name}) cannot be split")
        if node.units != len(split.permutation):
            raise _other_units(split, node.units)
        if homes is not None and homes[split.layer] != split.slots[0]:
            raise InputError(
                f"the split of layer {split.layer} ({node.name}) begins at slot {split.slots[0]} and the "
                f"layer is on slot {homes[split.layer]}: its first slot must be the layer's"
            )


def plan_bytes(
    layers: Sequence[LayerNode], homes: Sequence[int], plan: RewritePlan | None = None
) -> dict[tuple[int, int], int]:
    """What is moved for each batch.

    Args:
        layers: In order; they say how large a batch is.
        homes: Slot of each layer.
        plan: What is split.

    Returns:
        (from slot, to slot) -> bytes; pairs that nothing moves between are left out.

    Raises:
        InputError: See `check`.
    """
    plan = plan or RewritePlan(splits=())
    check(layers, plan, homes)
    found: Counter[tuple[int, int]] = Counter()
    for layer, source, target in zip(layers, homes, homes[1:], strict=False):
        if source != target:
            found[source, target] += layer.traffic_out_bytes
    for split in plan.splits:
        node, home = layers[split.layer], split.slots[0]
        for slot, size in zip(split.slots[1:], split.sizes[1:], strict=True):
            found[home, slot] += node.split_in_bytes
            back = node.split_out_bytes
            found[slot, home] += back * size // node.units if node.split_joins else back
    return {pair: size for pair, size in found.items() if size}


"""A split layer at home: others are asked for their parts, and meanwhile its own is computed."""

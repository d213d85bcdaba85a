"""`Membranes`: the membranes of a network's neurons, read and written at each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Membranes:
    """The membranes of neurons.

    Args:
        neurons: Modules with an attribute `v`.
        starts_at_rest: Whether the network resets all of them at the start of its forward.
    """

    def __init__(self, neurons: Sequence[Any], *, starts_at_rest: bool = False) -> None:
        self._starts_at_rest = starts_at_rest
        # spikingjelly stores state in a registry, which is faster to read than neuron.v.
        self._states = [
            neuron.__dict__["_memories"] if "v" in neuron.__dict__.get("_memories", ()) else neuron.__dict__
            for neuron in neurons
        ]

    def are_at_rest(self) -> bool:
        """Return whether the network runs from rest: it was reset since its last run, or resets itself."""
        return self._starts_at_rest or not any(isinstance(state["v"], torch.Tensor) for state in self._states)

    def get(self) -> list[Any]:
        """Return the values, in the order of the neurons."""
        return [state["v"] for state in self._states]

    def set(self, values: Sequence[Any]) -> None:
        """Assign the values, in the order of the neurons."""
        for state, v in zip(self._states, values, strict=True):
            state["v"] = v

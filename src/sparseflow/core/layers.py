"""A model as a list of layers that can be run one by one, and cut into parts: what a plan is made for.

A wing that decides where layers run need not know the model. It asks for a `LayeredModel`: its layers with
what each costs, and the layers themselves, one after the other, on a state of named tensors. The state
between two layers is all that must move when they are on two devices, so its bytes are the layers' traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

LAYER_TYPES = ("embed", "attention", "mlp", "head")
"""Kinds of layer; "head" is whatever makes logits from the last state."""

PRECISIONS = ("float64", "float32", "bfloat16", "float16")
"""Dtypes of weights and activations, as torch writes them."""


@dataclass(frozen=True, kw_only=True)
class LayerNode:
    """What one layer costs for one batch, whatever it runs on.

    Attributes:
        id: Its place among the model's layers, from 0.
        name: What the model calls it, such as `"blocks.3.attention"`.
        layer_type: One of `LAYER_TYPES`.
        flops: Floating-point operations, a multiply-add counted as two; a scalar tensor where gates that are
            being trained decide how many, so that gradients reach them.
        bytes: Read and written at least: weights, inputs, outputs and what is kept in between; as `flops`.
        weight_bytes: Of parameters.
        memory_bytes: Held while it runs: weights, and the most activations at the same time.
        seq_len: Tokens of a sample.
        embed_dim: Width of a token.
        num_heads: Heads of an attention, else 0.
        mlp_ratio: Hidden channels of a perceptron over `embed_dim`, else 0.
        precision: One of `PRECISIONS`.
        batch: Samples.
        traffic_in_bytes: Of the state that it takes from the layer before (the samples, for the first).
        traffic_out_bytes: Of the state that it gives to the next (the logits, for the last).
        splittable: Whether it can be cut into parts by units, see `Splittable`.
        units: Heads, hidden channels or output columns that parts share out; 0 where it cannot be split.
        split_in_bytes: What each part that is elsewhere must be sent.
        split_out_bytes: What each such part sends back, or, where `split_joins`, all parts together.
        split_joins: Whether parts give different columns, to be put side by side, rather than terms of a sum.
    """

    id: int
    name: str
    layer_type: str
    flops: float | Tensor
    bytes: float | Tensor
    weight_bytes: int
    memory_bytes: int
    seq_len: int
    embed_dim: int
    num_heads: int
    mlp_ratio: float
    precision: str
    batch: int
    traffic_in_bytes: int
    traffic_out_bytes: int
    splittable: bool = False
    units: int = 0
    split_in_bytes: int = 0
    split_out_bytes: int = 0
    split_joins: bool = False


@runtime_checkable
class Splittable(Protocol):
    """A module whose output is a sum over units (heads, hidden channels)."""

    def slice_units(self, units: Tensor, *, bias: bool) -> nn.Module:
        """A module of the same call with some units only; the outputs of parts add up to the whole's.

        Args:
            units: Which, int64, [u]; in the order that the part shall have them.
            bias: Whether what is added whatever the units (the last bias) is in this part.
        """
        ...


class LayeredModel(Protocol):
    """A model that lists its layers and runs them one by one, in evaluation mode."""

    def describe_layers(self, batch: int) -> Sequence[LayerNode]:
        """Its layers, in order, for batches of this size."""
        ...

    def initial_state(self, samples: Tensor) -> dict[str, Tensor]:
        """The state before the first layer."""
        ...

    def run_layer(self, layer: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state after a layer; after the last one it is `{"logits": ...}`."""
        ...

    def get_layer(self, layer: int) -> nn.Module:
        """What a split of it replaces: `Splittable`, or an `nn.Linear` whose columns are shared out."""
        ...

    def unit_importance(self, layer: int) -> Tensor:
        """How much each unit of a layer that can be split counts, [units]; larger is more."""
        ...

    def replace_layer(self, layer: int, module: nn.Module) -> None:
        """Put another module of the same call in its place."""
        ...

    def select_layers(self, layers: Sequence[int], device: torch.device | str) -> LayeredModel:
        """A copy that holds what these layers need, on a device, and can run no others."""
        ...

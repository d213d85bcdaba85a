"""A model as a sequence of layers that can be run one by one and split: the input of a placement plan.

The code that decides where layers run does not need the model itself. It takes a `LayeredModel`: the cost of
each layer, and the layers, which run one after the other on a state of named tensors. The state between two
layers is all that moves if they are on different devices, so its size is the traffic between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

LAYER_TYPES = ("embed", "attention", "mlp", "head")
"""Types of layer; `"head"` computes the logits from the last state."""

PRECISIONS = ("float64", "float32", "bfloat16", "float16")
"""Dtypes of weights and activations, as PyTorch names them."""


@dataclass(frozen=True, kw_only=True)
class LayerNode:
    """Cost of one layer for one batch, independent of the device.

    Attributes:
        id: Index among the layers of the model.
        name: Name in the model, such as `"blocks.3.attention"`.
        layer_type: One of `LAYER_TYPES`.
        flops: Floating-point operations, a multiply-add counted as two. A scalar tensor with gradients if
            gates in training decide the number.
        bytes: Minimum of bytes read and written: weights, inputs, outputs and intermediate results; a tensor
            like `flops`.
        weight_bytes: Bytes of the parameters.
        memory_bytes: Peak memory while it runs: weights and live activations.
        seq_len: Tokens of a sample.
        embed_dim: Channels of a token.
        num_heads: Attention heads; 0 for other layers.
        mlp_ratio: Hidden channels of an MLP divided by `embed_dim`; 0 for other layers.
        precision: One of `PRECISIONS`.
        batch_size: Samples of the batch.
        traffic_in_bytes: Bytes of the input state (for the first layer, of the samples).
        traffic_out_bytes: Bytes of the output state (for the last layer, of the logits).
        splittable: Whether its units can be distributed, see `Splittable`.
        units: Heads, hidden channels or output columns to distribute; 0 if it cannot be split.
        split_in_bytes: Bytes sent to each remote part of a split.
        split_out_bytes: Bytes that each remote part returns; with `split_joins`, all parts together.
        split_joins: Whether the outputs of the parts are concatenated as columns; otherwise they are summed.
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
    batch_size: int
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
        """Return a module with the same interface and only the given units.

        The outputs of modules that partition the units add up to the output of the full module.

        Args:
            units: Indices of the units in their new order, int64, shape [u].
            bias: Whether to keep the final bias, which exactly one part may add.
        """
        ...


class LayeredModel(Protocol):
    """A model in evaluation mode that lists its layers and runs them one by one."""

    def describe_layers(self, batch_size: int) -> Sequence[LayerNode]:
        """Costs of the layers, in order, for batches of `batch_size` samples."""
        ...

    def initial_state(self, samples: Tensor) -> dict[str, Tensor]:
        """Input state of the first layer."""
        ...

    def run_layer(self, layer: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run a layer and return its output state; for the last layer `{"logits": ...}`."""
        ...

    def get_layer(self, layer: int) -> nn.Module:
        """Module that a split replaces: a `Splittable`, or an `nn.Linear` whose columns are distributed."""
        ...

    def unit_importance(self, layer: int) -> Tensor:
        """Importance of each unit of a splittable layer, shape [units]; larger is more important."""
        ...

    def replace_layer(self, layer: int, module: nn.Module) -> None:
        """Replace the module that `get_layer` returns."""
        ...

    def select_layers(self, layers: Sequence[int], device: torch.device | str) -> LayeredModel:
        """Return a copy on `device` that holds and runs only the given layers."""
        ...

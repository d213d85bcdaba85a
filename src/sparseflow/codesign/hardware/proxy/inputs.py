"""Layers and devices as tensors: one entry per (layer, device) combination or pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflow.codesign.hardware.proxy.device import DeviceSpec
from sparseflow.codesign.workload.layers import to_float
from sparseflow.core.layers import LAYER_TYPES, PRECISIONS, LayerNode
from sparseflow.errors import InputError

_COUNTS = ("weight_bytes", "memory_bytes", "seq_len", "embed_dim", "num_heads", "mlp_ratio", "batch_size")

_AT_LEAST_ONE = ("memory_bytes", "seq_len", "embed_dim", "batch_size")
"""The other values may be 0: gates can remove all FLOPs of a layer, and not all layers have heads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ProxyInputs:
    """Inputs of a prediction. All tensors broadcast to one shape, [L, S] or [N]; float64 unless stated.

    Attributes:
        flops: FLOPs of the layer, differentiable.
        bytes: Bytes read and written, differentiable.
        weight_bytes: Bytes of the weights.
        memory_bytes: Bytes of weights and activations.
        seq_len: Tokens per sample.
        embed_dim: Width of a token.
        num_heads: Attention heads.
        mlp_ratio: Hidden channels over `embed_dim`.
        batch_size: Batch size.
        type_index: Index in `LAYER_TYPES`, int64.
        precision: Index in `PRECISIONS`, int64.
        devices: Distinct devices.
        device: Index in `devices`, int64.
        rate: FLOP/s at the layer's precision.
        peak_flops: FLOP/s at the fastest precision of the device.
        peak_bw: Bytes/s.
        tdp_w: W.
        idle_w: W.
        cores: Number of cores; 0 if unknown.
    """

    flops: Tensor
    bytes: Tensor
    weight_bytes: Tensor
    memory_bytes: Tensor
    seq_len: Tensor
    embed_dim: Tensor
    num_heads: Tensor
    mlp_ratio: Tensor
    batch_size: Tensor
    type_index: Tensor
    precision: Tensor
    devices: tuple[DeviceSpec, ...]
    device: Tensor
    rate: Tensor
    peak_flops: Tensor
    peak_bw: Tensor
    tdp_w: Tensor
    idle_w: Tensor
    cores: Tensor

    @classmethod
    def from_grid(cls, layers: Sequence[LayerNode], devices: Sequence[DeviceSpec]) -> ProxyInputs:
        """Combine every layer with every device, [L, S].

        Raises:
            InputError: There are no layers or devices, a value of a layer is out of range, or a device has no
                rate for the precision of a layer.
        """
        return cls._build(layers, devices, torch.arange(len(devices))[None], lambda column: column[:, None])

    @classmethod
    def from_pairs(cls, layers: Sequence[LayerNode], devices: Sequence[DeviceSpec]) -> ProxyInputs:
        """Pair each layer with the device at the same index, [N].

        Raises:
            InputError: See `from_grid`; or the numbers of layers and devices differ.
        """
        if len(layers) != len(devices):
            raise InputError(f"got {len(layers)} layers and {len(devices)} devices; expected equal numbers")
        index_of = {device: index for index, device in enumerate(dict.fromkeys(devices))}
        indices = torch.tensor([index_of[device] for device in devices], dtype=torch.int64)
        return cls._build(layers, list(index_of), indices, lambda column: column)

    @classmethod
    def _build(
        cls,
        layers: Sequence[LayerNode],
        devices: Sequence[DeviceSpec],
        device: Tensor,
        reshape: Callable[[Tensor], Tensor],
    ) -> ProxyInputs:
        """Combine the reshaped columns of the layers, [L, 1] or [N], with those of the indexed devices."""
        if not layers or not devices:
            raise InputError(
                f"got {len(layers)} layers and {len(devices)} devices; expected at least one of each"
            )
        for layer in layers:
            _check_layer(layer)
        names = ("flops", "bytes", *_COUNTS)
        columns = {name: _stack_values([getattr(layer, name) for layer in layers]) for name in names}
        columns["type_index"] = torch.tensor([LAYER_TYPES.index(layer.layer_type) for layer in layers])
        columns["precision"] = torch.tensor([PRECISIONS.index(layer.precision) for layer in layers])
        columns = {name: reshape(column) for name, column in columns.items()}
        known = [dict(spec.rates) for spec in devices]
        rates = torch.tensor(
            [[row.get(name, math.nan) for name in PRECISIONS] for row in known], dtype=_DTYPE
        )
        rate = rates[device, columns["precision"]]
        for position in rate.isnan().nonzero().tolist():
            spec = devices[int(device.expand_as(rate)[tuple(position)])]
            spec.rate(layers[position[0]].precision)  # raises the error of the first unknown rate
        specs = {
            name: torch.tensor([getattr(spec, name) or 0 for spec in devices], dtype=_DTYPE)[device]
            for name in ("peak_flops", "peak_bw", "tdp_w", "idle_w", "cores")
        }
        return cls(
            **columns,
            devices=tuple(devices),
            device=device,
            rate=rate,
            **specs,
        )

    @property
    def compute_ms(self) -> Tensor:
        """Compute time at the peak rate, ms."""
        return 1e3 * self.flops / self.rate

    @property
    def memory_ms(self) -> Tensor:
        """Memory access time at the peak bandwidth, ms."""
        return 1e3 * self.bytes / self.peak_bw


_DTYPE = torch.float64


def _stack_values(values: list[float | Tensor]) -> Tensor:
    if not any(isinstance(value, Tensor) for value in values):
        return torch.tensor(values, dtype=_DTYPE)
    return torch.stack([torch.as_tensor(value, dtype=_DTYPE).cpu().reshape(()) for value in values])


def _check_layer(layer: LayerNode) -> None:
    if layer.layer_type not in LAYER_TYPES or layer.precision not in PRECISIONS:
        raise InputError(
            f"layer {layer.name} has type {layer.layer_type!r} and precision {layer.precision!r}; expected "
            f"one of {', '.join(LAYER_TYPES)} and one of {', '.join(PRECISIONS)}"
        )
    for name in ("flops", "bytes", *_COUNTS):
        value = to_float(getattr(layer, name))
        minimum = 1.0 if name in _AT_LEAST_ONE else 0.0
        if not (math.isfinite(value) and value >= minimum):
            raise InputError(
                f"`{name}` (={value}) of layer {layer.name} must be finite and at least {minimum:g}"
            )

"""Layers on devices as tensors: one entry for each layer on each device, or for each pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflow.codesign.hardware.proxy.device import DeviceSpec
from sparseflow.codesign.workload.layers import number
from sparseflow.core.layers import LAYER_TYPES, PRECISIONS, LayerNode
from sparseflow.errors import InputError

_COUNTS = ("weight_bytes", "memory_bytes", "seq_len", "embed_dim", "num_heads", "mlp_ratio", "batch")

_AT_LEAST_1 = ("memory_bytes", "seq_len", "embed_dim", "batch")
"""The others may be 0: gates may leave no operations of a layer, and not all have heads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """What is to be predicted. All tensors broadcast to one shape: [L, S] or [N].

    Attributes:
        flops: float64; gradients go to what layers hold.
        bytes: float64; as `flops`.
        weight_bytes: float64.
        memory_bytes: float64.
        seq_len: float64.
        embed_dim: float64.
        num_heads: float64.
        mlp_ratio: float64.
        batch: float64.
        kind: int64, place in `LAYER_TYPES`.
        precision: int64, place in `PRECISIONS`.
        devices: Each once.
        device: int64, place in `devices`.
        rate: FLOP/s in the layer's precision, float64.
        peak_flops: float64.
        peak_bw: float64.
        tdp_w: float64.
        idle_w: float64.
        cores: float64; 0 where unknown.
    """

    flops: Tensor
    bytes: Tensor
    weight_bytes: Tensor
    memory_bytes: Tensor
    seq_len: Tensor
    embed_dim: Tensor
    num_heads: Tensor
    mlp_ratio: Tensor
    batch: Tensor
    kind: Tensor
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
    def grid(cls, layers: Sequence[LayerNode], devices: Sequence[DeviceSpec]) -> Work:
        """Every layer on every device, [L, S].

        Raises:
            InputError: There is no layer or no device, or a layer's figures make no sense; says which.
        """
        return cls._of(layers, devices, torch.arange(len(devices))[None], lambda column: column[:, None])

    @classmethod
    def pairs(cls, layers: Sequence[LayerNode], devices: Sequence[DeviceSpec]) -> Work:
        """The first layer on the first device, the second on the second, and so on, [N].

        Raises:
            InputError: As for `grid`, or there are not as many devices as layers.
        """
        if len(layers) != len(devices):
            raise InputError(f"{len(layers)} layers and {len(devices)} devices: as many of both are needed")
        places = {device: at for at, device in enumerate(dict.fromkeys(devices))}
        which = torch.tensor([places[device] for device in devices], dtype=torch.int64)
        return cls._of(layers, list(places), which, lambda column: column)

    @classmethod
    def _of(
        cls,
        layers: Sequence[LayerNode],
        devices: Sequence[DeviceSpec],
        device: Tensor,
        shaped: Callable[[Tensor], Tensor],
    ) -> Work:
        """Columns of layers in some shape, [L, 1] or [N], beside those of devices that `device` names."""
        if not layers or not devices:
            raise InputError(
                f"{len(layers)} layers on {len(devices)} devices: at least one of both is needed"
            )
        for layer in layers:
            _check(layer)
        columns = {name: _column([getattr(layer, name) for layer in layers]) for name in ("flops", "bytes")}
        counts = torch.tensor([[getattr(layer, name) for name in _COUNTS] for layer in layers], dtype=_FLOAT)
        columns |= dict(zip(_COUNTS, counts.unbind(1), strict=True))
        columns["kind"] = torch.tensor([LAYER_TYPES.index(layer.layer_type) for layer in layers])
        columns["precision"] = torch.tensor([PRECISIONS.index(layer.precision) for layer in layers])
        columns = {name: shaped(column) for name, column in columns.items()}
        rates = torch.tensor([[each.rate(name) for name in PRECISIONS] for each in devices], dtype=_FLOAT)
        specs = torch.tensor(
            [[each.peak_flops, each.peak_bw, each.tdp_w, each.idle_w, each.cores or 0] for each in devices],
            dtype=_FLOAT,
        )
        names = ("peak_flops", "peak_bw", "tdp_w", "idle_w", "cores")
        told = dict(zip(names, specs.unbind(1), strict=True))
        return cls(
            **columns,
            devices=tuple(devices),
            device=device,
            rate=rates[device, columns["precision"]],
            **{name: column[device] for name, column in told.items()},
        )

    @property
    def compute_ms(self) -> Tensor:
        """Operations at the peak rate."""
        return 1e3 * self.flops / self.rate

    @property
    def memory_ms(self) -> Tensor:
        """Bytes at the peak rate."""
        return 1e3 * self.bytes / self.peak_bw


_FLOAT = torch.float64


def _column(values: list[float | Tensor]) -> Tensor:
    if not any(isinstance(value, Tensor) for value in values):
        return torch.tensor(values, dtype=_FLOAT)
    return torch.stack([torch.as_tensor(value, dtype=_FLOAT).cpu().reshape(()) for value in values])


def _check(layer: LayerNode) -> None:
    if layer.layer_type not in LAYER_TYPES or layer.precision not in PRECISIONS:
        raise InputError(
            f"layer {layer.name} is of the type {layer.layer_type!r} in {layer.precision!r}; expected one of "
            f"{', '.join(LAYER_TYPES)} in one of {', '.join(PRECISIONS)}"
        )
    for name in ("flops", "bytes", *_COUNTS):
        value = number(getattr(layer, name))
        least = 1.0 if name in _AT_LEAST_1 else 0.0
        if not (math.isfinite(value) and value >= least):
            raise InputError(
                f"`{name}` (={value}) of layer {layer.name} must be finite and at least {least:g}"
            )

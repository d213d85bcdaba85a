"""Input features of the proxy: one vector per layer and device.

Besides the specifications of layer and device, the features describe effects that make small layers slower
than FLOPs and bytes suggest. GPUs compute matrix products in tiles of 128 x 128, as many at a time as there
are multiprocessors; each such round is a wave, and an incomplete last wave takes as long as a full one. The
shapes of the products follow from the layer's FLOPs (a multiply-add counts as two) and `inner`: values of a
patch, heads times head width, hidden channels, or classes.

Gradients flow through FLOPs and bytes. Features from tile counts are constants, because their gradients are
those of a sawtooth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflow.codesign.hardware.chips import ChipType
from sparseflow.codesign.hardware.proxy.device import DeviceSpec
from sparseflow.codesign.hardware.proxy.inputs import ProxyInputs
from sparseflow.core.layers import LAYER_TYPES, PRECISIONS, LayerNode

FEATURES = (
    "log10_flops",
    "log10_bytes",
    "log10_peak_flops",
    "log10_peak_bw",
    *(f"is_{name}" for name in LAYER_TYPES),
    "embed_dim/1024",
    "num_heads/16",
    "mlp_ratio/4",
    "seq_len/1024",
    *(f"is_{name}" for name in PRECISIONS),
    "log2_batch/8",
    "log10_compute/memory",
    "log10_rows",
    "log10_seq_len",
    "log10_embed_dim",
    "log10_inner",
    "core_share",
    "head_dim/128",
    "head_padding",
    "log2_waves_first/8",
    "log2_waves_second/8",
    "log2_waves_core/8",
    "lost_waves_first",
    "lost_waves_second",
    "lost_waves_core",
    "lost_rows",
    "lost_columns",
    "log10_tiled",
    "unaligned_8",
    "unaligned_64",
)
"""Names of the columns."""

TILE = 128
_HEAD_STEP = 32
"""Attention kernels pad the head width to multiples of this."""

_TILE_TOLERANCE = 1e-3
"""Fraction of a tile; small differences in FLOP counts must not start another tile."""


def build_layer_features(layer: LayerNode, device: DeviceSpec | ChipType) -> Tensor:
    """Compute the feature vector of a layer on a device.

    Returns:
        float64 [len(FEATURES)]; differentiable with respect to the layer's `flops` and `bytes`.

    Raises:
        InputError: A value of the layer is out of range.
    """
    return compute_features(ProxyInputs.from_pairs([layer], [DeviceSpec.from_chip(device)]))[0]


def compute_features(work: ProxyInputs) -> Tensor:
    """Compute the feature vectors, float64 [..., len(FEATURES)]."""
    embed, attention, mlp, head = (work.type_index == index for index in range(len(LAYER_TYPES)))
    rows, dim, seq = work.batch_size * work.seq_len, work.embed_dim, work.seq_len
    # FLOPs per unit of `inner`.
    flops_per_inner = torch.where(attention, rows * (8.0 * dim + 4.0 * seq), 2.0 * rows * dim)
    flops_per_inner = torch.where(
        mlp, 2.0 * flops_per_inner, torch.where(head, 2.0 * work.batch_size * dim, flops_per_inner)
    )
    # Gates may remove all FLOPs of a layer.
    flops, moved = work.flops.clamp_min(1.0), work.bytes.clamp_min(1.0)
    inner = flops / flops_per_inner
    balance = flops / work.rate * work.peak_bw / moved
    columns = [
        torch.log10(flops), torch.log10(moved), torch.log10(work.peak_flops),
        torch.log10(work.peak_bw), embed, attention, mlp, head, dim / 1024.0, work.num_heads / 16.0,
        work.mlp_ratio / 4.0, seq / 1024.0, *(work.precision == index for index in range(len(PRECISIONS))),
        torch.log2(work.batch_size) / 8.0, torch.log10(balance), torch.log10(rows),
        torch.log10(seq), torch.log10(dim), torch.log10(inner),
        torch.where(attention, 4.0 * seq / (8.0 * dim + 4.0 * seq), 0.0),
        *_tile_features(work, inner.detach()),
    ]  # fmt: skip
    return torch.stack(torch.broadcast_tensors(*(column.double() for column in columns)), -1)


def _tile_features(work: ProxyInputs, inner: Tensor) -> list[Tensor]:
    """Features from tiles, waves and alignment."""
    embed, attention, mlp, head = (work.type_index == index for index in range(len(LAYER_TYPES)))
    rows, dim, zero = work.batch_size * work.seq_len, work.embed_dim, torch.zeros(())
    width = torch.where(attention, inner / work.num_heads.clamp_min(1.0), zero)
    padded = _ceil_tiles(width / _HEAD_STEP) * _HEAD_STEP

    # (m, n, k) of the first product; the second is optional.
    m = torch.where(head, work.batch_size, rows)
    n = torch.where(attention, 3.0 * inner, torch.where(embed, dim, inner))
    k = torch.where(embed, inner, dim)
    has_second = attention | mlp
    first = _ceil_tiles(m / TILE) * _ceil_tiles(n / TILE)
    second = torch.where(has_second, _ceil_tiles(m / TILE) * _ceil_tiles(dim / TILE), zero)
    core = torch.where(attention, work.batch_size * work.num_heads * _ceil_tiles(work.seq_len / TILE), zero)

    known = work.cores > 0.0
    cores = torch.where(known, work.cores, 1.0)
    waves = [torch.where(known & (tiles > 0.0), tiles / cores, 1.0) for tiles in (first, second, core)]
    full_waves = [_ceil_tiles(wave) for wave in waves]
    wave_loss = [torch.log2(_ceil_tiles(wave.clamp_min(1.0)) / wave.clamp_min(1.0)) for wave in waves]

    wave_flops = 2.0 * TILE * TILE * cores
    attention_flops = 4.0 * rows * work.seq_len * inner
    tiled_flops = full_waves[0] * k * wave_flops + torch.where(
        has_second, full_waves[1] * inner * wave_flops, zero
    )
    tiled_flops = tiled_flops + torch.where(
        attention, attention_flops * full_waves[2] / waves[2] * padded / width.clamp_min(1e-9), zero
    )
    ratio = torch.where(known, tiled_flops / work.flops.detach().clamp_min(1.0), 1.0)
    return [
        width / 128.0,
        torch.log2(torch.where(width > 0.0, padded / width, 1.0)),
        *(torch.log2(wave) / 8.0 for wave in waves),
        *wave_loss,
        torch.log2(_ceil_tiles(m / TILE) * TILE / m),
        torch.log2(_ceil_tiles(n / TILE) * TILE / n),
        torch.log10(ratio),
        _is_unaligned(inner, dim, 8.0),
        _is_unaligned(inner, dim, 64.0),
    ]


def _ceil_tiles(value: Tensor) -> Tensor:
    return torch.ceil(value - _TILE_TOLERANCE).clamp_min(1.0)


def _is_unaligned(inner: Tensor, dim: Tensor, step: float) -> Tensor:
    """Whether a side of a product is not a multiple of `step`."""
    misaligned = [(side / step - torch.round(side / step)).abs() > _TILE_TOLERANCE for side in (inner, dim)]
    return misaligned[0] | misaligned[1]

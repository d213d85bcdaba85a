"""What the proxy reads of a layer on a device: one vector, the same every time.

Beside what the layer and the device say of themselves there is what makes small layers on GPUs take longer
than operations and bytes do: matrix products run in tiles of 128 by 128, so many at a time as there are
multiprocessors, and the last round of tiles takes as long as a full one. `waves` are such rounds. What the
products are follows from the layer's operations, which are those of its products, a multiply-add counted as
two; `inner` is what they leave open: values of a patch, heads times their width, hidden channels, or classes.

Gradients go through operations and bytes; whatever comes from counting tiles is a constant to them, since its
slopes are those of a saw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflow.codesign.hardware.chips import ChipType
from sparseflow.codesign.hardware.proxy.device import DeviceSpec
from sparseflow.codesign.hardware.proxy.inputs import Work
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
"""Attention kernels come in widths of a head that are multiples of this; others are padded."""

_ROUNDING = 1e-3
"""Of a tile; operations that are counted a little differently must not begin another tile."""


def build_layer_features(layer: LayerNode, device: DeviceSpec | ChipType) -> Tensor:
    """The vector of a layer on a device, float64, [len(FEATURES)]; gradients go to its flops and bytes.

    Raises:
        InputError: The layer's figures make no sense.
    """
    return features(Work.pairs([layer], [DeviceSpec.of(device)]))[0]


def features(work: Work) -> Tensor:
    """The vectors of much work, float64, [..., len(FEATURES)]."""
    embed, attention, mlp, head = (work.kind == at for at in range(len(LAYER_TYPES)))
    rows, dim, seq = work.batch * work.seq_len, work.embed_dim, work.seq_len
    # Operations for each value of `inner`.
    each = torch.where(attention, rows * (8.0 * dim + 4.0 * seq), 2.0 * rows * dim)
    each = torch.where(mlp, 2.0 * each, torch.where(head, 2.0 * work.batch * dim, each))
    # Gates may leave nothing of a layer, which has no logarithm.
    flops, moved = work.flops.clamp_min(1.0), work.bytes.clamp_min(1.0)
    inner = flops / each
    balance = flops / work.rate * work.peak_bw / moved
    columns = [
        torch.log10(flops), torch.log10(moved), torch.log10(work.peak_flops),
        torch.log10(work.peak_bw), embed, attention, mlp, head, dim / 1024.0, work.num_heads / 16.0,
        work.mlp_ratio / 4.0, seq / 1024.0, *(work.precision == at for at in range(len(PRECISIONS))),
        torch.log2(work.batch) / 8.0, torch.log10(balance), torch.log10(rows),
        torch.log10(seq), torch.log10(dim), torch.log10(inner),
        torch.where(attention, 4.0 * seq / (8.0 * dim + 4.0 * seq), 0.0),
        *_tiles(work, inner.detach()),
    ]  # fmt: skip
    return torch.stack(torch.broadcast_tensors(*(column.double() for column in columns)), -1)


def _tiles(work: Work, inner: Tensor) -> list[Tensor]:
    """What comes from tiles, waves and alignment."""
    embed, attention, mlp, head = (work.kind == at for at in range(len(LAYER_TYPES)))
    rows, dim, zero = work.batch * work.seq_len, work.embed_dim, torch.zeros(())
    width = torch.where(attention, inner / work.num_heads.clamp_min(1.0), zero)
    padded = _ceil(width / _HEAD_STEP) * _HEAD_STEP

    # (m, n, k) of the first product, and of the second where there is one.
    m = torch.where(head, work.batch, rows)
    n = torch.where(attention, 3.0 * inner, torch.where(embed, dim, inner))
    k = torch.where(embed, inner, dim)
    two = attention | mlp
    first = _ceil(m / TILE) * _ceil(n / TILE)
    second = torch.where(two, _ceil(m / TILE) * _ceil(dim / TILE), zero)
    core = torch.where(attention, work.batch * work.num_heads * _ceil(work.seq_len / TILE), zero)

    known = work.cores > 0.0
    cores = torch.where(known, work.cores, 1.0)
    waves = [torch.where(known & (tiles > 0.0), tiles / cores, 1.0) for tiles in (first, second, core)]
    full = [_ceil(wave) for wave in waves]
    lost = [torch.log2(_ceil(wave.clamp_min(1.0)) / wave.clamp_min(1.0)) for wave in waves]

    whole = 2.0 * TILE * TILE * cores
    attending = 4.0 * rows * work.seq_len * inner
    tiled = full[0] * k * whole + torch.where(two, full[1] * inner * whole, zero)
    tiled = tiled + torch.where(
        attention, attending * full[2] / waves[2] * padded / width.clamp_min(1e-9), zero
    )
    ratio = torch.where(known, tiled / work.flops.detach().clamp_min(1.0), 1.0)
    return [
        width / 128.0,
        torch.log2(torch.where(width > 0.0, padded / width, 1.0)),
        *(torch.log2(wave) / 8.0 for wave in waves),
        *lost,
        torch.log2(_ceil(m / TILE) * TILE / m),
        torch.log2(_ceil(n / TILE) * TILE / n),
        torch.log10(ratio),
        _unaligned(inner, dim, 8.0),
        _unaligned(inner, dim, 64.0),
    ]


def _ceil(value: Tensor) -> Tensor:
    return torch.ceil(value - _ROUNDING).clamp_min(1.0)


def _unaligned(inner: Tensor, dim: Tensor, step: float) -> Tensor:
    """Whether a side of a product is no multiple of `step`."""
    off = [(side / step - torch.round(side / step)).abs() > _ROUNDING for side in (inner, dim)]
    return off[0] | off[1]

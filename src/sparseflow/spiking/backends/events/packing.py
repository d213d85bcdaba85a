"""Layout of a group's weights and bias for the event kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sparseflow.spiking.backends.events.format import allocate_aligned_zeros, get_array_address
from sparseflow.spiking.backends.events.kernels.convolution import VECTOR_CHOICES
from sparseflow.spiking.backends.events.kernels.llvm import LANES, VECTOR_BYTES, get_cpu_features
from sparseflow.spiking.backends.events.kernels.records import SOURCE
from sparseflow.spiking.backends.spec import GroupSpec, SpikeSource

_CACHE_BYTES = 640 << 10
"""Size limit of the weights of one tile of output channels: most of a level-2 cache."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedWeights:
    """Weights and bias, cut into tiles of output channels.

    Attributes:
        channels: Output channels.
        vectors: Vectors of 16 output channels per tile.
        tiles: Number of tiles.
        weights: For each source, float32 [tiles, k * k * C_in + 1, 16 * vectors].
        sources: One `records.SOURCE` per source, complete except for its events.
        bias: float32 [tiles * 16 * vectors].
    """

    channels: int
    vectors: int
    tiles: int
    weights: tuple[np.ndarray, ...]
    sources: np.ndarray
    bias: np.ndarray


def choose_vectors(sources: Sequence[SpikeSource], channels: int) -> int:
    """Choose the number of vectors of 16 output channels per tile."""
    if not sources:
        return -(-channels // LANES)
    taps = sum(s.weight.shape[1] * s.weight.shape[2] * s.weight.shape[3] for s in sources)
    max_vectors = 8 if "avx512f" in get_cpu_features() else 4
    choices = [v for v in VECTOR_CHOICES if v <= max_vectors and taps * v * VECTOR_BYTES <= _CACHE_BYTES]

    def cost(vectors: int) -> float:
        # Each tile walks all events, which costs about as much as one more vector.
        return -(-channels // (LANES * vectors)) * (vectors + 1)

    return min(choices or [1], key=cost)


def pack_weight(weight: torch.Tensor, lanes: int) -> np.ndarray:
    """Convert [C_out, C_in, k, k] to [tile, k * k * C_in + 1, lanes], aligned to 64 bytes.

    The rows of a tile are its weights for each (dx, dy, c), zero beyond C_out; the last row is zero.
    """
    c_out, c_in, k, _ = weight.shape
    tiles, taps = -(-c_out // lanes), k * k * c_in
    packed = allocate_aligned_zeros(tiles * (taps + 1) * lanes, np.float32).reshape(tiles, taps + 1, lanes)
    padded = torch.zeros(tiles * lanes, c_in, k, k)
    padded[:c_out] = weight.detach().float().cpu()
    rows = padded.unflatten(0, (tiles, lanes)).permute(0, 4, 3, 2, 1).reshape(tiles, taps, lanes)
    packed[:, :taps] = rows.numpy()
    return packed


def pack_group(spec: GroupSpec, sources: Sequence[SpikeSource]) -> PackedWeights:
    """Pack a group whose convolutions `sources` run on events."""
    channels = int(spec.bias.shape[0])
    vectors = choose_vectors(sources, channels)
    lanes = LANES * vectors
    tiles = -(-channels // lanes)
    weights = tuple(pack_weight(s.weight, lanes) for s in sources)
    records = np.zeros(max(len(sources), 1), dtype=SOURCE)
    for record, source, packed in zip(records, sources, weights, strict=False):
        record["channels"], record["kernel"] = source.weight.shape[1:3]
        record["stride"], record["padding"] = source.stride, source.padding
        record["weight"], record["tile_bytes"] = get_array_address(packed), packed[0].nbytes
    bias = allocate_aligned_zeros(tiles * lanes, np.float32)
    bias[:channels] = spec.bias.detach().float().cpu().numpy()
    return PackedWeights(
        channels=channels, vectors=vectors, tiles=tiles, weights=weights, sources=records, bias=bias
    )

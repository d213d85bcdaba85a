"""Tile variants of the Hopper kernel, ranked by an estimate of their time.

`estimate_us` is a model of one kernel launch, with constants measured on an H200: how many warpgroups share
an SM, their combined rate, and how many rounds of tiles the busiest SM runs. On the measured layers its
first choice is at most a few percent slower than the best; timing a few variants settles the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparseflow.spiking.backends.packed.format import BLOCK, count_blocks
from sparseflow.spiking.backends.packed.words import choose_time_chunk
from sparseflow.spiking.backends.spec import GroupSpec

SHARED_BYTES = 227 * 1024
"""Shared memory of a Hopper SM that CTAs can use."""

_SMS = 132
"""Streaming multiprocessors of the GPU on which the constants below were measured."""

_RATE = {1: 4.5, 2: 5.4, 3: 5.4, 4: 5.5}
"""TFLOP/s of one SM's tensor cores by the number of warpgroups that feed it."""

_START_US = 2.5
"""Launch, first weights, and neurons of the last tile."""

_NEURON_US = 0.1
"""Neurons of 64 pixels, 64 channels and one time step."""

_SHARE_US = 5.0
"""Adding partial sums: once, and once more per wave of CTAs."""


MAX_SPLIT_UNITS = 3
"""Maximum units of a K batch if weights come in parts. Tensor cores truncate when they add: this many
consecutive units cost a sum about 1e-7 of its size; nine cost several times that if a few weights dominate.
tests/spiking/backends/packed/test_accuracy.py models the hardware.
"""


@dataclass(frozen=True, kw_only=True)
class HopperVariant:
    """Tile sizes of the kernel; all variants give the same result.

    Attributes:
        bm: Rows of a tile: pixels, times the time steps laid out along the rows (`pair`).
        bn: Output channels of a tile, 64 or 128.
        tc: Time steps whose sums are held at once; each weight is read T / tc times per tile.
        ub: Units of a K batch: 3 or 9 taps, or blocks of a 1x1.
        ring: K batches held in shared memory.
        warps: Warps per CTA.
        split: CTAs that share one tile's K loop.
        ctas: CTAs per SM; 0 starts one CTA per tile instead of persistent ones.
        pair: Time steps along the rows of a tile, 1 or 2. With 2, a tile has half the pixels and its sums
            half the registers, for the same reuse of weights.
    """

    bm: int = 64
    bn: int = 64
    tc: int = 4
    ub: int = 3
    ring: int = 3
    warps: int = 4
    split: int = 1
    ctas: int = 2
    pair: int = 1

    @property
    def name(self) -> str:
        """Unique name such as `m64n64t4u3r3w4s1c2`, with suffix `p2` if time steps are paired."""
        name = f"m{self.bm}n{self.bn}t{self.tc}u{self.ub}r{self.ring}w{self.warps}s{self.split}c{self.ctas}"
        return name + (f"p{self.pair}" if self.pair > 1 else "")

    @property
    def max_registers(self) -> int | None:
        """Registers per thread with which `ctas` CTAs fit on an SM; None if 255 fit."""
        limit = 65536 // (max(self.ctas, 1) * self.warps * 32) // 8 * 8
        return limit if limit < 248 else None

    @property
    def pixels(self) -> int:
        """Output pixels of a tile."""
        return self.bm // self.pair

    @property
    def activity_tile(self) -> int:
        """Pixels per activity word of the output: those of one warp."""
        return 16 // self.pair


def count_units(spec: GroupSpec) -> tuple[int, int]:
    """Count the K steps (units) of the first and the second source."""
    first = spec.sources[0].weight
    second = count_blocks(spec.sources[1].weight.shape[1]) if len(spec.sources) > 1 else 0
    return count_blocks(first.shape[1]) * first.shape[-1] ** 2, second


def list_hopper_variants(
    spec: GroupSpec, *, T: int, N: int, H: int, W: int, parts: int = 1
) -> list[HopperVariant]:
    """List the variants that fit, ordered by `estimate_us`.

    Args:
        spec: The group.
        T: Time steps.
        N: Images.
        H: Output rows.
        W: Output columns.
        parts: See `PackedGroup`.
    """
    taps = spec.sources[0].weight.shape[-1] ** 2
    candidates = _list_3x3_candidates(spec, T, parts) if taps == 9 else _list_1x1_candidates(spec, T, parts)
    fitted = [_fit_variant(spec, variant, T=T, parts=parts) for variant in candidates]
    variants = dict.fromkeys(variant for variant in fitted if variant is not None)
    return sorted(variants, key=lambda v: estimate_us(spec, v, T=T, N=N, H=H, W=W, parts=parts))


_Row = tuple[bool, int, int, int, int, int, int, int, int, int]
"""Condition, and the fields of a `HopperVariant`: bm, bn, tc, ub, ring, warps, split, ctas, pair."""


def _list_3x3_candidates(spec: GroupSpec, T: int, parts: int) -> list[HopperVariant]:
    units, units2 = count_units(spec)
    tc = choose_time_chunk(T)
    nine = units // 9  # batches of nine taps
    single, in_parts, wide = not units2, parts > 1, spec.sources[0].weight.shape[0] % 128 == 0
    return _select_rows([
        (single, 128, 64, 1, 9, nine, 8, 1, 2, 1),
        (single, 64, 64, 1, 9, nine, 4, 1, 3, 1),
        (single, 128, 64, 1, 9, nine, 8, 1, 1, 1),
        (single and in_parts, 128, 64, 1, 3, 3 * nine, 8, 1, 1, 1),
        (tc > 1, 64, 64, 2, 3, 3, 4, 1, 3, 1),
        (tc > 1, 64, 64, 2, 3, 4, 4, 1, 2, 1),
        (tc == 4, 64, 64, 4, 3, 3, 4, 1, 3, 2),
        (tc == 4, 64, 64, 4, 3, 3, 4, 1, 0, 2),
        (tc == 4, 128, 64, 4, 3, 4, 8, 1, 1, 2),
        # Weights in parts: longer rings would not fit twice.
        (tc == 4 and in_parts, 64, 64, 4, 3, 2, 4, 1, 2, 2),
        (tc == 4 and in_parts, 64, 64, 4, 3, 2, 4, 1, 0, 2),
        (tc == 4 and in_parts and wide, 128, 128, 2, 3, 2, 8, 1, 1, 2),
        (T % 8 == 0, 64, 64, 8, 3, 4, 4, 1, 2, 2),
        (T % 8 == 0, 64, 64, 8, 3, 4, 4, 1, 0, 2),
        (True, 64, 64, tc, 3, 4, 4, 1, 2, 1),
        (True, 64, 64, tc, 3, 4, 4, 1, 0, 1),
        (True, 128, 64, tc, 3, 6, 8, 1, 1, 1),
        (wide and tc >= 2, 64, 128, 2, 3, 2, 4, 1, 2, 1),
        (wide and tc == 4, 64, 128, 4, 3, 2, 4, 1, 2, 2),
        (wide and tc == 4, 64, 128, 4, 3, 2, 4, 1, 0, 2),
        (True, 64, 64, tc, 3, 4, 4, 2, 0, 2 if tc == 4 else 1),
        (True, 64, 64, tc, 3, 4, 4, 4, 0, 2 if tc == 4 else 1),
        (True, 64, 64, tc, 3, 4, 4, 2, 0, 1),
    ])  # fmt: skip


def _list_1x1_candidates(spec: GroupSpec, T: int, parts: int) -> list[HopperVariant]:
    units, units2 = count_units(spec)
    tc = choose_time_chunk(T)
    ub = next(u for u in ((4, 2, 1) if parts == 1 else (2, 1)) if units % u == 0)
    single, in_parts, wide = not units2, parts > 1, spec.sources[0].weight.shape[0] % 128 == 0
    pair = 2 if in_parts and tc == 4 else 1
    return _select_rows([
        (single, 128, 64, 1, ub, units // ub, 8, 1, 2, 1),
        (single, 64, 64, 1, ub, units // ub, 4, 1, 4, 1),
        (True, 64, 64, tc, ub, 12 // ub, 4, 1, 2, 1),
        (True, 64, 64, tc, ub, 12 // ub, 4, 1, 0, 1),
        (True, 128, 64, tc, ub, 20 // ub, 8, 1, 1, 1),
        (tc == 4, 64, 64, 4, ub, 8 // ub, 4, 1, 3, 2),
        (tc == 4, 64, 64, 4, ub, 8 // ub, 4, 1, 0, 2),
        (tc == 4 and in_parts, 64, 64, 4, ub, 6 // ub, 4, 1, 2, 2),
        (tc == 4 and in_parts, 128, 64, 4, ub, 12 // ub, 8, 1, 1, 2),
        (T % 8 == 0, 64, 64, 8, ub, 12 // ub, 4, 1, 2, 2),
        (wide and tc >= 2, 64, 128, 2, ub, 6 // ub, 4, 1, 2, 1),
        (True, 64, 64, tc, ub, 12 // ub, 4, 2, 0, pair),
        (True, 64, 64, tc, ub, 12 // ub, 4, 4, 0, pair),
    ])  # fmt: skip


def _select_rows(rows: list[_Row]) -> list[HopperVariant]:
    return [
        HopperVariant(bm=bm, bn=bn, tc=tc, ub=ub, ring=ring, warps=warps, split=split, ctas=ctas, pair=pair)
        for condition, bm, bn, tc, ub, ring, warps, split, ctas, pair in rows
        if condition
    ]


def _fit_variant(spec: GroupSpec, v: HopperVariant, *, T: int, parts: int) -> HopperVariant | None:
    """Limit the ring of a variant to shared memory; None if the variant does not fit or cannot pay off."""
    units, units2 = count_units(spec)
    if units % v.ub or T % v.tc or v.tc % v.pair or (spec.skips and v.bn > BLOCK):
        return None
    batches = units // v.ub + units2
    batch_bytes = v.ub * parts * v.bn * 2 * BLOCK
    max_ring = (SHARED_BYTES // max(v.ctas, 1) - 2048) // batch_bytes
    v = replace(v, ring=min(v.ring, max_ring, -(-batches // v.split)))
    # Single time steps pay off only if the weights stay resident.
    reuses_weights = v.tc > 1 or v.ring == batches
    splits_evenly = v.split == 1 or (v.tc == T and batches >= 2 * v.split)
    accumulators = v.tc // v.pair * v.bn
    if parts > 1:
        # The sums of a batch and of all batches must both fit into registers.
        too_large = v.ub > MAX_SPLIT_UNITS or accumulators > 2 * BLOCK
        if too_large or v.ctas > count_resident_ctas(v, accumulators, parts):
            return None
    fits = v.ring > 1 or (v.ring == 1 and batches == 1)
    return v if fits and reuses_weights and splits_evenly else None


def estimate_us(
    spec: GroupSpec, v: HopperVariant, *, T: int, N: int, H: int, W: int, parts: int = 1
) -> float:
    """Estimate the time of a variant in microseconds; only for comparing variants.

    Args:
        spec: The group.
        v: The variant.
        T: Time steps.
        N: Images.
        H: Output rows.
        W: Output columns.
        parts: See `PackedGroup`.
    """
    units, units2 = count_units(spec)
    tiles, columns = -(-N * H * W // v.pixels), spec.sources[0].weight.shape[0] // v.bn
    groups = v.warps // 4  # warpgroups of a CTA
    flops = 2.0 * 64 * v.bn * (units + units2) * BLOCK * parts * T / v.pair / v.split
    sums = v.tc // v.pair * v.bn  # accumulators of a pixel: what limits CTAs by registers, and hides latency
    fit = count_resident_ctas(v, sums, parts)

    def wave(ctas: int) -> float:
        """Time of one tile for each of `ctas` CTAs of an SM."""
        feeding = ctas * groups
        rate = _RATE[min(feeding, 4)]
        if v.bn == 128:
            rate *= 1.1  # each unpacked spike is used twice
        if feeding < 3 and sums < 256:
            rate *= 0.95
        return feeding * (flops / rate / 1e6 + _NEURON_US * T * v.bn / BLOCK / v.pair)

    if v.ctas:
        walkers = min(tiles, max(1, _SMS * min(v.ctas, fit) // (columns * v.split)))
        return _START_US + -(-tiles // walkers) * wave(-(-walkers * columns // _SMS))
    total, remaining = _START_US, tiles * columns * v.split
    if v.split > 1:
        total += _SHARE_US * (1 + remaining / _SMS)
    while remaining > 0:
        wave_ctas = min(remaining, _SMS * fit)
        total += wave(-(-wave_ctas // _SMS))
        remaining -= wave_ctas
    return total


def count_resident_ctas(v: HopperVariant, sums: int, parts: int) -> int:
    """Count the CTAs of a variant that fit on an SM."""
    accumulators = sums if parts == 1 else 2 * sums  # those of a batch plus those of all batches
    groups = 2 if accumulators > 128 else 3 if accumulators > 64 else 4
    by_registers = max(1, groups * 4 // v.warps)
    by_memory = SHARED_BYTES // (v.ring * v.ub * parts * v.bn * 2 * BLOCK + 2048)
    return max(1, min(by_registers, by_memory))

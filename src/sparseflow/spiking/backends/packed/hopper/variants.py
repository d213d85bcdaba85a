"""How the Hopper kernel may cut a group's work, and which cut is likely the fastest.

`estimate_us` is a small model of one kernel launch, with constants measured on an H200: how many warpgroups
share an SM, what they reach together, and how many rounds of tiles the fullest SM works through. On the
measured layers its first choice is at most a few percent behind the best; `autotune` settles the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparseflow.spiking.backends.packed.format import BLOCK, blocks_of
from sparseflow.spiking.backends.spec import GroupSpec

SHARED_BYTES = 227 * 1024
"""Shared memory of a Hopper SM that CTAs can use."""

H200_SMS = 132
"""Streaming multiprocessors of the GPU that the constants below were measured on."""

_RATE = {1: 4.5, 2: 5.4, 3: 5.4, 4: 5.5}
"""TFLOP/s of one SM's tensor cores by the number of warpgroups that feed it."""

_START_US = 2.5
"""Launch, the first weights, the last tile's neurons."""

_NEURON_US = 0.1
"""Neurons of 64 pixels, 64 channels and one time step."""

_SHARE_US = 5.0
"""Adding partial sums: once, and once more for every wave of CTAs."""


CHAIN = 3
"""Units of a K batch, at most, where weights come in parts. Tensor cores truncate when they add: with so many
units in a row that costs a sum about 1e-7 of its size, with nine several times that where a few weights dwarf
the rest. tests/spiking/kernels/test_packed_accuracy.py models the hardware."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How the kernel cuts the work; every choice gives the same result.

    Attributes:
        bm: Rows of a tile: pixels, times the time steps that lie along the rows (`pair`).
        bn: Output channels of a tile, 64 or 128.
        tc: Time steps whose sums are held at once; each weight is read T / tc times a tile.
        ub: Units of a K batch: 3 or 9 taps, or blocks of a 1x1.
        ring: K batches held in shared memory.
        warps: Warps of a CTA.
        split: CTAs that share one tile's K loop.
        ctas: CTAs an SM; 0 starts one CTA a tile instead of persistent ones.
        pair: Time steps along the rows of a tile, 1 or 2. With 2 a tile has half the pixels and its sums
            half the registers, for the same use of every weight.
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
        """A short unique name, `m64n64t4u3r3w4s1c2`, with `p2` behind it where time steps are paired."""
        name = f"m{self.bm}n{self.bn}t{self.tc}u{self.ub}r{self.ring}w{self.warps}s{self.split}c{self.ctas}"
        return name + (f"p{self.pair}" if self.pair > 1 else "")

    @property
    def max_registers(self) -> int | None:
        """Registers a thread may use so that `ctas` CTAs fit on an SM; None where 255 do not hurt."""
        limit = 65536 // (max(self.ctas, 1) * self.warps * 32) // 8 * 8
        return limit if limit < 248 else None

    @property
    def pixels(self) -> int:
        """Output pixels of a tile."""
        return self.bm // self.pair


def units_of(spec: GroupSpec) -> tuple[int, int]:
    """K steps (units) of the first and the second source."""
    first = spec.sources[0].weight
    second = blocks_of(spec.sources[1].weight.shape[1]) if len(spec.sources) > 1 else 0
    return blocks_of(first.shape[1]) * first.shape[-1] ** 2, second


def variants(spec: GroupSpec, *, T: int, N: int, H: int, W: int, parts: int = 1) -> list[Variant]:
    """Tunable configurations that fit, the one that `estimate_us` likes best first.

    Args:
        spec: The group.
        T: Time steps.
        N: Images.
        H: Output rows.
        W: Output columns.
        parts: See `prepare_group`.
    """
    units, units2 = units_of(spec)
    taps = spec.sources[0].weight.shape[-1] ** 2
    c_out = spec.sources[0].weight.shape[0]
    tc = next(c for c in (4, 2, 1) if T % c == 0)
    wide = c_out % 128 == 0
    found: list[Variant] = []

    def add(**kw: int) -> None:
        v = Variant(**kw)
        if units % v.ub or T % v.tc or v.tc % v.pair or (spec.skips and v.bn > BLOCK):
            return
        batches = units // v.ub + units2
        batch_bytes = v.ub * parts * v.bn * 2 * BLOCK
        room = (SHARED_BYTES // max(v.ctas, 1) - 2048) // batch_bytes
        v = replace(v, ring=min(v.ring, room, -(-batches // v.split)))
        keeps = v.tc > 1 or v.ring == batches  # one time step at a time pays only when the weights stay
        shares = v.split == 1 or (v.tc == T and batches >= 2 * v.split)
        held = v.tc // v.pair * v.bn
        if parts > 1 and (v.ub > CHAIN or held > 2 * BLOCK or v.ctas > _resident(v, held, parts)):
            return  # the sums of a batch and those of all batches would not both fit into registers
        if v.ring > 0 and keeps and shares and (v.ring > 1 or batches == 1) and v not in found:
            found.append(v)

    if taps == 9:
        every = units // 9  # batches of nine taps
        if not units2:
            add(bm=128, tc=1, ub=9, ring=every, warps=8, ctas=2)
            add(bm=64, tc=1, ub=9, ring=every, warps=4, ctas=3)
            add(bm=128, tc=1, ub=9, ring=every, warps=8, ctas=1)
            if parts > 1:
                add(bm=128, tc=1, ub=3, ring=3 * every, warps=8, ctas=1)
        if tc > 1:
            add(bm=64, tc=2, ub=3, ring=3, warps=4, ctas=3)
            add(bm=64, tc=2, ub=3, ring=4, warps=4, ctas=2)
        if tc == 4:
            add(bm=64, tc=4, ub=3, ring=3, warps=4, ctas=3, pair=2)
            add(bm=64, tc=4, ub=3, ring=3, warps=4, ctas=0, pair=2)
            add(bm=128, tc=4, ub=3, ring=4, warps=8, ctas=1, pair=2)
            if parts > 1:  # longer rings would not fit twice
                add(bm=64, tc=4, ub=3, ring=2, warps=4, ctas=2, pair=2)
                add(bm=64, tc=4, ub=3, ring=2, warps=4, ctas=0, pair=2)
                if wide:
                    add(bm=128, bn=128, tc=2, ub=3, ring=2, warps=8, ctas=1, pair=2)
        if T % 8 == 0:
            add(bm=64, tc=8, ub=3, ring=4, warps=4, ctas=2, pair=2)
            add(bm=64, tc=8, ub=3, ring=4, warps=4, ctas=0, pair=2)
        add(bm=64, tc=tc, ub=3, ring=4, warps=4, ctas=2)
        add(bm=64, tc=tc, ub=3, ring=4, warps=4, ctas=0)
        add(bm=128, tc=tc, ub=3, ring=6, warps=8, ctas=1)
        if wide and tc >= 2:
            add(bm=64, bn=128, tc=2, ub=3, ring=2, warps=4, ctas=2)
        if wide and tc == 4:
            add(bm=64, bn=128, tc=4, ub=3, ring=2, warps=4, ctas=2, pair=2)
            add(bm=64, bn=128, tc=4, ub=3, ring=2, warps=4, ctas=0, pair=2)
        for split in (2, 4):
            add(bm=64, tc=tc, ub=3, ring=4, warps=4, split=split, ctas=0, pair=2 if tc == 4 else 1)
        add(bm=64, tc=tc, ub=3, ring=4, warps=4, split=2, ctas=0)
    else:
        paired = 2 if parts > 1 and tc == 4 else 1
        ub = next(u for u in ((4, 2, 1) if parts == 1 else (2, 1)) if units % u == 0)
        if not units2:
            add(bm=128, tc=1, ub=ub, ring=units // ub, warps=8, ctas=2)
            add(bm=64, tc=1, ub=ub, ring=units // ub, warps=4, ctas=4)
        add(bm=64, tc=tc, ub=ub, ring=12 // ub, warps=4, ctas=2)
        add(bm=64, tc=tc, ub=ub, ring=12 // ub, warps=4, ctas=0)
        add(bm=128, tc=tc, ub=ub, ring=20 // ub, warps=8, ctas=1)
        if tc == 4:
            add(bm=64, tc=4, ub=ub, ring=8 // ub, warps=4, ctas=3, pair=2)
            add(bm=64, tc=4, ub=ub, ring=8 // ub, warps=4, ctas=0, pair=2)
            if parts > 1:
                add(bm=64, tc=4, ub=ub, ring=6 // ub, warps=4, ctas=2, pair=2)
                add(bm=128, tc=4, ub=ub, ring=12 // ub, warps=8, ctas=1, pair=2)
        if T % 8 == 0:
            add(bm=64, tc=8, ub=ub, ring=12 // ub, warps=4, ctas=2, pair=2)
        if wide and tc >= 2:
            add(bm=64, bn=128, tc=2, ub=ub, ring=6 // ub, warps=4, ctas=2)
        for split in (2, 4):
            add(bm=64, tc=tc, ub=ub, ring=12 // ub, warps=4, split=split, ctas=0, pair=paired)
    return sorted(found, key=lambda v: estimate_us(spec, v, T=T, N=N, H=H, W=W, parts=parts))


def estimate_us(
    spec: GroupSpec, v: Variant, *, T: int, N: int, H: int, W: int, parts: int = 1, sms: int = H200_SMS
) -> float:
    """Microseconds that a variant probably takes; meant for comparing variants, not for promises.

    Args:
        spec: The group.
        v: The variant.
        T: Time steps.
        N: Images.
        H: Output rows.
        W: Output columns.
        parts: See `prepare_group`.
        sms: Streaming multiprocessors of the GPU.
    """
    units, units2 = units_of(spec)
    tiles, columns = -(-N * H * W // v.pixels), spec.sources[0].weight.shape[0] // v.bn
    groups = v.warps // 4  # warpgroups of a CTA
    flops = 2.0 * 64 * v.bn * (units + units2) * BLOCK * parts * T / v.pair / v.split
    sums = v.tc // v.pair * v.bn  # accumulators of a pixel: what limits CTAs by registers, and hides latency
    fit = _resident(v, sums, parts)

    def wave(ctas: int) -> float:
        """One tile for each of `ctas` CTAs of an SM."""
        feeding = ctas * groups
        rate = _RATE[min(feeding, 4)]
        if v.bn == 128:
            rate *= 1.1  # every unpacked spike is used twice
        if feeding < 3 and sums < 256:
            rate *= 0.95
        return feeding * (flops / rate / 1e6 + _NEURON_US * T * v.bn / BLOCK / v.pair)

    if v.ctas:
        walkers = min(tiles, max(1, sms * min(v.ctas, fit) // (columns * v.split)))
        return _START_US + -(-tiles // walkers) * wave(-(-walkers * columns // sms))
    total, left = _START_US, tiles * columns * v.split
    if v.split > 1:
        total += _SHARE_US * (1 + left / sms)
    while left > 0:
        now = min(left, sms * fit)
        total += wave(-(-now // sms))
        left -= now
    return total


def _resident(v: Variant, sums: int, parts: int) -> int:
    """CTAs of a variant that fit on an SM."""
    held = sums if parts == 1 else 2 * sums  # those of a batch beside those of all
    groups = 2 if held > 128 else 3 if held > 64 else 4
    by_registers = max(1, groups * 4 // v.warps)
    by_memory = SHARED_BYTES // (v.ring * v.ub * parts * v.bn * 2 * BLOCK + 2048)
    return max(1, min(by_registers, by_memory))

"""Activity words in the Hopper kernel: which K batches a tile needs, in which order, and what fires in it.

A mask has a bit for every list of K batches: those of one block of channels for a 3x3, one batch for a 1x1.
"""

# Kernels are Triton's subset of Python: tuples grow by `+`, constexpr branches stay `if` statements.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# ruff: noqa: RUF005, SIM108
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflow.spiking.backends.packed.hopper.addressing import pixel_of
from sparseflow.spiking.backends.packed.hopper.layouts import either


@gluon.constexpr_function
def _replicated(rows, columns, num_warps):
    """Layout of [rows, columns] (powers of two) that every warp holds as a whole."""
    bases = [[0, 1 << i] for i in range(columns.bit_length() - 1)]
    bases += [[1 << i, 0] for i in range(rows.bit_length() - 1)]
    lanes = (bases + [[0, 0]] * 5)[:5]
    warps = [[0, 0]] * (num_warps.bit_length() - 1)
    return gl.DistributedLinearLayout(bases[5:], lanes, warps, [], [rows, columns])


@gluon.constexpr_function
def _power_of_two(n):
    return 1 << (n - 1).bit_length()


@gluon.jit
def load_activity(
    act_ptr,
    tile,
    pixels,
    act_tiles,
    PX: gl.constexpr,
    H: gl.constexpr,
    W: gl.constexpr,
    IH: gl.constexpr,
    IW: gl.constexpr,
    TAPS: gl.constexpr,
    STRIDE: gl.constexpr,
    UB: gl.constexpr,
    BLOCKS: gl.constexpr,
    SILENCE: gl.constexpr,
    IN_TILE: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):
    """Activity words [lists, SILENCE x blocks a list] of a tile's input pixels with their halo.

    `SILENCE` is how many input tiles that is at most; a list is what one bit of the mask stands for.
    """
    PER: gl.constexpr = 1 if TAPS == 9 else UB
    LISTS: gl.constexpr = gl.constexpr(_power_of_two(BLOCKS // PER))
    L: gl.constexpr = _replicated(LISTS, PER * SILENCE, NUM_WARPS)
    REACH: gl.constexpr = IW + 1 if TAPS == 9 else 0
    n, y, x = pixel_of(tile * PX, H, W)
    first = gl.maximum((n * IH + y * STRIDE) * IW + x * STRIDE - REACH, 0) // IN_TILE
    n, y, x = pixel_of(gl.minimum(tile * PX + (PX - 1), pixels - 1), H, W)
    last = gl.minimum(((n * IH + y * STRIDE) * IW + x * STRIDE + REACH) // IN_TILE, act_tiles - 1)
    place = gl.arange(0, PER * SILENCE, layout=gl.SliceLayout(0, L)).expand_dims(0)
    group = gl.arange(0, LISTS, layout=gl.SliceLayout(1, L)).expand_dims(1)
    block = group * PER + place // SILENCE
    at = first + place % SILENCE
    return gl.load(act_ptr + (block * act_tiles + at), mask=(block < BLOCKS) & (at <= last), other=0)


@gluon.jit
def active_lists(words, steps):
    """Mask of the lists that fire in any of the time steps whose bits `steps` has."""
    fires = gl.reduce(words & steps, 1, either)
    bit = gl.arange(0, fires.shape[0], layout=fires.type.layout)
    mask = gl.reduce(gl.where(fires != 0, 1 << bit, 0), 0, either)
    # Every lane has the same mask, but only after a `redux` does ptxas know it: loops over it and addresses
    # made from it then stay in uniform registers.
    return gl.inline_asm_elementwise(
        "redux.sync.or.b32 $0, $1, 0xffffffff;", "=r,r", [mask], gl.int32, False, 1
    )


@gluon.jit
def lowest_bit(mask):
    """Place of the lowest bit that is set."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 r; brev.b32 r, $1; clz.b32 $0, r; }", "=r,r", [mask], gl.int32, True, 1
    )


@gluon.jit
def count_bits(mask):
    """Bits that are set."""
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [mask], gl.int32, True, 1)


@gluon.jit
def next_batch(rest, sub, mask, PER_LIST: gl.constexpr):
    """The batch after (lowest list of `rest`, `sub`); starts again when there is none."""
    if PER_LIST == 1:
        rest = rest & (rest - 1)
    else:
        ends = sub + 1 == PER_LIST
        rest = gl.where(ends, rest & (rest - 1), rest)
        sub = gl.where(ends, 0, sub + 1)
    return gl.where(rest == 0, mask, rest), sub


@gluon.jit
def next_fetch(rest, sub, turn, mask, stop, batches, batches2, PER_LIST: gl.constexpr, UB2: gl.constexpr):
    """Batch to fetch at `turn` and what comes after: `stop` batches of the mask, then the second source's."""
    batch = lowest_bit(rest) * PER_LIST + sub
    if UB2 == 0:
        rest, sub = next_batch(rest, sub, mask, PER_LIST)
    else:
        second = turn >= stop
        batch = gl.where(second, batches + turn - stop, batch)
        next_rest, next_sub = next_batch(rest, sub, mask, PER_LIST)
        rest = gl.where(second, rest, next_rest)
        sub = gl.where(second, sub, next_sub)
        turn = gl.where(turn + 1 == stop + batches2, 0, turn + 1)
    return batch, rest, sub, turn


@gluon.jit
def note_firing(fired, blk: gl.constexpr, steps, BLOCKS: gl.constexpr):
    """`fired` with `steps` added to block `blk`."""
    noted = ()
    for i in gl.static_range(BLOCKS):
        if i == blk:
            noted = noted + (fired[i] | steps,)
        else:
            noted = noted + (fired[i],)
    return noted


@gluon.jit
def store_activity(ptr, fired, first, count, PX: gl.constexpr, NUM_WARPS: gl.constexpr):
    """One word a warp: the OR of `fired` [PX, 4] over its rows."""
    rows = gl.reduce(fired, 1, either).reshape([NUM_WARPS, PX // NUM_WARPS])
    words = gl.reduce(rows, 1, either)
    at = first + gl.arange(0, NUM_WARPS, layout=words.type.layout)
    gl.store(ptr + at, words, mask=at < count)

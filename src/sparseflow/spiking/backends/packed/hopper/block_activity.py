"""Activity words in the Hopper kernel: which K batches a tile needs, in which order, and what fires in it.

A mask has a bit per list of K batches: those of one block of channels for a 3x3, one batch for a 1x1.
"""

# Kernels are Triton's subset of Python: tuples grow by `+`, constexpr branches stay `if` statements.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# ruff: noqa: RUF005, SIM108
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflow.spiking.backends.packed.hopper.addressing import split_pixel
from sparseflow.spiking.backends.packed.hopper.layouts import bitwise_or


@gluon.constexpr_function
def _make_replicated_layout(rows, columns, num_warps):
    """Layout of [rows, columns] (powers of two) replicated in all warps."""
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
    WORDS: gl.constexpr,
    IN_TILE: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):
    """Load the activity words [lists, WORDS x blocks per list] of a tile's input pixels with their halo.

    `WORDS` is the maximum number of input tiles; a list corresponds to one bit of the mask.
    """
    PER: gl.constexpr = 1 if TAPS == 9 else UB
    LISTS: gl.constexpr = gl.constexpr(_power_of_two(BLOCKS // PER))
    L: gl.constexpr = _make_replicated_layout(LISTS, PER * WORDS, NUM_WARPS)
    REACH: gl.constexpr = IW + 1 if TAPS == 9 else 0
    n, y, x = split_pixel(tile * PX, H, W)
    first = gl.maximum((n * IH + y * STRIDE) * IW + x * STRIDE - REACH, 0) // IN_TILE
    n, y, x = split_pixel(gl.minimum(tile * PX + (PX - 1), pixels - 1), H, W)
    last = gl.minimum(((n * IH + y * STRIDE) * IW + x * STRIDE + REACH) // IN_TILE, act_tiles - 1)
    slot = gl.arange(0, PER * WORDS, layout=gl.SliceLayout(0, L)).expand_dims(0)
    group = gl.arange(0, LISTS, layout=gl.SliceLayout(1, L)).expand_dims(1)
    block = group * PER + slot // WORDS
    word_index = first + slot % WORDS
    return gl.load(
        act_ptr + (block * act_tiles + word_index), mask=(block < BLOCKS) & (word_index <= last), other=0
    )


@gluon.jit
def compute_active_mask(words, steps):
    """Compute the mask of the lists that fire in any of the time steps whose bits are set in `steps`."""
    fires = gl.reduce(words & steps, 1, bitwise_or)
    bit = gl.arange(0, fires.shape[0], layout=fires.type.layout)
    mask = gl.reduce(gl.where(fires != 0, 1 << bit, 0), 0, bitwise_or)
    # Every lane has the same mask, but only after a `redux` does ptxas know it: loops over it and addresses
    # made from it then stay in uniform registers.
    return gl.inline_asm_elementwise(
        "redux.sync.or.b32 $0, $1, 0xffffffff;", "=r,r", [mask], gl.int32, False, 1
    )


@gluon.jit
def find_lowest_bit(mask):
    return gl.inline_asm_elementwise(
        "{ .reg .b32 r; brev.b32 r, $1; clz.b32 $0, r; }", "=r,r", [mask], gl.int32, True, 1
    )


@gluon.jit
def count_bits(mask):
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [mask], gl.int32, True, 1)


@gluon.jit
def advance_batch(pending, sub, mask, PER_LIST: gl.constexpr):
    """Advance to the batch after (lowest list of `pending`, `sub`); wraps around at the end."""
    if PER_LIST == 1:
        pending = pending & (pending - 1)
    else:
        ends = sub + 1 == PER_LIST
        pending = gl.where(ends, pending & (pending - 1), pending)
        sub = gl.where(ends, 0, sub + 1)
    return gl.where(pending == 0, mask, pending), sub


@gluon.jit
def advance_fetch(
    pending, sub, turn, mask, stop, batches, batches2, PER_LIST: gl.constexpr, UB2: gl.constexpr
):
    """Return the batch to fetch at `turn` and the next state: `stop` batches of the mask, then the second
    source's.
    """
    batch = find_lowest_bit(pending) * PER_LIST + sub
    if UB2 == 0:
        pending, sub = advance_batch(pending, sub, mask, PER_LIST)
    else:
        second = turn >= stop
        batch = gl.where(second, batches + turn - stop, batch)
        next_rest, next_sub = advance_batch(pending, sub, mask, PER_LIST)
        pending = gl.where(second, pending, next_rest)
        sub = gl.where(second, sub, next_sub)
        turn = gl.where(turn + 1 == stop + batches2, 0, turn + 1)
    return batch, pending, sub, turn


@gluon.jit
def update_fired(fired, blk: gl.constexpr, steps, BLOCKS: gl.constexpr):
    """Add `steps` to block `blk` of `fired`."""
    updated = ()
    for i in gl.static_range(BLOCKS):
        if i == blk:
            updated = updated + (fired[i] | steps,)
        else:
            updated = updated + (fired[i],)
    return updated


@gluon.jit
def store_activity(ptr, fired, first, count, PX: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Store one word per warp: the OR of `fired` [PX, 4] over its rows."""
    rows = gl.reduce(fired, 1, bitwise_or).reshape([NUM_WARPS, PX // NUM_WARPS])
    words = gl.reduce(rows, 1, bitwise_or)
    word_index = first + gl.arange(0, NUM_WARPS, layout=words.type.layout)
    gl.store(ptr + word_index, words, mask=word_index < count)

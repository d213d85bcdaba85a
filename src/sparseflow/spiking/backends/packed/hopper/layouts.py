"""wgmma fragments in Gluon: bits of packed spikes to A operands, accumulators to bits.

A thread that holds one halfword of a pixel (`format.py`) holds all that its fragments of 64 channels need
as input and output; no data moves between threads.
"""

# Kernels are Triton's subset of Python: constexpr branches stay `if` statements.
# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def make_fragment_layout(bm, num_warps):
    """wgmma's A and accumulator fragments as [BM, 4, 2, 4, 2] = (row, k/16, (k/8)%2, quad lane, pair).

    With `bm` of 8 rows per warp instead of 16: one half of such a fragment, the rows g or the rows g + 8.
    """
    rows = bm // num_warps
    warps = [[rows << i, 0, 0, 0, 0] for i in range(num_warps.bit_length() - 1)]
    regs = [[0, 0, 0, 0, 1], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0]]
    if rows == 16:
        regs.insert(1, [8, 0, 0, 0, 0])
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [bm, 4, 2, 4, 2])


@gluon.constexpr_function
def make_halves_layout(bm, num_warps):
    """Layout of [BM, 4]: the four halfwords of one block of channels, for each pixel of a tile."""
    return gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, make_fragment_layout(bm, num_warps))))


@gluon.constexpr_function
def make_sums_layout(px, bn, num_warps, pair, mma):
    """Layout of one time step's sums [PX, BN]: wgmma's accumulator, or half of its rows."""
    if pair == 1:
        return mma
    regs = [[0, 1]] + [[0, 8 << i] for i in range((bn // 8).bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    warps = [[8 << i, 0] for i in range(num_warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [px, bn])


@gluon.constexpr_function
def _unpack_asm():
    """PTX: two halfwords (rows g and g+8) -> the 16 fp16x2 registers of four m64k16 A fragments."""
    lines = ["{ .reg .b32 w<8>;"]
    for row in range(2):
        w = [f"w{4 * row + i}" for i in range(4)]
        lines.append(f"prmt.b32 {w[0]}, ${16 + 2 * row}, 0, 0x1010;")
        lines += [f"shf.l.wrap.b32 {w[i]}, {w[0]}, {w[0]}, {4 * i};" for i in (1, 2, 3)]
        for r in range(8):
            mask = (1 << (11 + r % 2)) | (1 << (29 + r % 2))
            lines.append(f"and.b32 ${row + 2 * r}, {w[r // 2]}, {mask};")
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def _unpack_constraints():
    return ",".join(["=r"] * 16 + ["r"] * 32)


@gluon.jit
def unpack_spikes(half, BM: gl.constexpr, A: gl.constexpr):
    """Halfwords [BM, 4] -> fp16 [BM, 64], the A operand of four k16 steps."""
    w = half.to(gl.int32).expand_dims(1).expand_dims(2).expand_dims(4)
    w, _ = gl.broadcast(w, gl.full([BM, 4, 2, 4, 2], 0, gl.int32, w.type.layout))
    a = gl.inline_asm_elementwise(
        _unpack_asm(), _unpack_constraints(), [w], dtype=gl.float16, is_pure=True, pack=32
    )
    return gl.convert_layout(gl.reshape(a, [BM, 64]), A, assert_trivial=True)


@gluon.jit
def bitwise_or(a, b):
    return a | b


@gluon.jit
def _bit_values(L: gl.constexpr, BN: gl.constexpr):
    """int32 [1, BN]: the value of each column's bit in its halfword."""
    col = gl.arange(0, BN, layout=gl.SliceLayout(0, L))
    return (1 << (((col >> 3) & 7) * 2 + (col & 1))).expand_dims(0)


@gluon.jit
def pack_spikes(spikes, BM: gl.constexpr, BN: gl.constexpr):
    """bool [BM, BN] in the accumulator's layout -> int32 [BM, BN / 64, 4]; the sums stay inside a thread."""
    L: gl.constexpr = spikes.type.layout
    value, _ = gl.broadcast(_bit_values(L, BN), spikes)
    words = gl.where(spikes, value, 0).reshape([BM, BN // 64, 8, 4, 2])
    return gl.reduce(gl.reduce(words, 4, bitwise_or), 2, bitwise_or)


@gluon.jit
def spread_spikes(half, like, BM: gl.constexpr):
    """Halfwords [BM, 4] -> bool [BM, 64] in the layout of `like`."""
    w = half.to(gl.int32).expand_dims(1).expand_dims(2).expand_dims(4)
    w, _ = gl.broadcast(w, gl.full([BM, 4, 2, 4, 2], 0, gl.int32, w.type.layout))
    L: gl.constexpr = like.type.layout
    return (gl.convert_layout(w.reshape([BM, 64]), L, assert_trivial=True) & _bit_values(L, 64)) != 0


@gluon.jit
def split_time_steps(acc, BM: gl.constexpr, BN: gl.constexpr, PAIR: gl.constexpr, SUMS: gl.constexpr):
    """Split an accumulator into one [PX, BN] per time step; of a pair, rows g are the first and g + 8 the
    second.
    """
    if PAIR == 1:
        return (acc,)
    else:
        first, second = gl.split(acc.reshape([BM // 16, 2, 8, BN]).permute((0, 2, 3, 1)))
        return (
            gl.convert_layout(first.reshape([BM // 2, BN]), SUMS, assert_trivial=True),
            gl.convert_layout(second.reshape([BM // 2, BN]), SUMS, assert_trivial=True),
        )


@gluon.jit
def select_column_block(bits, blk: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr, L: gl.constexpr):
    """Select block `blk` of packed bits [BM, BN / 64, 4] as [BM, 4] in layout `L`."""
    if BN == 64:
        return gl.convert_layout(bits.reshape([BM, 4]), L, assert_trivial=True)
    else:
        low, high = gl.split(bits.permute((0, 2, 1)))
        if blk == 0:
            return gl.convert_layout(low, L, assert_trivial=True)
        else:
            return gl.convert_layout(high, L, assert_trivial=True)

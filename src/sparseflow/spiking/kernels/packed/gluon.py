"""The fused group on Hopper: 1-bit spikes -> wgmma -> bias -> IF/LIF over T -> 1-bit spikes (Gluon).

One CTA owns tiles of `BM` output pixels (flattened over images, rows, columns) and one column of `BN`
output channels. The A operand of every wgmma comes from registers: a thread loads the halfword that
holds exactly its fragment's bits of 64 channels (`format.py`) and spreads it with one PRMT, three
rotations and eight ANDs into fp16 pairs whose ones are powers of two; the weights carry the inverse
powers and are permuted along K to match. Nothing of A passes through shared memory. The accumulator's
fragment has the shape of A's, so a thread's own spikes are exactly one halfword of the output: no
shuffles in the epilogue.

The K loop goes over *batches*: `UB` units (the taps of one block of channels, or blocks of a 1x1), each
times `PARTS` weight matrices and `TC` time steps. A batch is straight-line code in which wgmmas stay
asynchronous (ptxas serialises them all if a barrier's wait loop or a loop's back edge comes between); it
ends with a drain. Weights come by TMA into a ring of `RING` batches and serve all `TC` time steps before
they are replaced; where the ring holds them all (`RESIDENT`) they stay for the whole kernel. A CTA keeps
its column while it walks over tiles, so the stream of weights never stops.

`EMIT`: the kernel writes, for the pixels of every warp and every block of channels, in which time steps
they fire. `SILENCE`: it reads what its input's kernel wrote so, over a tile and its halo, and visits only
the K batches of blocks that are not silent there, and then those of the second source, if there is one. The
list of batches is a bit mask; weights are fetched in its order.

With `SPLIT` > 1, that many CTAs share a tile's K loop: each writes its partial sums, and the last to
arrive adds them in a fixed order and runs the neuron, so the result does not depend on who is last.
"""

# Kernels are Triton's subset of Python: tuples grow by `+`, constexpr branches stay `if` statements.
# ruff: noqa: RUF005, SIM102, SIM108, B007
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait


@gluon.constexpr_function
def _fragment(bm, num_warps):
    """wgmma's A and accumulator fragments as [BM, 4, 2, 4, 2] = (row, k/16, (k/8)%2, quad lane, pair).

    With `bm` of 8 rows a warp instead of 16: one half of such a fragment, the rows g or the rows g + 8.
    """
    rows = bm // num_warps
    warps = [[rows << i, 0, 0, 0, 0] for i in range(num_warps.bit_length() - 1)]
    regs = [[0, 0, 0, 0, 1], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0]]
    if rows == 16:
        regs.insert(1, [8, 0, 0, 0, 0])
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [bm, 4, 2, 4, 2])


@gluon.constexpr_function
def _halves(bm, num_warps):
    """Layout of [BM, 4]: the four halfwords of one block of channels, for every pixel of a tile."""
    return gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, _fragment(bm, num_warps))))


@gluon.constexpr_function
def _sums_layout(px, bn, num_warps, pair, mma):
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
def _unpack(half, BM: gl.constexpr, A: gl.constexpr):
    """Halfwords [BM, 4] -> fp16 [BM, 64], the A operand of four k16 steps."""
    w = half.to(gl.int32).expand_dims(1).expand_dims(2).expand_dims(4)
    w, _ = gl.broadcast(w, gl.full([BM, 4, 2, 4, 2], 0, gl.int32, w.type.layout))
    a = gl.inline_asm_elementwise(
        _unpack_asm(), _unpack_constraints(), [w], dtype=gl.float16, is_pure=True, pack=32
    )
    return gl.convert_layout(gl.reshape(a, [BM, 64]), A, assert_trivial=True)


@gluon.jit
def _either(a, b):
    return a | b


@gluon.jit
def _bit_values(L: gl.constexpr, BN: gl.constexpr):
    """int32 [1, BN]: the value of every column's bit in its halfword."""
    col = gl.arange(0, BN, layout=gl.SliceLayout(0, L))
    return (1 << (((col >> 3) & 7) * 2 + (col & 1))).expand_dims(0)


@gluon.jit
def _pack(spikes, BM: gl.constexpr, BN: gl.constexpr):
    """bool [BM, BN] in the accumulator's layout -> int32 [BM, BN / 64, 4]; the sums stay inside a thread."""
    L: gl.constexpr = spikes.type.layout
    value, _ = gl.broadcast(_bit_values(L, BN), spikes)
    words = gl.where(spikes, value, 0).reshape([BM, BN // 64, 8, 4, 2])
    return gl.reduce(gl.reduce(words, 4, _either), 2, _either)


@gluon.jit
def _spread(half, like, BM: gl.constexpr):
    """Halfwords [BM, 4] -> bool [BM, 64] in the layout of `like`."""
    w = half.to(gl.int32).expand_dims(1).expand_dims(2).expand_dims(4)
    w, _ = gl.broadcast(w, gl.full([BM, 4, 2, 4, 2], 0, gl.int32, w.type.layout))
    L: gl.constexpr = like.type.layout
    return (gl.convert_layout(w.reshape([BM, 64]), L, assert_trivial=True) & _bit_values(L, 64)) != 0


@gluon.constexpr_function
def _unit_shift(unit, taps, width, ch):
    """Halfwords from a batch's first unit to its unit `unit`: a tap of a 3x3, or a block of a 1x1."""
    return unit * 4 if taps == 1 else ((unit // 3) * (width + 1) + unit % 3) * ch


@gluon.jit
def _place(pixel, H: gl.constexpr, W: gl.constexpr):
    """Image, row and column of a pixel counted over all images."""
    return pixel // (H * W), (pixel // W) % H, pixel % W


@gluon.jit
def _word(n, y, x, H: gl.constexpr, W: gl.constexpr):
    """Place of a pixel in memory (`format.py`); `y` and `x` may be one outside the image."""
    return ((H + 1) * n + y + 1) * (W + 1) + x + 1


@gluon.jit
def _batch_shift(batch, TAPS: gl.constexpr, UB: gl.constexpr, IW: gl.constexpr, CH: gl.constexpr):
    """Halfwords from a tile's first tap and block to the first unit of batch `batch`."""
    if TAPS == 1:
        return batch * (UB * 4)
    else:
        PER_BLOCK: gl.constexpr = 9 // UB
        return (batch // PER_BLOCK) * 4 + (batch % PER_BLOCK) * ((UB // 3) * (IW + 1) * CH)


@gluon.jit
def _load_units(
    x_ptr,
    offsets,
    shift,
    x_step,
    UB: gl.constexpr,
    TC: gl.constexpr,
    TAPS: gl.constexpr,
    IW: gl.constexpr,
    CH: gl.constexpr,
):
    """The halfwords of a batch, unit by unit and time step by time step."""
    words = ()
    for u in gl.static_range(UB):
        for t in gl.static_range(TC):
            words = words + (
                gl.load(x_ptr + (offsets + (shift + t * x_step + _unit_shift(u, TAPS, IW, CH)))),
            )
    return words


@gluon.constexpr_function
def _replicated(rows, columns, num_warps):
    """Layout of [rows, columns] (powers of two) that every warp holds as a whole."""
    bases = [[0, 1 << i] for i in range(columns.bit_length() - 1)]
    bases += [[1 << i, 0] for i in range(rows.bit_length() - 1)]
    lanes = (bases + [[0, 0]] * 5)[:5]
    warps = [[0, 0]] * (num_warps.bit_length() - 1)
    return gl.DistributedLinearLayout(bases[5:], lanes, warps, [], [rows, columns])


@gluon.jit
def _load_activity(
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
    n, y, x = _place(tile * PX, H, W)
    first = gl.maximum((n * IH + y * STRIDE) * IW + x * STRIDE - REACH, 0) // IN_TILE
    n, y, x = _place(gl.minimum(tile * PX + (PX - 1), pixels - 1), H, W)
    last = gl.minimum(((n * IH + y * STRIDE) * IW + x * STRIDE + REACH) // IN_TILE, act_tiles - 1)
    place = gl.arange(0, PER * SILENCE, layout=gl.SliceLayout(0, L)).expand_dims(0)
    group = gl.arange(0, LISTS, layout=gl.SliceLayout(1, L)).expand_dims(1)
    block = group * PER + place // SILENCE
    at = first + place % SILENCE
    return gl.load(act_ptr + (block * act_tiles + at), mask=(block < BLOCKS) & (at <= last), other=0)


@gluon.constexpr_function
def _power_of_two(n):
    return 1 << (n - 1).bit_length()


@gluon.jit
def _active(words, steps):
    """Mask of the lists that fire in any of the time steps whose bits `steps` has."""
    fires = gl.reduce(words & steps, 1, _either)
    bit = gl.arange(0, fires.shape[0], layout=fires.type.layout)
    mask = gl.reduce(gl.where(fires != 0, 1 << bit, 0), 0, _either)
    # Every lane has the same mask, but only after a `redux` does ptxas know it: loops over it and addresses
    # made from it then stay in uniform registers.
    return gl.inline_asm_elementwise(
        "redux.sync.or.b32 $0, $1, 0xffffffff;", "=r,r", [mask], gl.int32, False, 1
    )


@gluon.jit
def _lowest(mask):
    """Place of the lowest bit that is set."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 r; brev.b32 r, $1; clz.b32 $0, r; }", "=r,r", [mask], gl.int32, True, 1
    )


@gluon.jit
def _count(mask):
    """Bits that are set."""
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [mask], gl.int32, True, 1)


@gluon.jit
def _next(rest, sub, mask, PER_LIST: gl.constexpr):
    """The batch after (lowest list of `rest`, `sub`); starts again when there is none."""
    if PER_LIST == 1:
        rest = rest & (rest - 1)
    else:
        ends = sub + 1 == PER_LIST
        rest = gl.where(ends, rest & (rest - 1), rest)
        sub = gl.where(ends, 0, sub + 1)
    return gl.where(rest == 0, mask, rest), sub


@gluon.jit
def _next_fetch(rest, sub, turn, mask, stop, batches, batches2, PER_LIST: gl.constexpr, UB2: gl.constexpr):
    """Batch to fetch at `turn` and what comes after: `stop` batches of the mask, then the second source's."""
    batch = _lowest(rest) * PER_LIST + sub
    if UB2 == 0:
        rest, sub = _next(rest, sub, mask, PER_LIST)
    else:
        second = turn >= stop
        batch = gl.where(second, batches + turn - stop, batch)
        next_rest, next_sub = _next(rest, sub, mask, PER_LIST)
        rest = gl.where(second, rest, next_rest)
        sub = gl.where(second, sub, next_sub)
        turn = gl.where(turn + 1 == stop + batches2, 0, turn + 1)
    return batch, rest, sub, turn


@gluon.jit
def _fetch(
    w_desc,
    slots,
    full,
    index,
    batch,
    main,
    column,
    pred,
    RING: gl.constexpr,
    STEPS: gl.constexpr,
    STEPS2: gl.constexpr,
    BN: gl.constexpr,
):
    """Start copying K batch `batch` (`main` batches of STEPS, then some of STEPS2) into slot `index`."""
    bar = full.index(index)
    if STEPS2 == 0 or STEPS2 == STEPS:
        mbarrier.expect(bar, BN * 128 * STEPS, pred)
        for j in gl.static_range(STEPS):
            tma.async_copy_global_to_shared(
                w_desc, [column, (batch * STEPS + j) * 64], bar, slots.index(index * STEPS + j), pred
            )
    else:
        first = pred & (batch < main)
        second = pred & (batch >= main)
        mbarrier.expect(bar, BN * 128 * STEPS, first)
        mbarrier.expect(bar, BN * 128 * STEPS2, second)
        for j in gl.static_range(STEPS):
            tma.async_copy_global_to_shared(
                w_desc, [column, (batch * STEPS + j) * 64], bar, slots.index(index * STEPS + j), first
            )
        for j in gl.static_range(STEPS2):
            at = main * STEPS + (batch - main) * STEPS2 + j
            tma.async_copy_global_to_shared(
                w_desc, [column, at * 64], bar, slots.index(index * STEPS + j), second
            )


@gluon.jit
def _multiply(
    words,
    acc,
    accumulate,
    slots,
    slot0,
    UB: gl.constexpr,
    TC: gl.constexpr,
    PARTS: gl.constexpr,
    BM: gl.constexpr,
    A: gl.constexpr,
):
    """acc[t] += A[t] B for all units of a batch: asynchronous straight-line code, drained at the end."""
    for u in gl.static_range(UB):
        done = ()
        for t in gl.static_range(TC):
            a = _unpack(words[u * TC + t], BM, A)
            total = acc[t]
            for part in gl.static_range(PARTS):
                b = slots.index(slot0 + (u * PARTS + part)).permute((1, 0))
                if u + part == 0:
                    token = warpgroup_mma(a, b, total, use_acc=accumulate, is_async=True)
                else:
                    token = warpgroup_mma(a, b, total, is_async=True)
                total = warpgroup_mma_wait(1, deps=[token])
            done = done + (total,)
        acc = done
    drained = ()
    for t in gl.static_range(TC):
        drained = drained + (warpgroup_mma_wait(0, deps=[acc[t]]),)
    return drained


@gluon.jit
def _share(acc, base, count_ptr, me, at, SPLIT: gl.constexpr, SIZE: gl.constexpr, TC: gl.constexpr):
    """Write this CTA's partial sums; returns whether it was its tile's last (and resets the count)."""
    for t in gl.static_range(TC):
        gl.store(base + ((me * TC + t) * SIZE + at), acc[t])
    gl.thread_barrier()
    last = gl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if last:
        gl.store(count_ptr, 0)
    return last


@gluon.jit
def _gather(base, t, at, SPLIT: gl.constexpr, SIZE: gl.constexpr, TC: gl.constexpr):
    """Sum of all partial sums of time step `t`, always in the same order."""
    total = gl.load(base + (t * SIZE + at), cache_modifier=".cg")
    for s in gl.static_range(1, SPLIT):
        total += gl.load(base + ((s * TC + t) * SIZE + at), cache_modifier=".cg")
    return total


@gluon.jit
def _time_steps(acc, BM: gl.constexpr, BN: gl.constexpr, PAIR: gl.constexpr, SUMS: gl.constexpr):
    """An accumulator as one [PX, BN] a time step; of a pair, rows g are the first and g + 8 the second."""
    if PAIR == 1:
        return (acc,)
    else:
        first, second = gl.split(acc.reshape([BM // 16, 2, 8, BN]).permute((0, 2, 3, 1)))
        return (
            gl.convert_layout(first.reshape([BM // 2, BN]), SUMS, assert_trivial=True),
            gl.convert_layout(second.reshape([BM // 2, BN]), SUMS, assert_trivial=True),
        )


@gluon.jit
def _note(fired, blk: gl.constexpr, steps, BLOCKS: gl.constexpr):
    """`fired` with `steps` added to block `blk`."""
    noted = ()
    for i in gl.static_range(BLOCKS):
        if i == blk:
            noted = noted + (fired[i] | steps,)
        else:
            noted = noted + (fired[i],)
    return noted


@gluon.jit
def _store_activity(ptr, fired, first, count, PX: gl.constexpr, NUM_WARPS: gl.constexpr):
    """One word a warp: the OR of `fired` [PX, 4] over its rows."""
    rows = gl.reduce(fired, 1, _either).reshape([NUM_WARPS, PX // NUM_WARPS])
    words = gl.reduce(rows, 1, _either)
    at = first + gl.arange(0, NUM_WARPS, layout=words.type.layout)
    gl.store(ptr + at, words, mask=at < count)


@gluon.jit
def _column_block(bits, blk: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr, L: gl.constexpr):
    """Block `blk` of packed bits [BM, BN / 64, 4] as [BM, 4] in layout `L`."""
    if BN == 64:
        return gl.convert_layout(bits.reshape([BM, 4]), L, assert_trivial=True)
    else:
        low, high = gl.split(bits.permute((0, 2, 1)))
        if blk == 0:
            return gl.convert_layout(low, L, assert_trivial=True)
        else:
            return gl.convert_layout(high, L, assert_trivial=True)


# Not specialised: a count of 1 would otherwise become a compile-time constant and change the code's types.
@gluon.jit(
    do_not_specialize=[
        "pixels",
        "tiles",
        "T",
        "batches",
        "batches2",
        "x_step",
        "x2_step",
        "out_step",
        "dense_step",
        "act_tiles",
        "out_tiles",
    ]
)
def group_kernel(
    x_ptr,
    x2_ptr,
    w_desc,
    bias_ptr,
    out_ptr,
    skip_ptr,
    dense_ptr,
    v_in_ptr,
    v_out_ptr,
    part_ptr,
    count_ptr,
    act_ptr,
    out_act_ptr,
    scale,
    alpha,
    skip_value,
    threshold,
    v_reset,
    pixels,
    tiles,
    T,
    batches,
    batches2,
    x_step,
    x2_step,
    out_step,
    dense_step,
    act_tiles,
    out_tiles,
    H: gl.constexpr,
    W: gl.constexpr,
    IH: gl.constexpr,
    IW: gl.constexpr,
    CH: gl.constexpr,
    TAPS: gl.constexpr,
    STRIDE: gl.constexpr,
    IH2: gl.constexpr,
    IW2: gl.constexpr,
    CH2: gl.constexpr,
    STRIDE2: gl.constexpr,
    OCH: gl.constexpr,
    C_OUT: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    TC: gl.constexpr,
    PAIR: gl.constexpr,
    UB: gl.constexpr,
    UB2: gl.constexpr,
    PARTS: gl.constexpr,
    RING: gl.constexpr,
    RESIDENT: gl.constexpr,
    SPLIT: gl.constexpr,
    SILENCE: gl.constexpr,
    IN_TILE: gl.constexpr,
    EMIT: gl.constexpr,
    SOFT: gl.constexpr,
    SKIPS: gl.constexpr,
    DENSE: gl.constexpr,
    READ_V: gl.constexpr,
    WRITE_V: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):
    """One group; see the module's docstring. Grid (CTAs over pixel tiles, C_out / BN, SPLIT).

    With `SILENCE` and a ring that does not hold all weights, a CTA works on one tile only.

    `CH`, `CH2`, `OCH` are halfwords a pixel; `*_step` elements between time steps; `bias` already holds
    beta and delta, `scale` is beta times the power of two that the weights were divided by.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BN, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    HALVES: gl.constexpr = _halves(BM, NUM_WARPS)
    STEPS: gl.constexpr = UB * PARTS
    STEPS2: gl.constexpr = UB2 * PARTS
    PX: gl.constexpr = BM // PAIR
    TA: gl.constexpr = TC // PAIR
    SUMS: gl.constexpr = _sums_layout(PX, BN, NUM_WARPS, PAIR, MMA)
    OUT: gl.constexpr = _halves(PX, NUM_WARPS)

    slots = gl.allocate_shared_memory(gl.float16, [RING * STEPS, BN, 64], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=1)

    first_tile = gl.program_id(0)
    tile_stride = gl.num_programs(0)
    column = gl.program_id(1) * BN
    # this CTA's share [begin, begin + count) of the K batches
    if SPLIT == 1:
        begin = 0
        count = batches + batches2
    else:
        begin = (batches + batches2) * gl.program_id(2) // SPLIT
        count = (batches + batches2) * (gl.program_id(2) + 1) // SPLIT - begin
    PER_LIST: gl.constexpr = 9 // UB if TAPS == 9 else 1  # K batches that a bit of the mask stands for
    if SILENCE:
        gl.static_assert(SPLIT == 1, "silence is skipped where the K loop is not split")
        awake = _load_activity(
            act_ptr, first_tile, pixels, act_tiles, PX, H, W, IH, IW, TAPS, STRIDE, UB, CH // 4, SILENCE,
            IN_TILE, NUM_WARPS,
        )  # fmt: skip
        if not RESIDENT:
            mask = _active(awake, -1)
            stop = _count(mask) * PER_LIST
            fetch_rest = mask
            fetch_sub = 0
            fetch_turn = 0
    if RESIDENT:
        total = count
    elif SILENCE:
        total = (stop + batches2) * (T // TC)
    else:
        total = count * ((tiles - first_tile + tile_stride - 1) // tile_stride) * (T // TC)
    fetched = 0
    fetch_batch = 0
    for i in gl.static_range(RING):
        if SILENCE and not RESIDENT:
            fetch_batch, fetch_rest, fetch_sub, fetch_turn = _next_fetch(
                fetch_rest, fetch_sub, fetch_turn, mask, stop, batches, batches2, PER_LIST, UB2
            )
        _fetch(
            w_desc,
            slots,
            full,
            i,
            begin + fetch_batch,
            batches,
            column,
            fetched < total,
            RING,
            STEPS,
            STEPS2,
            BN,
        )
        fetched += 1
        if not SILENCE or RESIDENT:
            fetch_batch = gl.where(fetch_batch + 1 == count, 0, fetch_batch + 1)
    used = 0  # batches consumed so far

    row = gl.arange(0, BM, layout=gl.SliceLayout(1, HALVES))
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, HALVES)).expand_dims(0)
    if PAIR == 1:
        row_pixel = row
        row_step = row * 0
    else:
        row_pixel = (row // 16) * 8 + row % 8
        row_step = (row // 8) % 2
    out_row = gl.arange(0, PX, layout=gl.SliceLayout(1, OUT))
    out_lane = gl.arange(0, 4, layout=gl.SliceLayout(0, OUT)).expand_dims(0)
    sum_row = gl.arange(0, PX, layout=gl.SliceLayout(1, SUMS))
    sum_col = column + gl.arange(0, BN, layout=gl.SliceLayout(0, SUMS))
    REACH: gl.constexpr = 1 if TAPS == 9 else 0

    for tile in range(first_tile, tiles, tile_stride):
        n, y, x = _place(gl.minimum(tile * PX + row_pixel, pixels - 1), H, W)
        src = _word(n, y * STRIDE - REACH, x * STRIDE - REACH, IH, IW) * CH
        src = (src + row_step * x_step).expand_dims(1) + lane
        if UB2 > 0:
            src2 = _word(n, y * STRIDE2, x * STRIDE2, IH2, IW2) * CH2
            src2 = (src2 + row_step * x2_step).expand_dims(1) + lane
        inside = (tile * PX + out_row < pixels).expand_dims(1)
        n, y, x = _place(gl.minimum(tile * PX + out_row, pixels - 1), H, W)
        dst = (_word(n, y, x, H, W) * OCH).expand_dims(1) + (out_lane + column // 16)
        sum_pixel = gl.minimum(tile * PX + sum_row, pixels - 1).expand_dims(1)
        state = sum_pixel * C_OUT + sum_col.expand_dims(0)
        if READ_V:
            v = gl.load(v_in_ptr + state)
        else:
            v = gl.full([PX, BN], 0.0, gl.float32, SUMS) + v_reset

        fired = ()
        if EMIT:
            for blk in gl.static_range(BN // 64):
                fired = fired + (gl.full([PX, 4], 0, gl.int32, OUT),)
        if SILENCE and RESIDENT:
            here_awake = awake
            awake = _load_activity(
                act_ptr, gl.minimum(tile + tile_stride, tiles - 1), pixels, act_tiles, PX, H, W, IH, IW, TAPS,
                STRIDE, UB, CH // 4, SILENCE, IN_TILE, NUM_WARPS,
            )  # fmt: skip
        if SPLIT > 1:
            mine = tile >= 0
        else:
            mine: gl.constexpr = True
        for t0 in range(0, T, TC):
            acc = ()
            for a in gl.static_range(TA):
                acc = acc + (gl.full([BM, BN], 0.0, gl.float32, MMA),)
            here = t0 * x_step
            if SILENCE:
                if RESIDENT:
                    mask = _active(here_awake, ((1 << TC) - 1) << t0)
                    stop = _count(mask) * PER_LIST
                rest = mask
                sub = 0
            elif SPLIT == 1:
                stop = batches
            else:
                stop = gl.minimum(begin + count, batches)
            for turn in range(begin, stop):
                batch = turn
                if SILENCE:
                    batch = _lowest(rest) * PER_LIST + sub
                    rest, sub = _next(rest, sub, mask, PER_LIST)
                words = _load_units(
                    x_ptr,
                    src,
                    here + _batch_shift(batch, TAPS, UB, IW, CH),
                    PAIR * x_step,
                    UB,
                    TA,
                    TAPS,
                    IW,
                    CH,
                )
                slot = used % RING
                if RESIDENT:
                    slot = batch - begin
                    mbarrier.wait(full.index(slot), 0)
                else:
                    mbarrier.wait(full.index(slot), (used // RING) & 1)
                acc = _multiply(words, acc, turn > begin, slots, slot * STEPS, UB, TA, PARTS, BM, A)
                if not RESIDENT:
                    used += 1
                    gl.thread_barrier()
                    if SILENCE:
                        fetch_batch, fetch_rest, fetch_sub, fetch_turn = _next_fetch(
                            fetch_rest, fetch_sub, fetch_turn, mask, stop, batches, batches2, PER_LIST, UB2
                        )
                    _fetch(
                        w_desc,
                        slots,
                        full,
                        slot,
                        begin + fetch_batch,
                        batches,
                        column,
                        fetched < total,
                        RING,
                        STEPS,
                        STEPS2,
                        BN,
                    )
                    fetched += 1
                    if not SILENCE:
                        fetch_batch = gl.where(fetch_batch + 1 == count, 0, fetch_batch + 1)
            if UB2 > 0:
                here2 = t0 * x2_step
                for batch in range(gl.maximum(begin - batches, 0), begin + count - batches):
                    words = _load_units(
                        x2_ptr, src2, here2 + batch * (UB2 * 4), PAIR * x2_step, UB2, TA, 1, IW2, CH2
                    )
                    slot = used % RING
                    if RESIDENT:
                        slot = batch + batches - begin
                        mbarrier.wait(full.index(slot), 0)
                    else:
                        mbarrier.wait(full.index(slot), (used // RING) & 1)
                    acc = _multiply(
                        words, acc, batch + batches > begin, slots, slot * STEPS, UB2, TA, PARTS, BM, A
                    )
                    if not RESIDENT:
                        used += 1
                        gl.thread_barrier()
                        if SILENCE:
                            fetch_batch, fetch_rest, fetch_sub, fetch_turn = _next_fetch(
                                fetch_rest,
                                fetch_sub,
                                fetch_turn,
                                mask,
                                stop,
                                batches,
                                batches2,
                                PER_LIST,
                                UB2,
                            )
                        _fetch(
                            w_desc,
                            slots,
                            full,
                            slot,
                            begin + fetch_batch,
                            batches,
                            column,
                            fetched < total,
                            RING,
                            STEPS,
                            STEPS2,
                            BN,
                        )
                        fetched += 1
                        if not SILENCE:
                            fetch_batch = gl.where(fetch_batch + 1 == count, 0, fetch_batch + 1)

            if SPLIT > 1:
                part_at = gl.arange(0, BM, layout=gl.SliceLayout(1, MMA)).expand_dims(1) * BN + gl.arange(
                    0, BN, layout=gl.SliceLayout(0, MMA)
                ).expand_dims(0)
                tile_id = tile * gl.num_programs(1) + gl.program_id(1)
                part_base = part_ptr + tile_id * (SPLIT * TA * BM * BN)
                mine = _share(
                    acc, part_base, count_ptr + tile_id, gl.program_id(2), part_at, SPLIT, BM * BN, TA
                )
            if mine:
                bias = gl.load(bias_ptr + sum_col).expand_dims(0)
                for a in gl.static_range(TA):
                    if SPLIT > 1:
                        whole = _gather(part_base, a, part_at, SPLIT, BM * BN, TA)
                    else:
                        whole = acc[a]
                    sums = _time_steps(whole, BM, BN, PAIR, SUMS)
                    for s in gl.static_range(PAIR):
                        t = t0 + (a * PAIR + s)
                        current = sums[s] * scale + bias
                        if DENSE:
                            current += (
                                gl.load(dense_ptr + (state + t * dense_step)).to(gl.float32) * skip_value
                            )
                        if SKIPS:
                            gl.static_assert(BN == 64, "identity skips need BN == 64")
                            half = gl.load(skip_ptr + (dst + t * out_step))
                            current += gl.where(_spread(half, current, PX), skip_value, 0.0)
                        v = v * alpha + current
                        spikes = v >= threshold
                        if SOFT:
                            v = gl.where(spikes, v - threshold, v)
                        else:
                            v = gl.where(spikes, v_reset, v)
                        bits = _pack(spikes, PX, BN)
                        for blk in gl.static_range(BN // 64):
                            piece = _column_block(bits, blk, BN, PX, OUT)
                            gl.store(
                                out_ptr + (dst + (t * out_step + blk * 4)), piece.to(gl.int16), mask=inside
                            )
                            if EMIT:
                                fired = _note(fired, blk, gl.where(piece != 0, 1 << t, 0), BN // 64)
        if EMIT:
            if mine:
                for blk in gl.static_range(BN // 64):
                    _store_activity(
                        out_act_ptr + (column // 64 + blk) * out_tiles,
                        fired[blk],
                        tile * NUM_WARPS,
                        out_tiles,
                        PX,
                        NUM_WARPS,
                    )
        if WRITE_V:
            if mine:
                gl.store(v_out_ptr + state, v, mask=(tile * PX + sum_row < pixels).expand_dims(1))
    if SILENCE and RESIDENT:
        # weights of blocks that were silent everywhere may still be on their way into this CTA's memory
        for i in gl.static_range(RING):
            mbarrier.wait(full.index(i), 0)

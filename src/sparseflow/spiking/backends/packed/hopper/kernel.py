"""The fused group on Hopper: 1-bit spikes -> wgmma -> bias -> IF/LIF over T -> 1-bit spikes (Gluon).

One CTA owns tiles of `BM` output pixels (flattened over images, rows, columns) and one column of `BN`
output channels. The A operand of each wgmma comes from registers: a thread loads the halfword that holds
exactly its fragment's bits of 64 channels (`format.py`) and spreads it with one PRMT, three rotations and
eight ANDs into fp16 pairs whose ones are powers of two; the weights carry the inverse powers and are
permuted along K to match. No part of A passes through shared memory. The accumulator's fragment has the
shape of A's, so a thread's own spikes are exactly one halfword of the output: the epilogue needs no
shuffles.

The K loop goes over *batches*. A batch has `UB` units, each with `PARTS` weight matrices and `TC` time steps;
a unit is a tap of one block of channels, or a block of channels of a 1x1 convolution. A batch is
straight-line code, because ptxas serializes all wgmmas if a barrier's wait loop or a loop's back edge comes
between them. A batch ends when its wgmmas have finished (it is drained). Weights come by TMA into a ring of
`RING` batches and serve all `TC` time steps before they are replaced. If the ring holds all weights
(`RESIDENT`), they stay for the whole kernel. A CTA keeps its column while it iterates over tiles, so the
stream of weights never stops.

With `EMIT`, the kernel writes activity words: for the pixels of each warp and each block of channels, the
time steps in which they fire. With `ACTIVITY_WORDS`, it reads these words of its input, over a tile and its
halo. It then visits only the K batches of blocks that are active there, followed by those of the second
source, if there is one. The list of batches is a bit mask; weights are fetched in its order.

With `PARTS` > 1, each weight is the sum of several fp16 numbers, the largest first. The tensor cores then
add up only one batch, the smallest parts first, and fp32 adds the batches. The reason is that Hopper's tensor
cores truncate when they add to an fp32 accumulator (to about two bits below its last one). A sum over all of
K would have an error of more than 1e-6 of its size; that of an fp32 convolution is 1e-7. One part does not
need this: its own rounding is 2^-12, and its 11 bits leave the accumulator almost nothing to truncate.

With `SPLIT` > 1, that many CTAs share a tile's K loop. Each writes its partial sums. The last CTA to finish
adds them in a fixed order and runs the neurons, so the result does not depend on which CTA is last.
"""

# Kernels are Triton's subset of Python: tuples grow by `+`, constexpr branches stay `if` statements.
# ruff: noqa: RUF005, SIM102, B007
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from sparseflow.spiking.backends.packed.hopper.addressing import (
    batch_shift,
    load_units,
    membrane_index,
    padded_index,
    split_pixel,
)
from sparseflow.spiking.backends.packed.hopper.block_activity import (
    advance_batch,
    advance_fetch,
    compute_active_mask,
    count_bits,
    find_lowest_bit,
    load_activity,
    store_activity,
    update_fired,
)
from sparseflow.spiking.backends.packed.hopper.layouts import (
    make_halves_layout,
    make_sums_layout,
    pack_spikes,
    select_column_block,
    split_time_steps,
    spread_spikes,
    unpack_spikes,
)


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
    """Start to copy the weights of K batch `batch` into slot `index` of the ring, if `pred` holds.

    The first `main` batches have STEPS weight matrices each, the batches of the second source STEPS2.
    """
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
            row = main * STEPS + (batch - main) * STEPS2 + j
            tma.async_copy_global_to_shared(
                w_desc, [column, row * 64], bar, slots.index(index * STEPS + j), second
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
    BM: gl.constexpr,
    A: gl.constexpr,
):
    """Add A[t] B to acc[t] for all units of a batch.

    This is asynchronous straight-line code that waits for all wgmmas at the end. Without `accumulate`, the
    sums start from zero.
    """
    for u in gl.static_range(UB):
        products = ()
        for t in gl.static_range(TC):
            a = unpack_spikes(words[u * TC + t], BM, A)
            b = slots.index(slot0 + u).permute((1, 0))
            if u == 0:
                token = warpgroup_mma(a, b, acc[t], use_acc=accumulate, is_async=True)
            else:
                token = warpgroup_mma(a, b, acc[t], is_async=True)
            products = products + (warpgroup_mma_wait(1, deps=[token]),)
        acc = products
    drained = ()
    for t in gl.static_range(TC):
        drained = drained + (warpgroup_mma_wait(0, deps=[acc[t]]),)
    return drained


@gluon.jit
def _multiply_parts(
    words,
    sums,
    slots,
    slot0,
    UB: gl.constexpr,
    TC: gl.constexpr,
    PARTS: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    A: gl.constexpr,
):
    """Add A[t] B to sums[t] for all units of a batch whose weights come in parts.

    The tensor cores start from zero, and fp32 adds their results; the module's docstring has the reason. The
    time steps run one after the other, which frees the registers of A early.
    """
    products = ()
    for t in gl.static_range(TC):
        acc = gl.full([BM, BN], 0.0, gl.float32, sums[t].type.layout)
        for turn in gl.static_range(PARTS):
            for u in gl.static_range(UB):
                a = unpack_spikes(words[u * TC + t], BM, A)
                b = slots.index(slot0 + (u * PARTS + (PARTS - 1 - turn))).permute((1, 0))
                if turn + u == 0:
                    token = warpgroup_mma(a, b, acc, use_acc=False, is_async=True)
                else:
                    token = warpgroup_mma(a, b, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[token])
        products = products + (acc,)
    added = ()
    for t in gl.static_range(TC):
        added = added + (sums[t] + warpgroup_mma_wait(0, deps=[products[t]]),)
    return added


@gluon.jit
def _store_partial_sums(
    acc, base, count_ptr, rank, offset, SPLIT: gl.constexpr, SIZE: gl.constexpr, TC: gl.constexpr
):
    """Store this CTA's partial sums, and return whether it is the last CTA of its tile.

    The last CTA resets the tile's count to 0.
    """
    for t in gl.static_range(TC):
        gl.store(base + ((rank * TC + t) * SIZE + offset), acc[t])
    gl.thread_barrier()
    last = gl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if last:
        gl.store(count_ptr, 0)
    return last


@gluon.jit
def _load_partial_sums(base, t, offset, SPLIT: gl.constexpr, SIZE: gl.constexpr, TC: gl.constexpr):
    """Sum the partial sums of time step `t`, always in the same order."""
    total = gl.load(base + (t * SIZE + offset), cache_modifier=".cg")
    for s in gl.static_range(1, SPLIT):
        total += gl.load(base + ((s * TC + t) * SIZE + offset), cache_modifier=".cg")
    return total


# Not specialized: a count of 1 would otherwise become a compile-time constant and change the code's types.
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
    v_columns_ptr,
    part_ptr,
    count_ptr,
    act_ptr,
    out_act_ptr,
    scale,
    alpha,
    skip_value,
    threshold,
    reset_value,
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
    ACTIVITY_WORDS: gl.constexpr,
    IN_TILE: gl.constexpr,
    EMIT: gl.constexpr,
    RESET: gl.constexpr,
    SKIPS: gl.constexpr,
    DENSE: gl.constexpr,
    READ_V: gl.constexpr,
    WRITE_V: gl.constexpr,
    V_COLUMNS: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):
    """Run a group over all time steps. Grid (CTAs that share the tiles, C_OUT / BN, SPLIT).

    The module's docstring describes the algorithm. The parameters of the second source end in 2. With
    `ACTIVITY_WORDS` and without `RESIDENT`, a CTA works on one tile only.

    Each tile has these steps: set up addresses and membrane; for each chunk of TC time steps, run the K
    batches of both sources, add the partial sums of other CTAs, and run the neurons; write activity and
    membrane.

    Args:
        x_ptr, x2_ptr: Packed spikes of the sources, as halfwords; see `format.py`.
        w_desc: TMA descriptor of the weights; see `pack_hopper_weights`.
        bias_ptr: Bias, scaled by beta and with delta added, fp32 [C_OUT].
        out_ptr: Packed output, as halfwords.
        skip_ptr: Packed spikes that are added to the currents; read with SKIPS.
        dense_ptr: Tensor that is added to the currents, [T or 1, N, H, W, C_OUT]; read with DENSE.
        v_in_ptr: Initial membrane, fp32 [N, H, W, C_OUT]; read with READ_V.
        v_out_ptr: Membrane after the last step; written with WRITE_V.
        v_columns_ptr: int32 [C_OUT], the channel of both membranes for each channel; read with V_COLUMNS.
        part_ptr: Partial sums of the CTAs that share a tile.
        count_ptr: Number of CTAs that have finished each tile; 0 before and after a launch.
        act_ptr: Activity words of the first source, [blocks, act_tiles].
        out_act_ptr: Activity words of the output, [blocks, out_tiles]; written with EMIT.
        scale: beta times the power of two that the weights were divided by.
        alpha, threshold: See `NeuronSpec`.
        skip_value: Current of a spike or of 1.0 in `skip_ptr` and `dense_ptr`, which is beta.
        reset_value, RESET: As `reset_value` and `reset_mode` of `NeuronSpec`.
        pixels: Output pixels of all images of a time step.
        tiles: Tiles of output pixels.
        T: Time steps.
        batches, batches2: K batches of each source.
        x_step, x2_step, out_step, dense_step: Elements from one time step to the next.
        act_tiles, out_tiles: Activity words of a block of channels.
        H, W, IH, IW, IH2, IW2: Rows and columns of the output and of the inputs.
        CH, CH2, OCH: Halfwords per pixel of the inputs and of the output.
        C_OUT: Output channels.
        TAPS: 9 for a 3x3 convolution, 1 for a 1x1 convolution.
        STRIDE, STRIDE2: Strides of the convolutions.
        BM, BN, TC, PAIR, UB, UB2, RING, SPLIT: See `HopperVariant`; a tile has BM / PAIR output pixels.
        PARTS: fp16 numbers per weight.
        RESIDENT: Whether the ring holds all weights of the CTA.
        ACTIVITY_WORDS: Activity words that a tile reads, rounded up to a power of two; 0 reads none.
        IN_TILE: Pixels per activity word of the input.
        EMIT: Whether to write activity words.
        NUM_WARPS: Warps of a CTA.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BN, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    HALVES: gl.constexpr = make_halves_layout(BM, NUM_WARPS)
    STEPS: gl.constexpr = UB * PARTS
    STEPS2: gl.constexpr = UB2 * PARTS
    PX: gl.constexpr = BM // PAIR
    TA: gl.constexpr = TC // PAIR
    SUMS: gl.constexpr = make_sums_layout(PX, BN, NUM_WARPS, PAIR, MMA)
    OUT: gl.constexpr = make_halves_layout(PX, NUM_WARPS)

    slots = gl.allocate_shared_memory(gl.float16, [RING * STEPS, BN, 64], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=1)

    first_tile = gl.program_id(0)
    tile_stride = gl.num_programs(0)
    column = gl.program_id(1) * BN
    # This CTA runs the K batches [batch_start, batch_start + count).
    if SPLIT == 1:
        batch_start = 0
        count = batches + batches2
    else:
        batch_start = (batches + batches2) * gl.program_id(2) // SPLIT
        count = (batches + batches2) * (gl.program_id(2) + 1) // SPLIT - batch_start
    PER_LIST: gl.constexpr = 9 // UB if TAPS == 9 else 1  # K batches per bit of the mask.
    if ACTIVITY_WORDS:
        gl.static_assert(SPLIT == 1, "skipping requires an unsplit K loop")
        activity = load_activity(
            act_ptr, first_tile, pixels, act_tiles, PX, H, W, IH, IW, TAPS, STRIDE, UB, CH // 4,
            ACTIVITY_WORDS, IN_TILE, NUM_WARPS,
        )  # fmt: skip
        if not RESIDENT:
            mask = compute_active_mask(activity, -1)
            stop = count_bits(mask) * PER_LIST
            fetch_pending = mask
            fetch_sub = 0
            fetch_turn = 0
    if RESIDENT:
        total = count
    elif ACTIVITY_WORDS:
        total = (stop + batches2) * (T // TC)
    else:
        total = count * ((tiles - first_tile + tile_stride - 1) // tile_stride) * (T // TC)
    fetched = 0
    fetch_batch = 0
    for i in gl.static_range(RING):
        if ACTIVITY_WORDS and not RESIDENT:
            fetch_batch, fetch_pending, fetch_sub, fetch_turn = advance_fetch(
                fetch_pending, fetch_sub, fetch_turn, mask, stop, batches, batches2, PER_LIST, UB2
            )
        _fetch(
            w_desc,
            slots,
            full,
            i,
            batch_start + fetch_batch,
            batches,
            column,
            fetched < total,
            RING,
            STEPS,
            STEPS2,
            BN,
        )
        fetched += 1
        if not ACTIVITY_WORDS or RESIDENT:
            fetch_batch = gl.where(fetch_batch + 1 == count, 0, fetch_batch + 1)
    used = 0  # Batches whose weights were used so far.

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
        n, y, x = split_pixel(gl.minimum(tile * PX + row_pixel, pixels - 1), H, W)
        src = padded_index(n, y * STRIDE - REACH, x * STRIDE - REACH, IH, IW) * CH
        src = (src + row_step * x_step).expand_dims(1) + lane
        if UB2 > 0:
            src2 = padded_index(n, y * STRIDE2, x * STRIDE2, IH2, IW2) * CH2
            src2 = (src2 + row_step * x2_step).expand_dims(1) + lane
        inside = (tile * PX + out_row < pixels).expand_dims(1)
        n, y, x = split_pixel(gl.minimum(tile * PX + out_row, pixels - 1), H, W)
        dst = (padded_index(n, y, x, H, W) * OCH).expand_dims(1) + (out_lane + column // 16)
        sum_pixel = gl.minimum(tile * PX + sum_row, pixels - 1).expand_dims(1)
        state = sum_pixel * C_OUT + sum_col.expand_dims(0)
        if READ_V:
            v = gl.load(v_in_ptr + membrane_index(state, sum_pixel, sum_col, v_columns_ptr, C_OUT, V_COLUMNS))
        else:
            v = gl.full([PX, BN], 0.0, gl.float32, SUMS)
            if RESET % 2 == 0:
                v += reset_value

        fired = ()
        if EMIT:
            for blk in gl.static_range(BN // 64):
                fired = fired + (gl.full([PX, 4], 0, gl.int32, OUT),)
        if ACTIVITY_WORDS and RESIDENT:
            tile_activity = activity
            activity = load_activity(
                act_ptr, gl.minimum(tile + tile_stride, tiles - 1), pixels, act_tiles, PX, H, W, IH, IW, TAPS,
                STRIDE, UB, CH // 4, ACTIVITY_WORDS, IN_TILE, NUM_WARPS,
            )  # fmt: skip
        if SPLIT > 1:
            runs_neuron = tile >= 0
        else:
            runs_neuron: gl.constexpr = True
        for t0 in range(0, T, TC):
            acc = ()
            for a in gl.static_range(TA):
                acc = acc + (gl.full([BM, BN], 0.0, gl.float32, MMA),)
            x_offset = t0 * x_step
            if ACTIVITY_WORDS:
                if RESIDENT:
                    mask = compute_active_mask(tile_activity, ((1 << TC) - 1) << t0)
                    stop = count_bits(mask) * PER_LIST
                pending = mask
                sub = 0
            elif SPLIT == 1:
                stop = batches
            else:
                stop = gl.minimum(batch_start + count, batches)
            for turn in range(batch_start, stop):
                batch = turn
                if ACTIVITY_WORDS:
                    batch = find_lowest_bit(pending) * PER_LIST + sub
                    pending, sub = advance_batch(pending, sub, mask, PER_LIST)
                words = load_units(
                    x_ptr,
                    src,
                    x_offset + batch_shift(batch, TAPS, UB, IW, CH),
                    PAIR * x_step,
                    UB,
                    TA,
                    TAPS,
                    IW,
                    CH,
                )
                slot = used % RING
                if RESIDENT:
                    slot = batch - batch_start
                    mbarrier.wait(full.index(slot), 0)
                else:
                    mbarrier.wait(full.index(slot), (used // RING) & 1)
                if PARTS == 1:
                    acc = _multiply(words, acc, turn > batch_start, slots, slot * STEPS, UB, TA, BM, A)
                else:
                    acc = _multiply_parts(words, acc, slots, slot * STEPS, UB, TA, PARTS, BM, BN, A)
                if not RESIDENT:
                    used += 1
                    gl.thread_barrier()
                    if ACTIVITY_WORDS:
                        fetch_batch, fetch_pending, fetch_sub, fetch_turn = advance_fetch(
                            fetch_pending, fetch_sub, fetch_turn, mask, stop, batches, batches2, PER_LIST, UB2
                        )
                    _fetch(
                        w_desc,
                        slots,
                        full,
                        slot,
                        batch_start + fetch_batch,
                        batches,
                        column,
                        fetched < total,
                        RING,
                        STEPS,
                        STEPS2,
                        BN,
                    )
                    fetched += 1
                    if not ACTIVITY_WORDS:
                        fetch_batch = gl.where(fetch_batch + 1 == count, 0, fetch_batch + 1)
            if UB2 > 0:
                x2_offset = t0 * x2_step
                for batch in range(gl.maximum(batch_start - batches, 0), batch_start + count - batches):
                    words = load_units(
                        x2_ptr, src2, x2_offset + batch * (UB2 * 4), PAIR * x2_step, UB2, TA, 1, IW2, CH2
                    )
                    slot = used % RING
                    if RESIDENT:
                        slot = batch + batches - batch_start
                        mbarrier.wait(full.index(slot), 0)
                    else:
                        mbarrier.wait(full.index(slot), (used // RING) & 1)
                    if PARTS == 1:
                        acc = _multiply(
                            words, acc, batch + batches > batch_start, slots, slot * STEPS, UB2, TA, BM, A
                        )
                    else:
                        acc = _multiply_parts(words, acc, slots, slot * STEPS, UB2, TA, PARTS, BM, BN, A)
                    if not RESIDENT:
                        used += 1
                        gl.thread_barrier()
                        if ACTIVITY_WORDS:
                            fetch_batch, fetch_pending, fetch_sub, fetch_turn = advance_fetch(
                                fetch_pending,
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
                            batch_start + fetch_batch,
                            batches,
                            column,
                            fetched < total,
                            RING,
                            STEPS,
                            STEPS2,
                            BN,
                        )
                        fetched += 1
                        if not ACTIVITY_WORDS:
                            fetch_batch = gl.where(fetch_batch + 1 == count, 0, fetch_batch + 1)

            if SPLIT > 1:
                part_at = gl.arange(0, BM, layout=gl.SliceLayout(1, MMA)).expand_dims(1) * BN + gl.arange(
                    0, BN, layout=gl.SliceLayout(0, MMA)
                ).expand_dims(0)
                tile_id = tile * gl.num_programs(1) + gl.program_id(1)
                part_base = part_ptr + tile_id * (SPLIT * TA * BM * BN)
                runs_neuron = _store_partial_sums(
                    acc, part_base, count_ptr + tile_id, gl.program_id(2), part_at, SPLIT, BM * BN, TA
                )
            if runs_neuron:
                bias = gl.load(bias_ptr + sum_col).expand_dims(0)
                for a in gl.static_range(TA):
                    if SPLIT > 1:
                        tile_sums = _load_partial_sums(part_base, a, part_at, SPLIT, BM * BN, TA)
                    else:
                        tile_sums = acc[a]
                    sums = split_time_steps(tile_sums, BM, BN, PAIR, SUMS)
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
                            current += gl.where(spread_spikes(half, current, PX), skip_value, 0.0)
                        if RESET == 3:
                            current -= gl.where(v >= threshold, reset_value, 0.0)
                        elif RESET == 2:
                            v = gl.where(v >= threshold, reset_value, v)
                        v = v * alpha + current
                        spikes = v >= threshold
                        if RESET == 1:
                            v = gl.where(spikes, v - reset_value, v)
                        elif RESET == 0:
                            v = gl.where(spikes, reset_value, v)
                        bits = pack_spikes(spikes, PX, BN)
                        for blk in gl.static_range(BN // 64):
                            piece = select_column_block(bits, blk, BN, PX, OUT)
                            gl.store(
                                out_ptr + (dst + (t * out_step + blk * 4)), piece.to(gl.int16), mask=inside
                            )
                            if EMIT:
                                fired = update_fired(fired, blk, gl.where(piece != 0, 1 << t, 0), BN // 64)
        if EMIT:
            if runs_neuron:
                for blk in gl.static_range(BN // 64):
                    store_activity(
                        out_act_ptr + (column // 64 + blk) * out_tiles,
                        fired[blk],
                        tile * NUM_WARPS,
                        out_tiles,
                        PX,
                        NUM_WARPS,
                    )
        if WRITE_V:
            if runs_neuron:
                v_offset = membrane_index(state, sum_pixel, sum_col, v_columns_ptr, C_OUT, V_COLUMNS)
                gl.store(v_out_ptr + v_offset, v, mask=(tile * PX + sum_row < pixels).expand_dims(1))
    if ACTIVITY_WORDS and RESIDENT:
        # Copies of weights of blocks that were silent everywhere may not have finished yet.
        for i in gl.static_range(RING):
            mbarrier.wait(full.index(i), 0)

"""Triton kernels of the two stages; `conv.py` launches them.

Stage 1 reads the input once (`compute_plane_words` or `compute_pixel_words`, by memory format) and converts
the occupancy words to one list of active chunks per output tile (`list_chunks`). Stage 2 (`convolve`) owns
a tile of the output, starts from the bias and loops over the list; it needs no atomics and its result does
not depend on timing.

Strides are passed divided by a constant A that they all share, except that of the innermost dimension:
multiplying by the constant tells the compiler how far accesses may be vectorized.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def compute_plane_words(
    x_ptr, word_ptr, C, H, W, sn, sc, sh, sw, grid_h, chunks,
    A: tl.constexpr, B: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one row of blocks, COLS columns at a time. Input with W innermost.

    FULL: all chunks have GROUP channels.
    """
    pid = tl.program_id(0)
    i = pid % grid_h
    g = (pid // grid_h) % chunks
    n = pid // (grid_h * chunks)
    NB: tl.constexpr = COLS // B
    row = i * B + tl.arange(0, B)
    grid_w = tl.cdiv(W * A, B)
    base = x_ptr + n.to(tl.int64) * (sn * A) + (g * GROUP) * (sc * A)
    for start_column in range(0, W * A, COLS):
        column = start_column + tl.arange(0, COLS)
        inside = (row < H)[:, None] & (column < W * A)[None, :]
        values = base + ((row * (sh * A))[:, None] + (column * sw)[None, :])
        fired = tl.zeros([B, COLS], tl.int1)
        for c in tl.static_range(GROUP):
            valid = inside
            if not FULL:
                valid = inside & (g * GROUP + c < C)
            fired |= tl.load(values, mask=valid, other=0.0) != 0
            values += sc * A
        fired = tl.reshape(fired.to(tl.int32), [B, NB, B])
        rows = tl.max(fired, axis=2) << tl.arange(0, B)[:, None]
        columns = tl.max(fired, axis=0) << (16 + tl.arange(0, B))[None, :]
        word = tl.sum(rows, axis=0) | tl.sum(columns, axis=1)
        j = start_column // B + tl.arange(0, NB)
        tl.store(word_ptr + ((n * grid_h + i) * grid_w + j) * chunks + g, word, mask=j < grid_w)


@triton.jit
def compute_pixel_words(
    x_ptr, word_ptr, C, H, W, sn, sc, sh, sw, grid_h, grid_w, chunks, parts,
    A: tl.constexpr, B: tl.constexpr, CB: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program: CB channels (several chunks) of one block. Input with C innermost."""
    pid = tl.program_id(0)
    part = pid % parts
    block = pid // parts
    i = (block // grid_w) % grid_h
    j = block % grid_w
    n = block // (grid_w * grid_h)
    NG: tl.constexpr = CB // GROUP
    pixel = tl.arange(0, B * B)
    row = i * B + pixel // B
    column = j * B + pixel % B
    c = part * CB + tl.arange(0, CB)
    base = x_ptr + n.to(tl.int64) * (sn * A)
    offset = (row * (sh * A) + column * (sw * A))[:, None] + (c * sc)[None, :]
    inside = ((row < H) & (column < W))[:, None] & (c < C * A)[None, :]
    x = tl.load(base + offset, mask=inside, other=0.0)
    fired = tl.max(tl.reshape((x != 0).to(tl.int32), [B, B, NG, GROUP]), axis=3)
    rows = tl.max(fired, axis=1) << tl.arange(0, B)[:, None]
    columns = tl.max(fired, axis=0) << (16 + tl.arange(0, B))[:, None]
    word = tl.sum(rows, axis=0) | tl.sum(columns, axis=0)
    g = part * NG + tl.arange(0, NG)
    tl.store(word_ptr + block * chunks + g, word, mask=g < chunks)


@triton.jit
def list_chunks(
    word_ptr, count_ptr, chunk_ptr, tiles, tiles_h, tiles_w, H, W, grid_h, grid_w, chunks,
    K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, B: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr,
    REACH_H: tl.constexpr, REACH_W: tl.constexpr, TB: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """One program: TB tiles. A chunk is listed if a block is occupied in a row and a column of the field."""
    tile = tl.program_id(0) * TB + tl.arange(0, TB)
    valid_tile = tile < tiles
    first_column = (tile % tiles_w) * (TW * S) - P
    first_row = ((tile // tiles_w) % tiles_h) * (TH * S) - P
    n = tile // (tiles_w * tiles_h)
    last_row = tl.minimum(first_row + (TH - 1) * S + K, H) - 1
    last_column = tl.minimum(first_column + (TW - 1) * S + K, W) - 1
    first_row = tl.maximum(first_row, 0)
    first_column = tl.maximum(first_column, 0)
    # A 1x1 convolution of stride 2 reads even rows and columns only; blocks and tiles start at even ones.
    READ: tl.constexpr = 0x5555 if S > K else 0xFFFF
    g = tl.arange(0, GP)
    active = tl.zeros([TB, GP], tl.int32)
    for di in tl.static_range(REACH_H):
        i = first_row // B + di
        # bits from the first to the last row of the field that lie in this block; none without such a row
        low = tl.maximum(first_row - i * B, 0)
        high = tl.minimum(last_row - i * B, B - 1)
        row_bits = ((2 << tl.maximum(high, 0)) - (1 << low)) & READ
        row_bits = tl.where((i < grid_h) & (high >= low), row_bits, 0)
        for dj in tl.static_range(REACH_W):
            j = first_column // B + dj
            low = tl.maximum(first_column - j * B, 0)
            high = tl.minimum(last_column - j * B, B - 1)
            column_bits = ((2 << tl.maximum(high, 0)) - (1 << low)) & READ
            needed = valid_tile & (row_bits != 0) & (j < grid_w) & (high >= low)
            word_index = ((n * grid_h + i) * grid_w + j) * chunks
            word = tl.load(
                word_ptr + word_index[:, None] + g[None, :],
                mask=needed[:, None] & (g < chunks)[None, :],
                other=0,
            )
            hit = ((word & row_bits[:, None]) != 0) & (((word >> 16) & column_bits[:, None]) != 0)
            active |= hit.to(tl.int32)
    slot = tl.cumsum(active, axis=1) - active
    tl.store(chunk_ptr + (tile * chunks)[:, None] + slot, g[None, :] + tl.zeros([TB, GP], tl.int32),
             mask=active != 0)  # fmt: skip
    tl.store(count_ptr + tile, tl.sum(active, axis=1), mask=valid_tile)


@triton.jit
def convolve(
    x_ptr, w_ptr, bias_ptr, y_ptr, count_ptr, chunk_ptr, tiles_h, tiles_w, chunks,
    C, H, W, CO, CO_PAD, OH, OW,
    xn, xc, xh, xw, yn, yc, yh, yw,
    K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, GROUP: tl.constexpr,
    TH: tl.constexpr, TW: tl.constexpr, TC: tl.constexpr, PIXELS: tl.constexpr,
    XA: tl.constexpr, YA: tl.constexpr, FULL: tl.constexpr, BIAS: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: TH x TW output pixels by TC output channels, over the tile's active chunks only.

    PIXELS: channels are innermost. FULL: all chunks have GROUP channels.
    """
    # Programs of one field's output channels run concurrently and share its input in L2.
    columns = CO_PAD // TC
    tile = tl.program_id(0) // columns
    co = (tl.program_id(0) % columns) * TC + tl.arange(0, TC)
    n = (tile // (tiles_w * tiles_h)).to(tl.int64)
    m = tl.arange(0, TH * TW)
    oh = ((tile // tiles_w) % tiles_h) * TH + m // TW
    ow = (tile % tiles_w) * TW + m % TW
    if PIXELS:
        xw = xw * XA
        yw = yw * YA
        inside_y = (oh < OH) & (ow < OW)
        channel = co < CO * YA
    else:
        xc = xc * XA
        yc = yc * YA
        inside_y = (oh < OH) & (ow < OW * YA)
        channel = co < CO
    xh = xh * XA
    yh = yh * YA
    kk = tl.arange(0, GROUP)
    ih = oh * S - P
    iw = ow * S - P
    x_at = x_ptr + n * (xn * XA) + ((ih * xh + iw * xw)[:, None] + (kk * xc)[None, :])
    w_at = w_ptr + kk[:, None] * CO_PAD + co[None, :]
    steps = tl.load(count_ptr + tile) * (K * K)
    acc = tl.zeros([TH * TW, TC], ACC)
    if BIAS:
        # Loaded first, so that a silent tile waits for its count and its bias at the same time.
        acc += tl.load(bias_ptr + co, mask=channel, other=0.0).to(ACC)[None, :]
    for step in tl.range(0, steps, num_stages=STAGES):
        g = tl.load(chunk_ptr + tile * chunks + step // (K * K))
        tap = step % (K * K)
        dh = tap // K
        dw = tap % K
        inside = (ih + dh >= 0) & (ih + dh < H) & (iw + dw >= 0) & (iw + dw < W)
        valid = inside[:, None]
        if not FULL:
            valid = valid & (g * GROUP + kk < C)[None, :]
        x = tl.load(x_at + (dh * xh + dw * xw + g * GROUP * xc), mask=valid, other=0.0)
        w = tl.load(w_at + (tap * chunks + g) * GROUP * CO_PAD)
        acc = tl.dot(x, w, acc, input_precision=PRECISION, out_dtype=ACC)
    y_at = y_ptr + n * (yn * YA) + ((oh * yh + ow * yw)[:, None] + (co * yc)[None, :])
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=inside_y[:, None] & channel[None, :])

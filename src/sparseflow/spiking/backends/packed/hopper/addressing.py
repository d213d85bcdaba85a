"""Addresses of pixels, taps and membranes in the Hopper kernel."""

# Kernels are Triton's subset of Python: tuples grow by `+`, constexpr branches stay `if` statements.
# pyright: reportGeneralTypeIssues=false
# ruff: noqa: RUF005
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def split_pixel(pixel, H: gl.constexpr, W: gl.constexpr):
    """Image, row and column of a pixel counted over all images."""
    return pixel // (H * W), (pixel // W) % H, pixel % W


@gluon.jit
def padded_index(n, y, x, H: gl.constexpr, W: gl.constexpr):
    """Position of a pixel in padded memory (`format.py`); `y` and `x` may be one outside the image."""
    return ((H + 1) * n + y + 1) * (W + 1) + x + 1


@gluon.constexpr_function
def unit_shift(unit, taps, width, ch):
    """Halfwords from a batch's first unit to its unit `unit`: a tap of a 3x3, or a block of a 1x1."""
    return unit * 4 if taps == 1 else ((unit // 3) * (width + 1) + unit % 3) * ch


@gluon.jit
def batch_shift(batch, TAPS: gl.constexpr, UB: gl.constexpr, IW: gl.constexpr, CH: gl.constexpr):
    """Halfwords from a tile's first tap and block to the first unit of batch `batch`."""
    if TAPS == 1:
        return batch * (UB * 4)
    else:
        PER_BLOCK: gl.constexpr = 9 // UB
        return (batch // PER_BLOCK) * 4 + (batch % PER_BLOCK) * ((UB // 3) * (IW + 1) * CH)


@gluon.jit
def load_units(
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
    """Load the halfwords of a batch, unit by unit and time step by time step."""
    words = ()
    for u in gl.static_range(UB):
        for t in gl.static_range(TC):
            words = words + (gl.load(x_ptr + (offsets + (shift + t * x_step + unit_shift(u, TAPS, IW, CH)))),)
    return words


@gluon.jit
def membrane_index(state, pixel, column, table_ptr, C_OUT: gl.constexpr, V_COLUMNS: gl.constexpr):
    """Index of membranes: `state`, or with the channels of a table instead of `column`.

    Computed again for each read and write of a tile: kept, the indices would take registers from the K loop.
    """
    if V_COLUMNS:
        return pixel * C_OUT + gl.load(table_ptr + column).expand_dims(0)
    else:
        return state

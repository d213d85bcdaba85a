"""Kernel arguments: C records of addresses (int64 bytes), sizes and numbers.

A kernel takes the address of one record and reads everything from there. This makes it a C callback that
any thread pool can run, see `threads.py`. Sizes are in elements unless the name says bytes.
"""

from __future__ import annotations

import numpy as np

SLACK = 32
"""Entries after the end of a row of events that vector loads and stores may touch."""


def _make_dtype(*names: str, floats: tuple[str, ...] = ()) -> np.dtype:
    return np.dtype(
        [(name, np.int64) for name in names] + [(name, np.float32) for name in floats], align=True
    )


def get_field_offset(record: np.dtype, name: str) -> int:
    offsets: dict[str, int] = {field: entry[1] for field, entry in (record.fields or {}).items()}
    return offsets[name]


EVENTS = _make_dtype(
    "index",  # address of the entries, uint16 or (wide) int32
    "start",  # address of int32 [planes, N, H, W + 1]
    "row",  # allocated entries per row
    "wide",
    "planes",
    "table",  # address of `planes.plane_table`
)
"""A spike tensor in event form."""

SOURCE = _make_dtype(
    "index",  # the first six as in EVENTS
    "start",
    "row",
    "wide",
    "planes",
    "table",
    "height",
    "width",
    "channels",
    "kernel",
    "stride",
    "padding",
    "weight",  # address of float32 [tile][k * k * c + 1][16 * vectors]: rows by dx, dy, c, then one of zeros
    "tile_bytes",  # between two tiles
)
"""A spike tensor and the convolution that reads it."""

DENSE = _make_dtype(
    "data",  # address of float32 [T or 1, N, H, W, C]
    "time",  # elements between two time steps; 0 if constant over time
)
"""A real tensor that is added to the neuron's input."""

GROUP = _make_dtype(
    "next_item",  # atomic: work items handed out
    "next_slot",  # atomic: scratch slots handed out
    "need",  # atomic: length of the longest output row that did not fit, 0 if all fit
    "time_steps",
    "images",
    "channels",
    "height",
    "width",
    "vectors",  # of one tile
    "tiles",
    "used_vectors",  # ceil(C / 16)
    "last_lanes",  # bits of the valid lanes of the last used vector
    "block_rows",  # output rows of one work item
    "blocks",  # work items of one tile
    "sources",  # count, then address of SOURCE[]
    "source_list",
    "skips",
    "skip_list",
    "denses",
    "dense_list",
    "posts",
    "post_list",
    "bias",  # address of float32 [tiles * 16 * vectors]
    "v_in",  # address of float32 [N, H, W, C], or 0
    "v_out",
    "bits",  # address of uint16 [T][N][H][tiles][W][vectors]
    "finished",  # address of int64 [blocks]: finished tiles
    "mode",  # kind of output, see group.py
    "out",  # address of EVENTS, or of float32 [T, N, H, W, C]
    "scratch",  # address of the threads' private memory
    "scratch_bytes",  # of one thread
    "rows_bytes",  # of the part that holds numbers of weight rows
    "masks_bytes",  # of the part that holds one output row of bits
    "reset_mode",  # as in NeuronSpec
    floats=("alpha", "beta", "delta", "threshold", "rest", "reset_value"),
)
"""One run of a group."""

CODEC = _make_dtype(
    "next_item",
    "next_slot",
    "need",  # as in GROUP
    "flag",  # atomic: result of encode, see conversions.py
    "time_steps",
    "images",
    "channels",
    "height",
    "width",
    "source",  # address of float32 for encode, of EVENTS otherwise
    "stride_t",
    "stride_n",
    "stride_c",
    "stride_h",
    "stride_w",
    "out",  # address of EVENTS, or of float32 [T, N, H, W, C] or [T, N, C]
    "scratch",
    "scratch_bytes",
    "row_bytes",  # of the part of the scratch memory that holds a row of floats
)
"""One conversion between events and dense tensors, or one reduction of events."""

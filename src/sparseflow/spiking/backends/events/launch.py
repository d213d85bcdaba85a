"""Runs the group kernel: one `Launch` for each set of shapes holds the record and the scratch memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sparseflow.spiking.backends.events.format import Events, address_of_array, aligned_zeros, first_row
from sparseflow.spiking.backends.events.kernels import threads
from sparseflow.spiking.backends.events.kernels.compiler import compile_kernel
from sparseflow.spiking.backends.events.kernels.group import OUT_SUMS, make_group_kernel
from sparseflow.spiking.backends.events.kernels.llvm import ALL_LANES, LANES
from sparseflow.spiking.backends.events.kernels.planes import MOST_SHARED
from sparseflow.spiking.backends.events.kernels.records import DENSE, EVENTS, GROUP
from sparseflow.spiking.backends.events.packing import PackedGroup
from sparseflow.spiking.backends.spec import NeuronSpec

_ITEMS_PER_THREAD = 4
"""Work items that a thread should find at least, so that no thread waits long for the last one."""

Shape = tuple[int, int, int, int, int]
"""(T, N, C, H, W)."""


def _up_to_line(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


class Launch:
    """A group on inputs of fixed shapes.

    Args:
        packed: Weights and bias.
        neuron: The dynamics.
        shape: (T, N, C, H, W) of the output.
        events: The sources' inputs; only their shapes and capacities are used here.
        skips: How many event tensors are added to the neuron's input.
        constant: For each dense input, whether it is the same at every time step.
        posts: How many event tensors are added to the neuron's output.
        workers: Threads.

    Attributes:
        row: Entries that a row of the output gets.
    """

    def __init__(
        self,
        packed: PackedGroup,
        neuron: NeuronSpec,
        shape: Shape,
        events: Sequence[Events],
        skips: int,
        constant: Sequence[bool],
        posts: int,
        workers: int,
    ) -> None:
        t, n, c, h, w = shape
        self._packed, self._workers = packed, workers
        self._function = compile_kernel(make_group_kernel)
        self._sources = packed.sources.copy()
        for source, one in zip(self._sources, events, strict=False):
            source["height"], source["width"] = one.H, one.W
        self._skips = np.zeros(max(skips, 1), dtype=EVENTS)
        self._posts = np.zeros(max(posts, 1), dtype=EVENTS)
        self._denses = np.zeros(max(len(constant), 1), dtype=DENSE)
        for dense, same in zip(self._denses, constant, strict=False):
            dense["time"] = 0 if same else n * h * w * c

        pieces = min(h, -(-workers * _ITEMS_PER_THREAD // (n * packed.tiles)))
        block_rows = -(-h // pieces)
        blocks = n * -(-h // block_rows)
        self._finished = np.zeros(blocks, dtype=np.int64)
        lanes = LANES * packed.vectors
        kernels = [int(source["kernel"]) for source in self._sources]
        shorts = packed.tiles * w * packed.vectors
        masks_bytes = _up_to_line(2 * shorts + 64)
        rows_bytes = max((4 * k * e.row for k, e in zip(kernels, events, strict=False)), default=0)
        rows_bytes = _up_to_line(rows_bytes + 64) + masks_bytes
        buffers = 3 + (MOST_SHARED + 1) * len(events)
        most_width = max([w, *(e.W for e in events)])
        scratch_bytes = (
            rows_bytes + buffers * 4 * w * lanes + 64 * len(events) + _up_to_line(4 * (most_width + 1))
        )
        self._scratch = aligned_zeros(workers * scratch_bytes, np.uint8)
        self._bits = aligned_zeros(t * n * h * shorts + 32, np.uint16)

        self.row = first_row(c, w)
        self._group = np.zeros(1, dtype=GROUP)
        self._address = address_of_array(self._group)
        for name, value in {
            "time_steps": t,
            "images": n,
            "channels": c,
            "height": h,
            "width": w,
            "vectors": packed.vectors,
            "tiles": packed.tiles,
            "used_vectors": -(-c // LANES),
            "last_lanes": ALL_LANES >> (-c % LANES),
            "block_rows": block_rows,
            "blocks": blocks,
            "sources": len(events),
            "source_list": address_of_array(self._sources),
            "skips": skips,
            "skip_list": address_of_array(self._skips),
            "denses": len(constant),
            "dense_list": address_of_array(self._denses),
            "posts": posts,
            "post_list": address_of_array(self._posts),
            "bias": address_of_array(packed.bias),
            "bits": address_of_array(self._bits),
            "finished": address_of_array(self._finished),
            "scratch": address_of_array(self._scratch),
            "scratch_bytes": scratch_bytes,
            "rows_bytes": rows_bytes,
            "masks_bytes": masks_bytes,
            "hard": neuron.v_reset is not None,
            "alpha": neuron.alpha,
            "beta": neuron.beta,
            "delta": neuron.delta,
            "threshold": neuron.v_threshold,
            "rest": neuron.v_rest,
        }.items():
            self._group[name] = value

    def bind(
        self,
        events: Sequence[Events],
        skips: Sequence[Events],
        reals: Sequence[torch.Tensor],
        posts: Sequence[Events],
        before: torch.Tensor | None,
        after: torch.Tensor | None,
    ) -> None:
        """Point the record at this call's inputs, of the shapes given before.

        Args:
            events: One for each source.
            skips: Added to the neuron's input.
            reals: float32, memory [T or 1, N, H, W, C].
            posts: Added to the neuron's output.
            before: Membrane before the first step, memory [N, H, W, C], or None.
            after: Where the membrane after the last step goes, likewise.
        """
        for source, one in zip(self._sources, events, strict=False):
            for name in ("index", "start", "row", "wide", "planes", "table"):
                source[name] = one.record[name][0]
        for records, tensors in ((self._skips, skips), (self._posts, posts)):
            for i, one in enumerate(tensors):
                records[i] = one.record[0]
        for i, real in enumerate(reals):
            self._denses["data"][i] = real.data_ptr()
        group = self._group[0]
        group["v_in"] = 0 if before is None else before.data_ptr()
        group["v_out"] = 0 if after is None else after.data_ptr()

    def run(self, mode: int, out: int) -> int:
        """Run the kernel on what was bound.

        Args:
            mode: One of the OUT_ constants of `kernels.py`.
            out: Address of the output, as the mode asks.

        Returns:
            0, or how many entries the longest row of the output needs when some row did not fit.
        """
        group = self._group[0]
        group["mode"], group["out"] = mode, out
        group["next_item"] = group["next_slot"] = group["need"] = 0
        if mode != OUT_SUMS:
            self._finished.fill(0)
        threads.run(self._function, self._address, self._workers)
        return int(group["need"])

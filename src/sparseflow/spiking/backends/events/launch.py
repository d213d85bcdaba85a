"""`GroupLaunch`: the record and the scratch memory of the group kernel for one set of shapes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sparseflow.spiking.backends.events.format import (
    Events,
    allocate_aligned_zeros,
    estimate_row_capacity,
    get_array_address,
    round_up_to_cache_line,
)
from sparseflow.spiking.backends.events.kernels.compiler import compile_kernel, run_on_threads
from sparseflow.spiking.backends.events.kernels.group import OUT_SUMS, make_group_kernel
from sparseflow.spiking.backends.events.kernels.llvm import ALL_LANES, LANES
from sparseflow.spiking.backends.events.kernels.planes import MAX_SHARED
from sparseflow.spiking.backends.events.kernels.records import DENSE, EVENTS, GROUP
from sparseflow.spiking.backends.events.packing import PackedWeights
from sparseflow.spiking.backends.spec import NeuronSpec

_ITEMS_PER_THREAD = 4
"""Minimum work items per thread, so that no thread waits long for the last one."""

Shape = tuple[int, int, int, int, int]
"""(T, N, C, H, W)."""


class GroupLaunch:
    """A group on inputs of fixed shapes.

    Args:
        packed: Weights and bias.
        neuron: Neuron dynamics.
        shape: (T, N, C, H, W) of the output.
        events: Inputs of the sources; only their shapes and capacities are used.
        skips: Number of event tensors added to the neuron's input.
        constant: Whether each dense input is constant over time.
        posts: Number of event tensors added to the neuron's output.
        num_threads: Number of threads.

    Attributes:
        row_capacity: Number of entries that are allocated per row of the output.
    """

    def __init__(
        self,
        packed: PackedWeights,
        neuron: NeuronSpec,
        shape: Shape,
        events: Sequence[Events],
        skips: int,
        constant: Sequence[bool],
        posts: int,
        num_threads: int,
    ) -> None:
        t, n, c, h, w = shape
        self._packed, self._num_threads = packed, num_threads
        self._function = compile_kernel(make_group_kernel)
        self._sources = packed.sources.copy()
        for source, source_events in zip(self._sources, events, strict=False):
            source["height"], source["width"] = source_events.H, source_events.W
        self._skips = np.zeros(max(skips, 1), dtype=EVENTS)
        self._posts = np.zeros(max(posts, 1), dtype=EVENTS)
        self._denses = np.zeros(max(len(constant), 1), dtype=DENSE)
        for dense, is_constant in zip(self._denses, constant, strict=False):
            dense["time"] = 0 if is_constant else n * h * w * c

        max_blocks_per_image = -(-num_threads * _ITEMS_PER_THREAD // (n * packed.tiles))
        block_rows = -(-h // min(h, max_blocks_per_image))
        blocks = n * -(-h // block_rows)
        self._finished = np.zeros(blocks, dtype=np.int64)
        row_words = packed.tiles * w * packed.vectors  # Words of 16 bits in a row of output spikes.
        self._bits = allocate_aligned_zeros(t * n * h * row_words + 32, np.uint16)
        sizes = self._compute_scratch_sizes(events, w, row_words)
        self._scratch = allocate_aligned_zeros(num_threads * sizes["scratch_bytes"], np.uint8)

        self.row_capacity = estimate_row_capacity(c, w)
        self._group = np.zeros(1, dtype=GROUP)
        self._address = get_array_address(self._group)
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
            "source_list": get_array_address(self._sources),
            "skips": skips,
            "skip_list": get_array_address(self._skips),
            "denses": len(constant),
            "dense_list": get_array_address(self._denses),
            "posts": posts,
            "post_list": get_array_address(self._posts),
            "bias": get_array_address(packed.bias),
            "bits": get_array_address(self._bits),
            "finished": get_array_address(self._finished),
            "scratch": get_array_address(self._scratch),
            **sizes,
            "reset_mode": neuron.reset_mode,
            "alpha": neuron.alpha,
            "beta": neuron.beta,
            "delta": neuron.delta,
            "threshold": neuron.v_threshold,
            "rest": neuron.v_rest,
            "reset_value": neuron.reset_value,
        }.items():
            self._group[name] = value

    def _compute_scratch_sizes(self, events: Sequence[Events], width: int, row_words: int) -> dict[str, int]:
        """Compute the sizes of one thread's scratch memory, by the names of their fields in GROUP.

        The memory contains, in this order: numbers of weight rows and masks (together `rows_bytes`); the
        start of the sums, the currents and the membranes of a row; shared sums and cursors of each source;
        and the ends of the pixels of a source.
        """
        kernel_sizes = [int(source["kernel"]) for source in self._sources]
        max_entries = max(
            (size * source.row_capacity for size, source in zip(kernel_sizes, events, strict=False)),
            default=0,
        )
        masks_bytes = round_up_to_cache_line(2 * row_words + 64)
        rows_bytes = round_up_to_cache_line(4 * max_entries + 64) + masks_bytes
        float_row_bytes = 4 * width * LANES * self._packed.vectors
        num_float_rows = 3 + (MAX_SHARED + 1) * len(events)
        max_width = max([width, *(source.W for source in events)])
        return {
            "scratch_bytes": (
                rows_bytes
                + num_float_rows * float_row_bytes
                + 64 * len(events)
                + round_up_to_cache_line(4 * (max_width + 1))
            ),
            "rows_bytes": rows_bytes,
            "masks_bytes": masks_bytes,
        }

    def bind(
        self,
        events: Sequence[Events],
        skips: Sequence[Events],
        reals: Sequence[torch.Tensor],
        posts: Sequence[Events],
        v_before: torch.Tensor | None,
        v_after: torch.Tensor | None,
    ) -> None:
        """Write the addresses of one call's inputs to the record; the inputs have the launch's shapes.

        Args:
            events: Input of each source.
            skips: Events that are added to the neuron's input.
            reals: Tensors that are added to the neuron's input, float32, memory [T or 1, N, H, W, C].
            posts: Events that are added to the neuron's output.
            v_before: Membrane before the first step, memory [N, H, W, C]; None for the rest value.
            v_after: Receives the membrane after the last step, memory [N, H, W, C]; None discards it.
        """
        for source, source_events in zip(self._sources, events, strict=False):
            for name in ("index", "start", "row", "wide", "planes", "table"):
                source[name] = source_events.record[name][0]
        for records, tensors in ((self._skips, skips), (self._posts, posts)):
            for i, source_events in enumerate(tensors):
                records[i] = source_events.record[0]
        for i, real in enumerate(reals):
            self._denses["data"][i] = real.data_ptr()
        group = self._group[0]
        group["v_in"] = 0 if v_before is None else v_before.data_ptr()
        group["v_out"] = 0 if v_after is None else v_after.data_ptr()

    def run(self, mode: int, out: int) -> int:
        """Run the kernel on the bound inputs.

        Args:
            mode: One of the OUT_ constants of `kernels/group.py`.
            out: Address of the output, of the mode's type.

        Returns:
            0, or the capacity that the longest output row needs if some row did not fit.
        """
        group = self._group[0]
        group["mode"], group["out"] = mode, out
        group["next_item"] = group["next_slot"] = group["need"] = 0
        if mode != OUT_SUMS:
            self._finished.fill(0)
        run_on_threads(self._function, self._address, self._num_threads)
        return int(group["need"])

"""A fused group on a CPU: `prepare_group` lays out its weights once, the result runs it on any batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from sparseflow.errors import InputError
from sparseflow.spiking.kernels.events import threads
from sparseflow.spiking.kernels.events.compiler import compile_kernel
from sparseflow.spiking.kernels.events.format import (
    Events,
    address_of_array,
    allocate_events,
    record_list,
)
from sparseflow.spiking.kernels.events.kernels import (
    OUT_EVENTS,
    OUT_EVENTS_AGAIN,
    OUT_SPIKES,
    OUT_SUMS,
    VECTOR_CHOICES,
    make_group_kernel,
)
from sparseflow.spiking.kernels.events.records import DENSE, GROUP, SLACK, SOURCE
from sparseflow.spiking.kernels.events.simd import ALL_LANES, LANES, VECTOR_BYTES, cpu_features
from sparseflow.spiking.kernels.spec import GroupSpec, NeuronSpec, SpikeSource

_CACHE_BYTES = 640 << 10
"""Weights of one tile of output channels should fit here: most of a level-2 cache."""
_ITEMS_PER_THREAD = 4
"""Work items that a thread should find at least, so that no thread waits long for the last one."""


def _choose_vectors(sources: Sequence[SpikeSource], channels: int) -> int:
    """Vectors of 16 output channels in one tile."""
    taps = sum(s.weight.shape[1] * s.weight.shape[2] * s.weight.shape[3] for s in sources)
    most = 8 if "avx512f" in cpu_features() else 4
    choices = [v for v in VECTOR_CHOICES if v <= most and taps * v * VECTOR_BYTES <= _CACHE_BYTES]

    def cost(vectors: int) -> float:
        # Every tile walks all events again, which costs about as much as one more vector.
        return -(-channels // (LANES * vectors)) * (vectors + 1)

    return min(choices or [1], key=cost)


def _aligned(size: int, dtype: np.dtype | type) -> np.ndarray:
    kind = np.dtype(dtype)
    raw = np.zeros(size * kind.itemsize + 64, dtype=np.uint8)
    shift = -raw.ctypes.data % 64
    return raw[shift : shift + size * kind.itemsize].view(kind)


def _pack_weight(weight: torch.Tensor, lanes: int) -> np.ndarray:
    """[C_out, C_in, k, k] -> [tile, k * k * C_in + 1, lanes], 64-byte aligned.

    The rows of a tile are its weights for each (dx, dy, c), zero beyond C_out, and at last a row of zeros.
    """
    c_out, c_in, k, _ = weight.shape
    tiles, taps = -(-c_out // lanes), k * k * c_in
    packed = _aligned(tiles * (taps + 1) * lanes, np.float32).reshape(tiles, taps + 1, lanes)
    padded = torch.zeros(tiles * lanes, c_in, k, k)
    padded[:c_out] = weight.detach().float().cpu()
    packed[:, :taps] = padded.unflatten(0, (tiles, lanes)).permute(0, 4, 3, 2, 1).reshape(tiles, taps, lanes)
    return packed


def _rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """[..., C, H, W] float32 whose memory is [..., H, W, C]; a copy only where needed."""
    return x.float().movedim(-3, -1).contiguous()


@dataclass(frozen=True, kw_only=True)
class _PackedSource:
    """One convolution, ready for the kernel."""

    source: SpikeSource
    packed: np.ndarray
    lanes: int

    def fill(self, record: np.void, events: Events) -> None:
        c_out, c_in, k, _ = self.source.weight.shape
        if events.C != c_in:
            raise InputError(f"the convolution takes {c_in} channels, got events of shape {events.shape}")
        if (events.W + 1) * k * c_in >= 1 << 31:
            raise InputError(f"events of shape {events.shape} are too wide for a {k}x{k} event convolution")
        one = events.record[0]
        record["index"], record["start"] = one["index"], one["start"]
        record["row"], record["wide"] = one["row"], one["wide"]
        record["height"], record["width"], record["channels"] = events.H, events.W, c_in
        record["kernel"], record["stride"], record["padding"] = k, self.source.stride, self.source.padding
        record["weight"] = address_of_array(self.packed)
        record["tile_bytes"] = 4 * (k * k * c_in + 1) * self.lanes


class PreparedGroup:
    """A group whose weights are laid out for this machine. Made by `prepare_group`; not thread-safe.

    Attributes:
        spec: What it computes.
        conv: 'event' sums weight rows per event; 'dense' runs oneDNN and fuses what follows.
    """

    def __init__(self, spec: GroupSpec, conv: Literal["event", "dense"]) -> None:
        self.spec = spec
        self.conv = conv
        self.channels = int(spec.bias.shape[0])
        events = spec.sources if conv == "event" else ()
        self._vectors = _choose_vectors(events, self.channels) if events else -(-self.channels // LANES)
        lanes = LANES * self._vectors
        self._tiles = -(-self.channels // lanes)
        self._sources = [
            _PackedSource(source=s, packed=_pack_weight(s.weight, lanes), lanes=lanes) for s in events
        ]
        self._dense_weights = [
            s.weight.detach().float().contiguous(memory_format=torch.channels_last)
            for s in (spec.sources if conv == "dense" else ())
        ]
        self._bias = _aligned(self._tiles * lanes, np.float32)
        self._bias[: self.channels] = spec.bias.detach().float().cpu().numpy()
        self._scratch = _aligned(1, np.uint8)
        self._bits = np.empty(0, dtype=np.uint16)

    def __call__(
        self,
        spikes: Sequence[Events] | Sequence[torch.Tensor] = (),
        skips: Sequence[Events] = (),
        dense: Sequence[torch.Tensor] = (),
        post_skips: Sequence[Events] = (),
        v: torch.Tensor | None = None,
        want_v: bool = False,
        out: Literal["events", "dense"] = "events",
        *,
        time_steps: int | None = None,
    ) -> tuple[Events | torch.Tensor, torch.Tensor | None]:
        """Run the group.

        Args:
            spikes: One input per source: `Events` when `conv` is 'event', else dense [T or 1, N, C_in, H, W].
            skips: Events [T, N, C_out, H_out, W_out] added to the neuron's input.
            dense: float32 [T or 1, N, C_out, H_out, W_out] added to the neuron's input.
            post_skips: Events [T, N, C_out, H_out, W_out] added to the neuron's output.
            v: Membrane before the first step [N, C_out, H_out, W_out]; the neuron's rest value when None.
            want_v: Return the membrane after the last step.
            out: What the output is.
            time_steps: T, needed only when every input is constant over time.

        Returns:
            The output [T, N, C_out, H_out, W_out], as `Events` or channels-last float32, and the membrane
            [N, C_out, H_out, W_out] or None. Inputs are not modified.

        Raises:
            InputError: The inputs do not fit the group or one another.
        """
        spec = self.spec
        for name, given, expected in (
            ("spikes", len(spikes), len(spec.sources)),
            ("skips", len(skips), spec.skips),
            ("dense", len(dense), spec.dense_inputs),
            ("post_skips", len(post_skips), spec.post_skips),
        ):
            if given != expected:
                raise InputError(f"the group takes {expected} `{name}`, got {given}")
        events: list[Events] = []
        reals = list(dense)
        for source, x in zip(spec.sources, spikes, strict=True):
            if isinstance(x, Events) != (self.conv == "event"):
                raise InputError(f"a group with conv={self.conv!r} cannot take a {type(x).__name__}")
            if isinstance(x, Events):
                events.append(x)
            else:
                reals.append(self._convolve(len(reals) - len(dense), source, x))
        shape = self._out_shape(events, reals, skips, post_skips, time_steps)
        return self._run(shape, events, skips, reals, post_skips, v, want_v, out)

    def sums(self, spikes: Sequence[Events]) -> torch.Tensor:
        """Bias and convolutions alone: dense float32 [T, N, C_out, H_out, W_out], channels last."""
        shape = self._out_shape(spikes, (), (), (), None)
        total, _ = self._run(shape, spikes, (), (), (), None, False, "sums")
        assert isinstance(total, torch.Tensor)
        return total

    def _convolve(self, number: int, source: SpikeSource, x: torch.Tensor) -> torch.Tensor:
        flat = x.float().flatten(0, 1).contiguous(memory_format=torch.channels_last)
        weight = self._dense_weights[number]
        out = F.conv2d(flat, weight, stride=source.stride, padding=source.padding)
        return out.unflatten(0, x.shape[:2])

    def _out_shape(
        self,
        events: Sequence[Events],
        reals: Sequence[torch.Tensor],
        skips: Sequence[Events],
        post_skips: Sequence[Events],
        time_steps: int | None,
    ) -> tuple[int, int, int, int, int]:
        """(T, N, C, H, W) of the output; raises where two inputs disagree."""
        found: list[tuple[int, int, int, int, int]] = [
            (e.T, e.N, self.channels, s.source.out_size(e.H), s.source.out_size(e.W))
            for s, e in zip(self._sources, events, strict=True)
        ]
        found += [e.shape for e in (*skips, *post_skips)]
        real_shapes = [tuple(r.shape) for r in reals]
        steps = time_steps or (found[0][0] if found else max((s[0] for s in real_shapes), default=1))
        found += [(steps if s[0] == 1 else s[0], *s[1:]) for s in real_shapes if len(s) == 5]
        if not found or len(found) < len(events) + len(reals) + len(skips) + len(post_skips):
            raise InputError(f"dense inputs must be [T or 1, N, C, H, W], got shapes {real_shapes}")
        if any(shape != found[0] for shape in found) or found[0][0] != steps or found[0][2] != self.channels:
            raise InputError(
                f"the group's inputs give outputs [T, N, C, H, W] of different shapes: {found}; "
                f"expected {self.channels} channels and {steps} time steps"
            )
        return found[0]

    def _run(
        self,
        shape: tuple[int, int, int, int, int],
        events: Sequence[Events],
        skips: Sequence[Events],
        reals: Sequence[torch.Tensor],
        post_skips: Sequence[Events],
        v: torch.Tensor | None,
        want_v: bool,
        out: Literal["events", "dense", "sums"],
    ) -> tuple[Events | torch.Tensor, torch.Tensor | None]:
        time_steps, images, channels, height, width = shape
        workers = torch.get_num_threads()
        lanes = LANES * self._vectors
        rows = [_rows_contiguous(r) for r in reals]

        group = np.zeros(1, dtype=GROUP)
        g = group[0]
        g["time_steps"], g["images"], g["channels"] = time_steps, images, channels
        g["height"], g["width"] = height, width
        g["vectors"], g["tiles"], g["used_vectors"] = self._vectors, self._tiles, -(-channels // LANES)
        g["last_lanes"] = ALL_LANES >> (-channels % LANES)
        pieces = min(height, -(-workers * _ITEMS_PER_THREAD // (images * self._tiles)))
        g["block_rows"] = -(-height // pieces)
        g["blocks"] = images * -(-height // int(g["block_rows"]))
        finished = np.zeros(int(g["blocks"]), dtype=np.int64)
        g["finished"] = address_of_array(finished)

        sources = np.zeros(max(len(events), 1), dtype=SOURCE)
        for i, (source, one) in enumerate(zip(self._sources, events, strict=True)):
            source.fill(sources[i], one)
        g["sources"], g["source_list"] = len(events), address_of_array(sources)
        skip_records, post_records = record_list(skips), record_list(post_skips)
        g["skips"], g["skip_list"] = len(skips), address_of_array(skip_records)
        g["posts"], g["post_list"] = len(post_skips), address_of_array(post_records)
        denses = np.zeros(max(len(rows), 1), dtype=DENSE)
        for i, row in enumerate(rows):
            denses[i] = (row.data_ptr(), 0 if row.shape[0] == 1 and time_steps > 1 else row[0].numel())
        g["denses"], g["dense_list"] = len(rows), address_of_array(denses)

        offsets = max(
            (s.source.weight.shape[-1] * e.index.shape[-1] for s, e in zip(self._sources, events)), default=0
        )
        g["rows_bytes"] = -(-(4 * offsets + 64) // 64) * 64
        most_width = max([width, *(e.W for e in events)])
        scratch = int(g["rows_bytes"]) + 12 * width * lanes + 4 * (most_width + 1)
        g["scratch_bytes"] = -(-scratch // 64) * 64 + 64
        if self._scratch.size < workers * int(g["scratch_bytes"]):
            self._scratch = _aligned(workers * int(g["scratch_bytes"]), np.uint8)
        g["scratch"] = address_of_array(self._scratch)

        neuron: NeuronSpec = self.spec.neuron
        g["bias"] = address_of_array(self._bias)
        g["alpha"], g["beta"], g["delta"] = neuron.alpha, neuron.beta, neuron.delta
        g["threshold"], g["rest"] = neuron.v_threshold, neuron.v_rest
        g["hard"] = neuron.v_reset is not None
        before = None if v is None else _rows_contiguous(v)
        after = torch.empty(images, height, width, channels) if want_v else None
        if before is not None:
            if tuple(before.shape) != (images, height, width, channels):
                raise InputError(f"`v` must be {(images, channels, height, width)}, got {tuple(v.shape)}")  # type: ignore[union-attr]
            g["v_in"] = before.data_ptr()
        if after is not None:
            g["v_out"] = after.data_ptr()

        function = compile_kernel(make_group_kernel)
        if out == "sums":
            result = torch.empty(time_steps, images, height, width, channels)
            g["mode"], g["out"] = OUT_SUMS, result.data_ptr()
            threads.run(function, address_of_array(group), workers)
            return result.movedim(-1, -3), None
        bits = time_steps * images * height * self._tiles * width * self._vectors
        if self._bits.size < bits:
            self._bits = _aligned(bits, np.uint16)
        g["bits"] = address_of_array(self._bits)
        if out == "dense":
            result = torch.empty(time_steps, images, height, width, channels)
            g["mode"], g["out"] = OUT_SPIKES, result.data_ptr()
            threads.run(function, address_of_array(group), workers)
            spikes: Events | torch.Tensor = result.movedim(-1, -3)
        else:
            most = 1 + sum(e.max_value for e in post_skips)
            spikes = allocate_events(shape, max_value=most)
            g["mode"], g["out"] = OUT_EVENTS, spikes.address
            threads.run(function, address_of_array(group), workers)
            if g["need"] > spikes.index.shape[-1] - SLACK:
                # Sums of spikes outgrew a row of spikes: the neurons have run, only their events are rewritten.
                spikes = allocate_events(shape, capacity=int(g["need"]), max_value=most)
                g["mode"], g["out"], g["next_item"], g["next_slot"] = OUT_EVENTS_AGAIN, spikes.address, 0, 0
                finished[:] = 0
                threads.run(function, address_of_array(group), workers)
        return spikes, None if after is None else after.movedim(-1, -3)


def prepare_group(spec: GroupSpec, *, conv: Literal["event", "dense"]) -> PreparedGroup:
    """Lay out a group's weights.

    Args:
        spec: The group; its tensors may live anywhere and are copied.
        conv: 'event' for the event kernel, 'dense' for oneDNN's convolution with everything else fused.

    Raises:
        InputError: A source is not what the event kernel runs.
    """
    if not spec.sources and not spec.dense_inputs:
        raise InputError("a group needs at least one source or dense input")
    for source in spec.sources:
        c_out, _, k, k2 = source.weight.shape
        if c_out != spec.bias.shape[0] or k != k2:
            raise InputError(
                f"a source's weight {tuple(source.weight.shape)} does not fit the bias {tuple(spec.bias.shape)}"
            )
        if conv == "event" and (
            k not in (1, 3) or source.stride not in (1, 2) or source.padding not in (0, 1)
        ):
            raise InputError(
                f"the event kernel runs 1x1 and 3x3 at stride 1 or 2 and padding 0 or 1, got kernel {k}, "
                f"stride {source.stride}, padding {source.padding}"
            )
    return PreparedGroup(spec, conv)

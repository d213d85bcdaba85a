"""`EventGroup`: a fused group on a CPU, from events to events."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from sparseflow.errors import InputError
from sparseflow.spiking.backends.base import ConvolutionKind, SpikeForm, convolve_maps
from sparseflow.spiking.backends.events.format import Events, allocate_events
from sparseflow.spiking.backends.events.kernels.group import (
    OUT_EVENTS,
    OUT_EVENTS_RETRY,
    OUT_SPIKES,
    OUT_SUMS,
)
from sparseflow.spiking.backends.events.kernels.llvm import LANES
from sparseflow.spiking.backends.events.launch import GroupLaunch, Shape
from sparseflow.spiking.backends.events.packing import pack_group
from sparseflow.spiking.backends.spec import GroupSpec

_CYCLES_PER_THREAD = 50_000
"""Work below this is finished before another thread has woken up."""
_MAX_LAUNCHES = 4
"""Sets of shapes for which a group keeps buffers."""


def _to_channels_last(x: torch.Tensor) -> torch.Tensor:
    """Convert [..., C, H, W] to float32 memory [..., H, W, C]; copies only if needed."""
    return x.detach().float().movedim(-3, -1).contiguous()


class EventGroup:
    """A group with its weights laid out for this machine, for inputs of any shape. Thread-safe.

    Args:
        spec: The group. A dense convolution keeps weights that are float32 and channels last; all others are
            copied.
        convolution: "sparse" sums weight rows per event; "dense" runs oneDNN and fuses the rest.

    Raises:
        InputError: The group has no input, or the event kernel does not support a source.
    """

    def __init__(self, spec: GroupSpec, convolution: ConvolutionKind) -> None:
        _validate_spec(spec, convolution)
        self.spec = spec.without_weights()
        self.convolution = convolution
        self._packed = pack_group(spec, spec.sources if convolution == "sparse" else ())
        self._dense_weights = [
            s.weight.detach().float().contiguous(memory_format=torch.channels_last)
            for s in (spec.sources if convolution == "dense" else ())
        ]
        self._launches: dict[tuple[object, ...], GroupLaunch] = {}
        self._lock = threading.Lock()

    def __call__(
        self,
        sources: Sequence[Events] | Sequence[torch.Tensor] = (),
        skips: Sequence[Events] = (),
        dense: Sequence[torch.Tensor] = (),
        post_skips: Sequence[Events] = (),
        *,
        steps: int | None = None,
        v: torch.Tensor | None = None,
        out: SpikeForm = "native",
    ) -> tuple[Events | torch.Tensor, torch.Tensor]:
        """Run the group; see `PreparedGroup`. Inputs are not modified.

        Args:
            sources: `Events` for a sparse convolution, else dense [T or 1, N, C_in, H, W].
            skips, dense, post_skips: See `PreparedGroup`.
            steps: T; needed only if all inputs are constant over time.
            v: Membrane before the first step [N, C_out, H_out, W_out]; the neuron's rest value if None.
            out: Form of the output.

        Raises:
            InputError: The inputs do not match the group or one another.
        """
        spec = self.spec
        for name, actual, expected in (
            ("sources", len(sources), len(spec.sources)),
            ("skips", len(skips), spec.skips),
            ("dense", len(dense), spec.dense_inputs),
            ("post_skips", len(post_skips), spec.post_skips),
        ):
            if actual != expected:
                raise InputError(f"the group takes {expected} `{name}`, got {actual}")
        events: list[Events] = []
        reals = list(dense)
        for i, x in enumerate(sources):
            if isinstance(x, Events) != (self.convolution == "sparse"):
                raise InputError(f"a {self.convolution} group cannot take a {type(x).__name__}")
            if isinstance(x, Events):
                events.append(x)
            else:
                reals.append(self._convolve_dense(i, x))
        shape = self._infer_out_shape(events, reals, skips, post_skips, steps)
        if v is not None and tuple(v.shape) != (shape[1], *shape[2:]):
            raise InputError(f"`v` must be {(shape[1], *shape[2:])}, got {tuple(v.shape)}")
        # Keep references until the kernel has run: it uses raw addresses.
        reals, before = [_to_channels_last(r) for r in reals], None if v is None else _to_channels_last(v)
        after = torch.empty(shape[1], *shape[3:], shape[2])
        with self._lock:
            launch = self._get_launch(shape, events, skips, reals, post_skips)
            launch.bind(events, skips, reals, post_skips, before, after)
            spikes = self._run(launch, shape, 1 + sum(e.max_value for e in post_skips), out)
        return spikes, after.movedim(-1, -3)

    @staticmethod
    def _run(launch: GroupLaunch, shape: Shape, max_value: int, out: SpikeForm) -> Events | torch.Tensor:
        t, n, c, h, w = shape
        if out == "dense":
            result = torch.empty(t, n, h, w, c)
            launch.run(OUT_SPIKES, result.data_ptr())
            return result.movedim(-1, -3)
        events = allocate_events(shape, row_capacity=launch.row_capacity, max_value=max_value)
        need = launch.run(OUT_EVENTS, events.address)
        while need:
            # Some row did not fit: the neurons have run, only their events are written again.
            launch.row_capacity = need
            events = allocate_events(shape, row_capacity=need, max_value=max_value)
            need = launch.run(OUT_EVENTS_RETRY, events.address)
        return events

    def convolve(
        self, sources: Sequence[Events] | Sequence[torch.Tensor], addends: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        """Compute the sum of bias, convolutions and addends: float32 [T, N, C_out, H_out, W_out]."""
        spikes = [x for x in sources if isinstance(x, Events)]
        if len(spikes) < len(sources):
            reals = [self._convolve_dense(i, x) for i, x in enumerate(sources) if isinstance(x, torch.Tensor)]
            return sum([*reals[1:], *addends], reals[0]) + self.spec.bias.float().view(-1, 1, 1)
        t, n, c, h, w = shape = self._infer_out_shape(spikes, (), (), (), None)
        result = torch.empty(t, n, h, w, c)
        with self._lock:
            launch = self._get_launch(shape, spikes, (), (), ())
            launch.bind(spikes, (), (), (), None, None)
            launch.run(OUT_SUMS, result.data_ptr())
        sums = result.movedim(-1, -3)
        for addend in addends:
            sums += addend
        return sums

    def _convolve_dense(self, number: int, x: torch.Tensor) -> torch.Tensor:
        source, weight = self.spec.sources[number], self._dense_weights[number]
        return convolve_maps(x.float(), weight, stride=source.stride, padding=source.padding)

    def _infer_out_shape(
        self,
        events: Sequence[Events],
        reals: Sequence[torch.Tensor],
        skips: Sequence[Events],
        post_skips: Sequence[Events],
        steps: int | None,
    ) -> Shape:
        """Infer (T, N, C, H, W) of the output; raise an InputError if two inputs disagree."""
        channels = self._packed.channels
        out_shapes: list[Shape] = []
        for source, source_events in zip(self.spec.sources if events else (), events, strict=True):
            c_in, k = source.weight.shape[1:3]
            if c_in != source_events.C:
                raise InputError(
                    f"the convolution takes {c_in} channels, got events of shape {source_events.shape}"
                )
            if (source_events.W + 1) * k * c_in >= 1 << 31:
                raise InputError(
                    f"events of shape {source_events.shape} are too wide for an event convolution"
                )
            t, n, _, h, w = source_events.shape
            out_shapes.append((t, n, channels, source.compute_out_size(h), source.compute_out_size(w)))
        out_shapes += [e.shape for e in (*skips, *post_skips)]
        if any(r.dim() != 5 for r in reals):
            shapes = [tuple(r.shape) for r in reals]
            raise InputError(f"dense inputs must be [T or 1, N, C, H, W], got shapes {shapes}")
        steps = steps or (out_shapes[0][0] if out_shapes else max(r.shape[0] for r in reals))
        for real in reals:
            t, n, c, h, w = real.shape
            out_shapes.append((steps if t == 1 else t, n, c, h, w))
        first = out_shapes[0]
        if any(shape != first for shape in out_shapes) or first[0] != steps or first[2] != channels:
            raise InputError(
                f"the group's inputs give outputs [T, N, C, H, W] of different shapes: {out_shapes}; "
                f"expected {channels} channels and {steps} time steps"
            )
        if 0 in out_shapes[0]:
            raise InputError(f"all dimensions must be at least 1, got an output of shape {out_shapes[0]}")
        return out_shapes[0]

    def _choose_num_threads(self, shape: Shape, events: Sequence[Events]) -> int:
        t, n, c, h, w = shape
        vectors = t * n * h * w * -(-c // LANES)
        # About 30 cycles per vector of neurons, and one per weight vector at a firing rate of 1/20.
        taps = sum(s.weight[0].numel() for s in self.spec.sources) if events else 0
        return max(1, min(torch.get_num_threads(), int(vectors * (30 + taps / 20)) // _CYCLES_PER_THREAD))

    def _get_launch(
        self,
        shape: Shape,
        events: Sequence[Events],
        skips: Sequence[Events],
        reals: Sequence[torch.Tensor],
        post_skips: Sequence[Events],
    ) -> GroupLaunch:
        workers = self._choose_num_threads(shape, events)
        constant = tuple(r.shape[0] == 1 and shape[0] > 1 for r in reals)
        inputs = tuple((e.H, e.W, e.row_capacity) for e in events)
        key = (shape, inputs, len(skips), constant, len(post_skips), workers)
        launch = self._launches.get(key)
        if launch is None:
            while len(self._launches) >= _MAX_LAUNCHES:
                del self._launches[next(iter(self._launches))]
            launch = GroupLaunch(
                self._packed, self.spec.neuron, shape, events, len(skips), constant, len(post_skips), workers
            )
            self._launches[key] = launch
        return launch


def _validate_spec(spec: GroupSpec, convolution: ConvolutionKind) -> None:
    if not spec.sources and not spec.dense_inputs:
        raise InputError("a group needs at least one source or dense input")
    for source in spec.sources:
        c_out, _, k, k2 = source.weight.shape
        if c_out != spec.bias.shape[0] or k != k2:
            raise InputError(
                f"a source's weight {tuple(source.weight.shape)} does not fit "
                f"the bias {tuple(spec.bias.shape)}"
            )
        if convolution == "sparse" and not 0 <= source.padding <= max(1, k - 1):
            raise InputError(
                f"the event kernel runs a {k}x{k} convolution with a padding of at most {max(1, k - 1)}, got "
                f"{source.padding}"
            )

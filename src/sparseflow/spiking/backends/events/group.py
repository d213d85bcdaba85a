"""A fused group on a CPU: `prepare_group` lays out its weights once, the result runs it on any batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from sparseflow.errors import InputError
from sparseflow.spiking.backends.events.format import Events, allocate_events
from sparseflow.spiking.backends.events.kernels.group import (
    OUT_EVENTS,
    OUT_EVENTS_AGAIN,
    OUT_SPIKES,
    OUT_SUMS,
)
from sparseflow.spiking.backends.events.kernels.llvm import LANES
from sparseflow.spiking.backends.events.launch import Launch, Shape
from sparseflow.spiking.backends.events.packing import pack_group
from sparseflow.spiking.backends.spec import GroupSpec, NeuronSpec, SpikeSource

_CYCLES_PER_THREAD = 50_000
"""Less work than this is done before another thread has woken up."""
_MOST_LAUNCHES = 4
"""Sets of shapes that a group keeps buffers for."""


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    """[..., C, H, W] as float32 memory [..., H, W, C]; a copy only where needed."""
    return x.detach().float().movedim(-3, -1).contiguous()


class EventGroup:
    """A group whose weights are laid out for this machine. Made by `prepare_group`; calls take turns.

    Attributes:
        spec: What it computes, weights left out.
        conv: 'event' sums weight rows per event; 'dense' runs oneDNN and fuses what follows.
    """

    def __init__(self, spec: GroupSpec, conv: Literal["event", "dense"]) -> None:
        self.spec = spec.without_weights()
        self.conv = conv
        self._packed = pack_group(spec, spec.sources if conv == "event" else ())
        self._dense_weights = [
            s.weight.detach().float().clone(memory_format=torch.channels_last)
            for s in (spec.sources if conv == "dense" else ())
        ]
        self._launches: dict[tuple[object, ...], Launch] = {}
        self._lock = threading.Lock()

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
        if v is not None and tuple(v.shape) != (shape[1], *shape[2:]):
            raise InputError(f"`v` must be {(shape[1], *shape[2:])}, got {tuple(v.shape)}")
        # These stay referenced until the kernel has run: it knows addresses only.
        reals, before = [_channels_last(r) for r in reals], None if v is None else _channels_last(v)
        after = torch.empty(shape[1], *shape[3:], shape[2]) if want_v else None
        with self._lock:
            launch = self._launch(shape, events, skips, reals, post_skips)
            launch.bind(events, skips, reals, post_skips, before, after)
            spikes_out = self._run(launch, shape, 1 + sum(e.max_value for e in post_skips), out)
        return spikes_out, None if after is None else after.movedim(-1, -3)

    @staticmethod
    def _run(
        launch: Launch, shape: Shape, max_value: int, out: Literal["events", "dense"]
    ) -> Events | torch.Tensor:
        t, n, c, h, w = shape
        if out == "dense":
            result = torch.empty(t, n, h, w, c)
            launch.run(OUT_SPIKES, result.data_ptr())
            return result.movedim(-1, -3)
        found = allocate_events(shape, row=launch.row, max_value=max_value)
        need = launch.run(OUT_EVENTS, found.address)
        while need:
            # Some row outgrew its room: the neurons have run, only their events are written again.
            launch.row = need
            found = allocate_events(shape, row=need, max_value=max_value)
            need = launch.run(OUT_EVENTS_AGAIN, found.address)
        return found

    def sums(self, spikes: Sequence[Events]) -> torch.Tensor:
        """Bias and convolutions alone: dense float32 [T, N, C_out, H_out, W_out], channels last."""
        t, n, c, h, w = shape = self._out_shape(spikes, (), (), (), None)
        result = torch.empty(t, n, h, w, c)
        with self._lock:
            launch = self._launch(shape, spikes, (), (), ())
            launch.bind(spikes, (), (), (), None, None)
            launch.run(OUT_SUMS, result.data_ptr())
        return result.movedim(-1, -3)

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
    ) -> Shape:
        """(T, N, C, H, W) of the output; raises where two inputs disagree."""
        channels = self._packed.channels
        found: list[Shape] = []
        for source, one in zip(self.spec.sources if events else (), events, strict=True):
            c_in, k = source.weight.shape[1:3]
            if c_in != one.C:
                raise InputError(f"the convolution takes {c_in} channels, got events of shape {one.shape}")
            if (one.W + 1) * k * c_in >= 1 << 31:
                raise InputError(f"events of shape {one.shape} are too wide for an event convolution")
            found.append((one.T, one.N, channels, source.out_size(one.H), source.out_size(one.W)))
        found += [e.shape for e in (*skips, *post_skips)]
        if any(r.dim() != 5 for r in reals):
            shapes = [tuple(r.shape) for r in reals]
            raise InputError(f"dense inputs must be [T or 1, N, C, H, W], got shapes {shapes}")
        steps = time_steps or (found[0][0] if found else max(r.shape[0] for r in reals))
        for real in reals:
            t, n, c, h, w = real.shape
            found.append((steps if t == 1 else t, n, c, h, w))
        if any(shape != found[0] for shape in found) or found[0][0] != steps or found[0][2] != channels:
            raise InputError(
                f"the group's inputs give outputs [T, N, C, H, W] of different shapes: {found}; "
                f"expected {channels} channels and {steps} time steps"
            )
        if 0 in found[0]:
            raise InputError(f"a group needs at least one of everything, got an output of shape {found[0]}")
        return found[0]

    def _workers(self, shape: Shape, events: Sequence[Events]) -> int:
        """Threads that are worth waking."""
        t, n, c, h, w = shape
        vectors = t * n * h * w * -(-c // LANES)
        # Some 30 cycles for each vector of neurons, and one for each weight vector of one spike in twenty.
        taps = sum(s.weight[0].numel() for s in self.spec.sources) if events else 0
        return max(1, min(torch.get_num_threads(), int(vectors * (30 + taps / 20)) // _CYCLES_PER_THREAD))

    def _launch(
        self,
        shape: Shape,
        events: Sequence[Events],
        skips: Sequence[Events],
        reals: Sequence[torch.Tensor],
        post_skips: Sequence[Events],
    ) -> Launch:
        """The launch for these shapes."""
        workers = self._workers(shape, events)
        constant = tuple(r.shape[0] == 1 and shape[0] > 1 for r in reals)
        inputs = tuple((e.H, e.W, e.row) for e in events)
        key = (shape, inputs, len(skips), constant, len(post_skips), workers)
        launch = self._launches.get(key)
        if launch is None:
            while len(self._launches) >= _MOST_LAUNCHES:
                del self._launches[next(iter(self._launches))]
            launch = Launch(
                self._packed, self.spec.neuron, shape, events, len(skips), constant, len(post_skips), workers
            )
            self._launches[key] = launch
        return launch


def prepare_conv(source: SpikeSource, bias: torch.Tensor | None = None) -> Callable[[Events], torch.Tensor]:
    """One convolution without a neuron.

    Args:
        source: Weight, stride and padding.
        bias: float32 [C_out], or None.

    Returns:
        A function from events [T, N, C_in, H, W] to dense float32 [T, N, C_out, H_out, W_out], channels last.

    Raises:
        InputError: The event kernel does not run this convolution.
    """
    bias = torch.zeros(source.weight.shape[0]) if bias is None else bias.detach()
    neuron = NeuronSpec(alpha=1.0, beta=1.0, delta=0.0, v_threshold=1.0, v_reset=None)
    prepared = prepare_group(GroupSpec(sources=(source,), bias=bias, neuron=neuron), conv="event")
    return lambda events: prepared.sums([events])


def prepare_group(spec: GroupSpec, *, conv: Literal["event", "dense"]) -> EventGroup:
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
                f"a source's weight {tuple(source.weight.shape)} does not fit "
                f"the bias {tuple(spec.bias.shape)}"
            )
        if conv == "event" and (
            k not in (1, 3) or source.stride not in (1, 2) or source.padding not in (0, 1)
        ):
            raise InputError(
                f"the event kernel runs 1x1 and 3x3 at stride 1 or 2 and padding 0 or 1, got kernel {k}, "
                f"stride {source.stride}, padding {source.padding}"
            )
    return EventGroup(spec, conv)

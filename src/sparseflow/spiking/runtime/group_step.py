"""One group at run time: which way it runs, its prepared weights, and the membrane it leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import fx, nn

from sparseflow.spiking.backends.base import NATURAL, Arrangement, Backend, GroupShape, Order, PreparedGroup
from sparseflow.spiking.backends.precision import full_precision
from sparseflow.spiking.backends.spec import GroupSpec
from sparseflow.spiking.graph.fusion_matcher import ConvMatch, GroupMatch, fold_match, group_spec
from sparseflow.spiking.graph.registry import neuron_info
from sparseflow.spiking.graph.sites import padding_of
from sparseflow.spiking.runtime.channel_layout import permute_group
from sparseflow.spiking.runtime.spike_tensor import Env, Spikes, as_dense, run_node

Way = Literal["sparse", "dense", "module"]

Shared = WeakValueDictionary[tuple[str, Way], PreparedGroup]
"""Groups that several plans of one network have prepared, by name and way."""


@dataclass
class GroupStep:
    """One group at run time.

    Attributes:
        match: What belongs to the group.
        kinds: Largest value of every node that holds spikes.
        dtype: What the network's own operations compute in.
        way: How it runs; 'module' until somebody decides otherwise.
        emit: The form in which its spikes are wanted by whoever reads them next.
        arrangement: How channels lie in its spikes and in those that it reads; set by `arrange`.
        shared: What other plans of the network have prepared, where the backend's groups fit every shape.
    """

    match: GroupMatch
    backend: Backend
    modules: dict[str, nn.Module]
    kinds: dict[fx.Node, int]
    dtype: torch.dtype
    way: Way = "module"
    emit: Literal["native", "dense"] = "native"
    arrangement: Arrangement = NATURAL
    shared: Shared = field(default_factory=WeakValueDictionary)
    _prepared: dict[Way, PreparedGroup] = field(default_factory=dict)
    _stem: dict[str, torch.Tensor] = field(default_factory=dict)
    _shape: GroupShape | None = None
    _rest: float | None = None

    @property
    def name(self) -> str:
        return self.match.name

    @property
    def neuron(self) -> Any:
        return self.modules[self.match.neuron_name]

    @property
    def single(self) -> bool:
        return getattr(self.neuron, "step_mode", "m") == "s"

    def settle(self, way: Way) -> None:
        """Run this way from now on, and drop the buffers of the others."""
        self.way = way
        self._prepared = {kept: held for kept, held in self._prepared.items() if kept == way}

    def arrange(self, arrangement: Arrangement) -> None:
        """Let channels lie in another order; the groups that read or add these spikes must agree."""
        self.arrangement = arrangement
        self.forget()

    def forget(self) -> None:
        """Drop prepared weights, after the network's own have changed."""
        self._prepared.clear()
        self._stem.clear()
        self._rest = None

    def spec(self, channels: int) -> GroupSpec:
        """The group's arithmetic with the network's present weights, channels as the arrangement says."""
        info = neuron_info(self.neuron)
        assert info is not None and info.spec is not None
        spec = group_spec(self.match, self.modules, info.spec, channels)
        lies = self.arrangement
        inputs = [None if order is None else order.places for order in lies.inputs]
        return permute_group(spec, outputs=None if lies.output is None else lies.output.places, inputs=inputs)

    def _prepare(self, way: Way, shape: GroupShape) -> PreparedGroup:
        """The group laid out for `way`, by this plan or by another."""
        fits_every_shape = self.backend.fits_every_shape
        if self._shape != shape and not fits_every_shape:
            self._prepared.clear()
        self._shape = shape
        if way not in self._prepared:
            key = (self.name, way)
            prepared = self.shared.get(key) if fits_every_shape else None
            if prepared is None:
                convolution = "sparse" if way == "sparse" else "dense"
                spec = self.spec(shape.output[0])
                prepared = self.backend.prepare(spec, shape, convolution, self.arrangement)
                if fits_every_shape:
                    self.shared[key] = prepared
            self._prepared[way] = prepared
        return self._prepared[way]

    def run(self, env: Env, way: Way | None = None, emit: Literal["native", "dense"] | None = None) -> Spikes:
        """Run the group on the values in `env` and leave the membrane in the neuron."""
        way = way or self.way
        if way == "module":
            return self._run_modules(env)
        match, emit = self.match, emit or self.emit
        dense = [self._dense_conv(conv, env) for conv in match.dense_convs]
        dense += [self._sequence(node, env) for node in match.dense]
        sources = self._sources(env)
        added = [self._spikes(node, env) for node in (*match.skips, *match.post_skips)]
        forms = [spikes.native if way == "sparse" else spikes.lent for spikes in added]
        skips, post = forms[: len(match.skips)], forms[len(match.skips) :]
        steps, shape = self._sizes(sources, match.skips, dense, env)
        v = self.neuron.v
        if isinstance(v, torch.Tensor) and tuple(v.shape) != (shape.images, *shape.output):
            # What becomes of the membranes of another batch is for the neuron to say.
            return self._run_modules(env)
        prepared = self._prepare(way, shape)
        fed = [s.native if way == "sparse" else s.sequence for s in sources]
        v = v if isinstance(v, torch.Tensor) else self._constant_membrane(v, shape)
        out, v = prepared(fed, skips, dense, post, steps=steps, v=v, out=emit)
        self.neuron.v = v
        if emit == "dense":
            out = out[0] if self.single else out
            return self._wrap(self.match.output, dense=out, natural=False)
        return self._wrap(self.match.output, native=out)

    def misfit(self, env: Env) -> str | None:
        """Why the group's arithmetic does not cover the values in `env` (a sentence), or None."""
        rank = 4 if self.single else 5
        stems = {conv.input for conv in self.match.dense_convs if conv.repeats}
        if any(as_dense(env[node]).dim() != rank - (node in stems) for node in self.match.inputs):
            return "its values are not feature maps"
        match = self.match
        constant = [self._conv_shape(conv, env) for conv in match.dense_convs]
        constant += [tuple(self._sequence(node, env).shape) for node in match.dense]
        shapes = [self._conv_shape(conv, env) for conv in match.sources]
        shapes += [tuple(self._sequence(node, env).shape) for node in (*match.skips, *match.post_skips)]
        # Only a dense value may be constant over time; whatever else is broadcast is left to the network.
        steps = {s[0] for s in shapes} | {s[0] for s in constant if s[0] != 1}
        if len({s[1:] for s in (*shapes, *constant)}) > 1 or len(steps) > 1:
            return "it adds tensors of different shapes"
        return None

    def _conv_shape(self, conv: ConvMatch, env: Env) -> tuple[int, ...]:
        """[T, N, C, H, W] of what a convolution of the group yields."""
        module = self.modules[conv.name]
        assert isinstance(module, nn.Conv2d)
        value = as_dense(env[conv.input])
        value = value.unsqueeze(0) if value.dim() == 4 else value
        if module.padding == "same":
            sides: list[int] = list(value.shape[-2:])
        else:
            pads = padding_of(module)
            assert pads is not None
            spans = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
            sides = [
                (size + 2 * pad - span - 1) // stride + 1
                for size, pad, span, stride in zip(value.shape[-2:], pads, spans, module.stride, strict=True)
            ]
        steps = conv.repeats or value.shape[0]
        return (steps, value.shape[1], module.out_channels, *sides)

    def refusal(self, env: Env) -> str | None:
        """Why the sparse way is closed to this group, or None."""
        sources = self._sources(env)
        dense = [self._dense_conv(conv, env) for conv in self.match.dense_convs]
        dense += [self._sequence(node, env) for node in self.match.dense]
        _, shape = self._sizes(sources, self.match.skips, dense, env)
        return self.backend.refusal(self.spec(shape.output[0]), shape)

    def _wrap(
        self, node: fx.Node, *, native: Any = None, dense: torch.Tensor | None = None, natural: bool = True
    ) -> Spikes:
        """The value of `node` as spikes."""
        return Spikes(
            self.backend,
            native=native,
            dense=dense,
            single=self.single,
            dtype=self.dtype,
            max_value=self.kinds.get(node, 1),
            order=self._order(node),
            natural=natural,
        )

    def _order(self, node: fx.Node) -> Order | None:
        """How the channels of `node`, which the group reads or yields, lie."""
        for conv, order in zip(self.match.sources, self.arrangement.inputs, strict=False):
            if conv.input is node:
                return order
        return self.arrangement.output

    def _constant_membrane(self, value: float, shape: GroupShape) -> torch.Tensor | None:
        if self._rest is None:
            # Kept, for asking a neuron with a learned leak waits for the GPU.
            info = neuron_info(self.neuron)
            assert info is not None and info.spec is not None
            self._rest = info.spec.v_rest
        if float(value) == self._rest:
            return None
        device = next((p.device for p in self.modules[self.match.name].parameters()), torch.device("cpu"))
        return torch.full((shape.images, *shape.output), float(value), device=device)

    def _spikes(self, node: fx.Node, env: Env) -> Spikes:
        value = env[node]
        if not isinstance(value, Spikes):
            value = self._wrap(node, dense=value)
            env[node] = value
        return value

    def _sources(self, env: Env) -> list[Spikes]:
        return [self._spikes(conv.input, env) for conv in self.match.sources]

    def _sequence(self, node: fx.Node, env: Env) -> torch.Tensor:
        value = as_dense(env[node])
        return value.unsqueeze(0) if self.single else value

    def _dense_conv(self, conv: ConvMatch, env: Env) -> torch.Tensor:
        """A convolution of dense values, without its bias, which the group's own bias holds."""
        module = self.modules[conv.name]
        assert isinstance(module, nn.Conv2d)
        if conv.name not in self._stem:
            weight, _ = fold_match(conv, self.modules)
            if self.arrangement.output is not None:
                weight = weight[self.arrangement.output.places]
            weight = weight.to(self.backend.dtype).contiguous(memory_format=torch.channels_last)
            self._stem[conv.name] = weight
        weight = self._stem[conv.name]
        x = as_dense(env[conv.input])
        lead = x.shape[:-3]
        x = x.reshape(-1, *x.shape[-3:]).to(self.backend.dtype, memory_format=torch.channels_last)
        with full_precision(self.backend.dtype):
            y = F.conv2d(x, weight, None, module.stride, module.padding, module.dilation, module.groups)
        y = y.view(*lead, *y.shape[1:])
        return y.unsqueeze(0) if y.dim() == 4 else y

    def _sizes(
        self, sources: Sequence[Spikes], skips: Sequence[fx.Node], dense: Sequence[torch.Tensor], env: Env
    ) -> tuple[int, GroupShape]:
        repeats = [conv.repeats for conv in self.match.dense_convs if conv.repeats]
        shapes = [s.shape for s in sources]
        whole = [self._spikes(node, env).shape for node in skips]
        whole += [tuple(d.shape) for d in dense]
        if whole:
            output = whole[0][2:]
        else:
            spec_conv = self.modules[self.match.sources[0].name]
            padding = padding_of(spec_conv) if isinstance(spec_conv, nn.Conv2d) else None
            assert isinstance(spec_conv, nn.Conv2d) and padding is not None
            _, _, _, height, width = shapes[0]
            k, s, p = spec_conv.kernel_size[0], spec_conv.stride[0], padding[0]
            output = (spec_conv.out_channels, (height + 2 * p - k) // s + 1, (width + 2 * p - k) // s + 1)
        every = [*shapes, *whole]
        steps = max([*(shape[0] for shape in every), *repeats])
        shape = GroupShape(
            steps=steps,
            images=every[0][1],
            sources=tuple((c, h, w) for _, _, c, h, w in shapes),
            output=(output[0], output[1], output[2]),
            max_value=max([1, *(s.max_value for s in sources)]),
        )
        return steps, shape

    def _run_modules(self, env: Env) -> Spikes:
        local: Env = dict(env)
        for node in self.match.inner:
            self._run_inner(node, local)
        value = local[self.match.output]
        return self._wrap(self.match.output, dense=value)

    def _run_inner(self, node: fx.Node, local: Env) -> None:
        """Run `node`, and first whatever repetition of a constant input the plan had left out."""
        for needed in node.all_input_nodes:
            if needed not in local:
                self._run_inner(needed, local)
        local[node] = run_node(node, local, self.modules)

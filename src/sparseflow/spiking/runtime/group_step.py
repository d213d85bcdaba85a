"""`GroupStep`: one group at run time, with its mode, its prepared weights and its membrane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import fx, nn

from sparseflow.spiking.backends.base import (
    NATURAL_LAYOUT,
    Backend,
    ChannelLayout,
    ChannelOrder,
    GroupShape,
    PreparedGroup,
    PreparedStem,
    convolve_maps,
)
from sparseflow.spiking.backends.conv_geometry import ConvGeometry
from sparseflow.spiking.backends.precision import full_precision
from sparseflow.spiking.backends.spec import NEVER_FIRES, GroupSpec, NeuronSpec
from sparseflow.spiking.graph.fusion_matcher import ConvMatch, GroupMatch, fold_conv_match, make_group_spec
from sparseflow.spiking.graph.neurons.entry import MAX_COUNT
from sparseflow.spiking.graph.registry import NeuronInfo, get_neuron_info
from sparseflow.spiking.graph.time_steps import runs_step_by_step
from sparseflow.spiking.runtime.channel_layout import permute_group
from sparseflow.spiking.runtime.feature_form import FeatureForm
from sparseflow.spiking.runtime.precision_casts import cast_tensors
from sparseflow.spiking.runtime.spike_tensor import NodeValues, SpikeTensor, run_node, to_dense

GroupMode = Literal["sparse", "fused", "dense", "module"]

SharedGroups = WeakValueDictionary[tuple[str, GroupMode], PreparedGroup]
"""Prepared groups shared by the plans of one network, by name and mode."""


@dataclass
class GroupStep:
    """One group at run time.

    Attributes:
        match: The group's nodes and modules.
        backend: The plan's backend.
        modules: The network's modules by name.
        max_values: Largest value of each node that holds spikes.
        dtype: Data type of operations outside of groups.
        model_dtype: Data type of the network's own modules.
        mode: How the group runs.
        output_form: Form in which its readers take its spikes.
        layout: Channel orders of what it reads and writes; set by `set_layout`.
        shared: Groups prepared by the network's other plans, used if the backend's groups are shape-agnostic.
        keeps_membrane: Whether anything reads the membrane after a run; it may keep its old value otherwise.
    """

    match: GroupMatch
    backend: Backend
    modules: dict[str, nn.Module]
    max_values: dict[fx.Node, int]
    dtype: torch.dtype
    model_dtype: torch.dtype
    mode: GroupMode = "module"
    output_form: Literal["native", "dense"] = "native"
    layout: ChannelLayout = NATURAL_LAYOUT
    shared: SharedGroups = field(default_factory=WeakValueDictionary)
    keeps_membrane: bool = True
    _prepared: dict[GroupMode, PreparedGroup] = field(default_factory=dict)
    _dense_weights: dict[str, torch.Tensor] = field(default_factory=dict)
    _shape: GroupShape | None = None
    _neuron_spec: NeuronSpec | None = None
    _stem: PreparedStem | None = None

    @property
    def name(self) -> str:
        return self.match.name

    @property
    def membrane(self) -> Any:
        """The neuron's membrane: a tensor, or a number or None at rest."""
        return None if self.info.state is None else getattr(self.neuron, self.info.state)

    @membrane.setter
    def membrane(self, value: Any) -> None:
        if self.info.state is not None:
            setattr(self.neuron, self.info.state, value)

    @property
    def neuron(self) -> Any:
        return self.modules[self.match.neuron_name]

    @property
    def info(self) -> NeuronInfo:
        """Properties of the neuron."""
        assert self.match.neuron_info is not None
        return self.match.neuron_info

    @property
    def form(self) -> FeatureForm:
        """Form of the network's tensors that the group reads and yields."""
        assert self.match.neuron is not None
        is_single = self.info.step_mode == "s"
        return FeatureForm(self.match.features, is_single and not runs_step_by_step(self.match.neuron))

    def fix_mode(self, mode: GroupMode) -> None:
        """Set the mode and drop the weights and buffers of the other modes."""
        self.mode = mode
        self._prepared = {key: group for key, group in self._prepared.items() if key == mode}
        if mode != "fused":
            self._stem = None
        if mode in ("fused", "module"):
            self._dense_weights.clear()

    def set_layout(self, layout: ChannelLayout) -> None:
        """Set the channel layout; the groups that read or add these spikes must agree."""
        self.layout = layout
        self.invalidate()

    def invalidate(self) -> None:
        """Drop prepared weights, after the network's own have changed."""
        self._prepared.clear()
        self._dense_weights.clear()
        self._neuron_spec = self._stem = None

    def make_spec(self, channels: int) -> GroupSpec:
        """Make the group's spec with the current weights, channels in the layout's orders."""
        spec = make_group_spec(self.match, self.modules, self._get_neuron_spec(), channels)
        spec = replace(spec, keeps_membrane=self.keeps_membrane)
        orders = [
            None if order is None else order.permutation
            for order in (self.layout.output, *self.layout.inputs)
        ]
        return permute_group(spec, outputs=orders[0], inputs=orders[1:])

    def _get_neuron_spec(self) -> NeuronSpec:
        if self._neuron_spec is None:
            # Cached, because reading a neuron with a learned leak waits for the GPU.
            info = get_neuron_info(self.neuron)
            assert info is not None and info.spec is not None
            self._neuron_spec = info.spec
        return self._neuron_spec

    def _prepare(self, mode: GroupMode, shape: GroupShape) -> PreparedGroup:
        """Return the group prepared for `mode`, by this plan or another."""
        shape_agnostic = self.backend.shape_agnostic
        if self._shape != shape and not shape_agnostic:
            self._prepared.clear()
        self._shape = shape
        if mode not in self._prepared:
            key = (self.name, mode)
            prepared = self.shared.get(key) if shape_agnostic else None
            if prepared is None:
                convolution = "sparse" if mode == "sparse" else "dense"
                spec = self.make_spec(shape.output[0])
                prepared = self.backend.prepare(spec, shape, convolution, self.layout)
                if shape_agnostic:
                    self.shared[key] = prepared
            self._prepared[mode] = prepared
        return self._prepared[mode]

    def run(
        self,
        env: NodeValues,
        mode: GroupMode | None = None,
        output_form: Literal["native", "dense"] | None = None,
    ) -> Any:
        """Run the group on the values in `env` and store the membrane in the neuron.

        Returns:
            A `SpikeTensor`; a tensor for a convolution on its own.
        """
        mode = mode or self.mode
        if mode == "module":
            return self._run_modules(env)
        match, output_form = self.match, output_form or self.output_form
        if mode == "fused":
            return self._run_stem(env, output_form)
        dense = [self._run_dense_conv(conv, env) for conv in match.dense_convs]
        dense += [self._get_sequence(node, env) for node in match.dense]
        sources = self._get_sources(env)
        if mode == "sparse" and any(map(_exceeds_counts, sources)):
            return self._run_modules(env)
        addends = [self._get_spikes(node, env) for node in (*match.skips, *match.post_skips)]
        forms = [spikes.native if mode == "sparse" else spikes.addend for spikes in addends]
        skips, post = forms[: len(match.skips)], forms[len(match.skips) :]
        shape = self._compute_shape(sources, match.skips, dense, env)
        v = self._read_membrane(env)
        if not self._fits(v, shape):
            return self._run_modules(env)
        current = None
        if self.info.current_decay is not None:
            dense[0], current = self._filter_current(dense[0], env)
        prepared = self._prepare(mode, shape)
        source_inputs = [s.native if mode == "sparse" else s.sequence for s in sources]
        v = self._make_initial_membrane(v, shape)
        out, v = prepared(source_inputs, skips, dense, post, steps=shape.steps, v=v, out=output_form)
        return self._store_result(out, v, output_form, env, current)

    def _run_stem(self, env: NodeValues, output_form: Literal["native", "dense"]) -> SpikeTensor:
        """Run the only convolution and the neuron as one kernel."""
        (conv,) = self.match.dense_convs
        x = self._get_conv_input(conv, env)
        steps, images, *output = self._compute_conv_shape(conv, x.shape)
        size = (output[0], output[1], output[2])
        shape = GroupShape(steps=steps, images=images, sources=(), output=size)
        v = self._read_membrane(env)
        if not self._fits(v, shape):
            return self._run_modules(env)
        if self._stem is None or self._shape != shape:
            self._shape = shape
            spec, geometry = self.make_spec(size[0]), ConvGeometry.from_layer(self.modules[conv.name])
            assert self.backend.fused_kernels is not None
            self._stem = self.backend.fused_kernels.prepare_stem(
                self._fold_weight(conv), spec, geometry, shape, self.layout
            )
        out, v = self._stem(x, v=self._make_initial_membrane(v, shape), out=output_form)
        return self._store_result(out, v, output_form, env)

    def _read_membrane(self, env: NodeValues) -> Any:
        """Return the membrane before the first step, in the network's form: a tensor, a number or None."""
        if self.match.starts_at_rest:
            return None
        state = self.membrane if self.match.state is None else env[self.match.state]
        return state[0] if isinstance(state, tuple) else state

    def _filter_current(self, x: torch.Tensor, env: NodeValues) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the synaptic current that the membrane reads at each step, and that after the last step.

        Args:
            x: Input, [T, N, C, H, W].
            env: Values of nodes.
        """
        state = None if self.match.state is None else env[self.match.state]
        current = torch.zeros_like(x[0]) if state is None else self.form.expand(state[1]).to(x)
        currents = torch.empty_like(x)
        for step, out in zip(x, currents, strict=True):
            out.copy_(current)
            current = torch.add(step, current, alpha=self.info.current_decay or 0.0)
        return currents, current

    def _fits(self, v: Any, shape: GroupShape) -> bool:
        """Return whether the membrane is at rest or fits; the neuron itself handles other batch sizes."""
        return self.info.restarts or not isinstance(v, torch.Tensor) or self._has_shape(v, shape)

    def _has_shape(self, v: torch.Tensor, shape: GroupShape) -> bool:
        is_rank = v.dim() == self.form.rank - (not self.form.single_step)
        return is_rank and tuple(self.form.expand(v).shape) == (shape.images, *shape.output)

    def _make_initial_membrane(self, v: Any, shape: GroupShape) -> torch.Tensor | None:
        """Return the membrane as [N, C, H, W]; None for the rest value."""
        if v is None or (isinstance(v, torch.Tensor) and not self._has_shape(v, shape)):
            return None
        return self.form.expand(v) if isinstance(v, torch.Tensor) else self._make_constant_membrane(v, shape)

    def _store_result(
        self,
        out: Any,
        v: torch.Tensor | None,
        output_form: Literal["native", "dense"],
        env: NodeValues,
        current: torch.Tensor | None = None,
    ) -> SpikeTensor:
        if v is not None:
            self.membrane = self.form.reduce(v)
        if self.match.final_state is not None:
            state = [self.form.reduce(item) for item in (v, current) if item is not None]
            env[self.match.final_state] = self.info.make_state(*state) if self.info.make_state else state[0]
        if output_form == "dense":
            out = self.form.from_maps(out)
            return self._make_spike_tensor(self.match.output, dense=out, dense_in_network_order=False)
        return self._make_spike_tensor(self.match.output, native=out)

    def can_fuse(self) -> bool:
        """Return whether the group is a convolution of dense values and a neuron that run as one kernel."""
        match, kernels = self.match, self.backend.fused_kernels
        if kernels is None or match.neuron is None or len(match.dense_convs) != 1:
            return False
        if match.sources or match.skips or match.dense or match.post_skips or match.pooling is not None:
            return False
        layer = self.modules[match.dense_convs[0].name]
        geometry = ConvGeometry.from_layer(layer)
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        return kernels.get_stem_unsupported_reason(geometry, weight.shape[1]) is None

    def get_shape_mismatch(self, env: NodeValues) -> str | None:
        """Return why the group's arithmetic does not cover the values in `env` (a sentence), or None."""
        if any(to_dense(env[node]).dim() != self.form.rank for node in self.match.inputs):
            return "its inputs do not have the dimensions of its layers"
        match = self.match
        constant = [
            self._compute_conv_shape(conv, self._get_conv_input(conv, env).shape)
            for conv in match.dense_convs
        ]
        constant += [tuple(self._get_sequence(node, env).shape) for node in match.dense]
        shapes = [
            self._compute_conv_shape(conv, self._get_conv_input(conv, env).shape) for conv in match.sources
        ]
        shapes += [tuple(self._get_sequence(node, env).shape) for node in (*match.skips, *match.post_skips)]
        # Only dense values may be constant over time; other broadcasts are left to the network.
        steps = {s[0] for s in shapes} | {s[0] for s in constant if s[0] != 1}
        if len({s[1:] for s in (*shapes, *constant)}) > 1 or len(steps) > 1:
            return "it adds tensors of different shapes"
        return None

    def _compute_conv_shape(self, conv: ConvMatch, shape: Sequence[int]) -> tuple[int, ...]:
        """Compute [T, N, C, H, W] of the output of a convolution of the group from that of its input."""
        steps, images, _, height, width = shape
        geometry = ConvGeometry.from_layer(self.modules[conv.name])
        sizes = geometry.compute_out_sizes(height, width)
        if conv.pooling is not None:
            sizes = (conv.pooling.compute_out_size(sizes[0]), conv.pooling.compute_out_size(sizes[1]))
        return (conv.repeats or steps, images, self._count_out_channels(conv), *sizes)

    def _count_out_channels(self, conv: ConvMatch) -> int:
        weight = self.modules[conv.name].weight
        assert isinstance(weight, torch.Tensor)
        return weight.shape[0]

    def _get_conv_input(self, conv: ConvMatch, env: NodeValues) -> torch.Tensor:
        """Return the input of a convolution: dense [T or 1, N, C, H, W]."""
        return self.form.to_maps(to_dense(env[conv.input]))

    def get_unsupported_reason(self, env: NodeValues) -> str | None:
        """Return why the group cannot run in sparse mode, or None if it can."""
        sources = self._get_sources(env)
        dense = [self._run_dense_conv(conv, env) for conv in self.match.dense_convs]
        dense += [self._get_sequence(node, env) for node in self.match.dense]
        shape = self._compute_shape(sources, self.match.skips, dense, env)
        return self.backend.get_unsupported_reason(self.make_spec(shape.output[0]), shape)

    def _make_spike_tensor(
        self,
        node: fx.Node,
        *,
        native: Any = None,
        dense: torch.Tensor | None = None,
        dense_in_network_order: bool = True,
    ) -> SpikeTensor:
        return SpikeTensor(
            self.backend,
            native=native,
            dense=dense,
            form=self.form,
            dtype=self.dtype,
            max_value=self.max_values.get(node, 1),
            order=self._get_order(node),
            dense_in_network_order=dense_in_network_order,
        )

    def _get_order(self, node: fx.Node) -> ChannelOrder | None:
        """Return the channel order of `node`, which the group reads or yields."""
        for conv, order in zip(self.match.sources, self.layout.inputs, strict=False):
            if conv.input is node:
                return order
        return self.layout.output

    def _make_constant_membrane(self, value: float, shape: GroupShape) -> torch.Tensor | None:
        if float(value) == self._get_neuron_spec().v_rest:
            return None
        device = next((p.device for p in self.modules[self.match.name].parameters()), torch.device("cpu"))
        return torch.full((shape.images, *shape.output), float(value), device=device)

    def _get_spikes(self, node: fx.Node, env: NodeValues) -> SpikeTensor:
        value = env[node]
        if isinstance(value, SpikeTensor) and value.form == self.form:
            return value
        spikes = self._make_spike_tensor(node, dense=to_dense(value))
        if not isinstance(value, SpikeTensor):
            env[node] = spikes
        return spikes

    def _get_sources(self, env: NodeValues) -> list[SpikeTensor]:
        return [self._get_spikes(conv.input, env) for conv in self.match.sources]

    def _get_sequence(self, node: fx.Node, env: NodeValues) -> torch.Tensor:
        return self.form.to_maps(to_dense(env[node]))

    def _run_dense_conv(self, conv: ConvMatch, env: NodeValues) -> torch.Tensor:
        """Run a convolution of dense values without its bias, which is part of the group's bias."""
        if conv.name not in self._dense_weights:
            weight = self._fold_weight(conv)
            weight = weight.to(self.backend.dtype).contiguous(memory_format=torch.channels_last)
            self._dense_weights[conv.name] = weight
        geometry = ConvGeometry.from_layer(self.modules[conv.name])
        x = self._get_conv_input(conv, env).to(self.backend.dtype)
        with full_precision(self.backend.dtype):
            return convolve_maps(
                x, self._dense_weights[conv.name], stride=geometry.stride, padding=geometry.padding,
                dilation=geometry.dilation, groups=geometry.groups,
            )  # fmt: skip

    def _fold_weight(self, conv: ConvMatch) -> torch.Tensor:
        """Return the weight with BatchNorm folded in, output channels in the layout's order."""
        weight, _ = fold_conv_match(conv, self.modules)
        return weight if self.layout.output is None else weight[self.layout.output.permutation]

    def _compute_shape(
        self,
        sources: Sequence[SpikeTensor],
        skips: Sequence[fx.Node],
        dense: Sequence[torch.Tensor],
        env: NodeValues,
    ) -> GroupShape:
        repeats = [conv.repeats for conv in self.match.dense_convs if conv.repeats]
        shapes = [s.shape for s in sources]
        addend_shapes = [self._get_spikes(node, env).shape for node in skips]
        addend_shapes += [tuple(d.shape) for d in dense]
        if shapes:
            output = self._compute_conv_shape(self.match.sources[0], shapes[0])[2:]
        elif self.match.pooling is not None:
            (conv,) = self.match.dense_convs
            output = self._compute_conv_shape(conv, self._get_conv_input(conv, env).shape)[2:]
        else:
            output = addend_shapes[0][2:]
        all_shapes = [*shapes, *addend_shapes]
        return GroupShape(
            steps=max([*(shape[0] for shape in all_shapes), *repeats]),
            images=all_shapes[0][1],
            sources=tuple((c, h, w) for _, _, c, h, w in shapes),
            output=(output[0], output[1], output[2]),
            max_value=max([1, *(s.max_value for s in sources)]),
        )

    def _run_modules(self, env: NodeValues) -> SpikeTensor:
        return self._make_spike_tensor(self.match.output, dense=self._run_original(env))

    def _run_original(self, env: NodeValues) -> torch.Tensor:
        """Run the group's nodes as in the network."""
        local: NodeValues = dict(env)
        if self.dtype != self.model_dtype:
            inputs = {node: to_dense(env[node]) for node in self.match.inputs}
            local.update(cast_tensors(inputs, self.model_dtype))
        for node in self.match.inner:
            local[node] = run_node(node, local, self.modules)
        if self.match.final_state is not None:
            env[self.match.final_state] = local[self.match.final_state]
        return local[self.match.output].to(self.dtype)


def _exceeds_counts(spikes: SpikeTensor) -> bool:
    """Return whether a neuron without a bound fired more often in one step than spikes can represent."""
    return spikes.max_value > MAX_COUNT and float(spikes.sequence.max()) > MAX_COUNT


@dataclass
class ConvolutionStep(GroupStep):
    """Convolutions with their BatchNorms that feed no neuron of a group, and what is added to them.

    Their neuron may have other dynamics, or a pooling stands in between, or others read the sum, too.

    Attributes:
        rank: Number of dimensions of an input.
        reads_spikes: Whether a sparse kernel can run them.
    """

    rank: int = 5
    reads_spikes: bool = True

    @property
    def membrane(self) -> Any:
        """It has none."""
        return None

    @membrane.setter
    def membrane(self, value: Any) -> None:
        pass

    @property
    def neuron(self) -> Any:
        """It has none."""
        return None

    @property
    def form(self) -> FeatureForm:
        single = FeatureForm(self.match.features, single_step=True)
        return single if single.rank == self.rank else replace(single, single_step=False)

    def _get_neuron_spec(self) -> NeuronSpec:
        return NEVER_FIRES

    def make_spec(self, channels: int) -> GroupSpec:
        """Make the spec of the convolutions; what is added to them is passed to `convolve`."""
        return replace(super().make_spec(channels), dense_inputs=0)

    def get_unsupported_reason(self, env: NodeValues) -> str | None:
        if not self.reads_spikes:
            return "its input is not spikes"
        if not self.backend.runs_bare_convolutions:
            return "its output is not the input of a neuron that can be fused"
        return super().get_unsupported_reason(env)

    def run(
        self,
        env: NodeValues,
        mode: GroupMode | None = None,
        output_form: Literal["native", "dense"] | None = None,
    ) -> torch.Tensor:
        """Run the convolutions: a tensor of the network's dtype, with a time axis if the inputs have one."""
        mode = mode or self.mode
        if mode == "module":
            return self._run_original(env)
        sources = self._get_sources(env)
        if mode == "sparse" and any(map(_exceeds_counts, sources)):
            return self._run_original(env)
        prepared = self._prepare(mode, self._compute_shape(sources, (), (), env))
        inputs = [spikes.native if mode == "sparse" else spikes.sequence for spikes in sources]
        addends = [self._get_sequence(node, env) for node in self.match.dense]
        return self.form.from_maps(prepared.convolve(inputs, addends).to(self.dtype))

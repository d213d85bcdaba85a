"""A plan: how an analysed network is run, group by group.

The plan walks the traced network in its own order. Nodes that belong to a group (`match.py`) run as one piece
on the backend (`backend.py`); everything else runs as the network's author wrote it. Spikes travel between
groups in the backend's form and turn into dense tensors only where an ordinary operation reads them.

Each group runs in one of three ways, and `dispatch.py` measures which:

* ``sparse``: the backend's own convolution, which skips zeros;
* ``dense``: the library's convolution with BatchNorm folded in, and the backend's neuron behind it;
* ``module``: the network's own modules, untouched.

Membranes live where the network keeps them (`neuron.v`), so resetting and carrying state work as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.node import map_arg
from torch.nn.modules import module as torch_module

from sparseflow.spiking.backend import Backend, GroupShape, PreparedGroup
from sparseflow.spiking.graph import SpikeGraph
from sparseflow.spiking.graph.layers import forward_is_librarys
from sparseflow.spiking.graph.sites import padding_of
from sparseflow.spiking.kernels.spec import GroupSpec
from sparseflow.spiking.match import (
    SPIKE_KINDS,
    ConvMatch,
    GroupFinder,
    GroupMatch,
    fold_match,
    group_spec,
)
from sparseflow.spiking.order import conflict
from sparseflow.spiking.registry import neuron_info

Way = Literal["sparse", "dense", "module"]


class Spikes:
    """One layer's spikes in the backend's form, as a dense tensor, or both; converted when asked for.

    Args:
        native: The backend's form, or None.
        dense: float [T, N, C, H, W], or [N, C, H, W] when `single`.
        single: The network runs one step at a time, so its dense tensors carry no time axis.
        dtype: What the network's own operations compute in.
        max_value: Largest spike value (1 for binary spikes).
    """

    def __init__(
        self,
        backend: Backend,
        *,
        native: Any = None,
        dense: Any = None,
        single: bool,
        dtype: torch.dtype,
        max_value: int = 1,
    ) -> None:
        self._backend, self._native, self._dense = backend, native, dense
        self.single, self.dtype, self.max_value = single, dtype, max_value

    @property
    def native(self) -> Any:
        if self._native is None:
            self._native = self._backend.encode(self.sequence, self.max_value)
        return self._native

    @property
    def sequence(self) -> torch.Tensor:
        """Dense, with a time axis: [T, N, C, H, W]."""
        if self._dense is None:
            self._dense = self._backend.decode(self._native)
            if self.single:
                self._dense = self._dense[0]
        return self._dense.unsqueeze(0) if self.single else self._dense

    @property
    def dense(self) -> torch.Tensor:
        """Dense, as the network's own operations expect it."""
        sequence = self.sequence.to(self.dtype)
        return sequence[0] if self.single else sequence

    def spatial_mean(self) -> torch.Tensor:
        """Mean over H and W, [T, N, C], or [N, C] when the network runs one step at a time."""
        if self._native is None:
            return self.dense.mean(dim=(-2, -1))
        mean = self._backend.spatial_mean(self._native).to(self.dtype)
        return mean[0] if self.single else mean


Env = dict[fx.Node, Any]


@dataclass
class GroupStep:
    """One group at run time.

    Attributes:
        match: What belongs to the group.
        kinds: Largest value of every node that holds spikes.
        dtype: What the network's own operations compute in.
        way: How it runs; 'module' until somebody decides otherwise.
        emit: The form in which its spikes are wanted by whoever reads them next.
    """

    match: GroupMatch
    backend: Backend
    modules: dict[str, nn.Module]
    kinds: dict[fx.Node, int]
    dtype: torch.dtype
    way: Way = "module"
    emit: Literal["native", "dense"] = "native"
    _prepared: dict[Way, PreparedGroup] = field(default_factory=dict)
    _stem: dict[str, torch.Tensor] = field(default_factory=dict)
    _shape: GroupShape | None = None
    _spec: GroupSpec | None = None

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

    def forget(self) -> None:
        """Drop prepared weights, after the network's own have changed."""
        self._prepared.clear()
        self._stem.clear()
        self._spec = None

    def spec(self, channels: int) -> GroupSpec:
        """The group's arithmetic with the network's present weights."""
        if self._spec is None:
            info = neuron_info(self.neuron)
            assert info is not None and info.spec is not None
            self._spec = group_spec(self.match, self.modules, info.spec, channels)
        return self._spec

    def run(self, env: Env, way: Way | None = None, emit: Literal["native", "dense"] | None = None) -> Spikes:
        """Run the group on the values in `env` and leave the membrane in the neuron."""
        way = way or self.way
        if way == "module":
            return self._run_modules(env)
        match, emit = self.match, emit or self.emit
        dense = [self._dense_conv(conv, env) for conv in match.dense_convs]
        dense += [self._sequence(node, env) for node in match.dense]
        sources = [self._spikes(conv.input, env) for conv in match.sources]
        skips = [self._spikes(node, env).native for node in match.skips]
        post = [self._spikes(node, env).native for node in match.post_skips]
        steps, shape = self._sizes(sources, match.skips, dense, env)
        v = self.neuron.v
        if isinstance(v, torch.Tensor) and tuple(v.shape) != (shape.images, *shape.output):
            # What becomes of the membranes of another batch is for the neuron to say.
            return self._run_modules(env)
        if self._shape != shape:
            self._prepared.clear()
            self._shape = shape
        if way not in self._prepared:
            spec = self.spec(shape.output[0])
            self._prepared[way] = self.backend.prepare(spec, shape, "sparse" if way == "sparse" else "dense")
        fed = [s.native if way == "sparse" else s.sequence for s in sources]
        v = v if isinstance(v, torch.Tensor) else self._constant_membrane(v, shape)
        out, v = self._prepared[way](fed, skips, dense, post, steps=steps, v=v, out=emit)
        self.neuron.v = v
        if emit == "dense":
            out = out[0] if self.single else out
            return self._wrap(self.match.output, dense=out)
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
        sources = [self._spikes(conv.input, env) for conv in self.match.sources]
        dense = [self._dense_conv(conv, env) for conv in self.match.dense_convs]
        dense += [self._sequence(node, env) for node in self.match.dense]
        _, shape = self._sizes(sources, self.match.skips, dense, env)
        return self.backend.refusal(self.spec(shape.output[0]), shape)

    def _wrap(self, node: fx.Node, *, native: Any = None, dense: torch.Tensor | None = None) -> Spikes:
        """The value of `node` as spikes."""
        return Spikes(
            self.backend,
            native=native,
            dense=dense,
            single=self.single,
            dtype=self.dtype,
            max_value=self.kinds.get(node, 1),
        )

    def _constant_membrane(self, value: float, shape: GroupShape) -> torch.Tensor | None:
        info = neuron_info(self.neuron)
        assert info is not None and info.spec is not None
        if float(value) == info.spec.v_rest:
            return None
        device = next((p.device for p in self.modules[self.match.name].parameters()), torch.device("cpu"))
        return torch.full((shape.images, *shape.output), float(value), device=device)

    def _spikes(self, node: fx.Node, env: Env) -> Spikes:
        value = env[node]
        if not isinstance(value, Spikes):
            value = self._wrap(node, dense=value)
            env[node] = value
        return value

    def _sequence(self, node: fx.Node, env: Env) -> torch.Tensor:
        value = as_dense(env[node])
        return value.unsqueeze(0) if self.single else value

    def _dense_conv(self, conv: ConvMatch, env: Env) -> torch.Tensor:
        """A convolution of dense values, without its bias, which the group's own bias holds."""
        module = self.modules[conv.name]
        assert isinstance(module, nn.Conv2d)
        if conv.name not in self._stem:
            weight, _ = fold_match(conv, self.modules)
            weight = weight.to(self.backend.dtype).contiguous(memory_format=torch.channels_last)
            self._stem[conv.name] = weight
        weight = self._stem[conv.name]
        x = as_dense(env[conv.input])
        lead = x.shape[:-3]
        x = x.reshape(-1, *x.shape[-3:]).to(self.backend.dtype, memory_format=torch.channels_last)
        y = F.conv2d(x, weight, None, module.stride, module.padding, module.dilation, module.groups)
        y = y.view(*lead, *y.shape[1:])
        return y.unsqueeze(0) if y.dim() == 4 else y

    def _sizes(
        self, sources: Sequence[Spikes], skips: Sequence[fx.Node], dense: Sequence[torch.Tensor], env: Env
    ) -> tuple[int, GroupShape]:
        repeats = [conv.repeats for conv in self.match.dense_convs if conv.repeats]
        shapes = [_spike_shape(s) for s in sources]
        whole = [_spike_shape(self._spikes(node, env)) for node in skips]
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


def _spike_shape(spikes: Spikes) -> tuple[int, int, int, int, int]:
    native = spikes._native
    if native is None:
        t, n, c, h, w = spikes.sequence.shape
        return t, n, c, h, w
    return native.T, native.N, native.C, native.H, native.W


def as_dense(value: Any) -> Any:
    """A value of the network as its own operations expect it."""
    return value.dense if isinstance(value, Spikes) else value


def run_node(node: fx.Node, env: Env, modules: dict[str, nn.Module]) -> Any:
    """Run one fx node on the values in `env`, as the network's author wrote it."""
    args = map_arg(node.args, lambda n: as_dense(env[n]))
    kwargs = map_arg(node.kwargs, lambda n: as_dense(env[n]))
    if node.op == "call_module":
        return modules[str(node.target)](*args, **kwargs)
    if node.op == "call_method":
        receiver, *rest = args
        return getattr(receiver, str(node.target))(*rest, **kwargs)
    if node.op == "get_attr":
        owner, _, attribute = str(node.target).rpartition(".")
        return getattr(modules[owner], attribute)
    assert callable(node.target)
    return node.target(*args, **kwargs)


@dataclass(frozen=True)
class _Step:
    """One thing to do: a node on its own, or a group; and the values nobody needs after it."""

    node: fx.Node
    group: GroupStep | None
    frees: tuple[fx.Node, ...]


class Plan:
    """A network, ready to run group by group.

    Args:
        graph: The analysed network (traced by fx).
        backend: The device's backend.
    """

    def __init__(self, graph: SpikeGraph, backend: Backend) -> None:
        assert graph.module is not None
        self.graph, self.backend = graph, backend
        self.modules: dict[str, nn.Module] = dict(graph.module.named_modules())
        nodes = list(graph.module.graph.nodes)
        self._placeholders = [n for n in nodes if n.op == "placeholder"]
        kinds = {
            n: graph.values[n.name].max_value or 1
            for n in nodes
            if n.name in graph.values and graph.values[n.name].kind in SPIKE_KINDS
        }
        matches = list(GroupFinder(graph).groups())
        own = next((p.dtype for p in graph.model.parameters() if p.is_floating_point()), torch.float32)
        self.groups = [
            GroupStep(match=match, backend=backend, modules=self.modules, kinds=kinds, dtype=own)
            for match in matches
        ]
        at_output = {g.match.output: g for g in self.groups}
        inside = {n for g in self.groups for n in g.match.inner}
        bypassed = _bypassed_repetitions(self.groups)
        owner = {n: g.match.output for g in self.groups for n in g.match.inner}
        late = {
            n: g.match.output
            for g in self.groups
            for conv in g.match.dense_convs
            for n in bypassed
            if n is conv.node.all_input_nodes[0] or n in conv.node.all_input_nodes[0].all_input_nodes
        }
        self.conflict = conflict(graph.module, graph.neurons, {**late, **owner}, kinds)
        self._within = [module for module in graph.model.modules() if module is not graph.model]
        self._bypassed_modules = self._not_called(inside)
        self._forwards = [vars(module).get("forward") for module in self._bypassed_modules]
        listed: list[tuple[fx.Node, GroupStep | None, Sequence[fx.Node]]] = []
        for node in nodes:
            if node.op == "placeholder" or (node in inside and node not in at_output) or node in bypassed:
                continue
            group = at_output.get(node)
            reads = group.match.inputs if group else node.all_input_nodes
            listed.append((node, group, reads))
        last = {read: i for i, (_, _, reads) in enumerate(listed) for read in reads}
        self._steps = [
            _Step(node, group, tuple(read for read in dict.fromkeys(reads) if last[read] == i))
            for i, (node, group, reads) in enumerate(listed)
        ]

    def forget(self) -> None:
        """Drop every prepared weight, after the network's own have changed."""
        for group in self.groups:
            group.forget()

    def _not_called(self, inside: set[fx.Node]) -> list[nn.Module]:
        """The network's modules that a run of the plan may leave out: containers, and what groups replace."""
        assert self.graph.module is not None
        called: set[nn.Module] = set()
        for node in self.graph.module.graph.nodes:
            if node.op == "call_module" and node not in inside and not self._is_global_pool(node):
                called |= set(self.modules[str(node.target)].modules())
        return [module for module in self._within if module not in called]

    def overruled(self) -> str | None:
        """Why the network's own code must run after all (a sentence), or None.

        Somebody watches a module that the plan would not call, put one of them into training mode, or gave it
        another forward.
        """
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return "every module is hooked"
        for module, forward in zip(self._bypassed_modules, self._forwards, strict=True):
            if module._forward_hooks or module._forward_pre_hooks:
                return f"a {type(module).__name__} is hooked"
            if vars(module).get("forward") is not forward:
                return f"a {type(module).__name__} was given another forward"
            if module.training:
                return f"a {type(module).__name__} is in training mode"
        return None

    def watched(self) -> bool:
        """Whether any module within the network is hooked, so that it must be called each time."""
        return any(module._forward_hooks or module._forward_pre_hooks for module in self._within)

    def settle_forms(self) -> None:
        """Let each group emit what its readers take, once every group's way is chosen."""
        for group in self.groups:
            wants_native = any(
                (other.way == "sparse" and any(c.input is group.match.output for c in other.match.sources))
                or group.match.output in (*other.match.skips, *other.match.post_skips)
                for other in self.groups
            )
            pooled = any(self._is_global_pool(user) for user in group.match.output.users)
            group.emit = "native" if wants_native or pooled else "dense"

    def run(self, *inputs: Any, around: Callable[[GroupStep, Env], Spikes] | None = None) -> Any:
        """Run the network.

        Args:
            inputs: What the network's forward takes.
            around: Called instead of `group.run(env)` for each group; for measuring.
        """
        env: Env = {}
        for i, node in enumerate(self._placeholders):
            env[node] = inputs[i] if i < len(inputs) else node.args[0]
        for step in self._steps:
            if step.group is not None:
                env[step.node] = around(step.group, env) if around else step.group.run(env)
            elif step.node.op == "output":
                return map_arg(step.node.args[0], lambda n: as_dense(env[n]))
            else:
                env[step.node] = self._run_plain(step.node, env)
            for node in step.frees:
                del env[node]
        raise AssertionError("a traced network ends in an output node")

    def _run_plain(self, node: fx.Node, env: Env) -> Any:
        """An operation outside all groups; a global average pool reads spikes in the backend's form."""
        if self._is_global_pool(node):
            value = env[node.all_input_nodes[0]]
            if isinstance(value, Spikes):
                return value.spatial_mean()[..., None, None]
        return run_node(node, env, self.modules)

    def _is_global_pool(self, node: fx.Node) -> bool:
        if node.op != "call_module":
            return False
        module = self.modules[str(node.target)]
        known = isinstance(module, nn.AdaptiveAvgPool2d) and forward_is_librarys(module)
        return known and module.output_size in (1, (1, 1))


def _bypassed_repetitions(groups: Sequence[GroupStep]) -> set[fx.Node]:
    """Nodes that only repeat a constant input over time for convolutions which now run once."""
    bypassed: set[fx.Node] = set()
    for group in groups:
        for conv in group.match.dense_convs:
            repeated = conv.node.all_input_nodes[0]
            if conv.repeats and set(repeated.users) == {conv.node}:
                bypassed |= {repeated, *(n for n in repeated.all_input_nodes if set(n.users) == {repeated})}
                bypassed.discard(conv.input)
    return bypassed

"""`Plan`: execution of an analyzed network, group by group.

The plan runs the traced network in graph order. Nodes of a group (`graph/fusion_matcher.py`) run as one
unit on the backend; all other nodes run as in the original network. Spikes are passed between groups in the
backend's native form and are converted to dense tensors only where an ordinary operation reads them.

Each group runs in one of four modes, selected by the autotuner:

* ``sparse``: the backend's own convolution, which skips zeros;
* ``fused``: a convolution of few dense channels and its neuron as one kernel;
* ``dense``: the library's convolution with BatchNorm folded in, followed by the backend's neuron;
* ``module``: the network's own modules.

Membranes stay in the neurons, so resetting and carrying state work as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any
from weakref import WeakValueDictionary

from torch import fx, nn
from torch.fx.node import map_arg
from torch.nn.modules import module as torch_module

from sparseflow.spiking.backends.base import Backend
from sparseflow.spiking.backends.precision import get_model_dtype
from sparseflow.spiking.graph.aliasing import find_write_hazard
from sparseflow.spiking.graph.analysis import SpikeGraph
from sparseflow.spiking.graph.forward_reads import MISSING, EntryTable
from sparseflow.spiking.graph.fusion_matcher import SPIKE_KINDS, FusionMatcher, GroupMatch
from sparseflow.spiking.graph.module_state import keeps_other_state
from sparseflow.spiking.graph.simplification import simplify_network
from sparseflow.spiking.graph.sites import count_products
from sparseflow.spiking.graph.time_steps import get_folded_sizes, get_reset_module
from sparseflow.spiking.runtime.attention_step import AttentionStep
from sparseflow.spiking.runtime.channel_layout import FiringPattern, choose_channel_layouts
from sparseflow.spiking.runtime.group_step import ConvolutionStep, GroupMode, GroupStep, SharedGroups
from sparseflow.spiking.runtime.precision_casts import cast_layer, cast_tensors, runs_as_copy
from sparseflow.spiking.runtime.spike_tensor import (
    NodeValues,
    Passthrough,
    SpikeTensor,
    match_passthrough,
    run_node,
    to_dense,
)

_GET_HOOKS_AND_MODE = itemgetter("_forward_hooks", "_forward_pre_hooks", "training")


def _make_mutable(tree: Any) -> Any:
    """Convert fx's immutable lists and dictionaries to those that the network returns."""
    if isinstance(tree, list):
        return [_make_mutable(item) for item in tree]
    if isinstance(tree, dict):
        return {key: _make_mutable(item) for key, item in tree.items()}
    return tuple(map(_make_mutable, tree)) if type(tree) is tuple else tree


@dataclass(frozen=True)
class _PlanStep:
    """One step: a single node or a group, and the values that are freed after it."""

    node: fx.Node
    group: GroupStep | None
    frees: tuple[fx.Node, ...]


class Plan:
    """Executes a network group by group.

    Args:
        graph: The analyzed network (traced by fx).
        backend: The device's backend.
        shared: Prepared groups of the network's other plans.
        casts: Whether operations outside of groups run in the backend's precision, too.
        keeps_membranes: Whether the membranes after a run are read; if not, some keep their old values.

    Attributes:
        dtype: Precision of operations outside of groups.
        casts: Whether that is another precision than the network's.
        groups: The groups, in execution order.
        write_hazard: Why the plan must not be used (a sentence), or None.
        starts_at_rest: Whether the network resets all neurons before it runs them.
        keeps_other_state: Whether a layer that is no neuron keeps state between calls.
    """

    def __init__(
        self,
        graph: SpikeGraph,
        backend: Backend,
        shared: SharedGroups | None = None,
        *,
        casts: bool = True,
        keeps_membranes: bool = True,
    ) -> None:
        graph = simplify_network(graph)
        assert graph.module is not None
        self.graph, self.backend = graph, backend
        self.modules: dict[str, nn.Module] = dict(graph.module.named_modules())
        nodes = list(graph.module.graph.nodes)
        self._placeholders = [n for n in nodes if n.op == "placeholder"]
        max_values = {
            n: graph.values[n.name].max_value or 1
            for n in nodes
            if n.name in graph.values and graph.values[n.name].kind in SPIKE_KINDS
        }
        matcher = FusionMatcher(graph, has_fused_kernels=backend.fused_kernels is not None)
        matches = list(matcher.find_groups())
        self._model_dtype = get_model_dtype(graph.model)
        self.dtype = backend.dtype if casts else self._model_dtype
        self.casts = self.dtype != self._model_dtype
        self._cast_layers: dict[str, Any] = {}
        self._cast_constants: dict[fx.Node, Any] = {}
        shared = WeakValueDictionary() if shared is None else shared

        num_calls = Counter(str(n.target) for n in nodes if n.op == "call_module")

        def is_membrane_read(match: GroupMatch) -> bool:
            return keeps_membranes or match.final_state is not None or num_calls[match.neuron_name] != 1

        def make_group(match: GroupMatch) -> GroupStep:
            options: dict[str, Any] = {
                "match": match, "backend": backend, "modules": self.modules, "max_values": max_values,
                "dtype": self.dtype, "model_dtype": self._model_dtype, "shared": shared,
            }  # fmt: skip
            if match.attention is not None:
                return AttentionStep(**options)
            if match.neuron is not None:
                return GroupStep(**options, keeps_membrane=is_membrane_read(match))
            rank = len(graph.values[match.inputs[0].name].shape or ())
            reads_spikes = all(map(matcher.reads_spikes, match.sources))
            return ConvolutionStep(**options, rank=rank, reads_spikes=reads_spikes)

        self.groups = [make_group(match) for match in matches]
        group_by_output = {g.match.output: g for g in self.groups}
        self._passthroughs = self._find_passthroughs()
        inside = {n for g in self.groups for n in g.match.inner}
        owner = {n: g.match.output for g in self.groups for n in g.match.inner}
        self.write_hazard = find_write_hazard(graph.module, graph.neurons, owner, max_values)
        self._states = [
            (self.modules[name], info.state)
            for name, info in graph.neurons.items()
            if info.restarts and info.state is not None and name in self.modules
        ]
        self.starts_at_rest = self._starts_at_rest(nodes)
        called = {str(node.target) for node in nodes if node.op == "call_module"} - set(graph.neurons)
        opaque = graph.reads.opaque if graph.reads is not None else frozenset()
        self.keeps_other_state = any(
            name in opaque or keeps_other_state(self.modules[name]) for name in called
        )
        self._submodules = [module for module in graph.model.modules() if module is not graph.model]
        self._bypassed_modules = self._find_bypassed_modules(inside)
        self._layer_nodes = [n for n in nodes if n.op == "call_module"]
        self._replaced = set(nodes) if self.casts else inside | set(self._passthroughs)
        self._forwards = [vars(module).get("forward") for module in self._bypassed_modules]
        self._attributes = [vars(module) for module in self._submodules]
        self._own_forwards = EntryTable(
            [(attributes, "forward", attributes.get("forward", MISSING)) for attributes in self._attributes],
            by_identity=True,
        )
        entries: list[tuple[fx.Node, GroupStep | None, Sequence[fx.Node]]] = []
        for node in nodes:
            if node.op == "placeholder" or (node in inside and node not in group_by_output):
                continue
            group = group_by_output.get(node)
            reads = group.match.reads if group else node.all_input_nodes
            entries.append((node, group, reads))
        last_reader = {read: i for i, (_, _, reads) in enumerate(entries) for read in reads}
        self._steps = [
            _PlanStep(node, group, tuple(read for read in dict.fromkeys(reads) if last_reader[read] == i))
            for i, (node, group, reads) in enumerate(entries)
        ]

    def invalidate(self) -> None:
        """Drop all prepared weights, after the network's own have changed."""
        self._cast_layers.clear()
        self._cast_constants.clear()
        for group in self.groups:
            group.invalidate()

    def list_layers(self, include_called: bool) -> list[nn.Module]:
        """List the layers and neurons that run as part of a group, on spikes in native form, or as a copy.

        Args:
            include_called: List those that a run of the plan calls, too.
        """
        return [
            self.modules[str(node.target)]
            for node in self._layer_nodes
            if include_called or node in self._replaced
        ]

    def _starts_at_rest(self, nodes: Sequence[fx.Node]) -> bool:
        reset: set[nn.Module] = set()
        for node in nodes:
            if (module := get_reset_module(node)) is not None:
                reset.add(module)
            is_neuron = node.op == "call_module" and str(node.target) in self.graph.neurons
            if is_neuron and self.modules[str(node.target)] not in reset:
                return False
        return bool(reset)

    def list_used_parameters(self) -> set[nn.Parameter]:
        """List the network's parameters that a run reads, unlike those of which it has prepared copies."""
        used: set[nn.Parameter] = set()
        for step in self._steps:
            if step.group is not None and step.group.mode != "module":
                continue
            for node in [step.node] if step.group is None else step.group.match.inner:
                name = str(node.target)
                if node.op == "get_attr":
                    owner, _, attribute = name.rpartition(".")
                    value = getattr(self.modules[owner], attribute)
                    used |= {value} if isinstance(value, nn.Parameter) else set()
                elif node.op == "call_module":
                    layer = self.modules[name]
                    is_copied = step.group is None and self.casts and runs_as_copy(layer)
                    used |= set() if is_copied else set(layer.parameters())
        return used

    def _find_bypassed_modules(self, inside: set[fx.Node]) -> list[nn.Module]:
        """List the modules that a run of the plan may not call: containers, and modules of groups."""
        assert self.graph.module is not None
        called: set[nn.Module] = set()
        for node in self.graph.module.graph.nodes:
            if node.op != "call_module" or node in inside or node in self._passthroughs:
                continue
            layer = self.modules[str(node.target)]
            if not self.casts or not runs_as_copy(layer):
                called |= set(layer.modules())
        return [module for module in self._submodules if module not in called]

    def get_bypass_conflict(self) -> str | None:
        """Return why the network's own code must run (a sentence), or None.

        A module that the plan does not call has a hook, is in training mode, or has another forward.
        """
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return "a global module hook is registered"
        for module, forward in zip(self._bypassed_modules, self._forwards, strict=True):
            if module._forward_hooks or module._forward_pre_hooks:
                return f"a {type(module).__name__} has hooks"
            if vars(module).get("forward") is not forward:
                return f"the forward of a {type(module).__name__} was replaced"
            if module.training:
                return f"a {type(module).__name__} is in training mode"
        return None

    def needs_module_calls(self) -> bool:
        """Return whether a submodule must be called each time.

        It has a hook, is in training mode, or has another forward. If none does, there is no bypass conflict.
        """
        return (
            any(chain.from_iterable(map(_GET_HOOKS_AND_MODE, self._attributes)))
            or bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)
            or not self._own_forwards.is_unchanged()
        )

    def choose_layouts(self, *inputs: Any) -> None:
        """Observe where the network is silent on a sample and choose channel layouts that skip blocks.

        Runs the network's own modules once, which changes its membranes. Does nothing if the backend does
        not skip blocks of channels.
        """
        if self.backend.channel_block is None:
            return
        patterns: dict[fx.Node, FiringPattern] = {}

        def record_pattern(group: GroupStep, env: NodeValues) -> Any:
            output = group.run(env, mode="module")
            if isinstance(output, SpikeTensor):
                patterns[group.match.output] = FiringPattern.from_spikes(output.sequence)
            return output

        self.run(*inputs, group_runner=record_pattern)
        layouts = choose_channel_layouts(
            [g.match for g in self.groups],
            self._passthroughs,
            patterns,
            {
                conv.name: count_products(self.modules[conv.name])
                for g in self.groups
                for conv in g.match.sources
            },
            self.backend.channel_block,
        )
        for group, arrangement in zip(self.groups, layouts, strict=True):
            group.set_layout(arrangement)

    def set_modes(self, modes: Mapping[str, GroupMode]) -> None:
        """Set the groups' modes by name; what is prepared for other modes is kept."""
        for group in self.groups:
            group.mode = modes[group.name]
        self.update_output_forms()

    def update_output_forms(self) -> None:
        """Set the output form of each group to the one its readers take; requires final modes."""
        native_readers = {
            (c.input, g.form) for g in self.groups if g.mode == "sparse" for c in g.match.sources
        }
        for group in self.groups:
            if group.mode == "sparse" or not self.backend.adds_dense_spikes:
                native_readers |= {(n, group.form) for n in (*group.match.skips, *group.match.post_skips)}
        means = {node for node, layer in self._passthroughs.items() if layer.kind == "mean"}
        for group in self.groups:
            reached = list(self._iterate_reached(group.match.output))
            native = any((node, group.form) in native_readers or node in means for node in reached)
            group.output_form = "native" if native else "dense"

    def _iterate_reached(self, node: fx.Node) -> Iterator[fx.Node]:
        """Iterate over `node` and all nodes behind it that its spikes reach in native form."""
        yield node
        for user in node.users:
            if user in self._passthroughs:
                yield from self._iterate_reached(user)

    def run(self, *inputs: Any, group_runner: Callable[[GroupStep, NodeValues], Any] | None = None) -> Any:
        """Run the network.

        Args:
            inputs: Inputs of the network's forward.
            group_runner: Called instead of `group.run(env)` for each group; for measurements.
        """
        env: NodeValues = {}
        for i, node in enumerate(self._placeholders):
            env[node] = self._cast(inputs[i]) if i < len(inputs) else node.args[0]
        for step in self._steps:
            if step.group is not None:
                env[step.node] = group_runner(step.group, env) if group_runner else step.group.run(env)
            elif step.node.op == "output":
                self._make_states_contiguous()
                result = map_arg(step.node.args[0], lambda n: self._uncast(to_dense(env[n])))
                return _make_mutable(result)
            else:
                env[step.node] = self._run_operation(step.node, env)
            for node in step.frees:
                del env[node]
        raise AssertionError("a traced network ends in an output node")

    def _make_states_contiguous(self) -> None:
        """Copy membranes in another memory format, which a neuron would pass on to the network's own code."""
        for neuron, name in self._states:
            state = getattr(neuron, name)
            if not state.is_contiguous():
                setattr(neuron, name, state.contiguous())

    def _run_operation(self, node: fx.Node, env: NodeValues) -> Any:
        value = env[node.all_input_nodes[0]] if node in self._passthroughs else None
        if isinstance(value, SpikeTensor):
            return value.apply_passthrough(self._passthroughs[node])
        if not self.casts:
            return run_node(node, env, self.modules)
        if node.op == "get_attr":
            if node not in self._cast_constants:
                self._cast_constants[node] = self._cast(run_node(node, env, self.modules))
            return self._cast_constants[node]
        name = str(node.target)
        if node.op == "call_module" and name not in self._cast_layers:
            self._cast_layers[name] = cast_layer(self.modules[name], self.dtype, self._model_dtype)
        return run_node(node, env, self._cast_layers)

    def _cast(self, value: Any) -> Any:
        """Cast the network's tensors to the precision of operations outside of groups."""
        return cast_tensors(value, self.dtype) if self.casts else value

    def _uncast(self, value: Any) -> Any:
        """Undo `_cast`."""
        return cast_tensors(value, self._model_dtype) if self.casts else value

    def _find_passthroughs(self) -> dict[fx.Node, Passthrough]:
        """Find the layers that spikes of the groups pass in native form."""
        assert self.graph.module is not None
        reached = {g.match.output: g.form for g in self.groups if g.match.neuron is not None}
        inside = {node for group in self.groups for node in group.match.inner}
        passthroughs: dict[fx.Node, Passthrough] = {}
        for node in self.graph.module.graph.nodes:
            if node.op != "call_module" or node in inside or len(node.all_input_nodes) != 1:
                continue
            form = reached.get(node.all_input_nodes[0])
            if form is None:
                continue
            layer = match_passthrough(
                self.modules[str(node.target)], form=form, folds=get_folded_sizes(node) is not None
            )
            if layer is not None:
                passthroughs[node] = layer
                if layer.kind != "mean":
                    reached[node] = form
        return passthroughs

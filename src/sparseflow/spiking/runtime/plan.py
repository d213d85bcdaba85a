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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.nn.modules import module as torch_module

from sparseflow.spiking.backends.base import Backend
from sparseflow.spiking.graph import SpikeGraph
from sparseflow.spiking.graph.aliasing import conflict
from sparseflow.spiking.graph.fusion_matcher import SPIKE_KINDS, GroupFinder
from sparseflow.spiking.runtime.channel_layout import Pattern, arrange
from sparseflow.spiking.runtime.group_step import GroupStep, Shared, Way
from sparseflow.spiking.runtime.spike_passthrough import Passage, passage
from sparseflow.spiking.runtime.spike_tensor import Env, Spikes, as_dense, run_node


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
        shared: Prepared groups of the network's other plans.
    """

    def __init__(self, graph: SpikeGraph, backend: Backend, shared: Shared | None = None) -> None:
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
            GroupStep(
                match=match,
                backend=backend,
                modules=self.modules,
                kinds=kinds,
                dtype=own,
                shared=WeakValueDictionary() if shared is None else shared,
            )
            for match in matches
        ]
        at_output = {g.match.output: g for g in self.groups}
        self._passages = self._find_passages()
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
            if node.op == "call_module" and node not in inside and node not in self._passages:
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

    def arrange(self, *inputs: Any) -> None:
        """See where the network is silent on a sample, and let channels lie so that blocks are skipped.

        Runs the network's own modules once, which changes its membranes. Nothing happens where the backend
        skips no blocks of channels.
        """
        if self.backend.block is None:
            return
        patterns: dict[fx.Node, Pattern] = {}

        def around(group: GroupStep, env: Env) -> Spikes:
            found = group.run(env, way="module")
            patterns[group.match.output] = Pattern.of(found.sequence)
            return found

        self.run(*inputs, around=around)
        found = arrange([g.match for g in self.groups], self._passages, patterns, self.backend.block)
        for group, arrangement in zip(self.groups, found, strict=True):
            group.arrange(arrangement)

    def run_all(self, ways: Mapping[str, Way]) -> None:
        """Let groups run in these ways, by name; what is prepared for others stays."""
        for group in self.groups:
            group.way = ways[group.name]
        self.settle_forms()

    def settle_forms(self) -> None:
        """Let each group emit what its readers take, once every group's way is chosen."""
        takers = {c.input for g in self.groups if g.way == "sparse" for c in g.match.sources}
        for group in self.groups:
            if group.way == "sparse" or not self.backend.adds_dense:
                takers |= {*group.match.skips, *group.match.post_skips}
        takers |= {node for node, layer in self._passages.items() if layer.kind == "mean"}
        for group in self.groups:
            native = not takers.isdisjoint(self._onward(group.match.output))
            group.emit = "native" if native else "dense"

    def _onward(self, node: fx.Node) -> Iterator[fx.Node]:
        """`node` and every node behind it that its spikes reach in the form they have."""
        yield node
        for user in node.users:
            if user in self._passages:
                yield from self._onward(user)

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
        """An operation outside all groups."""
        value = env[node.all_input_nodes[0]] if node in self._passages else None
        if isinstance(value, Spikes):
            return value.through(self._passages[node])
        return run_node(node, env, self.modules)

    def _find_passages(self) -> dict[fx.Node, Passage]:
        """The layers that spikes of this network's groups pass in the form they have."""
        assert self.graph.module is not None
        reached = {group.match.output: group.single for group in self.groups}
        inside = {node for group in self.groups for node in group.match.inner}
        found: dict[fx.Node, Passage] = {}
        for node in self.graph.module.graph.nodes:
            if node.op != "call_module" or node in inside or len(node.all_input_nodes) != 1:
                continue
            single = reached.get(node.all_input_nodes[0])
            if single is None:
                continue
            layer = passage(self.modules[str(node.target)], single=single)
            if layer is not None:
                found[node] = layer
                if layer.kind != "mean":
                    reached[node] = single
        return found


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

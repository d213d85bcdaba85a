"""What is known about every node of a traced network, found by walking forward from its neurons."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from sparseflow.errors import ModelError
from sparseflow.spiking.graph import layer_rules, rules
from sparseflow.spiking.graph import values as v
from sparseflow.spiking.graph.registry import NeuronInfo
from sparseflow.spiking.graph.values import Value

VIEW_ATTRIBUTES = ("T", "mT", "H", "mH", "data", "real")


def neuron_value(name: str, info: NeuronInfo) -> Value:
    """What a neuron puts out."""
    if info.output == "real" or info.max_value is None:
        return v.dense(f"neuron `{name}`, whose outputs are not spikes")
    return v.integer(info.max_value, (name,), path=(f"{info.type}@{name}",))


def check_output(name: str, info: NeuronInfo, output: Any) -> None:
    """Raise a ModelError if a neuron's output is not what it was declared to be."""
    if info.max_value is None or not isinstance(output, torch.Tensor):
        return
    if output.dtype == torch.bool:
        return
    kept = (output >= 0) & (output <= info.max_value) & (output == output.round())
    if not bool(kept.all()):
        found = output[~kept].flatten()[0].item()
        raise ModelError(
            f"neuron `{name}` counts as {info.output}, at most {info.max_value}, but put out {found}; "
            f"declare its class with register_neuron({info.type}, output='real')"
        )


class Walk:
    """One walk over a traced network, in the order in which it runs.

    Args:
        module: The traced network.
        neurons: Its neurons by module name.

    Attributes:
        values: What is known about each node, at every time at which it may be read.
        inputs: For each call of a convolution, in order: module name, node, and what it reads at that moment.
    """

    def __init__(self, module: fx.GraphModule, neurons: Mapping[str, NeuronInfo]) -> None:
        self._modules = dict(module.named_modules())
        self._module, self._neurons = module, neurons
        self._now: dict[fx.Node, Value] = {}
        self._ever: dict[fx.Node, Value] = {}
        self._aliases: dict[fx.Node, set[fx.Node]] = {}
        self.inputs: list[tuple[str, fx.Node, Value]] = []
        for node in module.graph.nodes:
            self._visit(node)
        self.values = {node.name: value for node, value in self._ever.items()}

    def _visit(self, node: fx.Node) -> None:
        value = self._value(node)
        self._now[node] = self._ever[node] = value
        written = self._written(node)
        group = {node}.union(*(self._aliases[source] for source in self._shares_memory_with(node, written)))
        for member in group:
            self._aliases[member] = group
        if written is None:
            return
        for alias in group:
            # A view shares some elements with what was written: each is now either as it was or new.
            changed = value if alias in (written, node) else v.join((self._now[alias], value), "in-place")
            self._now[alias] = changed
            self._ever[alias] = v.join((self._ever[alias], changed), "in-place")

    def _shares_memory_with(self, node: fx.Node, written: fx.Node | None) -> list[fx.Node]:
        """The inputs of which `node` may be a view."""
        if written is not None:
            return [written]
        inputs = node.all_input_nodes
        if node.op == "call_module":
            name = str(node.target)
            return (
                inputs
                if name not in self._neurons and layer_rules.layer_may_alias(self._modules[name])
                else []
            )
        if node.op not in ("call_function", "call_method"):
            return []
        op = None if node.target is getattr else rules.operation_name(node.target)
        if not rules.may_alias(op):
            return []
        return inputs if op is None else inputs[:1]

    def _written(self, node: fx.Node) -> fx.Node | None:
        """The node whose tensor `node` writes into."""
        first = node.args[0] if node.args else None
        if isinstance(out := node.kwargs.get("out"), fx.Node):
            return out
        if not isinstance(first, fx.Node):
            return None
        if node.op == "call_module":
            return first if getattr(self._modules[str(node.target)], "inplace", False) else None
        writes = node.op in ("call_function", "call_method") and rules.mutates_first(
            node.target, node.args, node.kwargs
        )
        return first if writes else None

    def _value(self, node: fx.Node) -> Value:
        if node.op == "placeholder":
            return v.dense("the network's input")
        if node.op == "get_attr":
            return v.dense(f"the constant `{node.target}`")
        if node.op == "output":
            return (
                self._now[node.args[0]] if isinstance(node.args[0], fx.Node) else v.dense("several outputs")
            )
        args, kwargs = self._known(node.args), self._known(node.kwargs)
        if node.op == "call_module":
            return self._layer(node, (*args, *kwargs.values()))
        if node.target is getattr:
            return self._attribute(node)
        op = rules.operation_name(node.target)
        if op is None or "out" in kwargs:
            return v.dense(f"`{getattr(node.target, '__name__', node.target)}`")
        if op == "getitem" and self._is_pair(node.args[0]) and node.args[1] != 0:
            return v.dense("indices")
        return rules.apply(rules.Call(op=op, args=args, kwargs=kwargs))

    def _layer(self, node: fx.Node, values: tuple[Any, ...]) -> Value:
        name = str(node.target)
        layer = self._modules[name]
        if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
            read = next((item for item in values if isinstance(item, Value)), v.dense("no tensor"))
            self.inputs.append((name, node, read))
        if name in self._neurons:
            return neuron_value(name, self._neurons[name])
        return layer_rules.apply_layer(layer, name, values)

    def _attribute(self, node: fx.Node) -> Value:
        source, name = node.args
        assert isinstance(source, fx.Node)
        if name in VIEW_ATTRIBUTES or (name == "values" and self._is_pair(source)):
            return self._now[source].step(str(name))
        return v.dense("not a tensor")

    def _is_pair(self, node: Any) -> bool:
        """Whether `node` yields (values, indices)."""
        if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
            return False
        other = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        return rules.operation_name(node.target) in rules.PAIRS and isinstance(other, int)

    def _known(self, tree: Any) -> Any:
        """`tree` with what is known in place of every node; constants with one element become numbers."""
        if isinstance(tree, fx.Node):
            return self._constant(tree) if tree.op == "get_attr" else self._now[tree]
        if isinstance(tree, (list, tuple)):
            return tuple(self._known(item) for item in tree)
        if isinstance(tree, Mapping):
            return {key: self._known(item) for key, item in tree.items()}
        return tree

    def _constant(self, node: fx.Node) -> Any:
        held = operator.attrgetter(str(node.target))(self._module)
        return constant(held, self._now[node])


def constant(held: Any, otherwise: Value) -> Any:
    """The number in a one-element tensor, else `otherwise`."""
    if isinstance(held, torch.Tensor) and held.numel() == 1 and not held.is_meta:
        return float(held.detach())
    return otherwise

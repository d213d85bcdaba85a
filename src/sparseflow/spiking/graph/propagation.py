"""Propagation of values over a traced network, forward from its neurons."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from sparseflow.errors import ModelError
from sparseflow.spiking.graph import layer_rules, rules
from sparseflow.spiking.graph import values as v
from sparseflow.spiking.graph.aliasing import find_written_node, list_aliased_inputs
from sparseflow.spiking.graph.neurons.entry import UNBOUNDED
from sparseflow.spiking.graph.registry import NeuronInfo
from sparseflow.spiking.graph.sites import SpikeLayer
from sparseflow.spiking.graph.values import SpikeValue

VIEW_ATTRIBUTES = ("T", "mT", "H", "mH", "data", "real")


def make_neuron_value(name: str, info: NeuronInfo) -> SpikeValue:
    """Make the value of a neuron's output."""
    if info.output == "real" or info.max_value is None:
        return v.make_dense(f"neuron `{name}`, whose outputs are not spikes")
    return v.make_integer(info.max_value, (name,), path=(f"{info.type}@{name}",))


def check_neuron_output(name: str, info: NeuronInfo, output: Any) -> None:
    """Raise a ModelError if a neuron's output does not match its declaration."""
    if info.returned_states and isinstance(output, tuple):
        output = output[0]
    if info.max_value is None or not isinstance(output, torch.Tensor):
        return
    if output.dtype == torch.bool:
        return
    limit = math.inf if info.max_value == UNBOUNDED else info.max_value
    valid = (output >= 0) & (output <= limit) & (output == output.round())
    if not bool(valid.all()):
        invalid = output[~valid].flatten()[0].item()
        raise ModelError(
            f"neuron `{name}` is declared {info.output}, at most {info.max_value}, but its "
            f"output contains {invalid}; "
            f"declare its class with register_neuron({info.type}, output='real')"
        )


class ValuePropagation:
    """Propagation over a traced network, in execution order.

    Args:
        module: The traced network.
        neurons: Its neurons by module name.

    Attributes:
        values: Value of each node, valid at any time it may be read.
        inputs: For each call of a convolution or linear layer, in order: module name, node, and its input
            value at that time.
    """

    def __init__(self, module: fx.GraphModule, neurons: Mapping[str, NeuronInfo]) -> None:
        self._modules = dict(module.named_modules())
        self._module, self._neurons = module, neurons
        self._current: dict[fx.Node, SpikeValue] = {}
        self._joined: dict[fx.Node, SpikeValue] = {}
        self._aliases: dict[fx.Node, set[fx.Node]] = {}
        self.inputs: list[tuple[str, fx.Node, SpikeValue]] = []
        for node in module.graph.nodes:
            self._process_node(node)
        self.values = {node.name: value for node, value in self._joined.items()}

    def _process_node(self, node: fx.Node) -> None:
        value = self._compute_value(node)
        self._current[node] = self._joined[node] = value
        written = find_written_node(node, self._modules)
        sources = list_aliased_inputs(node, written, self._modules, self._neurons)
        group = {node}.union(*(self._aliases[source] for source in sources))
        for member in group:
            self._aliases[member] = group
        if written is None:
            return
        for alias in group:
            # A view shares some elements with the written tensor: each is now either unchanged or new.
            changed = value if alias in (written, node) else v.join((self._current[alias], value), "in-place")
            self._current[alias] = changed
            self._joined[alias] = v.join((self._joined[alias], changed), "in-place")

    def _compute_value(self, node: fx.Node) -> SpikeValue:
        if node.op == "placeholder":
            return v.make_dense("the network's input")
        if node.op == "get_attr":
            return v.make_dense(f"the constant `{node.target}`")
        if node.op == "output":
            result = node.args[0]
            return self._current[result] if isinstance(result, fx.Node) else v.make_dense("several outputs")
        args, kwargs = map_arg((node.args, node.kwargs), self._get_argument)
        if node.op == "call_module":
            return self._apply_layer(node, (*args, *kwargs.values()))
        if node.target is getattr:
            return self._get_attribute(node)
        op = rules.get_operation_name(node.target)
        if op is None or "out" in kwargs:
            return v.make_dense(f"`{getattr(node.target, '__name__', node.target)}`")
        if op == "getitem" and self._is_pair(node.args[0]) and node.args[1] != 0:
            return v.make_dense("indices")
        if op == "getitem" and self._is_neuron_with_state(node.args[0]) and node.args[1] != 0:
            return v.make_dense("the state of a neuron")
        return rules.apply_rule(rules.OperationCall(op=op, args=args, kwargs=kwargs))

    def _apply_layer(self, node: fx.Node, values: tuple[Any, ...]) -> SpikeValue:
        name = str(node.target)
        layer = self._modules[name]
        if isinstance(layer, SpikeLayer):
            read = next((item for item in values if isinstance(item, SpikeValue)), v.make_dense("no tensor"))
            self.inputs.append((name, node, read))
        if name in self._neurons:
            return make_neuron_value(name, self._neurons[name])
        return layer_rules.apply_layer_rule(layer, name, values)

    def _get_attribute(self, node: fx.Node) -> SpikeValue:
        source, name = node.args
        assert isinstance(source, fx.Node)
        if name in VIEW_ATTRIBUTES or (name == "values" and self._is_pair(source)):
            return self._current[source].append_op(str(name))
        return v.make_dense("not a tensor")

    def _is_pair(self, node: Any) -> bool:
        """Return whether `node` yields (values, indices)."""
        if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
            return False
        other = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        return rules.get_operation_name(node.target) in rules.VALUE_INDEX_OPS and isinstance(other, int)

    def _is_neuron_with_state(self, node: Any) -> bool:
        """Return whether `node` yields (spikes, state...)."""
        if not isinstance(node, fx.Node) or node.op != "call_module" or node.target not in self._neurons:
            return False
        return self._neurons[str(node.target)].returned_states > 0

    def _get_argument(self, node: fx.Node) -> Any:
        """Return the node's value; constants with one element become numbers."""
        value = self._current[node]
        if node.op != "get_attr":
            return value
        return extract_scalar(operator.attrgetter(str(node.target))(self._module), value)


def extract_scalar(tensor: Any, default: SpikeValue) -> Any:
    """Return the number in a one-element tensor, else `default`."""
    if isinstance(tensor, torch.Tensor) and tensor.numel() == 1 and not tensor.is_meta:
        return float(tensor.detach())
    return default

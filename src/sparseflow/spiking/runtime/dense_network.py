"""`DenseNetwork`: a network from rest as plain operations, for compilers.

BatchNorm is folded into the layer before it, each neuron is a loop of elementwise operations over the time
steps, and the membranes are outputs if they are kept.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate, map_arg
from torch.nn import functional as F

from sparseflow.spiking.backends.conv_geometry import ConvGeometry
from sparseflow.spiking.backends.precision import get_model_dtype
from sparseflow.spiking.backends.spec import NeuronSpec
from sparseflow.spiking.graph.analysis import SpikeGraph
from sparseflow.spiking.graph.fusion_matcher import ConvMatch, FusionMatcher, fold_conv_match
from sparseflow.spiking.graph.module_state import keeps_other_state
from sparseflow.spiking.graph.registry import get_neuron_info
from sparseflow.spiking.graph.simplification import get_folded_pooling
from sparseflow.spiking.graph.time_steps import (
    get_folded_sizes,
    get_reset_module,
    is_reset,
    runs_step_by_step,
)
from sparseflow.spiking.runtime.precision_casts import runs_as_copy

MAX_STEPS = 32
"""Time steps of a neuron up to which its loop is unrolled."""


class UnsupportedNetworkError(Exception):
    """The network is not a `DenseNetwork`; the message is the reason, without a full stop."""


class LoopNeuron(nn.Module):
    """A neuron from rest as a loop of elementwise operations over the time steps.

    Args:
        spec: Neuron dynamics.
    """

    def __init__(self, spec: NeuronSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the neuron on float [T, ...].

        Returns:
            The spikes, in the form of `x`, and the membrane after the last step, float32 [...].
        """
        spec = self.spec
        v: Any = spec.v_rest
        spikes = []
        for row in x.unbind():
            v = spec.alpha * v + spec.beta * row.float() + spec.delta
            fires = v >= spec.v_threshold
            v = torch.where(fires, v - spec.amount if spec.v_reset is None else spec.v_reset, v)
            spikes.append(fires.to(x.dtype))
        return torch.stack(spikes), v


class FoldedLayer(nn.Module):
    """A convolution or linear layer with the BatchNorm behind it folded in.

    Args:
        match: The layer and its BatchNorm.
        layers: The network's layers by name.
        dtype: Precision of the weights.
        memory_format: Layout of the weight of a Conv2d.
    """

    def __init__(
        self,
        match: ConvMatch,
        layers: dict[str, nn.Module],
        dtype: torch.dtype,
        memory_format: torch.memory_format,
    ) -> None:
        super().__init__()
        # A copy of this layer must not copy the graph of the network, so the match is not an attribute.
        self._fold_match = lambda: fold_conv_match(match, layers)
        layer = layers[match.name]
        assert isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Linear))
        geometry = ConvGeometry.from_layer(layer)
        sizes = (geometry.stride, geometry.padding, geometry.dilation)
        if isinstance(layer, nn.Conv1d):
            sizes = tuple(size if isinstance(size, str) else size[1:] for size in sizes)
        self._options = (*sizes, geometry.groups)
        self._convolve = {2: None, 3: F.conv1d, 4: F.conv2d}[layer.weight.dim()]
        weight, bias = self._fold()
        weight = weight.to(dtype, copy=True)  # `refresh` writes to it
        if weight.dim() == 4:
            weight = weight.contiguous(memory_format=memory_format)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(bias.to(dtype, copy=True), requires_grad=False)

    def _fold(self) -> tuple[torch.Tensor, torch.Tensor]:
        weight, bias = self._fold_match()
        if self._convolve is F.conv1d:
            weight = weight.squeeze(2)
        elif self._convolve is None:
            weight = weight.flatten(1)
        return weight, bias

    def refresh(self) -> None:
        """Fold again, after the network's weights have changed."""
        weight, bias = self._fold()
        self.weight.copy_(weight)
        self.bias.copy_(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer on one batch of samples."""
        if self._convolve is None:
            return F.linear(x, self.weight, self.bias)
        return self._convolve(x, self.weight, self.bias, *self._options)


class DenseNetwork:
    """A network from rest as a module of plain operations.

    Args:
        graph: The simplified graph of a network with a sample (see `simplify_network`).
        dtype: Precision of the operations; inputs and outputs keep the network's.
        memory_format: Layout of the weights of convolutions of feature maps.
        keeps_membranes: Whether the membranes after a run are outputs.

    Attributes:
        dtype: Precision of the operations.
        module: From the network's inputs to (output, membranes); the membranes are empty if not kept.
        neurons: The network's neurons, in the order of the membranes.

    Raises:
        UnsupportedNetworkError: A neuron has no known dynamics or no time axis, or the network has an
            operation that does not run in `dtype`.
    """

    def __init__(
        self,
        graph: SpikeGraph,
        dtype: torch.dtype,
        memory_format: torch.memory_format = torch.contiguous_format,
        *,
        keeps_membranes: bool = True,
    ) -> None:
        assert graph.module is not None
        self._network, self.dtype = graph, dtype
        self._layers: dict[str, nn.Module] = dict(graph.module.named_modules())
        self._model_dtype = get_model_dtype(graph.model)
        self._memory_format = memory_format
        self._graph = fx.Graph()
        self._attributes: dict[str, Any] = {}
        self._new_nodes: dict[fx.Node, fx.Node] = {}
        self._keeps_membranes = keeps_membranes
        self._membranes: list[fx.Node] = []
        self.neurons: list[nn.Module] = []
        self._add_nodes()
        self.module = fx.GraphModule(self._attributes, self._graph).eval()

    def refresh(self) -> bool:
        """Take over the network's current weights; return False if a neuron has other constants now."""
        with torch.no_grad():
            for name, attribute in self._attributes.items():
                original = self._layers.get(name)
                if isinstance(attribute, LoopNeuron):
                    if attribute.spec != _get_spec(original):
                        return False
                elif isinstance(attribute, FoldedLayer):
                    attribute.refresh()
                elif isinstance(attribute, nn.Module) and attribute is not original:
                    assert original is not None
                    attribute.load_state_dict(original.state_dict())
        return True

    def _add_nodes(self) -> None:
        folded: dict[fx.Node, ConvMatch] = {}
        skipped: set[fx.Node] = set()
        for group in FusionMatcher(self._network).find_groups():
            for match in (*group.sources, *group.dense_convs):
                inner = match.inner[:-1] if match.repeats else match.inner
                folded[inner[-1]] = match
                skipped |= set(inner[:-1])
        assert self._network.module is not None
        for node in self._network.module.graph.nodes:
            if node.op == "output":
                output = map_arg(node.args[0], lambda n: self._cast(self._new_nodes[n], self._model_dtype))
                self._graph.output((output, tuple(self._membranes)))
            elif node in folded:
                self._new_nodes[node] = self._add_folded_layer(folded[node])
            elif is_reset(node) and not node.users:
                if get_reset_module(node) in self.neurons:
                    raise UnsupportedNetworkError("the network resets neurons after it has run them")
            elif node not in skipped:
                self._new_nodes[node] = self._add_node(node)

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if self.dtype == self._model_dtype:
            return node
        return self._graph.call_function(_cast_tensor, (node, dtype))

    def _add_folded_layer(self, match: ConvMatch) -> fx.Node:
        self._attributes[match.name] = FoldedLayer(match, self._layers, self.dtype, self._memory_format)
        shape = self._network.values[match.node.name].shape or ()
        rank = {"map": 4, "sequence": 3}.get(match.features, len(shape))
        sizes = shape[:2] if len(shape) > rank else None
        return self._add_call("call_module", match.name, (self._new_nodes[match.input],), {}, sizes)

    def _add_call(
        self, op: str, target: Any, args: Any, kwargs: Any, sizes: tuple[int, ...] | None
    ) -> fx.Node:
        """Add an operation that takes time and batch as one axis of `sizes`, (T, N), or none."""
        if sizes is None:
            return self._graph.create_node(op, target, args, kwargs)
        args, kwargs = map_aggregate(
            (args, kwargs),
            lambda x: self._graph.call_method("flatten", (x, 0, 1)) if isinstance(x, fx.Node) else x,
        )
        output = self._graph.create_node(op, target, args, kwargs)
        return self._graph.call_method("unflatten", (output, 0, tuple(sizes)))

    def _add_node(self, node: fx.Node) -> fx.Node:
        name = str(node.target)
        if node.op == "placeholder":
            return self._cast(self._graph.node_copy(node), self.dtype)
        if node.op == "get_attr":
            owner, _, attribute = name.rpartition(".")
            self._attributes[name] = getattr(self._layers[owner], attribute)
            return self._cast(self._graph.node_copy(node), self.dtype)
        if node.op == "call_module" and name in self._network.neurons:
            return self._add_neuron(node, name)
        if get_folded_pooling(node) is not None:
            raise UnsupportedNetworkError(f"`{name}` reads pooled maps in several places")
        if node.op == "call_module" and name not in self._attributes:
            self._attributes[name] = self._convert_layer(name)
        args, kwargs = map_arg((node.args, node.kwargs), self._new_nodes.__getitem__)
        return self._add_call(node.op, node.target, args, kwargs, get_folded_sizes(node))

    def _add_neuron(self, node: fx.Node, name: str) -> fx.Node:
        neuron = self._layers[name]
        shape = self._network.values[node.name].shape
        spec = _get_spec(neuron)
        if spec is None or shape is None or name in self._attributes:
            raise UnsupportedNetworkError(f"the neuron `{name}` is not a loop of known operations")
        if getattr(neuron, "step_mode", "m") == "s" and not runs_step_by_step(node):
            raise UnsupportedNetworkError(f"the neuron `{name}` runs one time step per call")
        if shape[0] > MAX_STEPS:
            raise UnsupportedNetworkError(f"the neuron `{name}` runs {shape[0]} time steps, over {MAX_STEPS}")
        self._attributes[name] = LoopNeuron(spec)
        self.neurons.append(neuron)
        both = self._graph.call_module(name, (self._new_nodes[node.all_input_nodes[0]],))
        if self._keeps_membranes:
            self._membranes.append(self._graph.call_function(operator.getitem, (both, 1)))
        return self._graph.call_function(operator.getitem, (both, 0))

    def _convert_layer(self, name: str) -> nn.Module:
        layer = self._layers[name]
        if keeps_other_state(layer) or (self._network.reads and name in self._network.reads.opaque):
            raise UnsupportedNetworkError(f"`{name}` keeps state between calls")
        if self.dtype == self._model_dtype:
            return layer
        if not runs_as_copy(layer):
            raise UnsupportedNetworkError(f"`{name}` may not run in {self.dtype}")
        return copy.deepcopy(layer).to(self.dtype)


def _get_spec(neuron: nn.Module | None) -> NeuronSpec | None:
    """Return the dynamics of a neuron that stores its membrane, after the reset, in `v`; else None."""
    info = None if neuron is None else get_neuron_info(neuron)
    if info is None or info.spec is None or info.state != "v" or info.returned_states:
        return None
    return None if info.spec.delays_reset else info.spec


def _cast_tensor(value: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value

"""Exact rewrites after which a traced network computes less.

* Layers whose input is the same at all time steps run once; their output is repeated instead of their input.
* `contiguous()` disappears: what reads its result takes any memory layout.
* An adaptive average pooling that enlarges feature maps in front of a linear layer becomes part of that
  layer's weights: the network of an image of 224 pixels has it, and an image of 32 pixels leaves one pixel
  to enlarge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparseflow.spiking.graph import rules
from sparseflow.spiking.graph.aliasing import find_written_node
from sparseflow.spiking.graph.analysis import SpikeGraph
from sparseflow.spiking.graph.layer_rules import has_library_forward
from sparseflow.spiking.graph.propagation import ValuePropagation
from sparseflow.spiking.graph.sites import is_plain_conv
from sparseflow.spiking.graph.time_axis import lift_time_axis
from sparseflow.spiking.graph.time_steps import SAMPLE_RANKS, Shape, get_folded_sizes, set_folded_sizes

_POOLING_KEY = "sparseflow_pooling"


@dataclass(frozen=True)
class FlattenedPooling:
    """An adaptive average pooling of maps whose result is flattened for a linear layer.

    Attributes:
        channels: C.
        sizes: (H, W) of the maps.
        output_sizes: (H, W) after the pooling.
    """

    channels: int
    sizes: tuple[int, int]
    output_sizes: tuple[int, int]

    def apply(self, x: Tensor) -> Tensor:
        """Pool flat maps [..., C * H * W]: [..., C * output height * output width]."""
        maps = x.reshape(-1, self.channels, *self.sizes)
        return F.adaptive_avg_pool2d(maps, self.output_sizes).reshape(*x.shape[:-1], -1)

    def fold_weight(self, weight: Tensor) -> Tensor:
        """Convert the weight of the linear layer behind the pooling to one for its input.

        Args:
            weight: float [outputs, C * output height * output width].

        Returns:
            [outputs, C * H * W].
        """
        pixels = math.prod(self.sizes)
        basis = torch.eye(pixels, dtype=weight.dtype, device=weight.device).view(-1, 1, *self.sizes)
        pooled = F.adaptive_avg_pool2d(basis, self.output_sizes).flatten(1)
        return (weight.unflatten(1, (self.channels, -1)) @ pooled.T).flatten(1)


def get_folded_pooling(node: fx.Node) -> FlattenedPooling | None:
    """Return the pooling that a linear layer's node applies to its input first; None for no pooling."""
    return node.meta.get(_POOLING_KEY)


def match_repetition(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Match a node that repeats one time step.

    Returns:
        The node of that step, with a time axis of length 1, and the number of steps. None if the node is not
        `x.unsqueeze(0).repeat(T, 1, …)` or `x.unsqueeze(0).expand(T, -1, …)`.
    """
    if node.op != "call_method" or node.target not in ("repeat", "expand"):
        return None
    sizes: list[object] = list(node.args[1:])
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = list(sizes[0])
    unchanged = 1 if node.target == "repeat" else -1
    steps, step = next(iter(sizes), None), node.args[0]
    if not isinstance(steps, int) or len(sizes) < 2 or any(size != unchanged for size in sizes[1:]):
        return None
    return (step, steps) if isinstance(step, fx.Node) and _is_single_step(step) else None


def _is_single_step(node: fx.Node) -> bool:
    """Return whether the node's value has a time axis of length 1."""
    if node.op == "call_module" or get_folded_sizes(node) is not None:
        source = node.all_input_nodes
        return len(source) == 1 and _is_single_step(source[0])
    if node.target not in ("unsqueeze", torch.unsqueeze):
        return False
    arguments = node.args[1:]
    dim = arguments[0] if arguments else node.kwargs.get("dim")
    return isinstance(dim, int) and dim == 0


def simplify_network(graph: SpikeGraph) -> SpikeGraph:
    """Lift the time axis (`lift_time_axis`) and apply the exact rewrites of this module.

    Args:
        graph: The analysis of a network with a sample.

    Returns:
        An analysis with a rewritten `module`; `graph` itself if it has no sample.
    """
    lifted = lift_time_axis(graph)
    if lifted is graph or lifted.module is None:
        return graph
    shapes = {name: value.shape for name, value in lifted.values.items() if value.shape is not None}
    simplifier = _Simplifier(lifted.module, shapes)
    simplifier.run()
    propagation = ValuePropagation(lifted.module, graph.neurons)
    values = {name: value.with_shape(shapes.get(name)) for name, value in propagation.values.items()}
    return replace(lifted, values=values)


class _Simplifier:
    """Rewrites a network in place.

    Args:
        module: The network; its time axis is lifted.
        shapes: Shape of each node that yields a tensor; extended by the nodes that are added.
    """

    def __init__(self, module: fx.GraphModule, shapes: dict[str, Shape]) -> None:
        self._module, self._graph, self._shapes = module, module.graph, shapes
        self._layers = dict(module.named_modules())

    def run(self) -> None:
        """Apply all rewrites, unless an operation writes into a tensor, so that the order could matter."""
        if any(find_written_node(node, self._layers) is not None for node in self._graph.nodes):
            return
        self._remove_copies()
        for node in list(self._graph.nodes):
            if match_repetition(node) is not None:
                self._move_repetition(node)
        for node in list(self._graph.nodes):
            if node.op == "call_module" and isinstance(self._layers[str(node.target)], nn.Linear):
                self._fold_pooling(node)
        self._module.recompile()

    def _remove_copies(self) -> None:
        """Remove `contiguous()`, and let views of its source copy where they must."""
        for node in list(self._graph.nodes):
            if node.op != "call_method":
                continue
            if node.target == "view" and not any(isinstance(size, torch.dtype) for size in node.args[1:]):
                node.target = "reshape"
            takes_any_layout = all(self._takes_any_layout(user) for user in node.users)
            if node.target == "contiguous" and len(node.args) == 1 and not node.kwargs and takes_any_layout:
                node.replace_all_uses_with(node.all_input_nodes[0])
                self._graph.erase_node(node)

    def _takes_any_layout(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return has_library_forward(self._layers[str(node.target)])
        return node.op == "call_method" or (
            node.op == "call_function" and rules.get_operation_name(node.target) is not None
        )

    def _move_repetition(self, repeated: fx.Node) -> None:
        """Apply the layers that read a repeated time step to that step, and repeat their outputs."""
        match = match_repetition(repeated)
        assert match is not None
        step, steps = match
        for reader in list(repeated.users):
            if not self._treats_steps_alike(reader):
                continue
            shape = self._shapes[reader.name]
            with self._graph.inserting_before(reader):
                once = self._graph.create_node(
                    reader.op, reader.target, (step, *reader.args[1:]), reader.kwargs
                )
                after = self._graph.create_node(
                    "call_method", "expand", (once, steps, *[-1] * (len(shape) - 1))
                )
            once.meta.update(reader.meta)
            if get_folded_sizes(reader) is not None:
                set_folded_sizes(once, (1, shape[1]))
            self._shapes[once.name], self._shapes[after.name] = (1, *shape[1:]), shape
            reader.replace_all_uses_with(after)
            self._graph.erase_node(reader)
            self._move_repetition(after)
        self._erase_unused(repeated)

    def _treats_steps_alike(self, node: fx.Node) -> bool:
        """Return whether the node is a layer that treats each time step of its only input alone."""
        if len(node.all_input_nodes) != 1 or node.name not in self._shapes:
            return False
        if get_folded_sizes(node) is not None:
            return node.args[:1] == (node.all_input_nodes[0],)
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            return False
        layer = self._layers[str(node.target)]
        is_plain = has_library_forward(layer) or (isinstance(layer, nn.Conv2d) and is_plain_conv(layer))
        if not is_plain or layer.training or getattr(layer, "step_mode", "s") != "m":
            return False
        return any(
            isinstance(layer, cls) and len(self._shapes[node.name]) == rank + 1
            for cls, rank in SAMPLE_RANKS.items()
        )

    def _fold_pooling(self, linear: fx.Node) -> None:
        """Replace pooling, flattening and dropout before a linear layer by a smaller flattening."""
        node = linear.all_input_nodes[0]
        while node.op == "call_module" and isinstance(
            self._layers[str(node.target)], (nn.Identity, nn.Dropout)
        ):
            if self._layers[str(node.target)].training or set(node.users) != {linear}:
                return
            node = node.all_input_nodes[0]
        flat = node
        is_flatten = (
            isinstance(self._layers.get(str(node.target)), nn.Flatten)
            if node.op == "call_module"
            else rules.get_operation_name(node.target) in ("flatten", "reshape", "view")
        )
        if not is_flatten or not flat.all_input_nodes:
            return
        pooling = flat.all_input_nodes[0]
        layer = self._layers.get(str(pooling.target)) if pooling.op == "call_module" else None
        if not isinstance(layer, nn.AdaptiveAvgPool2d) or not has_library_forward(layer):
            return
        before, after = (self._shapes.get(item.name, ()) for item in (pooling.all_input_nodes[0], pooling))
        if len(after) < 4 or self._shapes.get(flat.name) != (*after[:-3], math.prod(after[-3:])):
            return
        sizes, output_sizes = before[-2:], after[-2:]
        if math.prod(sizes) >= math.prod(output_sizes) or not has_library_forward(
            self._layers[str(linear.target)]
        ):
            return
        with self._graph.inserting_before(linear):
            maps = self._graph.create_node("call_method", "flatten", (pooling.all_input_nodes[0], -3))
        self._shapes[maps.name] = (*before[:-3], math.prod(before[-3:]))
        linear.meta[_POOLING_KEY] = FlattenedPooling(
            after[-3], (sizes[0], sizes[1]), (output_sizes[0], output_sizes[1])
        )
        unused = linear.all_input_nodes[0]
        linear.replace_input_with(unused, maps)
        self._erase_unused(unused)

    def _erase_unused(self, node: fx.Node) -> None:
        """Erase a node that nothing reads, and then its inputs."""
        if node.users or node.op == "placeholder":
            return
        inputs = node.all_input_nodes
        self._graph.erase_node(node)
        for source in inputs:
            self._erase_unused(source)

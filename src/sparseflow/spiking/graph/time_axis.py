"""Removal of the reshapes and loops with which networks run layers that take no time axis.

Layers of torch take [N, C, H, W]. Most networks run them on [T * N, C, H, W], by `flatten(0, 1)` and
`reshape(T, N, ...)` or by containers such as SeqToANNContainer; others call them once for each time step.
`lift_time_axis` rewrites the traced network: these layers run on [T, N, C, H, W], and the reshapes and loops
disappear. Convolution, BatchNorm and neuron are then neighbors, as in a network whose layers take a time
axis.

The result depends on the shapes of the sample: shapes that the network asks for become constants.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from sparseflow.spiking.graph import rules
from sparseflow.spiking.graph.analysis import SpikeGraph
from sparseflow.spiking.graph.propagation import ValuePropagation
from sparseflow.spiking.graph.registry import NeuronInfo
from sparseflow.spiking.graph.time_loops import LoopJoiner
from sparseflow.spiking.graph.time_steps import VIEWS, Shape, runs_per_sample, set_folded_sizes

_UNKNOWN = object()
_DATA_DEPENDENT = (
    "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "repeat_interleave",
)  # fmt: skip
_ARITHMETIC = {
    operator.getitem, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg,
}  # fmt: skip


def lift_time_axis(graph: SpikeGraph) -> SpikeGraph:
    """Rewrite a traced network so that layers between neurons keep the time axis.

    Args:
        graph: The analysis of a network with a sample.

    Returns:
        An analysis with a rewritten `module`; `graph` itself if it has no sample.
    """
    if graph.module is None or not any(value.shape for value in graph.values.values()):
        return graph
    shapes = {name: value.shape for name, value in graph.values.items() if value.shape is not None}
    rewriter = _Rewriter(graph.module, shapes, graph.neurons)
    rewriter.rewrite()
    propagation = ValuePropagation(rewriter.module, graph.neurons)
    values = {name: value.with_shape(rewriter.shapes.get(name)) for name, value in propagation.values.items()}
    return replace(graph, module=rewriter.module, values=values)


class _Rewriter:
    """Rewrites a copy of one traced network.

    Attributes:
        module: The copy; it shares the layers.
        shapes: Shape of each node that yields a tensor.
    """

    def __init__(
        self, module: fx.GraphModule, shapes: Mapping[str, Shape], neurons: Mapping[str, NeuronInfo]
    ) -> None:
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        result = graph.graph_copy(module.graph, copied)
        graph.output(result)
        self.module = fx.GraphModule(module, graph, class_name=type(module).__name__)
        self._graph = self.module.graph
        names = {new.name: old.name for old, new in copied.items()}
        self._layers, self._neurons = dict(module.named_modules()), neurons
        self.shapes: dict[str, Shape] = {
            node.name: shapes[name]
            for node in self._graph.nodes
            if (name := names.get(node.name)) is not None and name in shapes
        }
        self._folds: dict[fx.Node, tuple[fx.Node, tuple[int, int]]] = {}
        self._replaced: list[fx.Node] = []

    def rewrite(self) -> None:
        """Replace queries of shapes by constants, split tuples, join loops, and remove folds."""
        self._replace_queries()
        LoopJoiner(self._graph, self._layers, self._neurons, self.shapes).run()
        for node in list(self._graph.nodes):
            if node.op not in ("placeholder", "get_attr", "output"):
                self._process_node(node)
        for node in reversed(self._replaced):
            if not node.users:
                self._graph.erase_node(node)
        self.module.recompile()

    # Queries of shapes

    def _replace_queries(self) -> None:
        """Replace numbers that follow from the input's shape, and drop assertions about them."""
        numbers: dict[fx.Node, Any] = {}
        varying: set[fx.Node] = set()
        for node in list(self._graph.nodes):
            if _is_data_dependent(node, numbers) or not varying.isdisjoint(node.all_input_nodes):
                varying.add(node)
                continue
            if node.target is torch._assert and node.op == "call_function":
                if not isinstance(condition := node.args[0], fx.Node) or numbers.get(condition) is True:
                    self._graph.erase_node(node)
                continue
            value = self._evaluate(node, numbers)
            if value is not _UNKNOWN:
                numbers[node] = value
        for node, number in numbers.items():
            for user in list(node.users):
                if user not in numbers:
                    user.args, user.kwargs = map_arg(
                        (user.args, user.kwargs),
                        lambda item, old=node, new=number: new if item is old else item,
                    )
        for node in reversed(list(numbers)):
            if not node.users:
                self._graph.erase_node(node)

    def _evaluate(self, node: fx.Node, numbers: Mapping[fx.Node, Any]) -> Any:
        """Return the value of a query of shapes or of arithmetic with such; `_UNKNOWN` for other nodes."""
        source: Any = node.args[0] if node.args else None
        shape = self.shapes.get(source.name) if isinstance(source, fx.Node) else None
        if node.op == "call_function" and node.target is getattr and shape is not None:
            return {"shape": torch.Size(shape), "ndim": len(shape)}.get(str(node.args[1]), _UNKNOWN)
        if node.op == "call_method" and shape is not None:
            if node.target == "size":
                dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
                return torch.Size(shape) if dim is None else shape[dim] if isinstance(dim, int) else _UNKNOWN
            queries = {"dim": len(shape), "ndimension": len(shape), "numel": math.prod(shape)}
            return queries.get(str(node.target), _UNKNOWN)
        if node.op != "call_function" or node.target not in _ARITHMETIC or not node.all_input_nodes:
            return _UNKNOWN
        assert callable(node.target)
        if any(item not in numbers for item in node.all_input_nodes):
            return _UNKNOWN
        args, kwargs = map_arg((node.args, node.kwargs), numbers.__getitem__)
        return node.target(*args, **kwargs)

    # Folds

    def _process_node(self, node: fx.Node) -> None:
        shape = self.shapes.get(node.name)
        source = node.args[0] if node.args else None
        if shape is None or not isinstance(source, fx.Node):
            return
        if node.op in ("call_method", "call_function") and rules.get_operation_name(node.target) in VIEWS:
            self._process_view(node, source, shape)
            return
        sizes = self._get_common_fold(node)
        is_folded = sizes is not None and shape[:1] == (math.prod(sizes),)
        if sizes is not None and is_folded and runs_per_sample(node, len(shape), self._layers, self.shapes):
            self._lift(node, sizes, shape)

    def _process_view(self, node: fx.Node, source: fx.Node, shape: Shape) -> None:
        if source in self._folds:
            unfolded, sizes = self._folds[source]
            # In a batch of 1, T * N is T: what begins with (T, N) is not folded.
            is_folded = shape[:1] == (math.prod(sizes),) and shape[:2] != sizes
            target = (*sizes, *shape[1:]) if is_folded else shape
            if self.shapes[unfolded.name] != target:
                unfolded = self._insert(node, "call_method", "reshape", (unfolded, target), target)
            if is_folded:
                self._fold(node, unfolded, sizes, shape)
            else:
                node.replace_all_uses_with(unfolded)
                self._replaced.append(node)
            return
        if node.target == "contiguous" and all(user.op == "call_module" for user in node.users):
            node.replace_all_uses_with(source)  # a layer takes any memory layout
            self._replaced.append(node)
            return
        before = self.shapes.get(source.name, ())
        if len(before) > 2 and shape == (before[0] * before[1], *before[2:]):
            self._folds[node] = source, (before[0], before[1])
            self._replaced.append(node)

    def _get_common_fold(self, node: fx.Node) -> tuple[int, int] | None:
        """Return (T, N) if every tensor that the node reads is folded from the same (T, N)."""
        sizes = {self._folds[source][1] if source in self._folds else None for source in node.all_input_nodes}
        return next(iter(sizes)) if len(sizes) == 1 else None

    def _lift(self, node: fx.Node, sizes: tuple[int, int], shape: Shape) -> None:
        """Insert the node's operation on unfolded tensors, and make the node a fold of its result."""
        args, kwargs = map_arg((node.args, node.kwargs), lambda item: self._folds[item][0])
        lifted = self._insert(node, node.op, node.target, args, (*sizes, *shape[1:]), kwargs)
        set_folded_sizes(lifted, sizes)
        self._fold(node, lifted, sizes, shape)

    def _fold(self, node: fx.Node, unfolded: fx.Node, sizes: tuple[int, int], shape: Shape) -> None:
        fold = self._insert(node, "call_method", "flatten", (unfolded, 0, 1), shape)
        self._folds[fold] = unfolded, sizes
        node.replace_all_uses_with(fold)
        self._replaced += [node, fold]

    def _insert(
        self, before: fx.Node, op: str, target: Any, args: Any, shape: Shape, kwargs: Any = None
    ) -> fx.Node:
        with self._graph.inserting_before(before):
            node = self._graph.create_node(op, target, args, kwargs or {})
        self.shapes[node.name] = shape
        return node


def _is_data_dependent(node: fx.Node, numbers: Container[fx.Node]) -> bool:
    """Return whether the shape of the node's result may depend on values of tensors."""
    if node.op not in ("call_function", "call_method"):
        return False
    if node.target is operator.getitem:
        index = node.args[1]
        items = index if isinstance(index, tuple) else (index,)
        return any(isinstance(item, fx.Node) and item not in numbers for item in items)
    name = rules.get_operation_name(node.target)
    return name in _DATA_DEPENDENT or (name == "where" and len(node.args) == 1)

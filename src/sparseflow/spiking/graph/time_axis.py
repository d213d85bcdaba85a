"""Removal of the reshapes and loops with which networks run layers that take no time axis.

Layers of torch take [N, C, H, W]. Most networks run them on [T * N, C, H, W], by `flatten(0, 1)` and
`reshape(T, N, ...)` or by containers such as SeqToANNContainer; others call them once for each time step.
`lift_time_axis` rewrites the traced network: these layers run on [T, N, C, H, W], and the reshapes and loops
disappear. Convolution, BatchNorm and neuron are then neighbors, as in a network whose layers take a time
axis.

The result depends on the shapes of the sample: shapes that the network asks for become constants.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from sparseflow.spiking.graph import rules
from sparseflow.spiking.graph.aliasing import find_written_node
from sparseflow.spiking.graph.analysis import SpikeGraph
from sparseflow.spiking.graph.layer_rules import has_library_forward
from sparseflow.spiking.graph.propagation import ValuePropagation
from sparseflow.spiking.graph.registry import NeuronInfo
from sparseflow.spiking.graph.sites import is_plain_conv

Shape = tuple[int, ...]

_FOLDED_KEY = "sparseflow_folded_sizes"
_STEPS_KEY = "sparseflow_steps"
_STATES_KEY = "sparseflow_returned_states"
_UNKNOWN = object()
_VIEWS = ("flatten", "unflatten", "reshape", "view", "contiguous")
_DATA_DEPENDENT = (
    "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "repeat_interleave",
)  # fmt: skip
_ARITHMETIC = {
    operator.getitem, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg,
}  # fmt: skip
SAMPLE_RANKS: dict[type[nn.Module], int] = {
    nn.Conv1d: 3, nn.Conv2d: 4, nn.BatchNorm2d: 4, nn.MaxPool1d: 3, nn.MaxPool2d: 4, nn.AvgPool1d: 3,
    nn.AvgPool2d: 4, nn.AdaptiveAvgPool1d: 3, nn.AdaptiveAvgPool2d: 4,
}  # fmt: skip
"""Layers that run on each sample alone if their input has this rank."""
_ANY_RANK = (nn.Linear, nn.BatchNorm1d, nn.LayerNorm, nn.Identity, nn.ReLU, nn.GELU, nn.Dropout)
"""Layers that run on each sample alone for every rank of at least 2."""
_ELEMENTWISE = ("add", "sub", "mul", "div", "truediv", "relu", "gelu", "sigmoid", "neg")
_CONSTRUCTORS = ("zeros", "empty", "ones", "full", "new_zeros", "new_empty", "zeros_like", "empty_like")
_REDUCTIONS = ("amax", "amin", "mean", "sum")
_POOLINGS = {f"{kind}_pool{rank}d": rank for kind in ("max", "avg", "adaptive_avg") for rank in (1, 2)}
"""Functions that run on each sample alone if their input has two more dimensions than they pool."""


def get_folded_sizes(node: fx.Node) -> tuple[int, int] | None:
    """Return (T, N) if the node's operation takes both as one axis; None for an operation as it stands."""
    return node.meta.get(_FOLDED_KEY)


def set_folded_sizes(node: fx.Node, sizes: tuple[int, int]) -> None:
    """Mark a node whose operation takes time steps and samples, (T, N), as one axis."""
    node.meta[_FOLDED_KEY] = sizes


def runs_step_by_step(node: fx.Node) -> bool:
    """Return whether the node stands for one call of a neuron per time step."""
    return _STEPS_KEY in node.meta


def is_reset(node: fx.Node) -> bool:
    """Return whether the node calls a method that sets a neuron to rest and returns its state."""
    return node.op == "call_function" and inspect.ismethod(node.target)


@dataclass(frozen=True)
class NeuronOutputs:
    """The nodes of the values that a neuron returns.

    Attributes:
        spikes: The spikes; None if nothing reads them.
        states: For each tensor of the state, that at every time step, if one before the last is read.
        final_states: For each tensor of the state, that after the last step, if it is read.
    """

    spikes: fx.Node | None
    states: Mapping[int, fx.Node]
    final_states: Mapping[int, fx.Node]


def get_neuron_outputs(node: fx.Node, info: NeuronInfo) -> NeuronOutputs | None:
    """Find the nodes of the values that a neuron returns; None if its tuple is read as a whole.

    A neuron returns (spikes, state...). One that runs step by step stands for
    (spikes at all steps, state at all steps..., state after the last step...).
    """
    if info.returned_states == 0:
        return NeuronOutputs(node, {}, {})
    items: dict[int, fx.Node] = {}
    for user in node.users:
        if user.target is not operator.getitem or user.args[0] is not node or user.args[1] in items:
            return None
        items[int(user.args[1])] = user  # type: ignore[arg-type]
    count = info.returned_states
    states = {index - 1: item for index, item in items.items() if 1 <= index <= count}
    if not runs_step_by_step(node):
        return NeuronOutputs(items.get(0), {}, states)
    final = {index - 1 - count: item for index, item in items.items() if index > count}
    return NeuronOutputs(items.get(0), states, final)


def run_step_by_step(node: fx.Node, call: Callable[..., Any], sequence: torch.Tensor, *state: Any) -> Any:
    """Call a neuron once for each time step.

    Args:
        node: A node for which `runs_step_by_step` is true.
        call: The neuron.
        sequence: Its inputs, [T, ...].
        state: The state before the first step, if the caller passes it.

    Returns:
        The spikes [T, ...]; or the tuple that `get_neuron_outputs` describes, with None instead of the states
        at every time step if nothing reads them.
    """
    count = node.meta[_STATES_KEY]
    if count == 0:
        return torch.stack([call(x) for x in sequence])
    takes_state = len(state) > 0
    steps: list[Any] = []
    for x in sequence:
        steps.append(call(x, *state))
        state = steps[-1][1:] if takes_state else ()
    read = [user.args[1] for user in node.users]
    columns = enumerate(zip(*steps, strict=True))
    return *(torch.stack(column) if i in read else None for i, column in columns), *steps[-1][1:]


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
        self._stacks: dict[tuple[fx.Node, ...], fx.Node] = {}
        self._replaced: list[fx.Node] = []

    def rewrite(self) -> None:
        """Replace queries of shapes by constants, split tuples, join loops, and remove folds."""
        self._replace_queries()
        self._split_tuples()
        self._replace_writes()
        self._join_loops()
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

    # Neurons with state

    def _split_tuples(self) -> None:
        """Let each value that a neuron returns be one node, and pass the state by position."""
        for node in list(self._graph.nodes):
            info = self._neurons.get(str(node.target)) if node.op == "call_module" else None
            if info is None or info.returned_states == 0:
                continue
            signature = inspect.signature(self._layers[str(node.target)].forward)
            node.args, node.kwargs = signature.bind(*node.args, **node.kwargs).args, {}
            items = [user for user in node.users if user.target is operator.getitem]
            shape = self.shapes.get(node.all_input_nodes[0].name)
            if any(user.op == "output" for user in node.users):
                with self._graph.inserting_after(node):
                    parts = [
                        self._graph.create_node("call_function", operator.getitem, (node, index))
                        for index in range(info.returned_states + 1)
                    ]
                output = next(user for user in node.users if user.op == "output")
                output.args = map_arg(
                    output.args, lambda item, node=node, parts=parts: tuple(parts) if item is node else item
                )
                items += parts
            nodes: dict[Any, fx.Node] = {}
            for item in items:
                first = nodes.setdefault(item.args[1], item)
                if item is not first:
                    item.replace_all_uses_with(first)
                    self._graph.erase_node(item)
            if shape is not None and 0 in nodes:
                self.shapes.setdefault(nodes[0].name, shape)

    # Loops over time steps

    def _replace_writes(self) -> None:
        """Stack what the network writes into a new tensor, one time step after the other."""
        order = {node: position for position, node in enumerate(self._graph.nodes)}
        for buffer in list(self._graph.nodes):
            is_new = buffer.op in ("call_function", "call_method") and not any(
                isinstance(arg, fx.Node) and arg.name in self.shapes for arg in buffer.args
            )
            is_new = is_new and rules.get_operation_name(buffer.target) in _CONSTRUCTORS
            writes = [user for user in buffer.users if user.target is operator.setitem]
            if not is_new or not writes:
                continue
            shape = self.shapes.get(buffer.name, ())
            values = {
                step: write.args[2] for write in writes if (step := _get_written_step(write)) is not None
            }
            readers = buffer.users.keys() - set(writes)
            last_write = max(map(order.__getitem__, writes))
            if len(values) < len(writes) or any(write.users for write in writes):
                continue
            if set(values) != set(range(*shape[:1])) or any(order[reader] < last_write for reader in readers):
                continue
            if any(
                not isinstance(value, fx.Node) or self.shapes.get(value.name) != shape[1:]
                for value in values.values()
            ):
                continue
            with self._graph.inserting_after(max(writes, key=order.__getitem__)):
                stacked = self._graph.call_function(torch.stack, ([values[step] for step in sorted(values)],))
            with self._graph.inserting_after(stacked):
                result = self._graph.call_method("type_as", (stacked, buffer))
            self.shapes[stacked.name] = self.shapes[result.name] = shape
            buffer.replace_all_uses_with(result, delete_user_cb=lambda user, new=result: user is not new)
            for write in writes:
                self._graph.erase_node(write)

    def _join_loops(self) -> None:
        """Replace the calls of a layer or a neuron in a loop over time steps by one."""
        nodes = list(self._graph.nodes)
        if any(find_written_node(node, self._layers) is not None for node in nodes):
            return  # the order of the calls could matter
        calls: dict[str, list[fx.Node]] = {}
        for node in nodes:
            takes_state = node.op == "call_module" and str(node.target) in self._neurons
            if node.op == "call_module" and (len(node.args) == 1 or takes_state) and not node.kwargs:
                calls.setdefault(str(node.target), []).append(node)
        for steps in calls.values():
            if len(steps) > 1:
                self._join_calls(tuple(steps))
        for node in nodes:
            items = _match_stack(node)
            if items is not None and (stacked := self._stack(items)) is not None:
                node.replace_all_uses_with(stacked)
        for node in reversed(self._graph.nodes):
            is_pure = node.op in ("call_function", "call_method") and node.target is not torch._assert
            if not node.users and (
                (is_pure and not is_reset(node)) or any(node in steps for steps in self._stacks)
            ):
                self._graph.erase_node(node)

    def _join_calls(self, nodes: tuple[fx.Node, ...]) -> None:
        """Join the calls of one module, which follow each other in time."""
        info = self._neurons.get(str(nodes[0].target))
        if info is not None and info.returned_states:
            self._join_neuron_with_state(nodes, info)
            return
        shape = self.shapes.get(nodes[0].name)
        if shape is None or any(self.shapes.get(node.name) != shape for node in nodes):
            return
        if info is not None and getattr(self._layers[str(nodes[0].target)], "step_mode", "s") != "s":
            return
        if info is None and not self._runs_per_sample(nodes[0], len(shape)):
            return
        source = self._stack(tuple(node.args[0] for node in nodes))  # type: ignore[arg-type]
        if source is None:
            return
        with self._graph.inserting_after(source):
            joined = self._graph.create_node("call_module", nodes[0].target, (source,))
        steps = len(nodes)
        if info is None:
            set_folded_sizes(joined, (steps, shape[0]))
        else:
            joined.meta.update({_STEPS_KEY: steps, _STATES_KEY: 0})
        self._stacks[nodes] = joined
        self._replace_by_steps(nodes, joined, shape)

    def _replace_by_steps(
        self, nodes: Sequence[fx.Node | None], stacked: fx.Node, shape: Shape | None
    ) -> None:
        """Replace the nodes of consecutive time steps by slices of `stacked`."""
        if shape is not None:
            self.shapes[stacked.name] = (len(nodes), *shape)
        for step, node in reversed(list(enumerate(nodes))):
            if node is None:
                continue
            with self._graph.inserting_after(stacked):
                item = self._graph.create_node("call_function", operator.getitem, (stacked, step))
            if shape is not None:
                self.shapes[item.name] = shape
            node.replace_all_uses_with(item)

    def _join_neuron_with_state(self, nodes: tuple[fx.Node, ...], info: NeuronInfo) -> None:
        """Join the calls of a neuron that returns its state, and gets it back if it does not store it."""
        outputs = [output for node in nodes if (output := get_neuron_outputs(node, info)) is not None]
        spikes = [output.spikes for output in outputs if output.spikes is not None]
        shape = self.shapes.get(spikes[0].name) if spikes else None
        if len(spikes) < len(nodes) or any(self.shapes.get(node.name) != shape for node in spikes):
            return
        if shape is None or info.step_mode != "s" or not self._passes_state_on(nodes, outputs):
            return
        states = [[output.final_states.get(i) for output in outputs] for i in range(info.returned_states)]
        are_read = [
            [item is not None and not set(item.users) <= set(nodes) for item in row] for row in states
        ]
        if info.state is None and any(any(row[:-1]) for row in are_read):
            return  # tuples are not stacked
        source = self._stack(tuple(node.args[0] for node in nodes))  # type: ignore[arg-type]
        if source is None:
            return
        arguments = (source, *nodes[0].args[1:])
        order = {node: position for position, node in enumerate(self._graph.nodes)}
        last = max((node for node in arguments if isinstance(node, fx.Node)), key=order.__getitem__)
        with self._graph.inserting_after(last):
            joined = self._graph.create_node("call_module", nodes[0].target, arguments)
        joined.meta.update({_STEPS_KEY: len(nodes), _STATES_KEY: info.returned_states})
        self._stacks[nodes] = joined

        def insert_item(index: int) -> fx.Node:
            with self._graph.inserting_after(joined):
                return self._graph.create_node("call_function", operator.getitem, (joined, index))

        for index, (items, is_read) in enumerate(zip(states, are_read, strict=True)):
            final_state = items[-1]
            if any(is_read[:-1]):
                self._replace_by_steps(items, insert_item(1 + index), shape)
            elif is_read[-1] and final_state is not None:
                final_state.replace_all_uses_with(insert_item(1 + info.returned_states + index))
        stacked = insert_item(0)
        self._stacks[tuple(spikes)] = stacked
        self._replace_by_steps(spikes, stacked, shape)

    @staticmethod
    def _passes_state_on(nodes: tuple[fx.Node, ...], outputs: Sequence[NeuronOutputs]) -> bool:
        """Return whether each call gets the state that the one before returned, or none of them gets it."""
        count = len(nodes[0].args) - 1
        for node, before in zip(nodes[1:], outputs, strict=False):
            expected = [before.final_states.get(index) for index in range(count)]
            if list(node.args[1:]) != expected:
                return False
        return True

    def _stack(self, nodes: tuple[fx.Node, ...]) -> fx.Node | None:
        """Return a node that stacks the values of `nodes` along a new first axis; None if there is none."""
        if not all(isinstance(node, fx.Node) for node in nodes):
            return None
        if nodes in self._stacks:
            return self._stacks[nodes]
        stacked = self._find_sequence(nodes)
        slices = {_match_slice(node) or node for node in nodes}
        if stacked is None and len(slices) == 1 and nodes[0].name in self.shapes:
            stacked = self._repeat(nodes[0], len(nodes))
        if stacked is None:
            stacked = self._stack_operation(nodes)
        if stacked is not None:
            self._stacks[nodes] = stacked
        return stacked

    def _find_sequence(self, nodes: tuple[fx.Node, ...]) -> fx.Node | None:
        """Return the tensor of which the nodes are the slices 0, 1, ... along its time axis."""
        slices = [_match_slice(node) for node in nodes]
        source, axis, _ = slices[0] or (None, 0, 0)
        if source is None or slices != [(source, axis, step) for step in range(len(nodes))]:
            return None
        shape = self.shapes.get(source.name, ())
        if shape[axis : axis + 1] != (len(nodes),):
            return None
        if axis == 1:
            with self._graph.inserting_after(source):
                source = self._graph.create_node("call_method", "transpose", (source, 0, 1))
            self.shapes[source.name] = (shape[1], shape[0], *shape[2:])
        return source

    def _repeat(self, node: fx.Node, steps: int) -> fx.Node:
        shape = self.shapes[node.name]
        with self._graph.inserting_after(node):
            row = self._graph.create_node("call_method", "unsqueeze", (node, 0))
        with self._graph.inserting_after(row):
            repeated = self._graph.create_node("call_method", "expand", (row, steps, *(-1 for _ in shape)))
        self.shapes[row.name], self.shapes[repeated.name] = (1, *shape), (steps, *shape)
        return repeated

    def _stack_operation(self, nodes: tuple[fx.Node, ...]) -> fx.Node | None:
        """Return one operation on stacked arguments if the nodes are the same operation per time step."""
        first = nodes[0]
        shape = self.shapes.get(first.name)
        if shape is None or any(self.shapes.get(node.name) != shape for node in nodes):
            return None
        if rules.get_operation_name(first.target) in _VIEWS and first.op in ("call_function", "call_method"):
            return self._stack_views(nodes, shape)
        if first.op not in ("call_function", "call_method") or any(
            (node.op, node.target, len(node.args), node.kwargs)
            != (first.op, first.target, len(first.args), first.kwargs)
            for node in nodes
        ):
            return None
        if any(isinstance(value, fx.Node) for value in first.kwargs.values()):
            return None
        if not self._runs_per_sample(first, len(shape)):
            return None
        args: list[Any] = []
        for values in zip(*(node.args for node in nodes), strict=True):
            if not isinstance(values[0], fx.Node):
                if any(value != values[0] for value in values):
                    return None
                args.append(values[0])
            elif (stacked := self._stack(values)) is None:
                return None
            else:
                args.append(stacked)
        order = {node: position for position, node in enumerate(self._graph.nodes)}
        last = max((arg for arg in args if isinstance(arg, fx.Node)), key=order.__getitem__)
        with self._graph.inserting_after(last):
            node = self._graph.create_node(first.op, first.target, tuple(args), first.kwargs)
        set_folded_sizes(node, (len(nodes), shape[0]))
        self.shapes[node.name] = (len(nodes), *shape)
        return node

    def _stack_views(self, nodes: tuple[fx.Node, ...], shape: Shape) -> fx.Node | None:
        """Return one reshape of stacked tensors for views that treat each sample alone."""
        sources = tuple(node.args[0] for node in nodes)
        names = {(node.op, node.target) for node in nodes}
        if len(names) > 1 or any(not isinstance(source, fx.Node) for source in sources):
            return None
        shapes = [self.shapes.get(source.name) for source in sources]  # type: ignore[union-attr]
        if any(before is None or before[:1] != shape[:1] for before in shapes):
            return None
        stacked = self._stack(sources)  # type: ignore[arg-type]
        if stacked is None:
            return None
        sizes = (len(nodes), *shape)
        with self._graph.inserting_after(stacked):
            node = self._graph.create_node("call_method", "reshape", (stacked, sizes))
        self.shapes[node.name] = sizes
        return node

    # Folds

    def _process_node(self, node: fx.Node) -> None:
        shape = self.shapes.get(node.name)
        source = node.args[0] if node.args else None
        if shape is None or not isinstance(source, fx.Node):
            return
        if node.op in ("call_method", "call_function") and rules.get_operation_name(node.target) in _VIEWS:
            self._process_view(node, source, shape)
            return
        sizes = self._get_common_fold(node)
        is_folded = sizes is not None and shape[:1] == (math.prod(sizes),)
        if sizes is not None and is_folded and self._runs_per_sample(node, len(shape)):
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

    def _runs_per_sample(self, node: fx.Node, rank: int) -> bool:
        """Return whether the node's operation treats each element of its first axis alone."""
        if node.op == "call_module":
            layer = self._layers[str(node.target)]
            is_known = has_library_forward(layer) or (isinstance(layer, nn.Conv2d) and is_plain_conv(layer))
            if not is_known or getattr(layer, "inplace", False):
                return False
            if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training:
                return False
            if getattr(layer, "step_mode", "s") != "s" or getattr(layer, "return_indices", False):
                return False
            if isinstance(layer, nn.Flatten):
                return layer.start_dim >= 1
            source_rank = len(self.shapes.get(node.all_input_nodes[0].name, ()))
            expected = next((number for cls, number in SAMPLE_RANKS.items() if isinstance(layer, cls)), None)
            return source_rank == expected or (expected is None and isinstance(layer, _ANY_RANK))
        if rules.mutates_first_argument(node.target, node.args, node.kwargs) or "out" in node.kwargs:
            return False
        name = rules.get_operation_name(node.target)
        if name in _ELEMENTWISE:
            ranks = {len(self.shapes[source.name]) for source in node.all_input_nodes}
            return ranks == {rank}
        if name in _POOLINGS and node.kwargs.get("return_indices") is not True and len(node.args) < 6:
            return len(self.shapes[node.all_input_nodes[0].name]) == rank == _POOLINGS[name] + 2
        if name in _REDUCTIONS:
            dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
            source_rank = len(self.shapes[node.all_input_nodes[0].name])
            listed = [dims] if isinstance(dims, int) else dims
            if not isinstance(listed, (list, tuple)) or len(listed) == 0:
                return False
            return all(isinstance(dim, int) and dim % source_rank != 0 for dim in listed)
        if name == "transpose" and len(node.args) == 3:
            return all(isinstance(dim, int) and dim % rank != 0 for dim in node.args[1:])
        return False

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


def _match_slice(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Return (x, axis, t) if the node is `x[t]` or `x[:, t]`, in any notation; else None."""
    if not node.args or not isinstance(source := node.args[0], fx.Node) or node.kwargs:
        return None
    if node.target in ("select", torch.select) and len(node.args) == 3:
        axis, step = node.args[1:]
    elif node.target is operator.getitem:
        index = node.args[1]
        items = [item for item in (index if isinstance(index, tuple) else (index,)) if item is not Ellipsis]
        axis = next((axis for axis, item in enumerate(items) if isinstance(item, int)), -1)
        if any(item != slice(None) for position, item in enumerate(items) if position != axis):
            return None
        step = items[axis] if items else None
        if source.target in ("unbind", torch.unbind) and items == [step] and not source.kwargs:
            axis = source.args[1] if len(source.args) > 1 else 0
            inner = source.all_input_nodes[0]
            return (inner, axis, step)  # type: ignore[return-value]
    else:
        return None
    return (source, axis, step) if axis in (0, 1) and isinstance(step, int) else None  # type: ignore[return-value]


def _get_written_step(write: fx.Node) -> int | None:
    """Return t if the node is `x[t] = value` or `x[t, :, ...] = value`; else None."""
    index = write.args[1]
    step, *slices = index if isinstance(index, tuple) else (index,)
    if not isinstance(step, int) or any(item not in (slice(None), Ellipsis) for item in slices):
        return None
    return step


def _match_stack(node: fx.Node) -> tuple[fx.Node, ...] | None:
    """Return the stacked nodes if the node stacks tensors along a new first axis; else None."""
    if node.op != "call_function" or node.target not in (torch.stack, torch.cat) or not node.args:
        return None
    items, *options = node.args
    dim = options[0] if options else node.kwargs.get("dim", 0)
    if dim != 0 or not isinstance(items, (list, tuple)) or not all(isinstance(x, fx.Node) for x in items):
        return None
    if node.target is torch.stack:
        return tuple(items)  # type: ignore[arg-type]
    if any(x.target not in ("unsqueeze", torch.unsqueeze) or x.args[1:] != (0,) for x in items):  # type: ignore[union-attr]
        return None
    return tuple(x.args[0] for x in items)  # type: ignore[union-attr]


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

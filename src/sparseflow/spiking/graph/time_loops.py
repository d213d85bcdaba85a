"""Removal of loops over time steps from a traced network."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from sparseflow.spiking.graph import rules
from sparseflow.spiking.graph.aliasing import find_written_node
from sparseflow.spiking.graph.registry import NeuronInfo
from sparseflow.spiking.graph.time_steps import (
    VIEWS,
    NeuronOutputs,
    Shape,
    get_neuron_outputs,
    get_reset_module,
    is_reset,
    runs_per_sample,
    set_folded_sizes,
    set_steps,
)

_CONSTRUCTORS = ("zeros", "empty", "ones", "full", "new_zeros", "new_empty", "zeros_like", "empty_like")


class LoopJoiner:
    """Replaces the calls of a layer or a neuron in a loop over time steps by one, in place.

    Args:
        graph: The network's graph; its queries of shapes are constants.
        layers: The network's layers by name.
        neurons: Its neurons by name.
        shapes: Shape of each node that yields a tensor; extended by the nodes that are added.
    """

    def __init__(
        self,
        graph: fx.Graph,
        layers: Mapping[str, nn.Module],
        neurons: Mapping[str, NeuronInfo],
        shapes: dict[str, Shape],
    ) -> None:
        self._graph, self._layers, self._neurons, self._shapes = graph, layers, neurons, shapes
        self._stacks: dict[tuple[fx.Node, ...], fx.Node] = {}

    def run(self) -> None:
        """Let each value be one node, then join loops."""
        self._split_tuples()
        self._replace_writes()
        self._join_loops()

    def _split_tuples(self) -> None:
        """Let each value that a neuron returns be one node, and pass the state by position."""
        for node in list(self._graph.nodes):
            info = self._neurons.get(str(node.target)) if node.op == "call_module" else None
            if info is None or info.returned_states == 0:
                continue
            signature = inspect.signature(self._layers[str(node.target)].forward)
            node.args, node.kwargs = signature.bind(*node.args, **node.kwargs).args, {}
            items: list[fx.Node] = []
            for user in list(node.users):
                if user.target is operator.getitem and isinstance(index := user.args[1], int):
                    user.update_arg(1, index % (info.returned_states + 1))
                    items.append(user)
            shape = self._shapes.get(node.all_input_nodes[0].name)
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
                self._shapes.setdefault(nodes[0].name, shape)

    def _replace_writes(self) -> None:
        """Stack what the network writes into a new tensor, one time step after the other."""
        order = {node: position for position, node in enumerate(self._graph.nodes)}
        for buffer in list(self._graph.nodes):
            is_new = buffer.op in ("call_function", "call_method") and not any(
                isinstance(arg, fx.Node) and arg.name in self._shapes for arg in buffer.args
            )
            is_new = is_new and rules.get_operation_name(buffer.target) in _CONSTRUCTORS
            writes = [user for user in buffer.users if user.target is operator.setitem]
            if not is_new or not writes:
                continue
            shape = self._shapes.get(buffer.name, ())
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
                not isinstance(value, fx.Node) or self._shapes.get(value.name) != shape[1:]
                for value in values.values()
            ):
                continue
            with self._graph.inserting_after(max(writes, key=order.__getitem__)):
                stacked = self._graph.call_function(torch.stack, ([values[step] for step in sorted(values)],))
            with self._graph.inserting_after(stacked):
                result = self._graph.call_method("type_as", (stacked, buffer))
            self._shapes[stacked.name] = self._shapes[result.name] = shape
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
        module = self._layers[str(nodes[0].target)]
        resets = [node for node in self._graph.nodes if get_reset_module(node) is module]
        if any(nodes[0] < reset < nodes[-1] for reset in resets):
            return
        earlier = [reset for reset in resets if reset < nodes[0]]
        info = self._neurons.get(str(nodes[0].target))
        if info is not None and info.returned_states:
            self._join_neuron_with_state(nodes, info, earlier)
            return
        shape = self._shapes.get(nodes[0].name)
        if shape is None or any(self._shapes.get(node.name) != shape for node in nodes):
            return
        if info is not None and getattr(self._layers[str(nodes[0].target)], "step_mode", "s") != "s":
            return
        if info is None and not runs_per_sample(nodes[0], len(shape), self._layers, self._shapes):
            return
        source = self._stack(tuple(node.args[0] for node in nodes))  # type: ignore[arg-type]
        if source is None:
            return
        with self._graph.inserting_after(self._find_last((source, *earlier))):
            joined = self._graph.create_node("call_module", nodes[0].target, (source,))
        steps = len(nodes)
        if info is None:
            set_folded_sizes(joined, (steps, shape[0]))
        else:
            set_steps(joined, steps, returned_states=0)
        self._stacks[nodes] = joined
        self._replace_by_steps(nodes, joined, shape)

    def _replace_by_steps(
        self, nodes: Sequence[fx.Node | None], stacked: fx.Node, shape: Shape | None
    ) -> None:
        """Replace the nodes of consecutive time steps by slices of `stacked`."""
        if shape is not None:
            self._shapes[stacked.name] = (len(nodes), *shape)
        for step, node in reversed(list(enumerate(nodes))):
            if node is None:
                continue
            with self._graph.inserting_after(stacked):
                item = self._graph.create_node("call_function", operator.getitem, (stacked, step))
            if shape is not None:
                self._shapes[item.name] = shape
            node.replace_all_uses_with(item)

    def _join_neuron_with_state(
        self, nodes: tuple[fx.Node, ...], info: NeuronInfo, resets: Sequence[fx.Node]
    ) -> None:
        """Join the calls of a neuron that returns its state, and gets it back if it does not store it.

        Args:
            nodes: The calls.
            info: The neuron.
            resets: Nodes that reset it before the first call.
        """
        outputs = [output for node in nodes if (output := get_neuron_outputs(node, info)) is not None]
        spikes = [output.spikes for output in outputs if output.spikes is not None]
        shape = self._shapes.get(spikes[0].name) if spikes else None
        if len(spikes) < len(nodes) or any(self._shapes.get(node.name) != shape for node in spikes):
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
        with self._graph.inserting_after(self._find_last((*arguments, *resets))):
            joined = self._graph.create_node("call_module", nodes[0].target, arguments)
        set_steps(joined, len(nodes), returned_states=info.returned_states)
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
        if stacked is None and len(slices) == 1 and nodes[0].name in self._shapes:
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
        shape = self._shapes.get(source.name, ())
        if shape[axis : axis + 1] != (len(nodes),):
            return None
        if axis == 1:
            with self._graph.inserting_after(source):
                source = self._graph.create_node("call_method", "transpose", (source, 0, 1))
            self._shapes[source.name] = (shape[1], shape[0], *shape[2:])
        return source

    def _repeat(self, node: fx.Node, steps: int) -> fx.Node:
        shape = self._shapes[node.name]
        with self._graph.inserting_after(node):
            row = self._graph.create_node("call_method", "unsqueeze", (node, 0))
        with self._graph.inserting_after(row):
            repeated = self._graph.create_node("call_method", "expand", (row, steps, *(-1 for _ in shape)))
        self._shapes[row.name], self._shapes[repeated.name] = (1, *shape), (steps, *shape)
        return repeated

    def _stack_operation(self, nodes: tuple[fx.Node, ...]) -> fx.Node | None:
        """Return one operation on stacked arguments if the nodes are the same operation per time step."""
        first = nodes[0]
        shape = self._shapes.get(first.name)
        if shape is None or any(self._shapes.get(node.name) != shape for node in nodes):
            return None
        if rules.get_operation_name(first.target) in VIEWS and first.op in ("call_function", "call_method"):
            return self._stack_views(nodes, shape)
        if first.op not in ("call_function", "call_method") or any(
            (node.op, node.target, len(node.args), node.kwargs)
            != (first.op, first.target, len(first.args), first.kwargs)
            for node in nodes
        ):
            return None
        if any(isinstance(value, fx.Node) for value in first.kwargs.values()):
            return None
        if not runs_per_sample(first, len(shape), self._layers, self._shapes):
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
        with self._graph.inserting_after(self._find_last(args)):
            node = self._graph.create_node(first.op, first.target, tuple(args), first.kwargs)
        set_folded_sizes(node, (len(nodes), shape[0]))
        self._shapes[node.name] = (len(nodes), *shape)
        return node

    def _find_last(self, arguments: Sequence[Any]) -> fx.Node:
        """Return the node among `arguments` that comes last in the graph."""
        order = {node: position for position, node in enumerate(self._graph.nodes)}
        return max((node for node in arguments if isinstance(node, fx.Node)), key=order.__getitem__)

    def _stack_views(self, nodes: tuple[fx.Node, ...], shape: Shape) -> fx.Node | None:
        """Return one reshape of stacked tensors for views that treat each sample alone."""
        sources = tuple(node.args[0] for node in nodes)
        names = {(node.op, node.target) for node in nodes}
        if len(names) > 1 or any(not isinstance(source, fx.Node) for source in sources):
            return None
        shapes = [self._shapes.get(source.name) for source in sources]  # type: ignore[union-attr]
        if any(before is None or before[:1] != shape[:1] for before in shapes):
            return None
        stacked = self._stack(sources)  # type: ignore[arg-type]
        if stacked is None:
            return None
        sizes = (len(nodes), *shape)
        with self._graph.inserting_after(stacked):
            node = self._graph.create_node("call_method", "reshape", (stacked, sizes))
        self._shapes[node.name] = sizes
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

"""What nodes of a traced network do at time steps: folds, calls of a neuron per step, and its outputs."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from sparseflow.spiking.graph import rules
from sparseflow.spiking.graph.layer_rules import has_library_forward
from sparseflow.spiking.graph.registry import NeuronInfo
from sparseflow.spiking.graph.sites import is_plain_conv

Shape = tuple[int, ...]

_FOLDED_KEY = "sparseflow_folded_sizes"
_STEPS_KEY = "sparseflow_steps"
_STATES_KEY = "sparseflow_returned_states"
VIEWS = ("flatten", "unflatten", "reshape", "view", "contiguous")
SAMPLE_RANKS: dict[type[nn.Module], int] = {
    nn.Conv1d: 3, nn.Conv2d: 4, nn.BatchNorm2d: 4, nn.MaxPool1d: 3, nn.MaxPool2d: 4, nn.AvgPool1d: 3,
    nn.AvgPool2d: 4, nn.AdaptiveAvgPool1d: 3, nn.AdaptiveAvgPool2d: 4,
}  # fmt: skip
"""Layers that run on each sample alone if their input has this rank."""
_ANY_RANK = (nn.Linear, nn.BatchNorm1d, nn.LayerNorm, nn.Identity, nn.ReLU, nn.GELU, nn.Dropout)
"""Layers that run on each sample alone for every rank of at least 2."""
_ELEMENTWISE = ("add", "sub", "mul", "div", "truediv", "relu", "gelu", "sigmoid", "neg")
_REDUCTIONS = ("amax", "amin", "mean", "sum")
_POOLINGS = {f"{kind}_pool{rank}d": rank for kind in ("max", "avg", "adaptive_avg") for rank in (1, 2)}
"""Functions that run on each sample alone if their input has two more dimensions than they pool."""


def get_folded_sizes(node: fx.Node) -> tuple[int, int] | None:
    """Return (T, N) if the node's operation takes both as one axis; None for an operation as it stands."""
    return node.meta.get(_FOLDED_KEY)


def set_folded_sizes(node: fx.Node, sizes: tuple[int, int]) -> None:
    """Mark a node whose operation takes time steps and samples, (T, N), as one axis."""
    node.meta[_FOLDED_KEY] = sizes


def set_steps(node: fx.Node, steps: int, *, returned_states: int) -> None:
    """Mark a node that stands for one call of a neuron per time step."""
    node.meta.update({_STEPS_KEY: steps, _STATES_KEY: returned_states})


def runs_step_by_step(node: fx.Node) -> bool:
    """Return whether the node stands for one call of a neuron per time step."""
    return _STEPS_KEY in node.meta


def is_reset(node: fx.Node) -> bool:
    """Return whether the node calls a method that sets a neuron, or a layer with state, to rest."""
    return get_reset_module(node) is not None


def get_reset_module(node: fx.Node) -> nn.Module | None:
    """Return the neuron or layer that the node sets to rest; None for other nodes."""
    is_method = node.op == "call_function" and inspect.ismethod(node.target)
    return node.target.__self__ if is_method else None  # type: ignore[union-attr]


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
    count = info.returned_states
    indices = range(2 * count + 1 if runs_step_by_step(node) else count + 1)
    for user in node.users:
        index = user.args[1] if user.target is operator.getitem and user.args[0] is node else None
        if not isinstance(index, int) or index not in indices or index in items:
            return None
        items[index] = user
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


def runs_per_sample(
    node: fx.Node, rank: int, layers: Mapping[str, nn.Module], shapes: Mapping[str, Shape]
) -> bool:
    """Return whether the node's operation treats each element of its first axis alone.

    Args:
        node: The node.
        rank: Number of dimensions of its result.
        layers: The network's layers by name.
        shapes: Shape of each node that yields a tensor.
    """
    if node.op == "call_module":
        layer = layers[str(node.target)]
        is_known = has_library_forward(layer) or (isinstance(layer, nn.Conv2d) and is_plain_conv(layer))
        if not is_known or getattr(layer, "inplace", False):
            return False
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training:
            return False
        if getattr(layer, "step_mode", "s") != "s" or getattr(layer, "return_indices", False):
            return False
        if isinstance(layer, nn.Flatten):
            return layer.start_dim >= 1
        source_rank = len(shapes.get(node.all_input_nodes[0].name, ()))
        expected = next((number for cls, number in SAMPLE_RANKS.items() if isinstance(layer, cls)), None)
        return source_rank == expected or (expected is None and isinstance(layer, _ANY_RANK))
    if rules.mutates_first_argument(node.target, node.args, node.kwargs) or "out" in node.kwargs:
        return False
    name = rules.get_operation_name(node.target)
    if name in _ELEMENTWISE:
        ranks = {len(shapes[source.name]) for source in node.all_input_nodes}
        return ranks == {rank}
    if name in _POOLINGS and node.kwargs.get("return_indices") is not True and len(node.args) < 6:
        return len(shapes[node.all_input_nodes[0].name]) == rank == _POOLINGS[name] + 2
    if name in _REDUCTIONS:
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        source_rank = len(shapes[node.all_input_nodes[0].name])
        listed = [dims] if isinstance(dims, int) else dims
        if not isinstance(listed, (list, tuple)) or len(listed) == 0:
            return False
        return all(isinstance(dim, int) and dim % source_rank != 0 for dim in listed)
    if name == "transpose" and len(node.args) == 3:
        return all(isinstance(dim, int) and dim % rank != 0 for dim in node.args[1:])
    return False

"""`import_nir`: a network of spikingjelly from a Neuromorphic Intermediate Representation (NIR)."""

from __future__ import annotations

import math
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from keyword import iskeyword
from typing import Any, Protocol, TypeGuard

import torch
from torch import fx, nn

from sparseflow.core.extras import require
from sparseflow.errors import InputError

DEFAULT_DT = 1e-4
"""Seconds of a time step, if none are given: the default of snnTorch and spikingjelly."""


class NirGraph(Protocol):
    """A `nir.NIRGraph`, whose package need not be installed."""

    nodes: dict[str, Any]
    edges: list[tuple[str, str]]


def is_nir_graph(value: object) -> TypeGuard[NirGraph]:
    """Return whether a value is a `nir.NIRGraph`."""
    return type(value).__name__ == "NIRGraph" and isinstance(getattr(value, "nodes", None), dict)


def import_nir(graph: NirGraph, *, dt: float = DEFAULT_DT) -> nn.Module:
    """Make a network from a NIR graph.

    Args:
        graph: A `nir.NIRGraph` without cycles, for example from `nir.read`. Its types of nodes are Affine,
            Linear, Conv1d, Conv2d, AvgPool2d, SumPool2d, Flatten, IF and LIF. Several inputs of a node are
            added.
        dt: Seconds of a time step, which exporters choose: 1e-4 for snnTorch and spikingjelly, 1 for sinabs.

    Returns:
        A network in eval mode with the neurons of spikingjelly. It takes [T, N, ...], T time steps and N
        samples, and returns its output for each time step.

    Raises:
        InputError: The graph has a cycle, a node of a type that is not supported, or neurons whose parameters
            differ or do not fit `dt`.
        MissingExtraError: spikingjelly is not installed.
    """
    if not is_nir_graph(graph):
        raise InputError(f"`graph` must be a nir.NIRGraph, not {type(graph).__name__}")
    if not (dt > 0 and math.isfinite(dt)):
        raise InputError(f"`dt` (={dt}) must be a positive number of seconds")
    sources: dict[str, list[str]] = {name: [] for name in graph.nodes}
    for source, target in graph.edges:
        sources[target].append(source)
    try:
        order = list(TopologicalSorter(sources).static_order())
    except CycleError as error:
        cycle = " -> ".join(reversed(error.args[1]))
        raise InputError(
            f"the NIR graph has a cycle ({cycle}); import it with a library and optimize that network"
        ) from error
    makers = _list_makers(dt)
    root, network, values = nn.Module(), fx.Graph(), {}
    for name in sorted(order, key=lambda name: type(graph.nodes[name]).__name__ != "Input"):
        node = graph.nodes[name]
        kind, inputs = type(node).__name__, [values[source] for source in sources[name]]
        if kind == "Input":
            values[name] = network.placeholder(f"input_{_to_identifier(name)}")
            continue
        if not inputs:
            raise InputError(f"the node {name!r} ({kind}) of the NIR graph has no input")
        value = inputs[0]
        for other in inputs[1:]:
            value = network.call_function(torch.add, (value, other))
        if kind == "Output":
            values[name] = network.output(value)
            continue
        if kind not in makers:
            supported = ", ".join(sorted(makers))
            raise InputError(f"the node {name!r} of the NIR graph is a {kind}; supported are {supported}")
        try:
            layer = makers[kind](node)
        except _UnsupportedNodeError as reason:
            raise InputError(f"the node {name!r} ({kind}) of the NIR graph: {reason}") from None
        attribute = _to_identifier(name)
        while hasattr(root, attribute):
            attribute += "_"
        root.add_module(attribute, layer)
        values[name] = network.call_module(attribute, (value,))
    return fx.GraphModule(root, network, "NirNetwork").eval()


class _UnsupportedNodeError(Exception):
    """Why a node cannot be converted (a sentence)."""


def _to_identifier(name: str) -> str:
    identifier = "".join(character if character.isalnum() else "_" for character in name)
    return identifier if identifier.isidentifier() and not iskeyword(identifier) else f"node_{identifier}"


def _list_makers(dt: float) -> dict[str, Callable[[Any], nn.Module]]:
    """List the functions that make a layer of spikingjelly from a node, by type of the node."""
    require("spikingjelly", "spiking")
    from spikingjelly.activation_based import layer, neuron

    def make_linear(node: Any) -> nn.Module:
        bias = getattr(node, "bias", None)
        created = layer.Linear(
            node.weight.shape[-1], node.weight.shape[-2], bias=bias is not None, step_mode="m"
        )
        return _set_weights(created, node.weight, bias)

    def make_convolution(node: Any) -> nn.Module:
        is_flat = node.weight.ndim == 3
        options = {
            name: _to_python(getattr(node, name)) for name in ("stride", "padding", "dilation", "groups")
        }
        kind: Any = layer.Conv1d if is_flat else layer.Conv2d
        channels = node.weight.shape[1] * int(options["groups"])
        created = kind(channels, node.weight.shape[0], tuple(node.weight.shape[2:]), step_mode="m", **options)
        return _set_weights(created, node.weight, node.bias)

    def make_average_pooling(node: Any, *, sums: bool = False) -> nn.Module:
        options = {name: _to_python(getattr(node, name)) for name in ("kernel_size", "stride", "padding")}
        created = layer.AvgPool2d(**options, step_mode="m")
        if sums:
            created.divisor_override = 1
        return created

    def make_flatten(node: Any) -> nn.Module:
        start, end = int(node.start_dim), int(node.end_dim)
        # NIR counts the dimensions of a sample without the batch.
        return layer.Flatten(start + (start >= 0), end + (end >= 0), step_mode="m")

    def make_integrator(node: Any) -> nn.Module:
        resistance = _get_uniform(node, "r")
        if not math.isclose(resistance * dt, 1, rel_tol=1e-5):
            raise _UnsupportedNodeError(f"`r` (={resistance:g}) is not 1 / dt; it fits dt={1 / resistance:g}")
        threshold, reset = _get_uniform(node, "v_threshold"), _get_uniform(node, "v_reset")
        return neuron.IFNode(v_threshold=threshold, v_reset=reset, step_mode="m")

    def make_leaky_integrator(node: Any) -> nn.Module:
        tau, resistance = _get_uniform(node, "tau") / dt, _get_uniform(node, "r")
        if tau <= 1:
            raise _UnsupportedNodeError(f"`tau` (={tau * dt:g} s) is not more than dt (={dt:g} s)")
        decays_input = math.isclose(resistance, 1, rel_tol=1e-5)
        if not decays_input and not math.isclose(resistance, tau, rel_tol=1e-5):
            raise _UnsupportedNodeError(f"`r` (={resistance:g}) is neither 1 nor tau / dt (={tau:g})")
        reset, leak = _get_uniform(node, "v_reset"), _get_uniform(node, "v_leak")
        if reset != leak:
            raise _UnsupportedNodeError(f"`v_leak` (={leak:g}) is not `v_reset` (={reset:g})")
        threshold = _get_uniform(node, "v_threshold")
        return neuron.LIFNode(
            tau=tau, decay_input=decays_input, v_threshold=threshold, v_reset=reset, step_mode="m"
        )

    return {
        "Affine": make_linear, "Linear": make_linear, "Conv1d": make_convolution, "Conv2d": make_convolution,
        "AvgPool2d": make_average_pooling, "SumPool2d": lambda node: make_average_pooling(node, sums=True),
        "Flatten": make_flatten, "IF": make_integrator, "LIF": make_leaky_integrator,
    }  # fmt: skip


def _set_weights(layer: Any, weight: Any, bias: Any) -> nn.Module:
    with torch.no_grad():
        layer.weight.copy_(torch.as_tensor(weight))
        if layer.bias is not None:
            layer.bias.zero_() if bias is None else layer.bias.copy_(torch.as_tensor(bias))
    return layer


def _to_python(value: Any) -> Any:
    values = torch.as_tensor(value) if not isinstance(value, str) else None
    if values is None:
        return value
    return values.item() if values.ndim == 0 else tuple(values.tolist())


def _get_uniform(node: Any, name: str) -> float:
    """Return the value that all neurons of a node have."""
    values = torch.as_tensor(getattr(node, name), dtype=torch.float64)
    if values.numel() == 0 or bool((values != values.flatten()[0]).any()):
        raise _UnsupportedNodeError(f"`{name}` differs between its neurons")
    return float(values.flatten()[0])

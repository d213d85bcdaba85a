"""Matching of attention between spikes: a product of three spike tensors in front of a neuron."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from sparseflow.spiking.graph import rules
from sparseflow.spiking.graph.time_steps import get_folded_sizes

_PRODUCTS = (operator.matmul, torch.matmul, "matmul")
_VIEWS = ("transpose", "permute", "reshape", "view", "flatten", "unflatten", "contiguous", "movedim")


@dataclass(frozen=True, kw_only=True)
class AttentionMatch:
    """`scale * first @ second @ third`, rearranged for a neuron.

    Attributes:
        factors: The nodes of the factors, [T, N, H, rows, columns]; without heads [T, N, rows, columns].
        has_heads: Whether the factors have an axis of heads.
        product: The node of the product.
        scale: Factor of the product.
        views: Nodes that rearrange the product, in order.
        inner: All nodes from the products to the neuron's input.
    """

    factors: tuple[fx.Node, fx.Node, fx.Node]
    has_heads: bool
    product: fx.Node
    scale: float
    views: tuple[fx.Node, ...]
    inner: tuple[fx.Node, ...]


def match_attention(
    neuron: fx.Node, shapes: Mapping[fx.Node, tuple[int, ...]], is_spikes: Callable[[fx.Node], bool]
) -> AttentionMatch | None:
    """Match the attention whose result a neuron reads.

    Args:
        neuron: The neuron's node.
        shapes: Shape of each node that yields a tensor.
        is_spikes: Whether a node yields spikes or their integer sums.
    """
    reader, node, scale = neuron, neuron.all_input_nodes[0], 1.0
    views: list[fx.Node] = []
    inner: list[fx.Node] = []
    while set(node.users) == {reader} and get_folded_sizes(node) is None:
        inner.append(node)
        factor = _match_scale(node)
        if _is_view(node):
            views.append(node)
        elif factor is not None:
            scale *= factor
        else:
            break
        reader, node = node, node.all_input_nodes[0]
    factors = _match_products(node, inner)
    if factors is None or node not in inner or not all(map(is_spikes, factors)):
        return None
    ranks = {len(shapes.get(factor, ())) for factor in factors}
    if ranks not in ({4}, {5}):
        return None
    if views and views[0].target == "contiguous":
        views.pop(0)  # the neuron takes any memory layout
    return AttentionMatch(
        factors=factors,
        has_heads=ranks == {5},
        product=node,
        scale=scale,
        views=tuple(reversed(views)),
        inner=tuple(inner),
    )


def _match_products(node: fx.Node, inner: list[fx.Node]) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Return the factors of `(a @ b) @ c` or `a @ (b @ c)`, and add the first product to `inner`."""
    if not _is_product(node):
        return None
    former, latter = node.all_input_nodes
    for product in (former, latter):
        if _is_product(product) and set(product.users) == {node}:
            inner.append(product)
            first, second = product.all_input_nodes
            return (first, second, latter) if product is former else (former, first, second)
    return None


def _is_product(node: fx.Node) -> bool:
    is_call = node.op in ("call_function", "call_method") and node.target in _PRODUCTS
    return (
        is_call and len(node.args) == 2 and len(node.all_input_nodes) == 2 and get_folded_sizes(node) is None
    )


def _is_view(node: fx.Node) -> bool:
    is_call = node.op in ("call_function", "call_method") and len(node.all_input_nodes) == 1
    return is_call and rules.get_operation_name(node.target) in _VIEWS


def _match_scale(node: fx.Node) -> float | None:
    """Return the number by which a node multiplies its only input."""
    if node.op not in ("call_function", "call_method") or len(node.args) != 2 or node.kwargs:
        return None
    numbers = [number for number in node.args if isinstance(number, int | float)]
    if len(numbers) != 1 or len(node.all_input_nodes) != 1:
        return None
    operation = rules.get_operation_name(node.target)
    if operation == "mul":
        return float(numbers[0])
    is_quotient = operation in ("div", "truediv") and node.args[1] is numbers[0] and numbers[0] != 0
    return 1.0 / numbers[0] if is_quotient else None

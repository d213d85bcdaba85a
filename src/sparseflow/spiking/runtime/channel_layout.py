"""Where channels lie between groups: in an order in which whole blocks of them fall silent together.

A GPU kernel skips a block of channels wherever none of them fires. Channels that rarely fire are scattered
over a trained layer; put side by side they make silent blocks. The change is exact: a group's outputs are
permuted with its weights, and whatever reads them expects that order. Layers whose spikes are added to each
other share one order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from sparseflow.errors import InputError
from sparseflow.spiking.backends.base import TILE, Arrangement, Order
from sparseflow.spiking.backends.spec import GroupSpec, SpikeSource
from sparseflow.spiking.graph.fusion_matcher import GroupMatch
from sparseflow.spiking.runtime.spike_passthrough import Passage

WINDOW = 8
"""Tiles that a work item reads together, its halo included (about)."""

WORTHWHILE = 0.05
"""Share of the work that must be silent before anybody looks for it."""

REPAID = 400.0
"""Time steps x channels x share of the work saved from which an order pays for scattered membranes.

Skipping saves a neuron that much of its convolution; scattering its membrane costs about the same everywhere
(measured on an H200: even at 128 channels, 4 time steps and half of the work).
"""

GRAIN = 16
"""Shares of silence are rounded to one in so many, so that equal layers are tuned once."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """Where a layer's channels fire at all.

    Attributes:
        steps: T.
        fires: bool [C, ceil(N H W / TILE)]: whether a channel fires in any time step within so many pixels.
    """

    steps: int
    fires: Tensor

    @classmethod
    def of(cls, spikes: Tensor) -> Pattern:
        """The pattern of spikes [T, N, C, H, W]."""
        fires = (spikes != 0).any(0).transpose(0, 1).flatten(1)
        missing = -fires.shape[1] % TILE
        fires = torch.nn.functional.pad(fires, (0, missing)).unflatten(1, (-1, TILE)).any(-1)
        return cls(spikes.shape[0], fires)


def silent_share(pattern: Pattern, block: int, order: Tensor | None = None) -> float:
    """The share of a sparse convolution's work that meets nothing but silence.

    Args:
        pattern: Where its input fires.
        block: Channels that are skipped together.
        order: Which channel lies at each place; None for as they are.
    """
    fires = pattern.fires if order is None else pattern.fires[order]
    channels, tiles = fires.shape
    padded = torch.nn.functional.pad(fires, (0, -tiles % WINDOW, 0, -channels % block))
    active = padded.unflatten(0, (-1, block)).any(1).unflatten(1, (-1, WINDOW)).any(-1)
    return 1.0 - active.float().mean().item()


def cluster_channels(rates: Tensor) -> Tensor:
    """An order of channels, the most active first, in which blocks are silent as often as can be.

    A block is silent where none of its channels fires. If channels fire independently, no other order has
    more silent blocks: the sum over blocks of the products of (1 - rate) is largest when equals sit together.

    Args:
        rates: How often each channel fires, [C]: a fraction of pixels and time steps, or better of the tiles
            in which it fires at all.

    Returns:
        int64 [C], a permutation: place i gets channel `order[i]`. Channels of equal rates keep their order.

    Raises:
        InputError: `rates` is not one-dimensional, or holds NaN.
    """
    if rates.dim() != 1 or rates.isnan().any():
        raise InputError(f"rates must be [C] without NaN, got {rates.dtype} {tuple(rates.shape)}")
    return torch.argsort(rates, descending=True, stable=True)


def arrange(
    groups: Sequence[GroupMatch],
    passages: Mapping[fx.Node, Passage],
    patterns: Mapping[fx.Node, Pattern],
    block: int,
) -> list[Arrangement]:
    """Choose an order for every layer, and say where looking for silence is worth it.

    Args:
        groups: The network's groups.
        passages: Layers that spikes pass in the form they have.
        patterns: Where the output of every group fires on a sample.
        block: Channels that are skipped together.

    Returns:
        An arrangement a group.
    """
    ties = _Ties(groups, passages)
    readers: dict[fx.Node, list[fx.Node]] = {}
    for group in groups:
        for conv in group.sources:
            origin = ties.origin(conv.input)
            if origin in patterns:
                readers.setdefault(ties.root(origin), []).append(origin)
    orders: dict[fx.Node, Order] = {}
    for root, read in readers.items():
        seen = [patterns[origin] for origin in dict.fromkeys(read)]
        channels = seen[0].fires.shape[0]
        if root in ties.fixed or channels <= block:
            continue
        places = cluster_channels(torch.stack([p.fires.float().mean(1) for p in seen]).amax(0))
        # Within a block any order will do; the network's own keeps neighbouring membranes together.
        places = torch.cat([part.sort().values for part in places.split(block)])
        gain = sum(silent_share(p, block, places) - silent_share(p, block) for p in seen) / len(seen)
        if gain >= WORTHWHILE and gain * channels * seen[0].steps >= REPAID:
            orders[root] = Order.of(places)

    def order_of(node: fx.Node) -> Order | None:
        return orders.get(ties.root(node))

    silent: dict[int, float] = {}
    marking: set[fx.Node] = set()
    for number, group in enumerate(groups):
        origin = ties.origin(group.sources[0].input) if group.sources else None
        if origin is None or origin not in patterns:
            continue
        order = order_of(origin)
        share = silent_share(patterns[origin], block, None if order is None else order.places)
        if share >= WORTHWHILE:
            silent[number] = round(share * GRAIN) / GRAIN
            marking.add(origin)
    return [
        Arrangement(
            output=order_of(group.output),
            inputs=tuple(order_of(conv.input) for conv in group.sources),
            silent=silent.get(number, 0.0),
            marks=group.output in marking,
        )
        for number, group in enumerate(groups)
    ]


class _Ties:
    """Which values of a network must have their channels in one order, and which in the network's own."""

    def __init__(self, groups: Sequence[GroupMatch], passages: Mapping[fx.Node, Passage]) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        self._passages = {node for node, layer in passages.items() if layer.kind != "mean"}
        outputs = {group.output for group in groups}
        inner = {node for group in groups for node in group.inner}
        for node in self._passages:
            self._tie(node, node.all_input_nodes[0])
        fixed: set[fx.Node] = set()
        for group in groups:
            for node in (*group.skips, *group.post_skips):
                self._tie(group.output, node)
            if group.dense:
                fixed.add(group.output)  # it comes with the network's channels as they are
        members = [*outputs, *self._passages, *self._parent]
        for node in members:
            readers = [u for u in node.users if u not in passages]
            made = node in outputs or node in self._passages
            if not made or any(reader not in inner for reader in readers):
                fixed.add(node)
        self.fixed = {self.root(node) for node in fixed}

    def origin(self, node: fx.Node) -> fx.Node:
        """The group's output that reaches `node` through passages alone, or `node`."""
        while node in self._passages:
            node = node.all_input_nodes[0]
        return node

    def root(self, node: fx.Node) -> fx.Node:
        """One node that stands for all that share an order with `node`."""
        while node in self._parent:
            node = self._parent[node]
        return node

    def _tie(self, left: fx.Node, right: fx.Node) -> None:
        one, other = self.root(left), self.root(right)
        if one is not other:
            self._parent[one] = other


def permute_group(
    spec: GroupSpec, *, outputs: Tensor | None = None, inputs: Sequence[Tensor | None] = ()
) -> GroupSpec:
    """A group that reads and writes permuted channels.

    Args:
        spec: The group. Its skips and dense inputs must come in the order of `outputs`.
        outputs: Order of its output channels; None leaves them.
        inputs: Order of every source's input channels, None for those that stay; empty leaves all.

    Raises:
        InputError: An order is not a permutation of the channels it is for, or `inputs` has not one for
            every source.
    """
    if inputs and len(inputs) != len(spec.sources):
        raise InputError(f"{len(inputs)} orders of inputs for {len(spec.sources)} sources")
    sources = []
    for i, source in enumerate(spec.sources):
        weight = source.weight
        if outputs is not None:
            weight = weight[_checked(outputs, weight.shape[0])]
        order = inputs[i] if inputs else None
        if order is not None:
            weight = weight[:, _checked(order, weight.shape[1])]
        sources.append(SpikeSource(weight=weight, stride=source.stride, padding=source.padding))
    bias = spec.bias if outputs is None else spec.bias[_checked(outputs, spec.bias.shape[0])]
    return replace(spec, sources=tuple(sources), bias=bias)


def _checked(order: Tensor, channels: int) -> Tensor:
    if order.shape != (channels,) or not torch.equal(order.sort().values.cpu(), torch.arange(channels)):
        raise InputError(f"not a permutation of {channels} channels: {order.dtype} {tuple(order.shape)}")
    return order

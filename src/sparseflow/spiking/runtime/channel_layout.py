"""Channel orders between groups in which whole blocks of channels are silent together.

A GPU kernel skips a block of channels if none of them fires. In a trained layer the channels that rarely
fire are scattered; placed next to each other they form silent blocks. The change is exact: a group's
outputs are permuted with its weights, and their readers expect that order. Layers whose spikes are added to
each other share one order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from sparseflow.spiking.backends.base import ACTIVITY_TILE, ChannelLayout, ChannelOrder
from sparseflow.spiking.backends.spec import GroupSpec
from sparseflow.spiking.graph.fusion_matcher import GroupMatch
from sparseflow.spiking.runtime.spike_tensor import Passthrough

WINDOW_TILES = 8
"""Tiles that a work item reads together, including its halo (approximate)."""

MIN_SILENT_FRACTION = 0.05
"""Minimum fraction of silent work for which skipping is enabled."""

MIN_REORDER_GAIN = 3600.0
"""Time steps x products per input value x saved fraction from which reordering pays for scattered membranes.

Skipping saves a value of the input that much of the convolutions that read it; scattering its membrane costs
about the same everywhere (measured on an H100: even at 128 channels, 3x3, 4 time steps and half of the work).
"""

SILENT_FRACTION_LEVELS = 16
"""Silent fractions are rounded to this many levels, so that similar layers are tuned once."""


@dataclass(frozen=True, eq=False)
class FiringPattern:
    """Where a layer's channels fire.

    Attributes:
        steps: T.
        active: bool [C, ceil(N H W / ACTIVITY_TILE)], whether a channel fires in any time step within a tile.
    """

    steps: int
    active: Tensor

    @classmethod
    def from_spikes(cls, spikes: Tensor) -> FiringPattern:
        """Compute the pattern of spikes [T, N, C, H, W]."""
        fires = (spikes != 0).any(0).transpose(0, 1).flatten(1)
        missing = -fires.shape[1] % ACTIVITY_TILE
        fires = torch.nn.functional.pad(fires, (0, missing)).unflatten(1, (-1, ACTIVITY_TILE)).any(-1)
        return cls(spikes.shape[0], fires)


def compute_silent_fraction(pattern: FiringPattern, block: int, order: Tensor | None = None) -> float:
    """Compute the fraction of a sparse convolution's work that reads only silent blocks.

    Args:
        pattern: Firing pattern of its input.
        block: Channels that are skipped together.
        order: Channel at each position; None for the network's order.
    """
    fires = pattern.active if order is None else pattern.active[order]
    channels, tiles = fires.shape
    padded = torch.nn.functional.pad(fires, (0, -tiles % WINDOW_TILES, 0, -channels % block))
    active = padded.unflatten(0, (-1, block)).any(1).unflatten(1, (-1, WINDOW_TILES)).any(-1)
    return 1.0 - active.float().mean().item()


def cluster_channels(rates: Tensor) -> Tensor:
    """Order channels by rate, descending, which maximizes the number of silent blocks.

    A block is silent if none of its channels fires. If channels fire independently, no other order has more
    silent blocks: the sum over blocks of the products of (1 - rate) is largest if similar rates are grouped.

    Args:
        rates: How often each channel fires, [C]: a fraction of pixels and time steps, or better of the
            tiles in which it fires at all.

    Returns:
        int64 [C], a permutation: position i gets channel `order[i]`. Channels of equal rates keep their
        order.
    """
    return torch.argsort(rates, descending=True, stable=True)


def choose_channel_layouts(
    groups: Sequence[GroupMatch],
    passthroughs: Mapping[fx.Node, Passthrough],
    patterns: Mapping[fx.Node, FiringPattern],
    num_products: Mapping[str, int],
    block: int,
) -> list[ChannelLayout]:
    """Choose the channel order of each layer, and where skipping silent blocks pays off.

    Args:
        groups: The network's groups.
        passthroughs: Layers that spikes pass in native form.
        patterns: Firing pattern of each group's output on a sample.
        num_products: Products of each convolution per value of its input, by its name.
        block: Channels that are skipped together.

    Returns:
        One layout per group.
    """
    constraints = _OrderConstraints(groups, passthroughs)
    readers: dict[fx.Node, list[fx.Node]] = {}
    max_products: dict[fx.Node, int] = {}
    for group in groups:
        for conv in group.sources:
            origin = constraints.find_origin(conv.input)
            if origin in patterns:
                root = constraints.find_root(origin)
                readers.setdefault(root, []).append(origin)
                max_products[root] = max(max_products.get(root, 0), num_products[conv.name])
    orders: dict[fx.Node, ChannelOrder] = {}
    for root, read in readers.items():
        read_patterns = [patterns[origin] for origin in dict.fromkeys(read)]
        channels = read_patterns[0].active.shape[0]
        if root in constraints.fixed or channels <= block:
            continue
        permutation = cluster_channels(torch.stack([p.active.float().mean(1) for p in read_patterns]).amax(0))
        # Within a block the order is arbitrary; the network's own keeps neighboring membranes together.
        permutation = torch.cat([part.sort().values for part in permutation.split(block)])
        gain = sum(
            compute_silent_fraction(p, block, permutation) - compute_silent_fraction(p, block)
            for p in read_patterns
        ) / len(read_patterns)
        saved = gain * max_products[root] * read_patterns[0].steps
        if gain >= MIN_SILENT_FRACTION and saved >= MIN_REORDER_GAIN:
            orders[root] = ChannelOrder.from_permutation(permutation)

    def get_order(node: fx.Node) -> ChannelOrder | None:
        return orders.get(constraints.find_root(node))

    silent_fractions: dict[int, float] = {}
    emitting: set[fx.Node] = set()
    for number, group in enumerate(groups):
        origin = constraints.find_origin(group.sources[0].input) if group.sources else None
        if origin is None or origin not in patterns:
            continue
        order = get_order(origin)
        fraction = compute_silent_fraction(
            patterns[origin], block, None if order is None else order.permutation
        )
        if fraction >= MIN_SILENT_FRACTION:
            silent_fractions[number] = round(fraction * SILENT_FRACTION_LEVELS) / SILENT_FRACTION_LEVELS
            emitting.add(origin)
    return [
        ChannelLayout(
            output=get_order(group.output),
            inputs=tuple(get_order(conv.input) for conv in group.sources),
            silent_fraction=silent_fractions.get(number, 0.0),
            emit_activity=group.output in emitting,
        )
        for number, group in enumerate(groups)
    ]


class _OrderConstraints:
    """Which values must share one channel order, and which must keep the network's."""

    def __init__(self, groups: Sequence[GroupMatch], passthroughs: Mapping[fx.Node, Passthrough]) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        self._passthroughs = {node for node, layer in passthroughs.items() if layer.kind != "mean"}
        outputs = {group.output for group in groups}
        inner = {node for group in groups for node in group.inner}
        for node in self._passthroughs:
            self._union(node, node.all_input_nodes[0])
        fixed: set[fx.Node] = set()
        for group in groups:
            for node in (*group.skips, *group.post_skips):
                self._union(group.output, node)
            if group.dense:
                fixed.add(group.output)  # dense inputs have the network's channel order
        members = [*outputs, *self._passthroughs, *self._parent]
        for node in members:
            readers = [u for u in node.users if u not in passthroughs]
            is_produced = node in outputs or node in self._passthroughs
            if not is_produced or any(reader not in inner for reader in readers):
                fixed.add(node)
        self.fixed = {self.find_root(node) for node in fixed}

    def find_origin(self, node: fx.Node) -> fx.Node:
        """Find the group output that reaches `node` through passthroughs only, or `node`."""
        while node in self._passthroughs:
            node = node.all_input_nodes[0]
        return node

    def find_root(self, node: fx.Node) -> fx.Node:
        """Find the representative of all nodes that share an order with `node`."""
        while node in self._parent:
            node = self._parent[node]
        return node

    def _union(self, first: fx.Node, second: fx.Node) -> None:
        first_root, second_root = self.find_root(first), self.find_root(second)
        if first_root is not second_root:
            self._parent[first_root] = second_root


def permute_group(
    spec: GroupSpec, *, outputs: Tensor | None = None, inputs: Sequence[Tensor | None] = ()
) -> GroupSpec:
    """Permute the channels that a group reads and writes.

    Args:
        spec: The group. Its skips and dense inputs must be in the order of `outputs`.
        outputs: Order of its output channels; None keeps them.
        inputs: Order of each source's input channels, None to keep them; empty keeps all.
    """
    sources = []
    for source, order in zip(spec.sources, inputs or [None] * len(spec.sources), strict=True):
        weight = source.weight if outputs is None else source.weight[outputs]
        sources.append(replace(source, weight=weight if order is None else weight[:, order]))
    bias = spec.bias if outputs is None else spec.bias[outputs]
    return replace(spec, sources=tuple(sources), bias=bias)

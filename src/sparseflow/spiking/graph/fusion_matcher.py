"""Matching of fusable groups: convolutions, BatchNorm, residual and neuron as one unit.

From each neuron, the matcher walks back through additions, BatchNorms and convolutions that have no other
reader. The end of the walk determines how the value enters the neuron: as a convolution of spikes (a
*source*), as spikes added directly (a *skip*), or as a dense tensor (from a *dense convolution* of the
group, or from elsewhere in the network). `backends/spec.py` defines the arithmetic; nothing is measured
here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import fx, nn

from sparseflow.spiking.backends.conv_geometry import ConvGeometry
from sparseflow.spiking.backends.spec import GroupSpec, MaxPooling, NeuronSpec, SpikeSource
from sparseflow.spiking.graph.aliasing import find_written_node
from sparseflow.spiking.graph.analysis import SpikeGraph
from sparseflow.spiking.graph.attention_matcher import AttentionMatch, match_attention
from sparseflow.spiking.graph.layer_rules import has_library_forward, match_max_pooling
from sparseflow.spiking.graph.registry import NeuronInfo
from sparseflow.spiking.graph.simplification import (
    FlattenedPooling,
    get_folded_pooling,
    match_repetition,
)
from sparseflow.spiking.graph.sites import ConvSite, Refusal, is_plain_conv
from sparseflow.spiking.graph.time_steps import (
    get_folded_sizes,
    get_neuron_outputs,
    is_reset,
    runs_step_by_step,
)

FeatureKind = Literal["map", "vector", "sequence", "tokens"]
"""[N, C, H, W], [N, C], [N, C, L] or [N, L, C], with or without a time axis."""

SPIKE_KINDS = ("binary", "integer")
_ADDITIONS = {operator.add, operator.iadd, torch.add}


@dataclass(frozen=True, kw_only=True)
class ConvMatch:
    """A convolution of the group, with the BatchNorm that follows it (if any).

    Attributes:
        input: The fx node whose value is convolved.
        node: The convolution's node.
        name: The convolution's module name.
        bn_node: The BatchNorm's node.
        bn_name: The BatchNorm's module name.
        inner: Its nodes in order: the convolution, the BatchNorm, and transpositions around that.
        features: Kind of its input and output.
        input_pooling: Pooling of the flat input of a linear layer, which is folded into the weights.
        pooling: Max pooling of the output.
        repeats: Time steps over which the output is repeated unchanged; None if it has its own time axis.
    """

    input: fx.Node
    node: fx.Node
    name: str
    bn_node: fx.Node | None = None
    bn_name: str | None = None
    inner: tuple[fx.Node, ...] = ()
    features: FeatureKind = "map"
    input_pooling: FlattenedPooling | None = None
    pooling: MaxPooling | None = None
    repeats: int | None = None


@dataclass(frozen=True, kw_only=True)
class GroupMatch:
    """One group: the terms added before a neuron, the neuron, and what is added to its spikes.

    Attributes:
        neuron: The neuron's node; None for convolutions without a neuron.
        neuron_name: The neuron's module name; empty without a neuron.
        output: The node whose value the group yields: the neuron, or the SEW addition behind it; without a
            neuron, the convolution, its BatchNorm, or the addition of its output.
        sources: Convolutions of spikes.
        dense_convs: Convolutions of dense values (a stem).
        skips: Nodes of spikes added to the neuron's input.
        dense: Nodes of dense tensors added to the neuron's input, or to the convolutions without a neuron.
        post_skips: Nodes of spikes added to the neuron's output.
        inner: All nodes that the group replaces, in graph order, `output` last.
        features: Kind of all its inputs and its output.
        attention: The attention whose product is the neuron's input; its factors are in `dense`.
        neuron_info: Properties of the neuron.
        state: The node of the membrane before the first step; None if the neuron stores its membrane or
            starts at rest.
        starts_at_rest: Whether the membrane is at rest before the first step.
        final_state: The node of the membrane after the last step, which the group yields, too.
    """

    neuron: fx.Node | None
    neuron_name: str
    output: fx.Node
    sources: tuple[ConvMatch, ...]
    dense_convs: tuple[ConvMatch, ...]
    skips: tuple[fx.Node, ...]
    dense: tuple[fx.Node, ...]
    post_skips: tuple[fx.Node, ...]
    inner: tuple[fx.Node, ...]
    features: FeatureKind = "map"
    attention: AttentionMatch | None = None
    neuron_info: NeuronInfo | None = None
    state: fx.Node | None = None
    starts_at_rest: bool = False
    final_state: fx.Node | None = None

    @property
    def name(self) -> str:
        """Name of the main convolution, or of the neuron if the group has no convolution."""
        convs = self.sources or self.dense_convs
        return convs[0].name if convs else self.neuron_name

    @property
    def pooling(self) -> MaxPooling | None:
        """The max pooling before the neuron."""
        return next((conv.pooling for conv in (*self.sources, *self.dense_convs)), None)

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """All nodes whose features the group reads, without repetition."""
        nodes = [c.input for c in (*self.sources, *self.dense_convs)]
        return tuple(dict.fromkeys([*nodes, *self.skips, *self.dense, *self.post_skips]))

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """All nodes whose values the group reads: its inputs and the membrane."""
        return self.inputs if self.state is None else (*self.inputs, self.state)


@dataclass
class _GroupTerms:
    """Terms collected on the walk back from one neuron."""

    sources: list[ConvMatch] = field(default_factory=list)
    dense_convs: list[ConvMatch] = field(default_factory=list)
    skips: list[fx.Node] = field(default_factory=list)
    dense: list[fx.Node] = field(default_factory=list)
    inner: set[fx.Node] = field(default_factory=set)
    features: FeatureKind | None = None
    takes_time: bool = True


class FusionMatcher:
    """Finds the groups of one analyzed network.

    Args:
        graph: The analysis; it must have a traced module.
        has_fused_kernels: Whether attention and its neuron form a group, and a group may have a max pooling
            between a convolution and the neuron.
    """

    def __init__(self, graph: SpikeGraph, *, has_fused_kernels: bool = False) -> None:
        if graph.module is None:
            raise ValueError("groups can only be matched in a traced network")
        self._graph, self._has_fused_kernels = graph, has_fused_kernels
        self._modules = dict(graph.module.named_modules())
        self._calls: dict[int, int] = {}
        for node in graph.module.graph.nodes:
            if node.op == "call_module":
                key = id(self._modules[node.target])
                self._calls[key] = self._calls.get(key, 0) + 1
        self._replaceable = {
            site.name
            for site in graph.sites
            if site.replaceable or self._is_bare_product(site) or self._is_large_convolution(site)
        }
        self._replaceable |= {
            str(node.target) for node in graph.module.graph.nodes if get_folded_pooling(node) is not None
        }
        self._claimed: set[fx.Node] = set()

    def _is_bare_product(self, site: ConvSite) -> bool:
        """Return whether a linear layer or a Conv1d is a 1x1 convolution of spikes."""
        layer = self._graph.model.get_submodule(site.name)
        if site.refusal is not Refusal.NOT_A_MAP or not has_library_forward(layer):
            return False
        return ConvGeometry.from_layer(layer) == ConvGeometry()

    def _is_large_convolution(self, site: ConvSite) -> bool:
        """Return whether only the kernels of groups run a convolution of spikes, for its sizes."""
        if site.refusal not in (Refusal.KERNEL_SIZE, Refusal.STRIDE, Refusal.PADDING):
            return False
        layer = self._graph.model.get_submodule(site.name)
        geometry = ConvGeometry.from_layer(layer)
        is_plain = geometry.is_square and geometry.dilation == (1, 1) and geometry.groups == 1
        if not is_plain or getattr(layer, "padding_mode", "zeros") != "zeros":
            return False
        return int(geometry.padding[0]) <= max(1, geometry.kernel_size[0] - 1)

    def find_groups(self) -> Iterator[GroupMatch]:
        """Yield the groups with a neuron, then the other convolutions, both in the network's order."""
        inner: set[fx.Node] = set()
        for group in self._find_neuron_groups():
            inner.update(group.inner)
            yield group
        yield from self._find_convolutions(inner)

    def _find_convolutions(self, inner: set[fx.Node]) -> Iterator[GroupMatch]:
        """Find convolutions of spikes or with a BatchNorm, and sums of them, outside of `inner`."""
        module = self._graph.module
        assert module is not None
        for node in module.graph.nodes:
            if node in inner or node.op != "call_module":
                continue
            reader = next(iter(node.users)) if len(node.users) == 1 else node
            conv = self._match_bare_convolution(reader) if reader not in inner else None
            if conv is None or conv.node is not node:
                conv = self._match_bare_convolution(node)
            if conv is None or conv.node is not node:
                continue
            group = self._match_sum(conv, inner)
            inner = inner | set(group.inner)
            yield group

    def _match_bare_convolution(self, node: fx.Node) -> ConvMatch | None:
        """Match a convolution that runs without a neuron; `node` is its output."""
        conv = self._match_convolution(node)
        if conv is None or self._graph.values[conv.input.name].shape is None:
            return None
        return conv if self.reads_spikes(conv) or self._can_fold(conv) else None

    def _match_sum(self, conv: ConvMatch, inner: set[fx.Node]) -> GroupMatch:
        """Make the group of a convolution, and of the sum if its only reader adds a tensor to it."""
        output = conv.inner[-1]
        group = GroupMatch(
            neuron=None, neuron_name="", output=output, sources=(conv,), dense_convs=(), skips=(), dense=(),
            post_skips=(), inner=conv.inner, features=conv.features,
        )  # fmt: skip
        addition = next(iter(output.users)) if len(output.users) == 1 else output
        if addition in inner or not _is_addition(addition) or len(addition.all_input_nodes) != 2:
            return group
        (addend,) = (node for node in addition.all_input_nodes if node is not output)
        values = [self._graph.values.get(node.name) for node in (output, addend)]
        shapes = {None if value is None else value.shape for value in values}
        if None in shapes or len(shapes) > 1:
            return group
        if find_written_node(addition, self._modules) not in (None, output):
            return group
        other = self._match_bare_convolution(addend) if set(addend.users) == {addition} else None
        merges = (
            self._has_fused_kernels
            and other is not None
            and inner.isdisjoint(other.inner)
            and other.features == conv.features
            and self.reads_spikes(other) == self.reads_spikes(conv)
        )
        if merges and other is not None:
            nodes = {*conv.inner, *other.inner, addition}
            ordered = tuple(node for node in addition.graph.nodes if node in nodes)
            return replace(group, output=addition, sources=(conv, other), inner=ordered)
        return replace(group, output=addition, dense=(addend,), inner=(*conv.inner, addition))

    def reads_spikes(self, conv: ConvMatch) -> bool:
        """Return whether a sparse kernel can run the convolution."""
        return conv.name in self._replaceable and self._get_kind(conv.input) in SPIKE_KINDS

    def _can_fold(self, conv: ConvMatch) -> bool:
        """Return whether the convolution has a BatchNorm to fold and the same geometry in both directions."""
        geometry = ConvGeometry.from_layer(self._modules[conv.name])
        is_square = geometry.stride[0] == geometry.stride[1] and geometry.padding[0] == geometry.padding[1]
        return conv.bn_node is not None and is_square and geometry.dilation == (1, 1) and geometry.groups == 1

    def _find_neuron_groups(self) -> Iterator[GroupMatch]:
        module = self._graph.module
        assert module is not None
        order = {node: i for i, node in enumerate(module.graph.nodes)}
        for node in module.graph.nodes:
            if node.op != "call_module" or node.target not in self._graph.neurons:
                continue
            info = self._graph.neurons[node.target]
            outputs = self._get_outputs(node, info, order)
            if outputs is None or self._calls[id(self._modules[node.target])] > 1:
                continue
            spikes, state, final_state = outputs
            attention = self._match_attention(node)
            if attention is not None:
                yield GroupMatch(
                    neuron=node, neuron_name=str(node.target), output=node, sources=(), dense_convs=(),
                    skips=(), dense=attention.factors, post_skips=(), attention=attention, neuron_info=info,
                    inner=tuple(sorted({*attention.inner, node}, key=order.__getitem__)),
                    features=self._guess_features(node),
                )  # fmt: skip
                continue
            terms = _GroupTerms(takes_time=self._takes_time(node))
            if info.current_decay is not None:
                terms.dense.append(node.all_input_nodes[0])  # its current stands between a convolution and it
            elif not self._collect_pooled_convolution(node, terms):
                self._collect_terms(node.all_input_nodes[0], node, terms)
            output, post_skips = self._match_sew_addition(spikes)
            nodes = {*terms.inner, node, spikes, output} | ({final_state} if final_state else set())
            resets = state is not None and is_reset(state) and set(state.users) == {node}
            if resets and state is not None:
                nodes.add(state)
            inner = sorted(nodes, key=order.__getitem__)
            yield GroupMatch(
                neuron=node,
                neuron_name=str(node.target),
                output=output,
                sources=tuple(terms.sources),
                dense_convs=tuple(terms.dense_convs),
                skips=tuple(terms.skips),
                dense=tuple(terms.dense),
                post_skips=post_skips,
                inner=tuple(inner),
                features=terms.features or self._guess_features(node),
                neuron_info=info,
                state=None if resets else state,
                starts_at_rest=resets or (state is None and info.state is None),
                final_state=final_state,
            )

    def _get_outputs(
        self, neuron: fx.Node, info: NeuronInfo, order: dict[fx.Node, int]
    ) -> tuple[fx.Node, fx.Node | None, fx.Node | None] | None:
        """Return the nodes of the spikes, and of the membrane before and after; None if no kernel runs it."""
        outputs = get_neuron_outputs(neuron, info)
        if info.spec is None or outputs is None or outputs.spikes is None or outputs.states:
            return None
        if not isinstance(neuron.args[0], fx.Node) or neuron.kwargs or len(neuron.args) > 2:
            return None
        state = neuron.args[1] if len(neuron.args) > 1 else None
        final_state = outputs.final_states.get(0)
        readers = final_state.users if final_state is not None else {}
        if any(order[reader] < order[outputs.spikes] for reader in readers):
            return None
        return (outputs.spikes, state, final_state) if state is None or isinstance(state, fx.Node) else None

    def _match_attention(self, neuron: fx.Node) -> AttentionMatch | None:
        if not self._has_fused_kernels or not self._takes_time(neuron) or len(neuron.all_input_nodes) > 1:
            return None
        module = self._graph.module
        assert module is not None
        values = {node: self._graph.values.get(node.name) for node in module.graph.nodes}
        shapes = {node: value.shape for node, value in values.items() if value is not None and value.shape}
        return match_attention(neuron, shapes, lambda node: self._get_kind(node) in SPIKE_KINDS)

    def _guess_features(self, neuron: fx.Node) -> FeatureKind:
        """Return the kind of a neuron's input from its rank; a neuron treats all elements alike."""
        value = self._graph.values.get(neuron.all_input_nodes[0].name)
        shape = None if value is None else value.shape
        kinds: dict[int, FeatureKind] = {2: "vector", 3: "sequence"}
        return "map" if shape is None else kinds.get(len(shape) - self._takes_time(neuron), "map")

    def _takes_time(self, neuron: fx.Node) -> bool:
        """Return whether one call of a neuron takes all time steps."""
        return self._graph.neurons[str(neuron.target)].step_mode != "s" or runs_step_by_step(neuron)

    def _get_kind(self, node: fx.Node) -> str:
        value = self._graph.values.get(node.name)
        return "dense" if value is None else value.kind

    def _get_called_module(self, node: fx.Node) -> nn.Module | None:
        """Return the module that `node` calls, if it is called once only."""
        if node.op != "call_module":
            return None
        module = self._modules[str(node.target)]
        return module if self._calls[id(module)] == 1 else None

    def _collect_terms(self, node: fx.Node, reader: fx.Node, terms: _GroupTerms) -> None:
        """Add the value of `node`, read by `reader`, to `terms`."""
        single_reader = set(node.users) == {reader}
        if self._get_kind(node) in SPIKE_KINDS:
            terms.skips.append(node)
            return
        if single_reader and _is_addition(node):
            first, second = node.args
            assert isinstance(first, fx.Node) and isinstance(second, fx.Node)
            if first is not second:
                terms.inner.add(node)
                self._collect_terms(first, node, terms)
                self._collect_terms(second, node, terms)
                return
        conv = self._match_repeated_convolution(node, terms.takes_time) if single_reader else None
        if conv is None or not self._add_convolution(conv, terms):
            terms.dense.append(node)

    def _add_convolution(self, conv: ConvMatch, terms: _GroupTerms) -> bool:
        """Add a convolution to `terms`; return whether the group can have it."""
        reads_spikes = self._get_kind(conv.input) in SPIKE_KINDS
        if reads_spikes and conv.name not in self._replaceable:
            return False
        if terms.features not in (None, conv.features):
            return False
        terms.features = conv.features
        terms.inner.update(conv.inner)
        (terms.sources if reads_spikes else terms.dense_convs).append(conv)
        return True

    def _collect_pooled_convolution(self, neuron: fx.Node, terms: _GroupTerms) -> bool:
        """Add the convolution whose max-pooled output is the neuron's only input; return if there is one."""
        node, inner, repeats = neuron.all_input_nodes[0], [], None
        if not self._has_fused_kernels or set(node.users) != {neuron}:
            return False
        repetition = match_repetition(node) if terms.takes_time else None
        if repetition is not None:
            inner.append(node)
            node, repeats = repetition
        layer = self._get_called_module(node)
        if layer is None or len(node.users) != 1:
            return False
        folds = get_folded_sizes(node) is not None
        pooling = match_max_pooling(layer, takes_time=terms.takes_time, folds=folds)
        source = node.all_input_nodes[0]
        conv = self._match_convolution(source, terms.takes_time) if set(source.users) == {node} else None
        if pooling is None or conv is None or conv.features != "map":
            return False
        conv = replace(conv, inner=(*conv.inner, node, *inner), pooling=pooling, repeats=repeats)
        return self._add_convolution(conv, terms)

    def _match_repeated_convolution(self, node: fx.Node, takes_time: bool) -> ConvMatch | None:
        """Match a convolution as `_match_convolution` does, or one whose output is repeated over time."""
        repetition = match_repetition(node) if takes_time else None
        if repetition is None:
            return self._match_convolution(node, takes_time)
        step, repeats = repetition
        conv = self._match_convolution(step, takes_time) if set(step.users) == {node} else None
        return None if conv is None else replace(conv, inner=(*conv.inner, node), repeats=repeats)

    def _match_convolution(self, node: fx.Node, takes_time: bool | None = None) -> ConvMatch | None:
        """Match a convolution or linear layer and its BatchNorm.

        Args:
            node: The node whose value is the output.
            takes_time: Whether it has a time axis; None if that is unknown.
        """
        bn_node: fx.Node | None = None
        inner = [node]
        is_transposed = _transposes_last(node)
        if is_transposed:
            node = self._step_back(node, inner)
        module = self._get_called_module(node)
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            if not has_library_forward(module) or not module.track_running_stats or module.training:
                return None
            bn_node, node = node, self._step_back(node, inner)
            if is_transposed:
                if not _transposes_last(node):
                    return None
                node = self._step_back(node, inner)
            module = self._get_called_module(node)
        elif is_transposed:
            return None
        if len(set(inner)) < len(inner) or len(node.all_input_nodes) != 1:
            return None
        features = self._get_features(node, module, takes_time)
        if features is None:
            return None
        if bn_node is not None:
            bn = self._modules[str(bn_node.target)]
            if isinstance(bn, nn.BatchNorm2d) != (features == "map") or is_transposed != (
                features == "tokens"
            ):
                return None
        return ConvMatch(
            input=node.all_input_nodes[0],
            node=node,
            name=str(node.target),
            bn_node=bn_node,
            bn_name=None if bn_node is None else str(bn_node.target),
            inner=tuple(reversed(inner)),
            features=features,
            input_pooling=get_folded_pooling(node),
        )

    @staticmethod
    def _step_back(node: fx.Node, inner: list[fx.Node]) -> fx.Node:
        """Append the only input of `node` to `inner` and return it; or `node` itself if others read it."""
        inputs = node.all_input_nodes
        before = inputs[0] if len(inputs) == 1 and set(inputs[0].users) == {node} else node
        inner.append(before)
        return before

    def _get_features(
        self, node: fx.Node, module: nn.Module | None, takes_time: bool | None
    ) -> FeatureKind | None:
        """Return what kind of features a layer reads and writes; None if it is no plain convolution."""
        if module is None or not has_library_forward(module):
            return None
        if isinstance(module, nn.Conv2d):
            return "map" if is_plain_conv(module) and module.padding_mode == "zeros" else None
        if isinstance(module, nn.Conv1d):
            return "sequence" if module.padding_mode == "zeros" else None
        if not isinstance(module, nn.Linear):
            return None
        value = self._graph.values.get(node.name)
        rank = 0 if value is None or value.shape is None else len(value.shape)
        # A linear layer treats all leading dimensions alike; those of 3 dimensions may be time and batch.
        takes_time = rank > 2 if takes_time is None else takes_time
        kinds: dict[int, FeatureKind] = {2: "vector", 3: "tokens"}
        return kinds.get(rank - takes_time)

    def _match_sew_addition(self, neuron: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
        users = list(neuron.users)
        if len(users) != 1 or not _is_addition(users[0]) or users[0] in self._claimed:
            return neuron, ()
        other_inputs = [a for a in users[0].all_input_nodes if a is not neuron]
        if len(other_inputs) != 1 or self._get_kind(other_inputs[0]) not in SPIKE_KINDS:
            return neuron, ()
        self._claimed.add(users[0])
        return users[0], (other_inputs[0],)


def _transposes_last(node: fx.Node) -> bool:
    """Return whether the node swaps the last two dimensions."""
    is_transpose = node.op in ("call_method", "call_function") and node.target in (
        "transpose",
        torch.transpose,
    )
    return is_transpose and set(node.args[1:]) == {-1, -2}


def _is_addition(node: fx.Node) -> bool:
    targets = {"call_function": _ADDITIONS, "call_method": ("add", "add_")}
    adds = node.target in targets.get(node.op, ())
    plain = len(node.args) == 2 and not node.kwargs
    return adds and plain and all(isinstance(operand, fx.Node) for operand in node.args)


def fold_conv_match(match: ConvMatch, modules: dict[str, nn.Module]) -> tuple[torch.Tensor, torch.Tensor]:
    """Fold the eval-mode BatchNorm (if any) of a match into its convolution.

    Returns:
        float32 weight [C_out, C_in, kh, kw] and float32 bias [C_out], computed in float64. The weight shares
        the memory of the layer's own if nothing is folded into it.
    """
    conv, bn = modules[match.name], None if match.bn_name is None else modules[match.bn_name]
    assert isinstance(conv, (nn.Conv2d, nn.Conv1d, nn.Linear))
    assert bn is None or isinstance(bn, (nn.BatchNorm1d, nn.BatchNorm2d))
    weight = conv.weight.detach()
    if isinstance(conv, nn.Linear):
        if match.input_pooling is not None:
            weight = match.input_pooling.fold_weight(weight.double())
        weight = weight[:, :, None, None]
    elif isinstance(conv, nn.Conv1d):
        weight = weight.unsqueeze(-2)
    bias = torch.zeros(weight.shape[0], dtype=torch.float64, device=weight.device)
    if conv.bias is not None:
        bias = conv.bias.detach().double()
    if bn is not None:
        assert bn.running_mean is not None and bn.running_var is not None
        scale = (bn.running_var.double() + bn.eps).rsqrt()
        if bn.affine:
            scale = scale * bn.weight.detach().double()
        weight = weight.double() * scale[:, None, None, None]
        bias = (bias - bn.running_mean.double()) * scale
        if bn.affine:
            bias = bias + bn.bias.detach().double()
    return weight.float(), bias.float()


def make_group_spec(
    match: GroupMatch, modules: dict[str, nn.Module], neuron: NeuronSpec, channels: int
) -> GroupSpec:
    """Make the spec of `match` with the current weights, for a neuron layer of `channels` channels."""
    sources: list[SpikeSource] = []
    bias = torch.zeros(channels)
    for conv in (*match.sources, *match.dense_convs):
        # The neuron kernel adds all biases; in a dense convolution they would cost a GPU one more pass.
        weight, shift = fold_conv_match(conv, modules)
        bias = bias.to(shift.device) + shift
        if conv in match.sources:
            geometry = ConvGeometry.from_layer(modules[conv.name])
            padding = int(geometry.padding[0])
            sources.append(SpikeSource(weight=weight, stride=geometry.stride[0], padding=padding))
    return GroupSpec(
        sources=tuple(sources),
        bias=bias,
        neuron=neuron,
        skips=len(match.skips),
        dense_inputs=len(match.dense_convs) + len(match.dense),
        post_skips=len(match.post_skips),
        pooling=match.pooling,
    )

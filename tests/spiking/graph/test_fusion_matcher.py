"""Tests of groups: folded layers, added terms, and layers that stay outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn.utils import parametrizations

pytest.importorskip("spikingjelly")

from spikingjelly.activation_based import layer, neuron

from sparseflow.spiking.backends.spec import NeuronSpec
from sparseflow.spiking.graph.analysis import analyze
from sparseflow.spiking.graph.fusion_matcher import (
    ConvMatch,
    FusionMatcher,
    GroupMatch,
    fold_conv_match,
    make_group_spec,
)
from sparseflow.spiking.graph.simplification import simplify_network
from tests.spiking.families import CASES, FAMILIES
from tests.spiking.nets import Constant, Small, images, ready, small

SPEC = NeuronSpec(alpha=1.0, beta=1.0, delta=0.0, v_threshold=1.0, v_reset=0.0)


class Parts(nn.Module):
    """Layers for a forward pass on [N, 4, 6, 6], one time step per call."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.start = neuron.IFNode()
        self.a, self.b, self.c = neuron.IFNode(), neuron.IFNode(), neuron.LIFNode()
        self.conv, self.conv2, self.down = (
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(4, 4, 1),
        )
        self.bn, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.pool = nn.AvgPool2d(3, 1, 1)
        self.run = forward
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, self.start(x))


def groups(net: nn.Module, sample: Any = None) -> dict[str, GroupMatch]:
    return {group.neuron_name: group for group in FusionMatcher(analyze(net, sample)).find_groups()}


def match_groups(
    forward: Callable[[Any, torch.Tensor], torch.Tensor], change: Callable[[Any], Any] = lambda m: None
):
    net = Parts(forward)
    change(net)
    return groups(net, images(2, channels=4, size=6))


def test_small_network_has_three_groups() -> None:
    actual = groups(small(), images(3, 2))
    assert list(actual) == ["sn1", "sn2", "sn3"]
    stem, middle, last = actual.values()
    assert [(c.name, c.bn_name, c.repeats) for c in stem.dense_convs] == [("conv1", "bn1", None)]
    assert stem.sources == () and stem.name == "conv1" and stem.inputs[0].op == "placeholder"
    assert [(c.name, c.bn_name) for c in middle.sources] == [("conv2", "bn2")]
    assert middle.inputs == (stem.output,) and middle.dense_convs == ()
    assert [(c.name, c.bn_name) for c in last.sources] == [("conv3", None)]
    assert [n.name for n in middle.inner] == ["conv2", "bn2", "sn2"]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_groups_of_every_family_are_disjoint_and_end_in_their_output(name: str, mode: str) -> None:
    net, x = FAMILIES[name](mode)
    graph = analyze(net, x)
    assert graph.module is not None
    order = {node: i for i, node in enumerate(graph.module.graph.nodes)}
    used: set[Any] = set()
    for group in FusionMatcher(graph).find_groups():
        assert not used & set(group.inner)
        used |= set(group.inner)
        assert list(group.inner) == sorted(group.inner, key=order.__getitem__)
        assert group.inner[-1] is group.output and group.neuron in (None, *group.inner)
        assert not set(group.inputs) & set(group.inner)
        # Nobody else reads what the group keeps to itself.
        for node in set(group.inner) - {group.output}:
            assert set(node.users) <= set(group.inner)


def test_identity_residual_is_a_skip() -> None:
    actual = match_groups(lambda m, s: m.a(m.bn(m.conv(s)) + s))
    assert [c.name for c in actual["a"].sources] == ["conv"] and [n.name for n in actual["a"].skips] == [
        "start"
    ]


def test_strided_residual_is_a_second_source() -> None:
    actual = match_groups(lambda m, s: m.a(m.bn(m.conv(s)) + m.bn2(m.down(s))))
    assert [(c.name, c.bn_name) for c in actual["a"].sources] == [("conv", "bn"), ("down", "bn2")]
    assert actual["a"].name == "conv" and len(actual["a"].inputs) == 1


def test_residuals_stack() -> None:
    def forward(m: Any, s: torch.Tensor) -> torch.Tensor:
        b = m.b(m.conv2(s))
        return m.a(((m.conv(s) + s) + b) + m.pool(s))

    actual = match_groups(forward)["a"]
    assert [c.name for c in actual.sources] == ["conv"]
    assert [n.name for n in actual.skips] == ["start", "b"] and [n.name for n in actual.dense] == ["pool"]
    assert len(actual.inner) == 5  # the convolution, three additions, the neuron


@pytest.mark.parametrize(
    ("forward", "skips"),
    [
        (lambda m, s: m.a(m.conv(s)) + s, 1),
        (lambda m, s: torch.add(s, m.a(m.conv(s))), 1),
        (lambda m, s: m.a(m.conv(s)).add(s), 1),
        (lambda m, s: m.a(m.conv(s)) + m.pool(s), 0),
        (lambda m, s: m.a(m.conv(s)) + 1, 0),
        (lambda m, s: torch.add(m.a(m.conv(s)), s, alpha=2), 0),
    ],
)
def test_spikes_added_behind_a_neuron(forward: Any, skips: int) -> None:
    group = match_groups(forward)["a"]
    assert len(group.post_skips) == skips and (group.output is not group.neuron) == bool(skips)


def test_addition_belongs_to_one_neuron() -> None:
    actual = match_groups(lambda m, s: m.a(m.conv(s)) + m.b(m.conv2(s)))
    assert [len(actual[name].post_skips) for name in ("a", "b")].count(1) == 1


def test_neuron_with_two_readers_does_not_claim_the_addition() -> None:
    def forward(m: Any, s: torch.Tensor) -> torch.Tensor:
        a = m.a(m.conv(s))
        return m.b(m.conv2(a)) + (a + s)

    actual = match_groups(forward)
    assert actual["a"].post_skips == () and actual["a"].output is actual["a"].neuron


@pytest.mark.parametrize(
    ("forward", "change"),
    [
        pytest.param(lambda m, s: m.a(m.bn(m.conv(s) * 2)), None, id="scaled between"),
        pytest.param(lambda m, s: m.a(m.bn(m.conv(s))), lambda m: m.bn.train(), id="BatchNorm in training"),
        pytest.param(
            lambda m, s: m.a(m.bn(m.conv(s))),
            lambda m: setattr(m, "bn", nn.BatchNorm2d(4, track_running_stats=False).eval()),
            id="BatchNorm of the batch",
        ),
        pytest.param(
            lambda m, s: m.a(m.bn(m.conv(s))),
            lambda m: m.bn.register_forward_hook(lambda *a: None),
            id="hooked BatchNorm",
        ),
        pytest.param(lambda m, s: m.a(m.bn(m.conv(s)) - m.conv(s)), None, id="shared convolution"),
    ],
)
def test_unfoldable_layers_stay_outside_groups(forward: Any, change: Any) -> None:
    group = match_groups(forward, change or (lambda m: None))["a"]
    assert group.sources == () and group.dense_convs == () and len(group.dense) >= 1


def test_convolution_with_two_readers_is_not_fused() -> None:
    def forward(m: Any, s: torch.Tensor) -> torch.Tensor:
        y = m.conv(s)
        return m.a(y) + m.b(y)

    actual = match_groups(forward)
    assert actual["a"].sources == actual["b"].sources == ()
    assert [n.name for n in actual["a"].dense] == [n.name for n in actual["b"].dense] == ["conv"]


def test_tensor_added_to_itself_is_one_term() -> None:
    def forward(m: Any, s: torch.Tensor) -> torch.Tensor:
        y = m.conv(s)
        return m.a(y + y)

    assert match_groups(forward)["a"].sources == ()


def test_neuron_called_twice_has_no_group() -> None:
    assert "a" not in match_groups(lambda m, s: m.a(m.conv(m.a(s))))


def test_neuron_without_spec_has_no_group() -> None:
    actual = match_groups(lambda m, s: m.k(m.conv(s)), lambda m: setattr(m, "k", neuron.KLIFNode().eval()))
    assert "k" not in actual


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        layer.WSConv2d(4, 4, 3, padding=1),
    ],
)
def test_convolution_with_extra_computation_is_not_folded(conv: nn.Module) -> None:
    for forward in (lambda m, s: m.a(m.special(s)), lambda m, s: m.a(m.special(m.pool(s)))):
        group = match_groups(forward, lambda m: setattr(m, "special", conv.eval()))["a"]
        assert group.sources == () and group.dense_convs == ()


def test_parametrized_convolution_folds_its_computed_weight() -> None:
    conv: Any = parametrizations.weight_norm(nn.Conv2d(2, 3, 3))
    weight, _ = fold(conv)
    assert torch.equal(weight, conv.weight.detach())


# --- a time-constant input ----------------------------------------------------------------------------------


def test_constant_input_is_convolved_once() -> None:
    graph = simplify_network(analyze(ready(Constant()), images(2)))
    (group,) = (group for group in FusionMatcher(graph).find_groups() if group.neuron_name == "sn1")
    (conv,) = group.dense_convs
    assert conv.repeats == 3 and graph.values[conv.input.name].shape == (1, 2, 3, 8, 8)


def fold(conv: nn.Module, bn: nn.Module | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Fold `bn` into `conv`, as the match of both does."""
    node = fx.Graph().placeholder("x")
    match = ConvMatch(input=node, node=node, name="conv", bn_name=None if bn is None else "bn")
    return fold_conv_match(match, {"conv": conv} if bn is None else {"conv": conv, "bn": bn})


# --- arithmetic ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_folding_is_exact_to_float32(norm: bool, bias: bool, affine: bool) -> None:
    torch.manual_seed(0)
    conv, bn = nn.Conv2d(3, 5, 3, bias=bias), nn.BatchNorm2d(5, affine=affine).eval()
    assert bn.running_mean is not None and bn.running_var is not None
    bn.running_mean.normal_()
    bn.running_var.uniform_(0.01, 9)
    if affine:
        nn.init.normal_(bn.weight)
        nn.init.normal_(bn.bias)
    weight, shift = fold(conv, bn if norm else None)
    assert weight.dtype == shift.dtype == torch.float32 and not weight.requires_grad
    x = torch.randn(2, 3, 7, 7, dtype=torch.float64)
    y = conv.double()(x)
    expected = bn.double()(y) if norm else y
    actual = torch.nn.functional.conv2d(x, weight.double(), shift.double())
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(conv.float().weight, conv.weight)


@pytest.mark.parametrize(("padding", "pixels"), [("same", 1), ("valid", 0), (1, 1), (0, 0)])
def test_padding_in_words_is_padding_in_pixels(padding: Any, pixels: int) -> None:
    net = small()
    net.conv2 = layer.Conv2d(6, 6, 3, padding=padding, step_mode="m").eval()
    graph = analyze(net, images(3, 2))
    match = {g.neuron_name: g for g in FusionMatcher(graph).find_groups()}["sn2"]
    spec = make_group_spec(match, dict(net.named_modules()), SPEC, 6)
    assert spec.sources[0].padding == pixels and spec.sources[0].stride == 1


def test_group_spec_counts_all_terms() -> None:
    net = Parts(lambda m, s: m.a((m.bn(m.conv(s)) + s) + m.pool(s)) + s)
    match = groups(net, images(2, channels=4, size=6))["a"]
    spec = make_group_spec(match, dict(net.named_modules()), SPEC, 4)
    assert (len(spec.sources), spec.skips, spec.dense_inputs, spec.post_skips) == (1, 1, 1, 1)
    assert torch.equal(spec.bias, fold(net.conv, net.bn)[1])


def test_only_a_traced_network_has_groups() -> None:
    from tests.spiking.nets import Opaque, ready

    with pytest.raises(ValueError):
        FusionMatcher(analyze(ready(Opaque()), images(3, 2)))


def test_small_networks_fire() -> None:
    """The networks of these tests are neither silent nor saturated."""
    for make in (neuron.IFNode, neuron.LIFNode, lambda: neuron.ParametricLIFNode(init_tau=2.0)):
        net = small(make=make)
        rates: list[float] = []
        for name in ("sn1", "sn2", "sn3"):
            net.get_submodule(name).register_forward_hook(
                lambda m, i, o, rates=rates: rates.append(o.mean().item())
            )
        with torch.no_grad():
            net(images(3, 2))
        assert len(rates) == 3 and all(0.02 < rate < 0.9 for rate in rates), rates
    assert isinstance(net, Small)

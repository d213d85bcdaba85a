"""Spiking ResNets: shapes, step modes, tracing, where activations are binary."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from sparseflow.core import extras
from sparseflow.errors import InputError, MissingExtraError
from sparseflow.spiking.models.spiking_resnet import (
    DEPTHS,
    SpikingResNet,
    spiking_resnet,
)

pytest.importorskip("spikingjelly")
from spikingjelly.activation_based import functional, neuron


class LeafTracer(fx.Tracer):
    """Stops at spikingjelly's modules."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).__module__.startswith("spikingjelly") or super().is_leaf_module(
            m, module_qualified_name
        )


def firing(**kwargs: object) -> SpikingResNet:
    """A small network in eval mode whose BN was scaled up until every layer fires."""
    torch.manual_seed(0)
    net = spiking_resnet(**{"depth": 18, "width": 4, "T": 3, **kwargs})  # pyright: ignore[reportArgumentType]
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.constant_(module.weight, 2.5)
            module.momentum = None
    with torch.no_grad():
        for _ in range(3):
            net(torch.randn(4, 3, 16, 16))
            functional.reset_net(net)
    return net.eval()


def run(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    functional.reset_net(net)
    with torch.no_grad():
        return net(x)


@pytest.mark.parametrize("residual", ["spiking", "sew_add"])
@pytest.mark.parametrize("depth", sorted(DEPTHS))
def test_every_depth_builds_and_runs(depth: int, residual: str) -> None:
    net = firing(depth=depth, width=2, T=2, residual=residual, num_classes=7)
    assert run(net, torch.randn(2, 3, 9, 11)).shape == (2, 7)


@pytest.mark.parametrize(("depth", "convs"), [(18, 20), (34, 36), (50, 53), (101, 104), (152, 155)])
def test_depth_counts_convolutions(depth: int, convs: int) -> None:
    net = spiking_resnet(depth, width=2)
    assert sum(isinstance(m, nn.Conv2d) for m in net.modules()) == convs


def test_width_64_resnet18_has_the_usual_parameters() -> None:
    # ResNet-18's 11,173,962 for a 3x3 stem and 10 classes; neurons have none.
    assert sum(p.numel() for p in spiking_resnet(18).parameters()) == 11_173_962


@pytest.mark.parametrize("stem_once", [False, True])
def test_constant_image_equals_its_repeated_sequence(stem_once: bool) -> None:
    plain = firing()
    net = spiking_resnet(18, width=4, T=3, stem_once=stem_once).eval()
    net.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 16, 16)
    out = run(net, x)
    assert out.abs().sum() > 0
    torch.testing.assert_close(out, run(plain, x.unsqueeze(0).repeat(3, 1, 1, 1, 1)), rtol=1e-5, atol=1e-6)


def test_sequence_may_change_over_time() -> None:
    net = firing()
    x = torch.randn(3, 2, 3, 16, 16)
    assert not torch.equal(run(net, x), run(net, x[:1].repeat(3, 1, 1, 1, 1)))


def test_stem_once_refuses_a_changing_sequence() -> None:
    with pytest.raises(RuntimeError):
        run(firing(stem_once=True), torch.randn(3, 2, 3, 16, 16))


@pytest.mark.parametrize("residual", ["spiking", "sew_add"])
def test_single_step_mode_averages_to_the_same_logits(residual: str) -> None:
    net = firing(residual=residual)
    x = torch.randn(2, 3, 16, 16)
    expected = run(net, x)
    functional.set_step_mode(net, "s")
    functional.reset_net(net)
    with torch.no_grad():
        steps = torch.stack([net(x) for _ in range(3)])
    assert steps.std(0).max() > 0
    torch.testing.assert_close(steps.mean(0), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
@pytest.mark.parametrize("residual", ["spiking", "sew_add"])
@pytest.mark.parametrize("step_mode", ["s", "m"])
@pytest.mark.parametrize("depth", [18, 50])
def test_traces_with_spikingjelly_as_leaves(depth: int, step_mode: str, residual: str, stem: str) -> None:
    net = firing(depth=depth, residual=residual, stem=stem)
    functional.set_step_mode(net, step_mode)
    graph = LeafTracer().trace(net)
    traced = fx.GraphModule(net, graph)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(run(traced, x), run(net, x), rtol=0, atol=0)
    called = {n.target for n in graph.nodes if n.op == "call_module"}
    assert called >= {name for name, m in net.named_modules() if isinstance(m, neuron.BaseNode)}


@pytest.mark.parametrize(("residual", "binary"), [("spiking", True), ("sew_add", False)])
def test_convolution_inputs_are_spikes(residual: str, binary: bool) -> None:
    net = firing(residual=residual)
    fed: list[torch.Tensor] = []
    for name, module in net.named_modules():
        if isinstance(module, nn.Conv2d) and name != "conv1":
            module.register_forward_pre_hook(lambda m, inputs: fed.append(inputs[0]))
    run(net, torch.randn(4, 3, 16, 16))
    values = torch.cat([x.flatten() for x in fed]).unique()
    assert torch.equal(values, values.round())
    assert (values.max() == 1) == binary


def test_neuron_factory_is_used_for_every_neuron() -> None:
    net = spiking_resnet(18, width=2, neuron=lambda: neuron.IFNode(step_mode="m"))
    actual = [m for m in net.modules() if isinstance(m, neuron.BaseNode)]
    assert len(actual) == 17
    assert all(type(m) is neuron.IFNode for m in actual)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"depth": 20}, r"`depth` \(=20\)"),
        ({"stem": "mnist"}, r"`stem` \(='mnist'\)"),
        ({"residual": "and"}, r"`residual` \(='and'\)"),
        ({"width": 0}, r"`width` \(=0\)"),
        ({"T": 0}, r"`T` \(=0\)"),
        ({"num_classes": -1}, r"`num_classes` \(=-1\)"),
    ],
)
def test_bad_arguments_are_named(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        spiking_resnet(**kwargs)  # pyright: ignore[reportArgumentType]


def test_missing_spikingjelly_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"sparseflow\[spiking\]"):
        spiking_resnet(18, width=2)

"""Small, firing networks of all thirteen spikingjelly model families.

`FAMILIES[name](step_mode)` gives a network in eval mode and an input for it; `CASES` lists every family with
the step modes that it has. Weights are random but the same each time; BatchNorm has seen a few batches, so
that the networks fire.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")

from spikingjelly.activation_based import functional, layer, neuron

Family = Callable[[str], tuple[nn.Module, torch.Tensor]]
FAMILIES: dict[str, Family] = {}
STEP_MODES: dict[str, tuple[str, ...]] = {}
STEPS = 2


@contextmanager
def _torchvision() -> Iterator[None]:
    """Let spikingjelly's model modules import, with torchvision, a broken one, or none.

    They import one download function. If torchvision is not installed, a stub replaces it during the import
    only; if it was built for another torch, its missing operators are declared.
    """
    if importlib.util.find_spec("torchvision") is not None:
        try:
            import torchvision  # noqa: F401
        except RuntimeError:
            library = torch.library.Library("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        yield
        return
    names = ("torchvision", "torchvision.models", "torchvision.models.utils")
    stand_ins = {name: ModuleType(name) for name in names}
    stand_ins[names[-1]].load_state_dict_from_url = None  # type: ignore[attr-defined]
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)


def _model(name: str) -> Any:
    with _torchvision():
        return importlib.import_module(f"spikingjelly.activation_based.model.{name}")


def _family(name: str, modes: tuple[str, ...]) -> Callable[[Family], Family]:
    def register(build: Family) -> Family:
        def seeded(step_mode: str) -> tuple[nn.Module, torch.Tensor]:
            assert step_mode in modes, f"{name} has no step mode {step_mode!r}"
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return build(step_mode)

        FAMILIES[name], STEP_MODES[name] = seeded, modes
        return seeded

    return register


def fire(
    net: nn.Module, sample: torch.Tensor, step_mode: str, gain: float = 2.5
) -> tuple[nn.Module, torch.Tensor]:
    """Calibrate BatchNorm on a few random batches; leave the network in eval mode at rest.

    `gain` becomes BatchNorm's weight: thresholds are at 1 to 2 for inputs of variance one.
    """
    if step_mode == "m":
        functional.set_step_mode(net, "m")
    net.eval()
    norms = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        # No momentum: the running statistics are the mean over the batches shown below.
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
        nn.init.constant_(norm.weight, gain)
    with torch.no_grad():
        for _ in range(2):
            functional.reset_net(net)
            net(torch.rand_like(sample))
    for norm in norms:
        norm.momentum = 0.1
    functional.reset_net(net)
    return net.eval(), sample


def _louder(net: nn.Module, factor: float) -> None:
    """Scale the weights of linear layers, which no BatchNorm follows."""
    for module in net.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(factor)


def _input(step_mode: str, channels: int = 3, size: int = 32, images: int = 2) -> torch.Tensor:
    shape = (images, channels, size, size)
    return torch.rand(STEPS, *shape) if step_mode == "m" else torch.rand(shape)


@_family("spiking_resnet", ("s", "m"))
def spiking_resnet(step_mode: str) -> tuple[nn.Module, torch.Tensor]:
    """Residuals are added before the second neuron of a block."""
    family = _model("spiking_resnet")
    net = family.SpikingResNet(family.BasicBlock, [1, 1, 1, 1], num_classes=4, spiking_neuron=neuron.IFNode)
    return fire(net, _input(step_mode), step_mode)


@_family("sew_resnet", ("s", "m"))
def sew_resnet(step_mode: str) -> tuple[nn.Module, torch.Tensor]:
    """Residuals are added to spikes, so values are small integers."""
    return sew(step_mode, "ADD")


def sew(step_mode: str, cnf: str) -> tuple[nn.Module, torch.Tensor]:
    """A SEW ResNet with the given connection: 'ADD', 'AND' or 'IAND'."""
    family = _model("sew_resnet")
    net = family.SEWResNet(
        family.BasicBlock, [2, 1, 1, 1], num_classes=4, cnf=cnf, spiking_neuron=neuron.LIFNode, tau=1.5
    )
    return fire(net, _input(step_mode), step_mode)


@_family("ms_resnet", ("m",))
def ms_resnet(step_mode: str) -> tuple[nn.Module, torch.Tensor]:
    """Residuals are membranes: no convolution reads a sum."""
    net = _model("ms_resnet").MSResNet(T=STEPS, num_classes=4, layers=(1, 1, 1), base_channels=8)
    return fire(net, _input("s"), step_mode)


@_family("spiking_vgg", ("s", "m"))
def spiking_vgg(step_mode: str) -> tuple[nn.Module, torch.Tensor]:
    """Convolutions between max pools; its fixed classifier of 120 M weights is swapped for a small one."""
    with torch.device("meta"):
        net = _model("spiking_vgg").SpikingVGG(
            [8, "M", 16, "M", 16], batch_norm=True, init_weights=False, spiking_neuron=neuron.IFNode
        )
    net.features.to_empty(device="cpu")
    for module in net.features:
        if isinstance(module, (nn.Conv2d, nn.BatchNorm2d)):
            module.reset_parameters()
    net.classifier = nn.Sequential(
        layer.Linear(16 * 7 * 7, 32), neuron.IFNode(), layer.Dropout(), layer.Linear(32, 4)
    )
    _louder(net, 4.0)
    return fire(net, _input(step_mode), step_mode)


@_family("parametric_lif_net", ("s", "m"))
def parametric_lif_net(step_mode: str) -> tuple[nn.Module, torch.Tensor]:
    """Trainable time constants."""
    net = _model("parametric_lif_net").MNISTNet(
        channels=8, spiking_neuron=neuron.ParametricLIFNode, init_tau=2.0
    )
    _louder(net, 6.0)
    return fire(net, _input(step_mode, channels=1, size=28), step_mode)


@_family("spikformer", ("m",))
def spikformer(step_mode: str) -> tuple[nn.Module, torch.Tensor]:
    """Convolutions inside SeqToANNContainer, then attention."""
    net = _model("spikformer").Spikformer(
        T=STEPS,
        img_size_h=32,
        img_size_w=32,
        patch_size=4,
        num_classes=4,
        embed_dims=32,
        num_heads=4,
        depths=1,
    )
    return fire(net, _input("s"), step_mode)


@_family("qkformer", ("m",))
def qkformer(step_mode: str) -> tuple[nn.Module, torch.Tensor]:
    """Spikes are added to spikes in every block."""
    net = _model("qkformer").QKFormer(
        T=STEPS, num_classes=4, embed_dims=32, num_heads=(2, 2, 2), depths=(1, 1, 1)
    )
    return fire(net, _input("s"), step_mode)


@_family("spike_driven_transformer", ("m",))
def spike_driven_transformer(step_mode: str) -> tuple[nn.Module, torch.Tensor]:
    """Attention by masking: spikes times spikes."""
    net = _model("spike_driven_transformer").SpikeDrivenTransformer(
        T=STEPS, num_classes=4, embed_dims=32, num_heads=4, depths=1, pooling_stat="0011"
    )
    return fire(net, _input("s"), step_mode)


@_family("maxformer", ("m",))
def maxformer(step_mode: str) -> tuple[nn.Module, torch.Tensor]:
    """Depthwise convolutions beside ordinary ones."""
    net = _model("maxformer").MaxFormer(T=STEPS, num_classes=4, embed_dims=32, depths=(1, 1, 1))
    return fire(net, _input("s"), step_mode)


@_family("masnn", ("m",))
def masnn(step_mode: str) -> tuple[nn.Module, torch.Tensor]:
    """Average pooling and attention before each neuron."""
    net = _model("masnn").MASNN(
        T=STEPS,
        num_classes=4,
        input_size=(16, 16),
        channels=(8, 8, 8),
        fc_hidden=16,
        reduction_t=2,
        reduction_c=2,
    )
    return fire(net, _input("m", channels=2, size=16), step_mode)


@_family("snas_net", ("s",))
def snas_net(step_mode: str) -> tuple[nn.Module, torch.Tensor]:
    """A loop over time steps inside the network; cells of searched operations."""
    return snas(step_mode, "forward")


def snas(step_mode: str, celltype: str) -> tuple[nn.Module, torch.Tensor]:
    """A SNASNet with 'forward' cells, or 'backward' ones, which carry activations to the next time step."""
    args = SimpleNamespace(
        timestep=STEPS, second_avgpooling=4, dataset="cifar100", celltype=celltype, threshold=1.0, tau=4 / 3
    )
    connections = torch.tensor([[0, 3, 2, 0], [4, 0, 1, 3], [3, 1, 0, 4], [2, 3, 1, 0]])
    net = _model("snas_net").SNASNet(args, connections)
    _louder(net, 20.0)
    return fire(net, _input("s", images=1), step_mode)


@_family("spike_dhs", ("m",))
def spike_dhs(step_mode: str) -> tuple[nn.Module, torch.Tensor]:
    """Three branches a layer, of which one runs; nearest-neighbour resizing between cells."""
    family = _model("spike_dhs")
    args = SimpleNamespace(fea_step=3, fea_num_layers=6, fea_block_multiplier=3, fea_filter_multiplier=4)
    net = family.SpikeDHS(args=args)
    net.feature.auxiliary_head = None
    net.classifier = family.SpikingLinear(48, 4, spiking=False)
    return fire(net, _input("s", size=16), step_mode)


@_family("spiking_vggws_ottt", ("s",))
def spiking_vggws_ottt(step_mode: str) -> tuple[nn.Module, torch.Tensor]:
    """Weight-standardised convolutions of scaled spikes, trained online."""
    net = _model("spiking_vggws_ottt").OTTTSpikingVGG(
        [16, 32, "A", 512], num_classes=4, weight_standardization=True, spiking_neuron=neuron.OTTTLIFNode
    )
    for module in net.modules():
        if isinstance(module, layer.WSConv2d) and module.gain is not None:
            nn.init.constant_(module.gain, 6.0)
    return fire(net, _input(step_mode), step_mode)


CASES = [(name, mode) for name, modes in STEP_MODES.items() for mode in modes]

BY_VALUE = {"masnn", "ms_resnet", "spiking_vggws_ottt"}
"""Families whose convolutions read real numbers, so that no weights make their sums exact."""

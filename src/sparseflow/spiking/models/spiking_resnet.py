"""Spiking ResNets built from spikingjelly layers.

Two kinds of residual connections are supported:

* ``"spiking"``: the residual is added to the current *before* the block's last neuron, so all activations
  between convolutions are binary (SpikingResNet, Zheng et al., arXiv 2011.05280).
* ``"sew_add"``: the residual is added to the spikes *after* the last neuron, so activations are small
  integers (SEW-ResNet with ADD, Fang et al., arXiv 2102.04159).

``forward`` does not depend on data or shapes, so torch.fx traces a network with the spikingjelly layers and
neurons as leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from sparseflow.core import extras
from sparseflow.core.checks import check_at_least, check_one_of

Stem = Literal["cifar", "imagenet"]
Residual = Literal["spiking", "sew_add"]
NeuronFactory = Callable[[], nn.Module]

DEPTHS: dict[int, tuple[bool, tuple[int, int, int, int]]] = {
    18: (False, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
    101: (True, (3, 4, 23, 3)),
    152: (True, (3, 8, 36, 3)),
}
"""Depth -> (bottleneck blocks?, blocks in each of the four stages)."""


def _import_layers() -> Any:
    return extras.require("spikingjelly.activation_based.layer", "spiking")


def lif_neuron(*, tau: float = 2.0, v_threshold: float = 1.0) -> nn.Module:
    """A multi-step LIF neuron with hard reset to 0, detached reset and an ATan surrogate.

    Args:
        tau: Membrane time constant, in time steps; more than 1.
        v_threshold: Membrane value from which the neuron fires.

    Raises:
        MissingExtraError: spikingjelly is not installed.
    """
    extras.require("spikingjelly", "spiking")
    from spikingjelly.activation_based import neuron, surrogate

    return neuron.LIFNode(
        tau=tau,
        v_threshold=v_threshold,
        surrogate_function=surrogate.ATan(),
        detach_reset=True,
        step_mode="m",
    )


def _make_conv_bn(
    layer: Any, c_in: int, c_out: int, kernel: int, stride: int = 1
) -> tuple[nn.Module, nn.Module]:
    conv = layer.Conv2d(c_in, c_out, kernel, stride=stride, padding=kernel // 2, bias=False, step_mode="m")
    return conv, layer.BatchNorm2d(c_out, step_mode="m")


class SpikingBlock(nn.Module):
    """A residual block of two 3x3 convolutions, or of 1x1, 3x3, 1x1 ones (bottleneck).

    Args:
        c_in: Input channels.
        width: Channels of the inner convolutions.
        bottleneck: Whether the block ends with a 1x1 convolution to ``4 * width`` channels.
        stride: Stride of the (first) 3x3 convolution and of the shortcut.
        residual: Kind of the residual connection; see the module's docstring.
        neuron: Creates one multi-step neuron.
    """

    def __init__(
        self,
        c_in: int,
        width: int,
        *,
        bottleneck: bool,
        stride: int,
        residual: Residual,
        neuron: NeuronFactory,
    ) -> None:
        super().__init__()
        layer = _import_layers()
        c_out = 4 * width if bottleneck else width
        self.residual = residual
        self.bottleneck = bottleneck
        if bottleneck:
            self.conv1, self.bn1 = _make_conv_bn(layer, c_in, width, 1)
            self.sn1 = neuron()
            self.conv2, self.bn2 = _make_conv_bn(layer, width, width, 3, stride)
            self.sn2 = neuron()
            self.conv3, self.bn3 = _make_conv_bn(layer, width, c_out, 1)
            self.sn3 = neuron()
        else:
            self.conv1, self.bn1 = _make_conv_bn(layer, c_in, width, 3, stride)
            self.sn1 = neuron()
            self.conv2, self.bn2 = _make_conv_bn(layer, width, c_out, 3)
            self.sn2 = neuron()
        self.downsample: nn.Module | None = None
        if stride != 1 or c_in != c_out:
            # A SEW shortcut must carry spikes, because it is added to spikes.
            last = [neuron()] if residual == "sew_add" else []
            self.downsample = nn.Sequential(*_make_conv_bn(layer, c_in, c_out, 1, stride), *last)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.sn1(self.bn1(self.conv1(x)))))
        last = self.sn2
        if self.bottleneck:
            out = self.bn3(self.conv3(self.sn2(out)))
            last = self.sn3
        if self.residual == "spiking":
            return last(out + shortcut)
        return last(out) + shortcut


class SpikingResNet(nn.Module):
    """A spiking ResNet with direct encoding; see `spiking_resnet` for the arguments.

    In step mode ``"m"`` (the default) ``forward`` takes a constant image ``[N, 3, H, W]``, presented for
    ``T`` steps, or a sequence ``[T, N, 3, H, W]``, and returns logits ``[N, num_classes]`` averaged over
    time. In step mode ``"s"`` (set by ``functional.set_step_mode``) one call is one time step: it takes
    ``[N, 3, H, W]`` and returns that step's logits; the caller loops and averages. Call
    ``functional.reset_net`` between inputs in both modes.
    """

    def __init__(
        self,
        depth: int,
        *,
        width: int,
        num_classes: int,
        T: int,
        stem: Stem,
        residual: Residual,
        neuron: NeuronFactory,
        stem_once: bool,
    ) -> None:
        super().__init__()
        layer = _import_layers()
        bottleneck, counts = DEPTHS[depth]
        self.T = T
        self.step_mode = "m"
        self.stem_once = stem_once
        kernel, stride = (3, 1) if stem == "cifar" else (7, 2)
        self.conv1, self.bn1 = _make_conv_bn(layer, 3, width, kernel, stride)
        self.sn1 = neuron()
        self.maxpool = (
            layer.MaxPool2d(3, stride=2, padding=1, step_mode="m") if stem == "imagenet" else nn.Identity()
        )
        c_in = width
        stages: list[nn.Module] = []
        for stage, count in enumerate(counts):
            blocks: list[nn.Module] = []
            for block in range(count):
                blocks.append(SpikingBlock(
                    c_in, width << stage, bottleneck=bottleneck, stride=2 if stage > 0 and block == 0 else 1,
                    residual=residual, neuron=neuron,
                ))  # fmt: skip
                c_in = (width << stage) * (4 if bottleneck else 1)
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = layer.AdaptiveAvgPool2d((1, 1), step_mode="m")
        self.flatten = layer.Flatten(1, step_mode="m")
        self.fc = layer.Linear(c_in, num_classes, step_mode="m")
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward_steps(self, x: Tensor) -> Tensor:
        """Compute the logits of each time step, ``[T, N, num_classes]``; multi-step mode only."""
        if self.stem_once:
            # expand() raises for a sequence of T > 1: only a constant input can be shared.
            x = self.bn1(self.conv1(x.expand(1, -1, -1, -1, -1))).expand(self.T, -1, -1, -1, -1)
        else:
            # On a 4-D image this repeats it T times; on a 5-D sequence of T steps it does nothing.
            x = self.bn1(self.conv1(x.expand(self.T, -1, -1, -1, -1)))
        return self._run_body(x)

    def _run_body(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.sn1(x))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.flatten(self.avgpool(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.step_mode == "s":
            return self._run_body(self.bn1(self.conv1(x)))
        return self.forward_steps(x).mean(0)


def spiking_resnet(
    depth: int = 18,
    *,
    width: int = 64,
    num_classes: int = 10,
    T: int = 4,
    stem: Stem = "cifar",
    residual: Residual = "spiking",
    neuron: NeuronFactory = lif_neuron,
    stem_once: bool = False,
) -> SpikingResNet:
    """Build a spiking ResNet with fresh weights.

    Args:
        depth: 18, 34, 50, 101 or 152.
        width: Channels of the stem and of the first stage; each later stage doubles them.
        num_classes: Number of outputs.
        T: Time steps.
        stem: ``"cifar"`` (3x3, stride 1) or ``"imagenet"`` (7x7, stride 2, then max pooling).
        residual: ``"spiking"`` or ``"sew_add"``; see the module's docstring.
        neuron: Creates one multi-step neuron; called once per neuron layer.
        stem_once: Compute the first convolution and its BN once for a constant image instead of ``T``
            times. The result is the same; the input must then be ``[N, 3, H, W]`` and the step mode
            ``"m"``.

    Raises:
        InputError: An argument is out of range.
        MissingExtraError: spikingjelly is not installed.
    """
    check_one_of(DEPTHS, depth=depth)
    check_one_of(("cifar", "imagenet"), stem=stem)
    check_one_of(("spiking", "sew_add"), residual=residual)
    check_at_least(1, width=width, num_classes=num_classes, T=T)
    return SpikingResNet(
        depth, width=width, num_classes=num_classes, T=T, stem=stem, residual=residual, neuron=neuron,
        stem_once=stem_once,
    )  # fmt: skip

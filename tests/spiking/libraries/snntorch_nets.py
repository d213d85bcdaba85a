"""Networks in the idioms of snnTorch's tutorials and of its users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("snntorch")

import snntorch
from snntorch import surrogate

MakeNeuron = Callable[..., nn.Module]


def make_leaky(**options: Any) -> nn.Module:
    return snntorch.Leaky(**{"beta": 0.5, "spike_grad": surrogate.fast_sigmoid(), **options})


class FullyConnected(nn.Module):
    """Tutorial 5: a constant input, explicit membranes, spikes and membranes of the last layer recorded."""

    def __init__(self, num_steps: int = 5, make: MakeNeuron = make_leaky) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.fc1, self.lif1 = nn.Linear(20, 40), make()
        self.fc2, self.lif2 = nn.Linear(40, 10), make()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mem1: Any = self.lif1.init_leaky()  # type: ignore[operator]
        mem2: Any = self.lif2.init_leaky()  # type: ignore[operator]
        spk2_rec, mem2_rec = [], []
        for _ in range(self.num_steps):
            spk1, mem1 = self.lif1(self.fc1(x), mem1)
            spk2, mem2 = self.lif2(self.fc2(spk1), mem2)
            spk2_rec.append(spk2)
            mem2_rec.append(mem2)
        return torch.stack(spk2_rec, dim=0), torch.stack(mem2_rec, dim=0)


class Convolutional(nn.Module):
    """Tutorial 6 as a class: 5x5 convolutions, functional pooling, one input per step or a constant one."""

    def __init__(self, num_steps: int = 4, make: MakeNeuron = make_leaky) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.conv1, self.lif1 = nn.Conv2d(1, 12, 5), make()
        self.conv2, self.lif2 = nn.Conv2d(12, 16, 5), make()
        self.fc1, self.lif3 = nn.Linear(16 * 4 * 4, 10), make()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mem1: Any = self.lif1.reset_mem()  # type: ignore[operator]
        mem2: Any = self.lif2.reset_mem()  # type: ignore[operator]
        mem3: Any = self.lif3.reset_mem()  # type: ignore[operator]
        spikes = []
        for step in range(self.num_steps):
            image = x[step] if x.dim() == 5 else x
            spk1, mem1 = self.lif1(F.max_pool2d(self.conv1(image), 2), mem1)
            spk2, mem2 = self.lif2(F.max_pool2d(self.conv2(spk1), 2), mem2)
            spk3, mem3 = self.lif3(self.fc1(spk2.view(image.size(0), -1)), mem3)
            spikes.append(spk3)
        return torch.stack(spikes), mem3


class OneStep(nn.Module):
    """The example of `Leaky`'s documentation: the caller passes the membranes and gets them back."""

    def __init__(self, make: MakeNeuron = make_leaky) -> None:
        super().__init__()
        self.fc1, self.lif1 = nn.Linear(20, 40), make()
        self.fc2, self.lif2 = nn.Linear(40, 10), make()

    def forward(self, x: Tensor, mem1: Tensor, mem2: Tensor) -> tuple[Tensor, ...]:
        spk1, mem1 = self.lif1(self.fc1(x), mem1)
        spk2, mem2 = self.lif2(self.fc2(spk1), mem2)
        return mem1, spk1, mem2, spk2


def make_sequential(make: MakeNeuron = make_leaky) -> nn.Sequential:
    """Tutorial 6: hidden states, called once per step."""
    return nn.Sequential(
        nn.Conv2d(1, 12, 5), nn.MaxPool2d(2), make(init_hidden=True),
        nn.Conv2d(12, 16, 5), nn.MaxPool2d(2), make(init_hidden=True),
        nn.Flatten(), nn.Linear(16 * 4 * 4, 10), make(init_hidden=True, output=True),
    )  # fmt: skip


class SpikingBlock(nn.Module):
    """A residual block with hidden states: spikes of two layers are added, as in a spiking ResNet."""

    def __init__(self, channels: int, make: MakeNeuron = make_leaky) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.lif1 = make(init_hidden=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.lif2 = make(init_hidden=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.lif1(self.bn1(self.conv1(x)))
        return self.lif2(self.bn2(self.conv2(out)) + x)


class HiddenLoop(nn.Module):
    """A spiking ResNet with hidden states that resets its neurons and loops over [T, N, 2, 12, 12]."""

    def __init__(self, make: MakeNeuron = make_leaky) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 16, 3, padding=1)
        self.lif = make(init_hidden=True)
        self.blocks = nn.Sequential(SpikingBlock(16, make), SpikingBlock(16, make))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.modules():
            if isinstance(module, snntorch.Leaky):
                module.reset_mem()
        outputs = []
        for step in range(x.shape[0]):
            spikes = self.blocks(self.lif(self.stem(x[step])))
            outputs.append(self.head(spikes.amax(dim=(2, 3))))
        return torch.stack(outputs)


def make_vgg(make: MakeNeuron = make_leaky) -> nn.Sequential:
    """A VGG with BatchNorm and hidden states."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, "M", 32, 32, "M", 64, "M"):
        if width == "M":
            layers.append(nn.MaxPool2d(2))
        else:
            convolution = nn.Conv2d(channels, int(width), 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(int(width)), make(init_hidden=True)]
            channels = int(width)
    layers += [nn.Flatten(), nn.Linear(64 * 2 * 2, 32), make(init_hidden=True)]
    return nn.Sequential(*layers, nn.Linear(32, 10), make(init_hidden=True, output=True))

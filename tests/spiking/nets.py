"""Small networks whose arithmetic is exact, and helpers to run them from rest.

`dyadic` rounds a network's weights to a few binary digits: sums are then equal in every order, and two ways
to compute a network must agree bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")

from spikingjelly.activation_based import functional, layer, neuron

from sparseflow.spiking.backends.events.backend import EventBackend
from sparseflow.spiking.graph.analysis import analyze
from sparseflow.spiking.runtime.plan import GroupStep, NodeValues, Plan, SpikeTensor

T, N = 3, 2


def dyadic(net: nn.Module) -> nn.Module:
    """Round all weights of `net` so that its sums are exact, and set leaks to one half."""
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                assert module.running_var is not None and module.running_mean is not None
                module.eps = 1e-30  # some releases of torch refuse 0; this vanishes beside any variance here
                module.running_var.copy_(4.0 ** (module.running_var.clamp_min(1e-3).log2() / 2).round())
                module.running_mean.mul_(16).round_().div_(16)
            if isinstance(module, neuron.ParametricLIFNode):
                module.w.zero_()
            elif hasattr(module, "tau") and isinstance(module.tau, float):
                setattr(module, "tau", 2.0)  # noqa: B010 - not a member of nn.Module
        for name, parameter in net.named_parameters():
            if not name.endswith(".w"):
                parameter.mul_(32).round_().div_(32)
    return net


def images(*lead: int, channels: int = 3, size: int = 8, seed: int = 0) -> torch.Tensor:
    """Random images [*lead, channels, size, size] in sixteenths."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*lead, channels, size, size, generator=generator).mul(16).round().div(16)


class Small(nn.Module):
    """Stem, 3x3 and strided 1x1 convolution, each with a neuron; mean over pixels; classifier.

    Args:
        step_mode: 'm': [T, N, 3, 8, 8] to [T, N, 5]; 's': [N, 3, 8, 8] to [N, 5].
        make: Makes a neuron.
        bias, affine: Of convolutions and BatchNorms.
    """

    def __init__(
        self,
        step_mode: str = "m",
        make: Callable[[], nn.Module] = neuron.IFNode,
        *,
        channels: int = 6,
        bias: bool = False,
        affine: bool = True,
    ) -> None:
        super().__init__()
        c = channels
        self.conv1, self.bn1 = (
            layer.Conv2d(3, c, 3, padding=1, bias=bias),
            layer.BatchNorm2d(c, affine=affine),
        )
        self.sn1 = make()
        self.conv2, self.bn2 = (
            layer.Conv2d(c, c, 3, padding=1, bias=bias),
            layer.BatchNorm2d(c, affine=affine),
        )
        self.sn2 = make()
        self.conv3 = layer.Conv2d(c, c + 2, 1, stride=2)
        self.sn3 = make()
        self.fc = layer.Linear(c + 2, 5)
        functional.set_step_mode(self, step_mode)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.sn1(self.bn1(self.conv1(x)))
        x = self.sn2(self.bn2(self.conv2(x)))
        return self.sn3(self.conv3(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.features(x).flatten(-2).mean(-1))


class Constant(Small):
    """Takes one image for all time steps; with a sequence it takes the sequence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 4:
            x = x.unsqueeze(0).repeat(T, 1, 1, 1, 1)
        return super().forward(x)


class Loop(nn.Module):
    """Runs a network in step mode 's' once for each time step of [T, N, 3, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Small("s")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.net(x[0])
        for t in range(1, x.shape[0]):
            out = out + self.net(x[t])
        return out


class Opaque(Small):
    """Branches on the values of a tensor, so it cannot be traced."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.sn1(self.bn1(self.conv1(x)))
        if x.sum() < 0:
            return x
        x = self.sn2(self.bn2(self.conv2(x)))
        return self.sn3(self.conv3(x))


def ready(net: nn.Module, *, seed: int = 0, gain: float = 3.0) -> Any:
    """`net` in eval mode at rest, with random dyadic weights at which it fires."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                fan = module.weight[0].numel()
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * gain * fan**-0.5)
            if isinstance(module, (nn.Conv2d, nn.Linear, nn.BatchNorm2d)) and module.bias is not None:
                module.bias.copy_(torch.rand(module.bias.shape, generator=generator) / 2)
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_var is not None and module.running_mean is not None
                shape = module.running_var.shape
                module.running_var.copy_(torch.rand(shape, generator=generator) * 2 + 0.1)
                module.running_mean.copy_(torch.randn(shape, generator=generator) / 8)
                if module.affine:
                    module.weight.copy_(1 + torch.rand(shape, generator=generator))
    dyadic(net)
    functional.reset_net(net)
    return net.eval()


def small(step_mode: str = "m", make: Callable[[], nn.Module] = neuron.IFNode, **options: Any) -> Any:
    return ready(Small(step_mode, make, **options))


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "plan": (small, {}),
    "static": (small, {"policy": "static"}),
    "layers": (lambda: ready(Opaque()), {}),
}
"""The three ways in which a network can be accelerated: how to build one, and the options of `optimize`."""


def numbers(net: nn.Module) -> dict[str, torch.Tensor]:
    """The state_dict of `net`, copied."""
    return {key: value.clone() for key, value in net.state_dict().items()}


def from_rest(net: nn.Module, *inputs: torch.Tensor) -> Any:
    """Reset `net` and run it without gradients."""
    # Not by `functional.reset_net`, which remembers the modules that it found the first time.
    for module in net.modules():
        if callable(reset := getattr(module, "reset", None)):
            reset()
    with torch.no_grad():
        return net(*inputs)


def membranes(net: nn.Module) -> dict[str, Any]:
    """Every membrane by module name, copied."""
    return {name: copy.deepcopy(m.v) for name, m in net.named_modules() if hasattr(m, "v")}


def planned(net: nn.Module, *inputs: torch.Tensor) -> Plan:
    """The plan of `net` on the CPU's backend; every group runs the network's own modules."""
    return Plan(analyze(net, inputs), EventBackend())


def force(plan: Plan, group_mode: str, *inputs: torch.Tensor) -> dict[str, str]:
    """Run every group of `plan` in `group_mode` where possible ('sparse' falls back to 'dense').

    Returns:
        The mode of each group. Membranes are reset.
    """

    def run_group(group: GroupStep, env: NodeValues) -> SpikeTensor:
        required = group_mode
        if (
            required == "sparse"
            and group.get_shape_mismatch(env) is None
            and group.get_unsupported_reason(env) is not None
        ):
            required = "dense"
        group.mode = "module" if group.get_shape_mismatch(env) is not None else required  # type: ignore[assignment]
        return group.run(env)

    functional.reset_net(plan.graph.model)
    with torch.no_grad():
        plan.run(*inputs, group_runner=run_group)
    plan.update_output_forms()
    functional.reset_net(plan.graph.model)
    return {group.name: group.mode for group in plan.groups}


def same(first: Any, right: Any) -> bool:
    """Compare trees of tensors bit for bit; NaN equals NaN."""
    if isinstance(first, torch.Tensor):
        if not isinstance(right, torch.Tensor) or first.shape != right.shape or first.dtype != right.dtype:
            return False
        return bool(((first == right) | ((first != first) & (right != right))).all())
    if isinstance(first, dict):
        return first.keys() == right.keys() and all(same(first[key], right[key]) for key in first)
    if isinstance(first, (tuple, list)):
        return len(first) == len(right) and all(map(same, first, right))
    return bool(first == right)

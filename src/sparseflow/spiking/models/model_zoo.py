"""Networks by name: for the command line and the benchmarks.

A name is one of

* a shipped network (`zoo.names()`), trained;
* `spiking_resnet<depth>` or `sew_resnet<depth>`, depth 18, 34, 50, 101 or 152, with random weights and its
  BatchNorm statistics set so that it fires (`make_it_fire`);
* `package.module:factory`, a callable of yours without arguments that returns a module in eval mode.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from sparseflow.core import factory
from sparseflow.errors import FileFormatError, InputError
from sparseflow.spiking.graph.module_state import reset
from sparseflow.spiking.graph.registry import is_spiking_neuron
from sparseflow.spiking.models import pretrained

_RESIDUAL = {"spiking": "spiking", "sew": "sew_add"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to build a network that does not say so itself.

    Attributes:
        steps: T.
        classes: Outputs.
        image: Height and width of its input, in pixels; up to 64 the stem is CIFAR's, above ImageNet's.
        width: Channels of the first stage.
        firing: Mean firing rate to set the network to, above 0 and below 1; None for what `make_it_fire`
            gives by itself, which is 10 to 20 %.
        seed: Of random weights and random input.
    """

    steps: int = 4
    classes: int = 10
    image: int = 32
    width: int = 64
    firing: float | None = None
    seed: int = 0


def build(
    name: str,
    settings: Settings | None = None,
    *,
    weights: Path | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """The network called `name`, in eval mode, on `device`.

    Args:
        name: See the module's text.
        settings: For networks with random weights.
        weights: A safetensors file to load instead.
        device: Random weights are drawn and set to fire there, which saves time and gives other numbers on
            another kind of device.

    Raises:
        InputError: There is no such network.
        FileFormatError: The weights do not fit.
    """
    settings = settings or Settings()
    found = re.fullmatch(r"(spiking|sew)_resnet(\d+)", name)
    if name in pretrained.names():
        model: nn.Module = pretrained.load(name)
    elif found:
        model = _random_resnet(found[1], int(found[2]), settings, torch.device(device))
    elif ":" in name:
        model = factory.build_model(name)
    else:
        raise InputError(
            f"no network is called {name!r}; there are {', '.join(pretrained.names())}, spiking_resnet18 (34, 50, "
            "101, 152), sew_resnet18 (…), or give your own as package.module:factory"
        )
    if weights is not None:
        _load(model, weights)
    return model.to(device)


def _random_resnet(residual: str, depth: int, settings: Settings, device: torch.device) -> nn.Module:
    from sparseflow.spiking.models.spiking_resnet import spiking_resnet

    x = sample(settings, 4).to(device)
    with torch.random.fork_rng(devices=[x.get_device()] if x.is_cuda else []), device:
        torch.manual_seed(settings.seed)
        net = spiking_resnet(
            depth,  # type: ignore[arg-type]
            width=settings.width,
            num_classes=settings.classes,
            T=settings.steps,
            stem="cifar" if settings.image <= 64 else "imagenet",
            residual=_RESIDUAL[residual],  # type: ignore[arg-type]
        )
    make_it_fire(net, x, firing=settings.firing)
    return net


def make_it_fire(
    net: nn.Module, x: torch.Tensor, *, gain: float = 1.6, passes: int = 3, firing: float | None = None
) -> None:
    """Give random weights the statistics of a working network: BatchNorms follow `x`, scaled by `gain`.

    Args:
        net: Changed in place and left in eval mode.
        x: Input to set the statistics from.
        gain: Standard deviation behind each BatchNorm; thresholds are usually 1.
        passes: Runs in training mode.
        firing: Mean firing rate of the neurons on `x` to aim at, to about a hundredth; it is reached by one
            bias for all BatchNorms. None leaves their biases as they are.

    Raises:
        InputError: `firing` is not above 0 and below 1.
    """
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        nn.init.constant_(norm.weight, gain)
    if firing is None:
        follow(net, x, passes=passes)
        return
    if not 0 < firing < 1:
        raise InputError(f"`firing` (={firing}) must be above 0 and below 1")
    low, high = -4 * gain, 4 * gain
    while high - low > 0.01 * gain:
        middle = (low + high) / 2
        for norm in norms:
            nn.init.constant_(norm.bias, middle)
        # Statistics are taken anew each time, or a bias would add up from layer to layer.
        follow(net, x, passes=1)
        rate = _mean_rate(net, x)
        if abs(rate - firing) < 0.005:
            break
        low, high = (middle, high) if rate < firing else (low, middle)
    follow(net, x, passes=passes)


def follow(net: nn.Module, x: torch.Tensor, *, passes: int = 3) -> None:
    """Take every BatchNorm's mean and variance from `x`, leaving weights and biases.

    Args:
        net: Changed in place and left in eval mode, at rest.
        x: Input.
        passes: Runs in training mode that are averaged.
    """
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # a plain average over the passes
            module.reset_running_stats()
    net.train()
    with torch.no_grad():
        for _ in range(passes):
            reset(net)
            net(x)
    reset(net)
    net.eval()


def _mean_rate(net: nn.Module, x: torch.Tensor) -> float:
    """Mean over neurons of the fraction of their outputs that fire, from rest to rest."""
    rates: list[torch.Tensor] = []
    handles = [
        module.register_forward_hook(lambda _, args, out: rates.append((out != 0).float().mean()))
        for module in net.modules()
        if is_spiking_neuron(module)
    ]
    try:
        reset(net)
        with torch.no_grad():
            net(x)
    finally:
        for handle in handles:
            handle.remove()
    reset(net)
    return torch.stack(rates).mean().item()


def sample(settings: Settings, batch: int) -> torch.Tensor:
    """Random images, float32 [batch, 3, image, image], smooth as photographs are rather than white noise."""
    generator = torch.Generator().manual_seed(settings.seed)
    coarse = torch.randn(
        batch, 3, max(2, settings.image // 4), max(2, settings.image // 4), generator=generator
    )
    size = (settings.image, settings.image)
    return nn.functional.interpolate(coarse, size=size, mode="bilinear", align_corners=False)


def _load(model: nn.Module, weights: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        model.load_state_dict(load_file(weights))
    except FileNotFoundError as error:
        raise InputError(f"there is no file {weights}") from error
    except (SafetensorError, RuntimeError) as error:
        raise FileFormatError(f"{weights} does not fit {type(model).__name__}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Case:
    """One network and input of a grid.

    Attributes:
        model: See the module's text.
        settings: How to build it, where it does not say so itself.
        batch: Images.
    """

    model: str
    settings: Settings
    batch: int

    @property
    def name(self) -> str:
        s = self.settings
        if self.model in pretrained.names():
            return f"{self.model}, batch {self.batch}"
        shape = f"width {s.width}, {s.image}x{s.image}, {s.classes} classes, T {s.steps}"
        firing = "" if s.firing is None else f", firing {100 * s.firing:g} %"
        return f"{self.model}, {shape}{firing}, batch {self.batch}"

    def build(
        self, weights: Path | None = None, *, device: torch.device | str = "cpu"
    ) -> tuple[nn.Module, torch.Tensor, torch.Tensor | None]:
        """The network, one batch, and its labels where they are known, all on `device`."""
        model = build(self.model, self.settings, weights=weights, device=device)
        if self.model not in pretrained.names():
            return model, sample(self.settings, self.batch).to(device), None
        pixels, labels = pretrained.images()
        times = -(-self.batch // len(pixels))
        x = pretrained.normalize(pixels, self.model).repeat(times, 1, 1, 1)[: self.batch]
        known = torch.from_numpy(labels).repeat(times)[: self.batch]
        return model, x.to(device), known.to(device)

"""Networks by name: for the command line and the benchmarks.

A name is one of

* a shipped network (`zoo.names()`), trained;
* `spiking_resnet<depth>` or `sew_resnet<depth>`, depth 18, 34, 50, 101 or 152, with random weights and its
  BatchNorm statistics set so that it fires (`make_it_fire`);
* `package.module:factory`, a callable of yours without arguments that returns a module in eval mode.
"""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from sparseflow.errors import FileFormatError, InputError, ModelError
from sparseflow.spiking import zoo

_RESIDUAL = {"spiking": "spiking", "sew": "sew_add"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to build a network that does not say so itself.

    Attributes:
        steps: T.
        classes: Outputs.
        image: Height and width of its input, in pixels; up to 64 the stem is CIFAR's, above ImageNet's.
        width: Channels of the first stage.
        seed: Of random weights and random input.
    """

    steps: int = 4
    classes: int = 10
    image: int = 32
    width: int = 64
    seed: int = 0


def build(name: str, settings: Settings | None = None, *, weights: Path | None = None) -> nn.Module:
    """The network called `name`, in eval mode, on the CPU.

    Args:
        name: See the module's text.
        settings: For networks with random weights.
        weights: A safetensors file to load instead.

    Raises:
        InputError: There is no such network.
        FileFormatError: The weights do not fit.
    """
    settings = settings or Settings()
    found = re.fullmatch(r"(spiking|sew)_resnet(\d+)", name)
    if name in zoo.names():
        model: nn.Module = zoo.load(name)
    elif found:
        model = _random_resnet(found[1], int(found[2]), settings)
    elif ":" in name:
        model = _from_factory(name)
    else:
        raise InputError(
            f"no network is called {name!r}; there are {', '.join(zoo.names())}, spiking_resnet18 (34, 50, "
            "101, 152), sew_resnet18 (…), or give your own as package.module:factory"
        )
    if weights is not None:
        _load(model, weights)
    return model


def _random_resnet(residual: str, depth: int, settings: Settings) -> nn.Module:
    from sparseflow.spiking.networks import spiking_resnet

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        net = spiking_resnet(
            depth,  # type: ignore[arg-type]
            width=settings.width,
            num_classes=settings.classes,
            T=settings.steps,
            stem="cifar" if settings.image <= 64 else "imagenet",
            residual=_RESIDUAL[residual],  # type: ignore[arg-type]
        )
        make_it_fire(net, sample(settings, 4))
    return net


def make_it_fire(net: nn.Module, x: torch.Tensor, *, gain: float = 1.6, passes: int = 3) -> None:
    """Give random weights the statistics of a working network: BatchNorms follow `x`, scaled by `gain`.

    Args:
        net: Changed in place and left in eval mode.
        x: Input to set the statistics from.
        gain: Standard deviation behind each BatchNorm; thresholds are usually 1.
        passes: Runs in training mode.
    """
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        nn.init.constant_(norm.weight, gain)
        norm.momentum = None  # a plain average over the passes
        norm.reset_running_stats()
    net.train()
    with torch.no_grad():
        for _ in range(passes):
            for module in net.modules():
                if callable(getattr(module, "reset", None)):
                    module.reset()  # type: ignore[operator]
            net(x)
    for module in net.modules():
        if callable(getattr(module, "reset", None)):
            module.reset()  # type: ignore[operator]
    net.eval()


def sample(settings: Settings, batch: int) -> torch.Tensor:
    """Random images, float32 [batch, 3, image, image], smooth as photographs are rather than white noise."""
    generator = torch.Generator().manual_seed(settings.seed)
    coarse = torch.randn(
        batch, 3, max(2, settings.image // 4), max(2, settings.image // 4), generator=generator
    )
    size = (settings.image, settings.image)
    return nn.functional.interpolate(coarse, size=size, mode="bilinear", align_corners=False)


def _from_factory(name: str) -> nn.Module:
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"{name!r} cannot be imported: {error}") from error
    if not callable(factory):
        raise InputError(f"{name!r} is a {type(factory).__name__}, not a function that makes a network")
    model = factory()
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


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
        if self.model in zoo.names():
            return f"{self.model}, batch {self.batch}"
        shape = f"width {s.width}, {s.image}x{s.image}, {s.classes} classes, T {s.steps}"
        return f"{self.model}, {shape}, batch {self.batch}"

    def build(self, weights: Path | None = None) -> tuple[nn.Module, torch.Tensor, torch.Tensor | None]:
        """The network, one batch, and its labels where they are known."""
        model = build(self.model, self.settings, weights=weights)
        if self.model not in zoo.names():
            return model, sample(self.settings, self.batch), None
        pixels, labels = zoo.images()
        times = -(-self.batch // len(pixels))
        x = zoo.normalize(pixels, self.model).repeat(times, 1, 1, 1)[: self.batch]
        return model, x, torch.from_numpy(labels).repeat(times)[: self.batch]

"""Networks by name, for the command line and the benchmarks.

A name is one of

* a pretrained network (`pretrained.list_names()`);
* `spiking_resnet<depth>` or `sew_resnet<depth>`, depth 18, 34, 50, 101 or 152, with random weights and
  BatchNorm statistics calibrated so that it fires (`calibrate_firing`);
* `package.module:factory` or `path/to/file.py:factory`, a function or a class that returns a module.

`resnet18` is short for `spiking_resnet18`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from sparseflow.core import factory
from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError, InputError
from sparseflow.spiking.graph.module_state import reset_neurons
from sparseflow.spiking.graph.registry import is_spiking_neuron
from sparseflow.spiking.models import pretrained
from sparseflow.spiking.models.network_inputs import InputConfig, read_tensor_file

StepMode = Literal["s", "m"]

_RANDOM_RESNET = re.compile(r"(?:(spiking|sew)_)?resnet(18|34|50|101|152)")
_CHECKPOINT_KEYS = ("state_dict", "model", "net", "model_state_dict")
"""Names of the weights in a checkpoint that also contains other data."""
_RESIDUAL = {"spiking": "spiking", "sew": "sew_add"}


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Configuration of a network with random weights.

    Attributes:
        time_steps: T.
        num_classes: Number of outputs.
        image_size: Height and width of the input, in pixels; up to 64 the stem is CIFAR's, above ImageNet's.
        width: Channels of the first stage.
        firing_rate: Mean firing rate to calibrate to, above 0 and below 1; None for the default of
            `calibrate_firing`, 10 to 20 %.
        seed: Seed of random weights and random input.
    """

    time_steps: int = 4
    num_classes: int = 10
    image_size: int = 32
    width: int = 64
    firing_rate: float | None = None
    seed: int = 0


def check_network_name(name: str, arguments: Mapping[str, Any] | None = None) -> None:
    """Check that `build_network` knows the name, without building the network.

    Raises:
        InputError: The name is unknown or has no arguments, or its factory cannot be imported.
    """
    if arguments and ":" not in name:
        raise InputError(f"{name} has no argument {next(iter(arguments))!r}; only factories have arguments")
    if ":" in name:
        factory.import_factory(name)
    elif name not in pretrained.list_names() and not _RANDOM_RESNET.fullmatch(name):
        raise InputError(
            f"unknown network {name!r}; available: {', '.join(pretrained.list_names())}, spiking_resnet18 "
            "(34, 50, 101, 152), sew_resnet18 (…), package.module:factory or path/to/file.py:factory"
        )


def build_network(
    name: str,
    config: NetworkConfig | None = None,
    *,
    weights: Path | None = None,
    arguments: Mapping[str, Any] | None = None,
    step_mode: StepMode | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Build the network called `name`, in eval mode, on `device`.

    Args:
        name: See the module's docstring.
        config: Configuration of networks with random weights.
        weights: Weights to load, a `.safetensors`, `.pt` or `.pth` file.
        arguments: Keyword arguments of a factory.
        step_mode: Step mode to set in all of spikingjelly's layers; None leaves it.
        device: Random weights are sampled and calibrated on this device, which is faster; another kind of
            device gives other numbers.

    Raises:
        InputError: The name is unknown, or has no arguments.
        FileFormatError: The weights do not match the network.
    """
    config = config or NetworkConfig()
    check_network_name(name, arguments)
    match = _RANDOM_RESNET.fullmatch(name)
    if name in pretrained.list_names():
        model: nn.Module = pretrained.load_network(name)
    elif match:
        model = _build_random_resnet(match[1] or "spiking", int(match[2]), config, torch.device(device))
    else:
        model = factory.build_model(name, arguments)
    if weights is not None:
        _load_weights(model, weights)
    if step_mode is not None:
        require("spikingjelly.activation_based", "spiking").functional.set_step_mode(model, step_mode)
    return model.eval().to(device)


def _build_random_resnet(residual: str, depth: int, config: NetworkConfig, device: torch.device) -> nn.Module:
    from sparseflow.spiking.models.spiking_resnet import spiking_resnet

    x = sample_images(config, 4).to(device)
    with torch.random.fork_rng(devices=[x.get_device()] if x.is_cuda else []), device:
        torch.manual_seed(config.seed)
        net = spiking_resnet(
            depth,  # type: ignore[arg-type]
            width=config.width,
            num_classes=config.num_classes,
            T=config.time_steps,
            stem="cifar" if config.image_size <= 64 else "imagenet",
            residual=_RESIDUAL[residual],  # type: ignore[arg-type]
        )
    calibrate_firing(net, x, firing_rate=config.firing_rate)
    return net


def calibrate_firing(
    net: nn.Module, x: torch.Tensor, *, gain: float = 1.6, passes: int = 3, firing_rate: float | None = None
) -> None:
    """Give random weights the statistics of a working network: BatchNorms follow `x`, scaled by `gain`.

    Args:
        net: Changed in place and left in eval mode.
        x: Input that sets the statistics.
        gain: Standard deviation behind each BatchNorm; thresholds are usually 1.
        passes: Runs in training mode.
        firing_rate: Target mean firing rate of the neurons on `x`, reached to about 0.01 by one bias for
            all BatchNorms. None keeps their biases.

    Raises:
        InputError: `firing_rate` is not above 0 and below 1.
    """
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        nn.init.constant_(norm.weight, gain)
    if firing_rate is None:
        calibrate_batchnorm(net, x, passes=passes)
        return
    if not 0 < firing_rate < 1:
        raise InputError(f"`firing_rate` (={firing_rate}) must be above 0 and below 1")
    low, high = -4 * gain, 4 * gain
    while high - low > 0.01 * gain:
        middle = (low + high) / 2
        for norm in norms:
            nn.init.constant_(norm.bias, middle)
        # Statistics are recomputed each time; otherwise a bias would accumulate over layers.
        calibrate_batchnorm(net, x, passes=1)
        rate = _measure_mean_rate(net, x)
        if abs(rate - firing_rate) < 0.005:
            break
        low, high = (middle, high) if rate < firing_rate else (low, middle)
    calibrate_batchnorm(net, x, passes=passes)


def calibrate_batchnorm(net: nn.Module, x: torch.Tensor, *, passes: int = 3) -> None:
    """Set each BatchNorm's mean and variance from `x`, keeping weights and biases.

    Args:
        net: Changed in place and left in eval mode, at rest.
        x: Input.
        passes: Runs in training mode that are averaged.
    """
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # average over the passes
            module.reset_running_stats()
    net.train()
    with torch.no_grad():
        for _ in range(passes):
            reset_neurons(net)
            net(x)
    reset_neurons(net)
    net.eval()


def _measure_mean_rate(net: nn.Module, x: torch.Tensor) -> float:
    """Mean over neurons of the fraction of their outputs that fire; starts and ends at rest."""
    rates: list[torch.Tensor] = []
    handles = [
        module.register_forward_hook(lambda _, args, out: rates.append((out != 0).float().mean()))
        for module in net.modules()
        if is_spiking_neuron(module)
    ]
    try:
        reset_neurons(net)
        with torch.no_grad():
            net(x)
    finally:
        for handle in handles:
            handle.remove()
    reset_neurons(net)
    return torch.stack(rates).mean().item()


def sample_images(config: NetworkConfig, batch_size: int) -> torch.Tensor:
    """Sample random images, float32 [batch_size, 3, image_size, image_size], smooth like photographs."""
    generator = torch.Generator().manual_seed(config.seed)
    coarse_size = max(2, config.image_size // 4)
    coarse = torch.randn(batch_size, 3, coarse_size, coarse_size, generator=generator)
    size = (config.image_size, config.image_size)
    return nn.functional.interpolate(coarse, size=size, mode="bilinear", align_corners=False)


def _load_weights(model: nn.Module, weights: Path) -> None:
    content = read_tensor_file(weights)
    if isinstance(content, dict):
        content = next(
            (content[key] for key in _CHECKPOINT_KEYS if isinstance(content.get(key), dict)), content
        )
        # `nn.DataParallel` adds the prefix.
        if content and all(str(key).startswith("module.") for key in content):
            content = {key.removeprefix("module."): value for key, value in content.items()}
    try:
        model.load_state_dict(content)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise FileFormatError(f"{weights} does not match {type(model).__name__}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class BenchCase:
    """One network and input of a benchmark grid.

    Attributes:
        model: Name of the network; see the module's docstring.
        config: Configuration of networks with random weights.
        batch_size: Images per batch.
        inputs: Inputs to use instead of images.
        arguments: Keyword arguments of a factory.
        step_mode: See `build_network`.
    """

    model: str
    config: NetworkConfig
    batch_size: int
    inputs: InputConfig | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    step_mode: StepMode | None = None

    @property
    def name(self) -> str:
        s = self.config
        if self.inputs is not None:
            shapes = ["x".join(map(str, shape)) for shape in self.inputs.shapes]
            return ", ".join([self.model, *self.inputs.files, *shapes])
        if self.model in pretrained.list_names():
            return f"{self.model}, batch {self.batch_size}"
        shape = f"width {s.width}, {s.image_size}x{s.image_size}, {s.num_classes} classes, T {s.time_steps}"
        firing = "" if s.firing_rate is None else f", firing {100 * s.firing_rate:g} %"
        return f"{self.model}, {shape}{firing}, batch {self.batch_size}"

    def check(self) -> None:
        """Check the name and the inputs, without building the network.

        Raises:
            InputError, FileFormatError: See `check_network_name` and `InputConfig.read`.
        """
        check_network_name(self.model, self.arguments)
        if self.inputs is not None:
            self.inputs.read()

    def build(
        self, weights: Path | None = None, *, device: torch.device | str = "cpu"
    ) -> tuple[nn.Module, tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Build the network, one batch of inputs, and their labels (None if unknown), all on `device`."""
        model = build_network(
            self.model,
            self.config,
            weights=weights,
            arguments=self.arguments,
            step_mode=self.step_mode,
            device=device,
        )
        if self.inputs is not None:
            return model, tuple(x.to(device) for x in self.inputs.load(model)), None
        if self.model not in pretrained.list_names():
            return model, (sample_images(self.config, self.batch_size).to(device),), None
        pixels, labels = pretrained.load_images()
        times = -(-self.batch_size // len(pixels))
        x = pretrained.normalize(pixels, self.model).repeat(times, 1, 1, 1)[: self.batch_size]
        known = torch.from_numpy(labels).repeat(times)[: self.batch_size]
        return model, (x.to(device),), known.to(device)

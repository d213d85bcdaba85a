"""Networks of the model zoo: transformers, torchvision or a factory function. Nothing is downloaded.

Weights are random, since latency hardly depends on them; see `normalize_activations` for the exception.
torchvision is optional and in no extra: its build must match the installed torch. transformers has the same
ResNets.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparseflow.core import factory
from sparseflow.core.extras import require
from sparseflow.errors import InputError, ModelError

if TYPE_CHECKING:
    import torch
    from torch import nn

TRANSFORMERS, TORCHVISION = "transformers", "torchvision"

_BASIC_RESNET = {"layer_type": "basic", "embedding_size": 64, "hidden_sizes": [64, 128, 256, 512]}

PRESETS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "resnet18": ("resnet", {**_BASIC_RESNET, "depths": [2, 2, 2, 2]}),
    "resnet34": ("resnet", {**_BASIC_RESNET, "depths": [3, 4, 6, 3]}),
    "resnet50": ("resnet", {}),
    "mobilenet_v2": ("mobilenet_v2", {}),
    "convnext_tiny": ("convnext", {}),
    "vit_tiny": ("vit", {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}),
    "vit_small": ("vit", {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}),
    "swin_tiny": ("swin", {}),
    "regnet_y_4gf": ("regnet", {}),
    "efficientnet_b0": (
        "efficientnet",
        {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280, "dropout_rate": 0.2},
    ),
}
"""Name -> model type of transformers and the differences from its default configuration."""


def build_network(
    source: str, name: str, config: Mapping[str, Any], *, image_size: int, seed: int
) -> nn.Module:
    """Build a network in eval mode that maps images to tensors.

    Args:
        source: `"transformers"`, `"torchvision"` or `package.module:factory`.
        name: A preset, an image classifier of transformers such as `"vit"`, or a model of torchvision.
        config: Differences from transformers' default configuration, or arguments of the function.
        image_size: Height and width of the images, pixels; set in configurations with that field.
        seed: Random seed of the weights.

    Raises:
        InputError: The network does not exist, or does not accept the configuration.
        ModelError: The function did not return a module, or torchvision is missing or does not match torch.
        MissingExtraError: transformers is missing.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if source == TRANSFORMERS:
            model = _build_transformers(name, config, image_size)
        elif source == TORCHVISION:
            model = _build_torchvision(name, config)
        elif ":" in source:
            model = factory.build_model(source, config)
        else:
            raise InputError(
                f"unknown source {source!r}; expected {TRANSFORMERS}, {TORCHVISION} or package.module:factory"
            )
    return _return_tensors(model.eval().requires_grad_(False))


def normalize_activations(model: nn.Module, images: torch.Tensor) -> None:
    """Give the activations of a network with random weights and batch norms the scale of a trained one.

    Convolutions get weights of unit gain, and batch norms the statistics of a batch. Otherwise activations
    shrink from layer to layer to subnormal numbers, with which CPUs compute many times slower.

    Args:
        model: Model in eval mode; it is modified. Without batch norms it is unchanged.
        images: At least two images.
    """
    import torch
    from torch import nn

    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over batches, here one
        norm.train()
    with torch.no_grad():
        model(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()


def _build_transformers(name: str, config: Mapping[str, Any], image_size: int) -> nn.Module:
    transformers = require("transformers", "latency")
    model_type, preset = PRESETS.get(name, (name, {}))
    try:
        model_config = transformers.AutoConfig.for_model(model_type, **{**preset, **config})
    except ValueError as error:
        raise InputError(
            f"transformers has no model {model_type!r}; expected a preset ({', '.join(PRESETS)}) or one of "
            "its model types, such as vit, with a configuration"
        ) from error
    except Exception as error:
        raise InputError(f"transformers rejects the configuration of {name}: {error}") from error
    unknown = sorted(set(config) - set(type(model_config)().to_dict()))
    if unknown:
        raise InputError(f"transformers' configuration of {model_type!r} has no field {', '.join(unknown)}")
    if hasattr(model_config, "image_size") and "image_size" not in config:
        model_config.image_size = image_size
    if "num_labels" not in config and "id2label" not in config:
        model_config.num_labels = 1000
    try:
        return transformers.AutoModelForImageClassification.from_config(model_config)
    except Exception as error:
        raise InputError(f"transformers cannot build {name} as an image classifier: {error}") from error


def _build_torchvision(name: str, config: Mapping[str, Any]) -> nn.Module:
    import torch

    hint = (
        f"install the build for torch {torch.__version__}, or use the same network from transformers: "
        f"source: {TRANSFORMERS} has {', '.join(PRESETS)}"
    )
    try:
        models = importlib.import_module("torchvision.models")
    except ModuleNotFoundError as error:
        raise ModelError(f"`torchvision` is required for {name} and not installed; {hint}") from error
    except (ImportError, RuntimeError) as error:
        raise ModelError(f"the installed `torchvision` does not match torch ({error}); {hint}") from error
    try:
        return models.get_model(name, weights=None, **config)
    except (ValueError, TypeError) as error:
        raise InputError(f"torchvision cannot build {name}: {error}") from error


def _return_tensors(model: nn.Module) -> nn.Module:
    """Wrap a model to return plain tensors; transformers returns mappings."""
    import torch
    from torch import nn

    class TensorOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, images: torch.Tensor) -> Any:
            outputs = self.model(images)
            if isinstance(outputs, torch.Tensor):
                return outputs
            values = outputs.values() if isinstance(outputs, Mapping) else outputs
            tensors = tuple(value for value in values if isinstance(value, torch.Tensor))
            return tensors[0] if len(tensors) == 1 else tensors

    return TensorOutputs().eval()

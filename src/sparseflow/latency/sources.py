"""Where a zoo's networks come from: transformers, torchvision or a function of yours. Nothing is downloaded.

Weights are random: latency does not depend on them. torchvision is optional and in no extra, since its build
must be the one made for the torch that is installed; transformers' ResNet is the same network without it.
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

_BASIC = {"layer_type": "basic", "embedding_size": 64, "hidden_sizes": [64, 128, 256, 512]}

PRESETS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "resnet18": ("resnet", {**_BASIC, "depths": [2, 2, 2, 2]}),
    "resnet34": ("resnet", {**_BASIC, "depths": [3, 4, 6, 3]}),
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
"""Name -> transformers' kind of model and what differs from its default configuration."""


def build(source: str, name: str, config: Mapping[str, Any], *, size: int, seed: int) -> nn.Module:
    """A network in eval mode that takes images and gives tensors.

    Args:
        source: `"transformers"`, `"torchvision"` or `package.module:factory`.
        name: A preset's name, one of transformers' image classifiers such as `"vit"`, or torchvision's.
        config: For transformers, what differs in the configuration; else arguments of the function.
        size: Height and width of the images, pixels; given to configurations that ask for it.
        seed: What the weights are drawn from.

    Raises:
        InputError: There is no such network, or it does not take the configuration.
        ModelError: The function returned something else, or torchvision is missing or does not fit torch.
        MissingExtraError: transformers is missing.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if source == TRANSFORMERS:
            model = _from_transformers(name, config, size)
        elif source == TORCHVISION:
            model = _from_torchvision(name, config)
        elif ":" in source:
            model = factory.build_model(source, config)
        else:
            raise InputError(
                f"the source {source!r} is not known; choose {TRANSFORMERS}, {TORCHVISION} "
                f"or package.module:factory"
            )
    return _tensors_only(model.eval().requires_grad_(False))


def _from_transformers(name: str, config: Mapping[str, Any], size: int) -> nn.Module:
    transformers = require("transformers", "latency")
    kind, preset = PRESETS.get(name, (name, {}))
    try:
        made = transformers.AutoConfig.for_model(kind, **{**preset, **config})
    except ValueError as error:
        raise InputError(
            f"transformers knows no model {kind!r}; presets: {', '.join(PRESETS)}; or the name of one of its "
            f"kinds of model, such as vit, with a configuration"
        ) from error
    except Exception as error:
        raise InputError(f"transformers refuses the configuration of {name}: {error}") from error
    unknown = sorted(set(config) - set(type(made)().to_dict()))
    if unknown:
        raise InputError(f"transformers' configuration of {kind!r} has no field {', '.join(unknown)}")
    if hasattr(made, "image_size") and "image_size" not in config:
        made.image_size = size
    if "num_labels" not in config and "id2label" not in config:
        made.num_labels = 1000
    try:
        return transformers.AutoModelForImageClassification.from_config(made)
    except Exception as error:
        raise InputError(f"transformers cannot build {name} as an image classifier: {error}") from error


def _from_torchvision(name: str, config: Mapping[str, Any]) -> nn.Module:
    import torch

    hint = (
        f"install the build made for torch {torch.__version__}, or take the same network from transformers: "
        f"source: {TRANSFORMERS} has {', '.join(PRESETS)}"
    )
    try:
        models = importlib.import_module("torchvision.models")
    except ModuleNotFoundError as error:
        raise ModelError(f"`torchvision` is needed for {name} and is not installed; {hint}") from error
    except (ImportError, RuntimeError) as error:
        raise ModelError(
            f"`torchvision` is installed and does not fit this torch ({error}); {hint}"
        ) from error
    try:
        return models.get_model(name, weights=None, **config)
    except (ValueError, TypeError) as error:
        raise InputError(f"torchvision cannot build {name}: {error}") from error


def _tensors_only(model: nn.Module) -> nn.Module:
    """The model, giving the tensors inside whatever it returns: transformers' outputs are mappings."""
    import torch
    from torch import nn

    class TensorsOnly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, images: torch.Tensor) -> Any:
            found = self.model(images)
            if isinstance(found, torch.Tensor):
                return found
            values = found.values() if isinstance(found, Mapping) else found
            tensors = tuple(value for value in values if isinstance(value, torch.Tensor))
            return tensors[0] if len(tensors) == 1 else tensors

    return TensorsOnly().eval()

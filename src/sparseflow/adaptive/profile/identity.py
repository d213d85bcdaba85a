"""Whether two models are the same: in what they take, or in what they answer.

Times hold for an architecture in a number format, whatever its weights (`model_id`). What controllers
learnt, what plans are worth and which blocks matter holds for the weights, in whatever format they are
(`weights_id`).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

_PASSING = {
    "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "return_dict",
    "output_attentions", "output_hidden_states",
}  # fmt: skip
"""What a configuration says of a call, a file or a version, and not of the model. Weights tell their
types."""

_TOLD = 1024
"""Numbers of each parameter that its values are told by, evenly spread."""


def model_id(model: nn.Module) -> str:
    """A digest of a model's configuration and of its parameters' names, shapes and types, not of their
    values.

    It survives saving and loading, training, moving to another device, and knobs.
    """
    parameters = sorted(
        (name, list(weight.shape), str(weight.dtype)) for name, weight in model.named_parameters()
    )
    return _digest([_told(model), parameters])


def weights_id(model: nn.Module) -> str:
    """A digest of a model's configuration and of its parameters' names, shapes and values, not of their
    types.

    It survives saving and loading, moving to another device, and knobs, but not training. Values are told as
    bfloat16 has them, so a model and its bfloat16 copy have one digest; a float16 copy has it where float16
    holds the values, as it does those of weights that were bfloat16 before, but for very small ones.
    """
    with torch.no_grad():
        parameters = sorted(
            (name, list(weight.shape), _values(weight)) for name, weight in model.named_parameters()
        )
    return _digest([_told(model), parameters])


def _told(model: nn.Module) -> Any:
    """What a model's configuration says of the model."""
    config: Any = getattr(model, "config", None)
    return _settled(config.to_dict()) if hasattr(config, "to_dict") else None


def _values(weight: torch.Tensor) -> str:
    some = weight.flatten()[:: max(1, weight.numel() // _TOLD)]
    return hashlib.sha256(some.to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes()).hexdigest()


def _digest(told: Any) -> str:
    text = json.dumps(told, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _settled(value: Any) -> Any:
    """Without what differs between two loads of the same model."""
    if isinstance(value, dict):
        return {
            str(name): _settled(content)
            for name, content in value.items()
            if name not in _PASSING and not str(name).startswith("_")
        }
    if isinstance(value, list | tuple):
        return [_settled(content) for content in value]
    return value

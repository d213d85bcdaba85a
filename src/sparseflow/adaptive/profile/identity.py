"""Digests that identify models.

Latency depends on the architecture and the number format, not on weights (`compute_model_id`). Controllers,
plan quality and block importance depend on the weights, in any number format (`compute_weights_id`).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

_IGNORED_KEYS = {
    "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "return_dict",
    "output_attentions", "output_hidden_states",
}  # fmt: skip
"""Configuration entries about calls, files or versions; the dtype is that of the weights."""

_NUM_SAMPLES = 1024
"""Evenly spaced values of each parameter that enter the digest."""


def compute_model_id(model: nn.Module) -> str:
    """Digest of a model's configuration and of the names, shapes and dtypes of its parameters.

    Saving and loading, training, moving to another device and attaching a `PlanRuntime` do not change it.
    """
    parameters = sorted(
        (name, list(weight.shape), str(weight.dtype)) for name, weight in model.named_parameters()
    )
    return _compute_digest([_get_config(model), parameters])


def compute_weights_id(model: nn.Module) -> str:
    """Digest of a model's configuration and of the names, shapes and values of its parameters.

    Training changes it; saving and loading, moving to another device and attaching a `PlanRuntime` do not.
    Values are rounded to bfloat16, so a model and its bfloat16 copy have the same digest. So does a float16
    copy if float16 represents the values, as it does for former bfloat16 weights except very small ones.
    """
    with torch.no_grad():
        parameters = sorted(
            (name, list(weight.shape), _hash_values(weight)) for name, weight in model.named_parameters()
        )
    return _compute_digest([_get_config(model), parameters])


def _get_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return _remove_ignored(config.to_dict()) if hasattr(config, "to_dict") else None


def _hash_values(weight: torch.Tensor) -> str:
    samples = weight.flatten()[:: max(1, weight.numel() // _NUM_SAMPLES)]
    return hashlib.sha256(samples.to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes()).hexdigest()


def _compute_digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _remove_ignored(value: Any) -> Any:
    """Remove what differs between two loads of the same model."""
    if isinstance(value, dict):
        return {
            str(name): _remove_ignored(content)
            for name, content in value.items()
            if name not in _IGNORED_KEYS and not str(name).startswith("_")
        }
    if isinstance(value, list | tuple):
        return [_remove_ignored(content) for content in value]
    return value

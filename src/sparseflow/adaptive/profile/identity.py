"""Whether two models are the same architecture, so that what was measured of one holds for the other."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import nn

_PASSING = {
    "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "return_dict",
    "output_attentions", "output_hidden_states",
}  # fmt: skip
"""What a configuration says of a call, a file or a version, and not of the model. Weights tell their
types."""


def model_id(model: nn.Module) -> str:
    """A digest of a model's configuration and of its parameters' names, shapes and types, not of their
    values.

    It survives saving and loading, training, moving to another device, and knobs.
    """
    config: Any = getattr(model, "config", None)
    told = _settled(config.to_dict()) if hasattr(config, "to_dict") else None
    parameters = sorted(
        (name, list(weight.shape), str(weight.dtype)) for name, weight in model.named_parameters()
    )
    text = json.dumps([told, parameters], sort_keys=True, default=str)
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

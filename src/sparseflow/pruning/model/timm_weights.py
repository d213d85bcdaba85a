"""Weights of timm and official files of VideoMAE, renamed as in transformers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseflow.errors import FileFormatError

TIMM_EPS = 1e-6
"""Epsilon of all layer norms of these models; no file states it."""

_KERNEL = re.compile(r"((?:module\.)?(?:encoder\.)?)patch_embed\.proj\.weight")
_STATE_KEYS = ("model", "module", "state_dict")
_EMBEDDINGS = {"patch_embed.proj": "patch_embeddings.projection", "pos_embed": "position_embeddings"}
_UNSUPPORTED_EMBEDDINGS = ("reg_token", "dist_token", "norm_pre")
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_MODULES = {
    "norm1": "layernorm_before", "norm2": "layernorm_after", "attn.proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense",
}  # fmt: skip
_BIASES = {"attn.q_bias": "query", "attn.v_bias": "value"}
_NAMES = {"norm": "layernorm", "head": "classifier"}


def read_checkpoint(file: Path) -> dict[str, Tensor]:
    """Read the weights of a checkpoint of torch; only tensors and plain values are unpickled.

    Args:
        file: A state dict, or a dictionary with one as `model`, `module` or `state_dict`.

    Raises:
        FileFormatError: The file is damaged or contains other objects.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # settings of the training
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of many types for damaged files
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileFormatError(f"{file} is no checkpoint of weights only: {text}") from error
    if isinstance(content, Mapping):
        content = next(
            (content[key] for key in _STATE_KEYS if isinstance(content.get(key), Mapping)), content
        )
    if not isinstance(content, Mapping):
        raise FileFormatError(f"{file} contains a {type(content).__name__}; expected a state dict")
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}


def rename_timm_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Rename weights of timm or VideoMAE as in transformers; None for weights with other names.

    Args:
        tensors: Name -> weight. Weights of a decoder stay as they are.
    """
    kernels = [match for name in tensors if (match := _KERNEL.fullmatch(name))]
    if len(kernels) != 1:
        return None
    renamed: dict[str, Tensor] = {}
    for name, value in tensors.items():
        suffix = name.removeprefix(kernels[0][1])
        if match := _BLOCK.fullmatch(suffix):
            renamed |= _rename_block_weight(f"encoder.layer.{match[1]}.", match[2], value)
        else:
            renamed[_rename(suffix)] = value
    return renamed


def _rename(name: str) -> str:
    """Name of a weight outside of blocks."""
    for timm_name, hf_name in _EMBEDDINGS.items():
        if name == timm_name or name.startswith(f"{timm_name}."):
            return f"embeddings.{hf_name}{name.removeprefix(timm_name)}"
    if name == "cls_token" or name.startswith(_UNSUPPORTED_EMBEDDINGS):
        return f"embeddings.{name}"
    module, _, kind = name.rpartition(".")
    return f"{_NAMES[module]}.{kind}" if module in _NAMES else name


def _rename_block_weight(prefix: str, name: str, value: Tensor) -> dict[str, Any]:
    """Names and values of a weight of a block; queries, keys and values are separate in transformers."""
    module, _, kind = name.rpartition(".")
    if module == "attn.qkv" and len(value) % 3 == 0:
        parts = zip(("query", "key", "value"), value.chunk(3), strict=True)
        return {f"{prefix}attention.attention.{part}.{kind}": tensor for part, tensor in parts}
    if name in _BIASES:
        return {f"{prefix}attention.attention.{_BIASES[name]}.bias": value}
    return {f"{prefix}{_MODULES.get(module, module)}.{kind}": value}

"""Precision of a network: its data type, and TF32 rounding of float32 convolutions in cuDNN.

TF32 keeps 10 of 23 mantissa bits of each factor. PyTorch allows it by default, and cuDNN uses it for some
shapes and layouts only, so a network that runs in float32 may or may not be rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def _find_setting() -> tuple[Any, str, object]:
    """Return the owner, the name and the exact (no TF32) value of torch's setting for convolutions."""
    cudnn: Any = torch.backends.cudnn
    try:
        cudnn.allow_tf32  # noqa: B018 - reading it tells
    except RuntimeError:
        # The newer settings are in use, by which convolutions can differ from recurrent layers.
        return cudnn.conv, "fp32_precision", "ieee"
    return cudnn, "allow_tf32", False


def is_tf32_allowed() -> bool:
    """Return whether cuDNN may round float32 convolutions to TF32."""
    owner, name, exact = _find_setting()
    return getattr(owner, name) != exact


@contextmanager
def full_precision(dtype: torch.dtype) -> Iterator[None]:
    """Disable TF32 for convolutions of `dtype` inside the context."""
    if dtype != torch.float32 or not torch.cuda.is_available():
        yield
        return
    owner, name, exact = _find_setting()
    saved = getattr(owner, name)
    setattr(owner, name, exact)
    try:
        yield
    finally:
        setattr(owner, name, saved)


def get_model_dtype(model: nn.Module, default: torch.dtype = torch.float32) -> torch.dtype:
    """Return the data type of a network's first floating-point parameter, or `default` if it has none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), default)

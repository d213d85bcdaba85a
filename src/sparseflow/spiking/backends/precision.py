"""Whether cuDNN may round float32 convolutions to TF32, and keeping our own from it.

TF32 keeps 10 of 23 bits of every factor. PyTorch allows it to cuDNN by default, and cuDNN takes it up for
some shapes and layouts and not for others: a network that runs in float32 today may not be rounded at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _setting() -> tuple[Any, str, object]:
    """Where torch keeps the setting of convolutions: its owner, its name, and its value for no rounding."""
    cudnn: Any = torch.backends.cudnn
    try:
        cudnn.allow_tf32  # noqa: B018 - reading it tells
    except RuntimeError:
        # The newer settings are in use, by which convolutions can differ from recurrent layers.
        return cudnn.conv, "fp32_precision", "ieee"
    return cudnn, "allow_tf32", False


def tf32_allowed() -> bool:
    """Whether the network's own float32 convolutions on a GPU may be rounded to TF32."""
    owner, name, exact = _setting()
    return getattr(owner, name) != exact


@contextmanager
def full_precision(dtype: torch.dtype) -> Iterator[None]:
    """Within, convolutions of `dtype` are not rounded further than `dtype` itself is."""
    if dtype != torch.float32 or not torch.cuda.is_available():
        yield
        return
    owner, name, exact = _setting()
    held = getattr(owner, name)
    setattr(owner, name, exact)
    try:
        yield
    finally:
        setattr(owner, name, held)

"""Whether cuDNN may round float32 convolutions to TF32, and keeping our own from it.

TF32 keeps 10 of 23 bits of every factor. PyTorch allows it to cuDNN by default, and cuDNN takes it up for
some shapes and layouts and not for others: a network that runs in float32 today may not be rounded at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def tf32_allowed() -> bool:
    """Whether the network's own float32 convolutions on a GPU may be rounded to TF32."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        # The newer settings are in use, by which convolutions can differ from recurrent layers.
        return torch.backends.cudnn.conv.fp32_precision != "ieee"  # type: ignore[attr-defined]


@contextmanager
def full_precision(dtype: torch.dtype) -> Iterator[None]:
    """Within, convolutions of `dtype` are not rounded further than `dtype` itself is."""
    if dtype != torch.float32 or not torch.cuda.is_available() or not tf32_allowed():
        yield
        return
    try:
        torch.backends.cudnn.allow_tf32 = False
    except RuntimeError:
        held = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
        torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.backends.cudnn.conv.fp32_precision = held  # type: ignore[attr-defined]
        return
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = True

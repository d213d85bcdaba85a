"""Select the backend for a device and data type."""

from __future__ import annotations

import torch
from torch import nn

from sparseflow.core import extras
from sparseflow.spiking.backends.base import Backend

TUNED_VARIANTS = 2
"""Variants of a GPU kernel that are timed when a group is prepared."""


def backend_for(sample: torch.Tensor, model: nn.Module, dtype: torch.dtype | None = None) -> Backend | None:
    """The backend for a network and its input, or None where none exists for the device or dtype.

    Args:
        sample: An input; its device counts.
        model: The network; its parameters' dtype counts unless `dtype` is given.
        dtype: What the user asked for.

    Raises:
        MissingExtraError: The device has a backend whose packages are not installed.
    """
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), sample.dtype)
    dtype = dtype or own
    if sample.device.type == "cpu" and dtype == torch.float32 == own:
        extras.require("numba", "spiking")
        from sparseflow.spiking.backends.events.backend import EventBackend

        return EventBackend()
    if sample.device.type == "cuda" and dtype in (torch.float32, torch.float16, torch.bfloat16):
        extras.require("triton", "spiking")
        from sparseflow.spiking.backends.packed.backend import PackedBackend

        return PackedBackend(dtype=dtype, device=sample.device, tune=TUNED_VARIANTS)
    return None

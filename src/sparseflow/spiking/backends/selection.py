"""Selection of the backend for a device and data type."""

from __future__ import annotations

import torch
from torch import nn

from sparseflow.core import extras
from sparseflow.spiking.backends.base import Backend
from sparseflow.spiking.backends.precision import get_model_dtype

NUM_TUNED_VARIANTS = 2
"""Variants of a GPU kernel that are timed when a group is prepared."""


def select_backend(
    sample: torch.Tensor, model: nn.Module, dtype: torch.dtype | None = None
) -> Backend | None:
    """Select the backend of a network, or return None if none supports its device and dtype.

    Args:
        sample: An input; only its device and dtype are read.
        model: The network.
        dtype: Requested precision; by default that of the parameters.

    Raises:
        MissingExtraError: The device has a backend whose packages are not installed.
    """
    model_dtype = get_model_dtype(model, sample.dtype)
    dtype = dtype or model_dtype
    if sample.device.type == "cpu" and dtype == torch.float32 == model_dtype:
        extras.require("numba", "spiking")
        from sparseflow.spiking.backends.events.backend import EventBackend

        return EventBackend()
    if sample.device.type == "cuda" and dtype in (torch.float32, torch.float16, torch.bfloat16):
        extras.require("triton", "spiking")
        from sparseflow.spiking.backends.packed.backend import PackedBackend

        return PackedBackend(dtype=dtype, device=sample.device, tune=NUM_TUNED_VARIANTS)
    return None

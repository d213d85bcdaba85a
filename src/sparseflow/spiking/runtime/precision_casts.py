"""Execution of a network's operations outside of groups in another precision than its parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from sparseflow.spiking.graph.layer_rules import has_library_forward
from sparseflow.spiking.graph.registry import is_spiking_neuron


def cast_tensors(values: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in nested containers."""
    return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, values)


def runs_as_copy(layer: nn.Module) -> bool:
    """Return whether `cast_layer` copies a layer."""
    return has_library_forward(layer) and not is_spiking_neuron(layer)


def cast_layer(layer: nn.Module, dtype: torch.dtype, model_dtype: torch.dtype) -> Callable[..., Any]:
    """Return a callable that runs a layer on tensors of another precision.

    A library layer runs as a copy with parameters of `dtype`. A neuron, whose membrane stays as it is, and a
    layer of unknown code run in the model's precision.

    Args:
        layer: A leaf module in eval mode.
        dtype: Precision of its inputs and outputs.
        model_dtype: Precision of its parameters.
    """
    if runs_as_copy(layer):
        duplicate = copy.deepcopy(layer).to(dtype)
        return lambda *args, **kwargs: duplicate(*cast_tensors(args, dtype), **cast_tensors(kwargs, dtype))

    def run(*args: Any, **kwargs: Any) -> Any:
        return cast_tensors(
            layer(*cast_tensors(args, model_dtype), **cast_tensors(kwargs, model_dtype)), dtype
        )

    return run

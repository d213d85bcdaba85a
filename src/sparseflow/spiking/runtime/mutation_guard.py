"""Detection of changes to a network, in microseconds.

A prepared plan holds folded weights and a captured graph holds addresses; both are invalid after weights
are loaded, the network is moved or a module is replaced. The check runs before each call and must be cheap:
the module tree is walked once, and each check is a few hundred comparisons by identity.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

import torch
from torch import nn


class MutationGuard:
    """A snapshot of a network's structure and tensor versions.

    Args:
        model: The network.
        neurons: Neurons whose constants (threshold, reset value, time constant, …) are part of a plan.

    In-place writes through `.data` cannot be detected.
    """

    def __init__(self, model: nn.Module, neurons: Iterable[nn.Module]) -> None:
        registries = [
            registry
            for module in model.modules()
            for registry in (module._modules, module._parameters, module._buffers)
            if registry
        ]
        self._registries = [(registry, tuple(registry.values())) for registry in registries]
        self._tensors = [
            tensor
            for module in model.modules()
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None and not tensor.is_inference()
        ]
        self._versions = self._read_versions()
        self._constants = [(attributes, _collect_constants(attributes)) for attributes in map(vars, neurons)]

    def is_structure_unchanged(self) -> bool:
        """Return whether the network still has the same modules, tensors and neuron constants."""
        for registry, values in self._registries:
            if len(registry) != len(values) or not all(map(is_, registry.values(), values)):
                return False
        return all(
            _are_constants_unchanged(attributes, constants) for attributes, constants in self._constants
        )

    def are_values_unchanged(self) -> bool:
        """Return whether the tensors were neither written to nor moved to other memory."""
        return self._read_versions() == self._versions

    def _read_versions(self) -> list[int]:
        return [t._version for t in self._tensors] + [t.data_ptr() for t in self._tensors]


def _collect_constants(attributes: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in attributes.items() if k != "v" and isinstance(v, int | float | str | None)}


def _are_constants_unchanged(attributes: dict[str, Any], constants: dict[str, Any]) -> bool:
    for name, value in constants.items():
        current = attributes.get(name, constants)
        if current is not value and (isinstance(current, torch.Tensor) or current != value):
            return False
    return True

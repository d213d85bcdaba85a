"""Notice, in microseconds, what changed in a network since it was looked at.

A prepared plan holds folded weights and a captured graph holds addresses; both must go when somebody loads
other weights, moves the network or swaps a module. The network is asked before every call, so looking has to
be cheap: everything that can be walked once is walked once, and what remains is a few hundred comparisons by
identity.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

import torch
from torch import nn


class Watch:
    """A network as it is now.

    Args:
        model: The network.
        neurons: Those whose constants (threshold, reset value, time constant, …) were built into a plan.

    Numbers written through `.data` in place leave no trace that could be seen here.
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
        self._numbers = self._look()
        self._constants = [(held, _constants(held)) for held in map(vars, neurons)]

    def same_parts(self) -> bool:
        """Whether the network still consists of the same modules, tensors and neuron constants."""
        for registry, values in self._registries:
            if len(registry) != len(values) or not all(map(is_, registry.values(), values)):
                return False
        return all(_unchanged(held, constants) for held, constants in self._constants)

    def same_numbers(self) -> bool:
        """Whether nobody wrote into those tensors or gave them other memory."""
        return self._look() == self._numbers

    def _look(self) -> list[int]:
        return [t._version for t in self._tensors] + [t.data_ptr() for t in self._tensors]


def _constants(held: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in held.items() if k != "v" and isinstance(v, int | float | str | None)}


def _unchanged(held: dict[str, Any], constants: dict[str, Any]) -> bool:
    for name, value in constants.items():
        now = held.get(name, constants)
        if now is not value and (isinstance(now, torch.Tensor) or now != value):
            return False
    return True

"""A network's memories: take them down, put them back, run something without leaving a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sparseflow.spiking.snapshot import kept_state

Memories = dict[nn.Module, dict[str, Any]]


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value


def memories(model: nn.Module) -> Memories:
    """Every stateful module's memories (spikingjelly's registry, or a registered neuron's `v`), copied."""
    found: Memories = {}
    for module in model.modules():
        registry = module.__dict__.get("_memories")
        if isinstance(registry, dict):
            found[module] = {name: _copied(value) for name, value in registry.items()}
        elif "v" in module.__dict__:
            found[module] = {"v": _copied(module.__dict__["v"])}
    return found


def put_back(saved: Memories) -> None:
    """Restore what `memories` took down. The same snapshot can be put back again and again."""
    for module, values in saved.items():
        for name, value in values.items():
            setattr(module, name, _copied(value))


def reset(model: nn.Module) -> None:
    """Reset every stateful module, as spikingjelly's `functional.reset_net` does."""
    for module in model.modules():
        if callable(getattr(module, "reset", None)):
            module.reset()  # type: ignore[operator]


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Run the body without gradients and leave `model` as it was, bit for bit."""
    with kept_state(model), torch.no_grad():
        yield

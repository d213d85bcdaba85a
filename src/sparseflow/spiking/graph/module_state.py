"""Put a network back as it was, bit for bit, after looking at it.

Looking means running, and a spiking network remembers what it was shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def kept_state(model: nn.Module) -> Iterator[None]:
    """Run the body, then put everything in `model` back as it was, bit for bit.

    Covers every module's attributes (membranes, recorded sequences, mode, anything a forward pass may write),
    buffers and torch's random state. Parameters are not copied: a forward pass does not write them.
    """
    saved = [(module, _snapshot(vars(module))) for module in model.modules()]
    devices = {tensor.device.index for tensor in model.parameters() if tensor.is_cuda}
    with torch.random.fork_rng(devices=sorted(device for device in devices if device is not None)):
        try:
            yield
        finally:
            for module, snapshot in saved:
                _restore(vars(module), snapshot)


def _snapshot(holder: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each attribute with a copy of its contents, where its contents can change."""
    return {key: (value, _contents(value)) for key, value in holder.items()}


def _contents(value: Any) -> Any:
    if isinstance(value, nn.Parameter):
        return None
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [(item, _contents(item)) for item in value]
    if isinstance(value, dict):
        return {key: (item, _contents(item)) for key, item in value.items()}
    return None


def _restore(holder: dict[str, Any], snapshot: dict[str, tuple[Any, Any]]) -> None:
    for key in [key for key in holder if key not in snapshot]:
        del holder[key]
    for key, (value, contents) in snapshot.items():
        holder[key] = _restored(value, contents)


def _restored(value: Any, contents: Any) -> Any:
    """`value`, the same object, holding `contents` again."""
    if isinstance(value, torch.Tensor):
        if contents is not None and not _same_bits(value, contents):
            value.detach().copy_(contents)
    elif isinstance(value, list):
        value[:] = [_restored(item, inner) for item, inner in contents]
    elif isinstance(value, tuple):
        for item, inner in contents:
            _restored(item, inner)
    elif isinstance(value, dict):
        for key in [key for key in value if key not in contents]:
            del value[key]
        for key, (item, inner) in contents.items():
            value[key] = _restored(item, inner)
    return value


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.is_meta:
        return False
    bits = _BITS.get(left.element_size())
    # As integers of the same width, which every layout allows: -0.0 is not 0.0, and a NaN equals itself.
    return torch.equal(left, right) if bits is None else torch.equal(left.view(bits), right.view(bits))


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

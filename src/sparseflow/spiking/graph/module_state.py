"""Module state: restore it bit for bit after a run, and detect changes between calls.

Analysis and timing run the network, and a spiking network keeps state between calls. A prepared plan holds
folded weights and a captured graph holds addresses; both are invalid after weights are loaded, the network is
moved or a module is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from sparseflow.spiking.graph.forward_reads import EntryTable
from sparseflow.spiking.graph.neurons.builtin import get_state_names, reset_state

_GET_VERSION = attrgetter("_version")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Run the body, then restore everything in `model` bit for bit.

    Covers all attributes of modules (membranes, recorded sequences, mode, anything a forward pass may
    write), buffers and torch's random state. Parameters are not copied: a forward pass does not write them.
    """
    saved = [(module, _take_snapshot(vars(module))) for module in model.modules()]
    devices = {tensor.device.index for tensor in model.parameters() if tensor.is_cuda}
    with torch.random.fork_rng(devices=sorted(device for device in devices if device is not None)):
        try:
            yield
        finally:
            for module, snapshot in saved:
                _restore(vars(module), snapshot)


def _take_snapshot(holder: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each attribute with a copy of its contents, if its contents can change."""
    return {key: (value, _copy_contents(value)) for key, value in holder.items()}


def _copy_contents(value: Any) -> Any:
    if isinstance(value, nn.Parameter):
        return None
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [(item, _copy_contents(item)) for item in value]
    if isinstance(value, dict):
        return {key: (item, _copy_contents(item)) for key, item in value.items()}
    return None


def _restore(holder: dict[str, Any], snapshot: dict[str, tuple[Any, Any]]) -> None:
    for key in [key for key in holder if key not in snapshot]:
        del holder[key]
    for key, (value, contents) in snapshot.items():
        holder[key] = _restore_value(value, contents)


def _restore_value(value: Any, contents: Any) -> Any:
    """Return `value`, the same object, with `contents` restored."""
    if isinstance(value, torch.Tensor):
        if contents is not None and not _has_same_bits(value, contents):
            value.detach().copy_(contents)
    elif isinstance(value, list):
        value[:] = [_restore_value(item, inner) for item, inner in contents]
    elif isinstance(value, tuple):
        for item, inner in contents:
            _restore_value(item, inner)
    elif isinstance(value, dict):
        for key in [key for key in value if key not in contents]:
            del value[key]
        for key, (item, inner) in contents.items():
            value[key] = _restore_value(item, inner)
    return value


def _has_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.is_meta:
        return False
    bits = _BITS.get(first.element_size())
    # Compared as integers of the same width: -0.0 differs from 0.0, and a NaN equals itself.
    return torch.equal(first, second) if bits is None else torch.equal(first.view(bits), second.view(bits))


NeuronStates = dict[nn.Module, dict[str, Any]]


def _copy_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, list):
        return [_copy_value(item) for item in value]
    return value


def copy_neuron_states(model: nn.Module) -> NeuronStates:
    """Copy the state of all stateful modules: spikingjelly's registry, or the attributes of a neuron."""
    states: NeuronStates = {}
    for module in model.modules():
        registry = module.__dict__.get("_memories")
        if isinstance(registry, dict):
            states[module] = {name: _copy_value(value) for name, value in registry.items()}
        elif names := get_state_names(module):
            values = {name: getattr(module, name) for name in names if hasattr(module, name)}
            states[module] = {name: _copy_value(value) for name, value in values.items()}
    return states


def restore_neuron_states(saved: NeuronStates) -> None:
    """Restore the result of `copy_neuron_states`, which can be restored repeatedly."""
    for module, values in saved.items():
        for name, value in values.items():
            setattr(module, name, _copy_value(value))


def keeps_other_state(module: nn.Module) -> bool:
    """Return whether a layer of spikingjelly, such as `SynapseFilter`, keeps state between calls.

    The mask of a dropout does not count: it is not used in eval mode.
    """
    return any(
        bool(m.__dict__.get("_memories")) and not type(m).__name__.startswith("Dropout")
        for m in module.modules()
    )


def reset_neurons(model: nn.Module) -> None:
    """Reset all stateful modules, like spikingjelly's `functional.reset_net`."""
    for module in model.modules():
        reset_state(module)


@contextmanager
def preserve_state_without_grad(model: nn.Module) -> Iterator[None]:
    """Run the body without gradients and restore `model` bit for bit."""
    with preserve_state(model), torch.no_grad():
        yield


class MutationGuard:
    """A snapshot of a network's structure and tensor versions.

    The check runs before each call and must be cheap: the module tree is walked once, and each check compares
    a few hundred values.

    Args:
        model: The network.
        replaced: Layers and neurons whose constants (stride, threshold, time constant, …) are part of a plan.

    In-place writes through `.data` cannot be detected.
    """

    def __init__(self, model: nn.Module, replaced: Iterable[nn.Module]) -> None:
        registries = [
            registry
            for module in model.modules()
            for registry in (module._modules, module._parameters, module._buffers)
        ]
        # State is no part of the structure: each call replaces it.
        states = {
            (id(module._buffers), name)
            for module in model.modules()
            for name in get_state_names(module)
            if name in module._buffers
        }
        self._empty = [registry for registry in registries if not registry]
        self._registries = [registry for registry in registries if registry]
        self._keys = [*chain.from_iterable(self._registries)]
        entries = [
            (registry, key, member)
            for registry in self._registries
            for key, member in registry.items()
            if (id(registry), key) not in states
        ]
        with_states = {holder for holder, _ in states}
        self._stateless = [registry for registry in self._registries if id(registry) not in with_states]
        self._members = [*chain.from_iterable(map(dict.values, self._stateless))]
        self._members_beside_states = EntryTable(
            [entry for entry in entries if id(entry[0]) in with_states], by_identity=True
        )
        self._tensors = [
            member
            for _, _, member in entries
            if isinstance(member, torch.Tensor) and not member.is_inference()
        ]
        self._versions = self._read_versions()
        constants = [
            (attributes, name, value)
            for attributes in map(vars, replaced)
            for name, value in attributes.items()
            # Membranes change, and plans check the mode themselves.
            if name not in ("v", "training") and isinstance(value, int | float | str | tuple | None)
        ]
        self._constants = EntryTable(constants, by_identity=False)

    def is_structure_unchanged(self) -> bool:
        """Return whether the network still has the same modules, tensors and constants."""
        return (
            not any(self._empty)
            and [*chain.from_iterable(self._registries)] == self._keys
            and all(map(is_, chain.from_iterable(map(dict.values, self._stateless)), self._members))
            and self._members_beside_states.is_unchanged()
            and self._constants.is_unchanged()
        )

    def are_values_unchanged(self) -> bool:
        """Return whether the tensors were neither written to nor moved to other memory."""
        return self._read_versions() == self._versions

    def has_trainable_parameters(self) -> bool:
        """Return whether a tensor of the network requires gradients."""
        return any(tensor.requires_grad for tensor in self._tensors)

    def _read_versions(self) -> list[int]:
        return [*map(_GET_VERSION, self._tensors), *map(torch.Tensor.data_ptr, self._tensors)]

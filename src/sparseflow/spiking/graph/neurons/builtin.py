"""Lookup of the neurons of known libraries, and their state.

None of the libraries is imported. A class is recognized by its module and name, and only if its library is
already imported; otherwise no network can contain its classes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from torch import nn

from sparseflow.spiking.graph.neurons import norse, sinabs, snntorch, spikingjelly
from sparseflow.spiking.graph.neurons.entry import NeuronEntry

_LIBRARIES: dict[str, Callable[[type], NeuronEntry | None]] = {
    "spikingjelly": spikingjelly.find_entry,
    "snntorch": snntorch.find_entry,
    "norse": norse.find_entry,
    "sinabs": sinabs.find_entry,
}
LIBRARIES = tuple(_LIBRARIES)
"""Names of the packages whose neurons are known."""


def find_builtin_neuron(cls: type) -> NeuronEntry | None:
    """Return the entry of one of the libraries' own classes; None for other classes."""
    library = cls.__module__.partition(".")[0]
    find = _LIBRARIES.get(library)
    return find(cls) if find is not None and library in sys.modules else None


def get_state_names(module: nn.Module) -> tuple[str, ...]:
    """Return the attributes in which a neuron of a known library, or one of the user's, keeps its state."""
    entry = _find_inherited_entry(type(module))
    if entry is not None:
        return entry.states
    return ("v",) if "v" in vars(module) else ()


def reset_state(module: nn.Module) -> None:
    """Set the state of a neuron to rest by the method of its library."""
    method = find_reset_method(type(module))
    if method is not None:
        getattr(module, method)()


@functools.lru_cache(maxsize=4096)
def find_reset_method(cls: type) -> str | None:
    """Return the name of the method by which modules of a class set their state to rest, or None."""
    names = ("reset",) if _find_inherited_entry(cls) is None else ("reset", "reset_mem", "reset_states")
    return next((name for name in names if callable(getattr(cls, name, None))), None)


@functools.lru_cache(maxsize=4096)
def _find_inherited_entry(cls: type) -> NeuronEntry | None:
    return next((entry for parent in cls.__mro__ if (entry := find_builtin_neuron(parent))), None)

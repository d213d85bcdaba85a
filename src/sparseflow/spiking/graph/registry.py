"""Which modules are spiking neurons, what they put out, and the constants of their dynamics.

spikingjelly's neurons are known by name (`known_neurons.py`); users add their own with `register_neuron`.

A class inherits what is known about its parent only where it overrides nothing that matters. A neuron whose
dynamics are not of the linear form in `kernels/spec.py` still counts as a neuron; its `spec` is None and
`reason` says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from sparseflow.spiking.backends.spec import NeuronSpec
from sparseflow.spiking.graph.builtin_neurons import Entry, Output, device_of, known_entry, known_output
from sparseflow.spiking.graph.module_state import kept_state

_NeuronClass = TypeVar("_NeuronClass", bound=type[nn.Module])

# What a subclass may define without changing what the neuron computes.
_HARMLESS = {
    "__init__", "__doc__", "__module__", "__qualname__", "__annotations__", "__dict__", "__weakref__",
    "__parameters__", "__orig_bases__", "__firstlineno__", "__static_attributes__", "__abstractmethods__",
    "_abc_impl", "__repr__", "__hash__", "extra_repr", "supported_step_mode", "_get_name",
    "__annotate_func__",
}  # fmt: skip
# Set on instances, so a class attribute or property of the same name takes their place.
_STATE = {
    "v",
    "v_threshold",
    "v_reset",
    "tau",
    "decay_input",
    "w",
    "surrogate_function",
    "step_mode",
    "training",
}


@dataclass(frozen=True, kw_only=True)
class NeuronInfo:
    """What is known about one neuron module.

    Attributes:
        type: The class's name.
        output: 'binary' (0 and 1), 'integer' (0 … `max_value`) or 'real' (anything else).
        max_value: The largest output; 1 for binary, None for real.
        spec: Charge, fire and reset as constants read from the module now; None when `reason` is set.
        reason: Why there is no spec, as a sentence without a full stop.
        step_mode: 's' (one time step a call), 'm' (all steps in one call), or None for a class without modes.
    """

    type: str
    output: Output
    max_value: int | None
    spec: NeuronSpec | None
    reason: str | None
    step_mode: Literal["s", "m"] | None = None


_registered: dict[type[nn.Module], Entry] = {}


def register_neuron(
    cls: _NeuronClass,
    *,
    spec: NeuronSpec | Callable[[Any], NeuronSpec] | None = None,
    output: Output = "binary",
    max_value: int | None = None,
) -> _NeuronClass:
    """Declare that modules of class `cls` are spiking neurons. Usable as a class decorator.

    The output must have the input's shape.

    Args:
        cls: The module's class. Subclasses count too, unless they override what `cls` defines.
        spec: The dynamics: constants, or a function from the module to them. None if of another form.
        output: 'binary' when outputs are exactly 0 or 1, 'integer' for 0 … `max_value`, else 'real'.
        max_value: Largest output; required for 'integer'.

    Returns:
        `cls`.

    Raises:
        TypeError: `cls` is not a subclass of `torch.nn.Module`.
        ValueError: `output` is unknown, or 'integer' comes without a positive `max_value`.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"`cls` must be a subclass of torch.nn.Module, got {cls!r}")
    if output not in ("binary", "integer", "real"):
        raise ValueError(f"`output` (={output!r}) must be 'binary', 'integer' or 'real'")
    if output == "integer" and (max_value is None or max_value < 1):
        raise ValueError(f"`max_value` (={max_value}) must be a positive integer when output is 'integer'")
    bound = {"binary": 1, "integer": max_value, "real": None}[output]
    reason = None if spec is not None else f"`{cls.__name__}` was registered without a spec"
    _registered[cls] = Entry(spec=spec, output=output, max_value=bound, reason=reason)
    return cls


def unregister_neuron(cls: type[nn.Module]) -> None:
    """Take back `register_neuron(cls)`; a class that was not registered is no error."""
    _registered.pop(cls, None)


def is_spiking_neuron(module: nn.Module) -> bool:
    """Whether `module` is a registered neuron or one of spikingjelly's."""
    return _lookup(type(module)) is not None


def neuron_info(module: nn.Module) -> NeuronInfo | None:
    """What is known about `module`; None when it is not a spiking neuron.

    The spec is read from the module each time (a ParametricLIF's tau may have been trained since).
    """
    found = _lookup(type(module))
    if found is None:
        return None
    parent, entry = found
    output, max_value, reason = entry.output, entry.max_value, entry.reason
    spec: NeuronSpec | None = None
    if parent not in _registered:
        output, max_value, why = known_output(module, parent, output)
        reason = reason or why
    overridden = _overridden(module, parent)
    if overridden:
        reason = f"`{type(module).__name__}` overrides {overridden} of `{parent.__name__}`"
        output, max_value = _observed(module, output, max_value)
    if reason is None:
        built = entry.spec(module) if callable(entry.spec) else entry.spec
        spec, reason = (built, None) if isinstance(built, NeuronSpec) else (None, built)
    if spec is not None and (why := _keeps_more_than_spikes(module)):
        spec, reason = None, why
    mode = getattr(module, "step_mode", None)
    return NeuronInfo(
        type=type(module).__name__,
        output=output,
        max_value=max_value,
        spec=spec,
        reason=reason,
        step_mode=mode if mode in ("s", "m") else None,
    )


def _lookup(cls: type) -> tuple[type, Entry] | None:
    """The nearest ancestor of `cls` (itself included) that is known, and what is known about it."""
    for parent in cls.__mro__:
        if parent in _registered:
            return parent, _registered[parent]
        entry = known_entry(parent)
        if entry is not None:
            return parent, entry
    return None


def _overridden(module: nn.Module, parent: type) -> str | None:
    """Names that the module's class (or the module itself) defines in place of `parent`'s, for a sentence."""
    theirs = _names_of(parent)
    below = [cls for cls in type(module).__mro__ if cls not in parent.__mro__]
    names = {name for cls in below for name in vars(cls) if name in theirs}
    names |= {name for name in vars(module) if name in theirs and callable(getattr(parent, name, None))}
    return ", ".join(f"`{name}`" for name in sorted(names)) or None


@lru_cache(maxsize=256)
def _names_of(cls: type) -> frozenset[str]:
    return frozenset((set(dir(cls)) | _STATE) - _HARMLESS)


def _keeps_more_than_spikes(module: nn.Module) -> str | None:
    """What somebody reads from the module besides its output, so that nothing else may stand in for it."""
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has forward hooks"
    if getattr(module, "store_v_seq", False):
        return "it stores its membrane at every step (store_v_seq)"
    if getattr(module, "_neuron_precision", None) is not None:
        return "it keeps its membrane in another precision"
    return None


def _observed(module: nn.Module, output: Output, max_value: int | None) -> tuple[Output, int | None]:
    """The declared output if the module's own code keeps to it, else 'real'.

    A subclass that overrides its parent's dynamics may put out anything. It is run from rest on inputs of
    many sizes, its state is put back, and its promise holds only if every output keeps to it and some output
    is not zero. `register_neuron` overrules this.
    """
    if output == "real" or max_value is None:
        return "real", None
    sizes = [held.numel() for held in (*module.parameters(), *module.buffers()) if held.dim() == 1]
    device = device_of(module)
    if device.type == "meta":
        return "real", None
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([0.1, 1.0, 10.0, 1e4]).repeat(4).view(-1, 1, 1, 1, 1)
    shape = (len(scales), 2, sizes[0] if sizes else 8, 4, 4)
    inputs = (torch.randn(shape, generator=generator) * scales).to(device)
    try:
        with kept_state(module), torch.no_grad():
            if callable(reset := getattr(module, "reset", None)):
                reset()
            outputs = (
                module(inputs)
                if getattr(module, "step_mode", "s") == "m"
                else torch.stack([module(step) for step in inputs])
            )
            if not isinstance(outputs, torch.Tensor) or outputs.shape != inputs.shape:
                return "real", None
            whole = bool(((outputs >= 0) & (outputs <= max_value) & (outputs == outputs.round())).all())
            return (output, max_value) if whole and bool(outputs.any()) else ("real", None)
    except Exception:
        return "real", None

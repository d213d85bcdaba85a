"""Registry of spiking neurons: their outputs and the constants of their dynamics.

The neurons of four libraries are built in (`neurons/`); users add their own with `register_neuron`.

A class inherits the entry of its parent only if it overrides nothing that matters. A neuron whose dynamics
do not have the linear form of `backends/spec.py` still counts as a neuron; its `spec` is None and `reason`
says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from sparseflow.core.checks import check_at_least, check_one_of
from sparseflow.spiking.backends.spec import NeuronSpec
from sparseflow.spiking.graph.module_state import preserve_state
from sparseflow.spiking.graph.neurons.builtin import find_builtin_neuron, find_reset_method
from sparseflow.spiking.graph.neurons.entry import NeuronEntry, NeuronOutputKind, get_module_device

_NeuronClass = TypeVar("_NeuronClass", bound=type[nn.Module])

# Names that a subclass may define without changing the neuron's computation.
_IGNORED_NAMES = {
    "__init__", "__doc__", "__module__", "__qualname__", "__annotations__", "__dict__", "__weakref__",
    "__parameters__", "__orig_bases__", "__firstlineno__", "__static_attributes__", "__abstractmethods__",
    "_abc_impl", "__repr__", "__hash__", "extra_repr", "supported_step_mode", "_get_name",
    "__annotate_func__",
}  # fmt: skip
# Set on instances, so that a class attribute or property of the same name overrides them.
_INSTANCE_ATTRIBUTES = {
    "v", "v_threshold", "v_reset", "tau", "decay_input", "w", "surrogate_function", "step_mode", "training",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NeuronInfo:
    """Properties of one neuron module.

    Attributes:
        type: Name of the class.
        output: 'binary' (0 and 1), 'integer' (0 … `max_value`) or 'real' (anything else).
        max_value: The largest output; 1 for binary, None for real.
        spec: Charge, fire and reset as constants, read from the module; None if `reason` is set.
        reason: Why there is no spec, as a sentence without a full stop.
        step_mode: 's' (one time step per call), 'm' (all steps in one call), or None for a class without
            modes.
        state: Attribute that holds the membrane; None if the caller passes the state.
        returned_states: Number of tensors (or tuples) of state that a call returns behind its spikes.
        make_state: Makes the returned state from the membrane (and the current); None if it is the membrane.
        current_decay: Decay of the synaptic current i, if the neuron has one: the membrane of a step reads i,
            and then i <- current_decay * i + x.
        restarts: Whether a membrane of another shape than the input counts as one at rest.
    """

    type: str
    output: NeuronOutputKind
    max_value: int | None
    spec: NeuronSpec | None
    reason: str | None
    step_mode: Literal["s", "m"] | None = None
    state: str | None = "v"
    returned_states: int = 0
    make_state: Callable[..., Any] | None = None
    current_decay: float | None = None
    restarts: bool = False


_registered: dict[type[nn.Module], NeuronEntry] = {}


def register_neuron(
    cls: _NeuronClass,
    *,
    spec: NeuronSpec | Callable[[Any], NeuronSpec] | None = None,
    output: NeuronOutputKind = "binary",
    max_value: int | None = None,
) -> _NeuronClass:
    """Register modules of class `cls` as spiking neurons. Usable as a class decorator.

    The output must have the input's shape. A module with a spec keeps its membrane in the attribute `v`: the
    rest value as a number after a reset, otherwise a tensor. Its input has a leading time axis, unless its
    attribute `step_mode` is "s".

    Args:
        cls: Class of the modules. Subclasses count too, unless they override what `cls` defines.
        spec: The dynamics: constants, or a function from the module to them. None if they have another form.
        output: 'binary' if outputs are exactly 0 or 1, 'integer' for 0 … `max_value`, else 'real'.
        max_value: Largest output; required for 'integer'.

    Returns:
        `cls`.

    Raises:
        TypeError: `cls` is not a subclass of `torch.nn.Module`.
        InputError: `output` is unknown, or 'integer' has no positive `max_value`.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"`cls` must be a subclass of torch.nn.Module, got {cls!r}")
    check_one_of(("binary", "integer", "real"), output=output)
    if output == "integer":
        check_at_least(1, max_value=max_value)
    bound = {"binary": 1, "integer": max_value, "real": None}[output]
    reason = None if spec is not None else f"`{cls.__name__}` was registered without a spec"
    _registered[cls] = NeuronEntry(spec=spec, output=output, max_value=bound, reason=reason)
    return cls


def unregister_neuron(cls: type[nn.Module]) -> None:
    """Undo `register_neuron(cls)`; does nothing if the class is not registered."""
    _registered.pop(cls, None)


def is_spiking_neuron(module: nn.Module) -> bool:
    """Return whether `module` is a registered neuron or one of a known library."""
    return _find_entry(type(module)) is not None


def list_reset_methods(module: nn.Module) -> tuple[str, ...]:
    """List the methods of a neuron, or of a layer with state, that set its state to rest."""
    match = _find_entry(type(module))
    names = list(match[1].resets) if match is not None else []
    if match is not None or isinstance(vars(module).get("_memories"), dict):
        names.append(find_reset_method(type(module)) or "")
    return tuple(name for name in dict.fromkeys(names) if hasattr(module, name))


def get_neuron_info(module: nn.Module) -> NeuronInfo | None:
    """Return the properties of `module`; None if it is not a spiking neuron.

    The spec is read from the module at each call (a ParametricLIF's tau may have been trained since).
    """
    match = _find_entry(type(module))
    if match is None:
        return None
    parent, entry = match
    output, max_value, reason = entry.output, entry.max_value, entry.reason
    spec: NeuronSpec | None = None
    if entry.describe_output is not None:
        output, max_value, spec_problem = entry.describe_output(module)
        reason = reason or spec_problem
    overridden = _find_overrides(module, parent)
    if overridden:
        reason = f"`{type(module).__name__}` overrides {overridden} of `{parent.__name__}`"
        output, max_value = _test_output(module, output, max_value)
    if reason is None:
        built_spec = entry.spec(module) if callable(entry.spec) else entry.spec
        spec, reason = (built_spec, None) if isinstance(built_spec, NeuronSpec) else (None, built_spec)
    if spec is not None and (spec_problem := _get_side_output(module)):
        spec, reason = None, spec_problem
    state = next(iter(entry.states), None)
    if spec is not None and state is not None and not hasattr(module, state):
        spec, reason = None, f"`{type(module).__name__}` does not keep its membrane in an attribute `{state}`"
    mode = getattr(module, "step_mode", None)
    if entry.is_single_step is not None:
        mode = "s" if entry.is_single_step else "m"
    return NeuronInfo(
        type=type(module).__name__,
        output=output,
        max_value=max_value,
        spec=spec,
        reason=reason,
        step_mode=mode if mode in ("s", "m") else None,
        state=state,
        returned_states=entry.count_returned_states(module),
        make_state=entry.make_state,
        current_decay=entry.get_current_decay(module),
        restarts=entry.restarts,
    )


def _find_entry(cls: type) -> tuple[type, NeuronEntry] | None:
    """Find the nearest registered ancestor of `cls` (itself included) and its entry."""
    for parent in cls.__mro__:
        if parent in _registered:
            return parent, _registered[parent]
        entry = find_builtin_neuron(parent)
        if entry is not None:
            return parent, entry
    return None


def _find_overrides(module: nn.Module, parent: type) -> str | None:
    """List the names that the module or its class defines instead of `parent`, formatted for a sentence."""
    parent_names = _list_relevant_names(parent)
    below = [cls for cls in type(module).__mro__ if cls not in parent.__mro__]
    names = {name for cls in below for name in vars(cls) if name in parent_names}
    names |= {name for name in vars(module) if name in parent_names and callable(getattr(parent, name, None))}
    return ", ".join(f"`{name}`" for name in sorted(names)) or None


@lru_cache(maxsize=256)
def _list_relevant_names(cls: type) -> frozenset[str]:
    return frozenset((set(dir(cls)) | _INSTANCE_ATTRIBUTES) - _IGNORED_NAMES)


def _get_side_output(module: nn.Module) -> str | None:
    """Describe what is read from the module besides its output, which prevents its replacement."""
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has forward hooks"
    if getattr(module, "store_v_seq", False):
        return "it stores its membrane at every step (store_v_seq)"
    if getattr(module, "_neuron_precision", None) is not None:
        return "its membrane has another precision"
    return None


def _test_output(
    module: nn.Module, output: NeuronOutputKind, max_value: int | None
) -> tuple[NeuronOutputKind, int | None]:
    """Return the declared output if the module's own code complies with it, else 'real'.

    A subclass that overrides its parent's dynamics may yield anything. It is run from rest on inputs of
    many scales and its state is restored. The declaration is accepted only if all outputs comply and some
    output is not zero. `register_neuron` takes precedence.
    """
    if output == "real" or max_value is None:
        return "real", None
    sizes = [tensor.numel() for tensor in (*module.parameters(), *module.buffers()) if tensor.dim() == 1]
    device = get_module_device(module)
    if device.type == "meta":
        return "real", None
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([0.1, 1.0, 10.0, 1e4]).repeat(4).view(-1, 1, 1, 1, 1)
    shape = (len(scales), 2, sizes[0] if sizes else 8, 4, 4)
    inputs = (torch.randn(shape, generator=generator) * scales).to(device)
    try:
        with preserve_state(module), torch.no_grad():
            if callable(reset := getattr(module, "reset", None)):
                reset()
            outputs = (
                module(inputs)
                if getattr(module, "step_mode", "s") == "m"
                else torch.stack([module(step) for step in inputs])
            )
            if not isinstance(outputs, torch.Tensor) or outputs.shape != inputs.shape:
                return "real", None
            is_valid = bool(((outputs >= 0) & (outputs <= max_value) & (outputs == outputs.round())).all())
            return (output, max_value) if is_valid and bool(outputs.any()) else ("real", None)
    except Exception:
        return "real", None

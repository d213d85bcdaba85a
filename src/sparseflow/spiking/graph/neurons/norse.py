"""norse's neurons by name.

A caller passes the state, a named tuple of tensors, and gets the next one back with the spikes.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sparseflow.spiking.backends.spec import NeuronSpec
from sparseflow.spiking.graph.neurons.entry import NeuronEntry, exceed, extract_number


def find_entry(cls: type) -> NeuronEntry | None:
    """Return the entry of one of norse's own classes; None for other classes."""
    return _ENTRIES.get(cls.__name__) if cls.__module__.startswith("norse.torch.module.") else None


def _make_state(module: str, name: str, *tensors: torch.Tensor) -> Any:
    """Make the named tuple `name` of one of norse's modules from a membrane (and a current)."""
    return getattr(sys.modules[f"norse.torch.functional.{module}"], name)(*tensors)


def _get_current_decay(module: Any) -> float | None:
    rate = extract_number(module.p.tau_syn_inv)
    return None if rate is None else 1.0 - module.dt * rate


def _build_lif_spec(module: Any) -> NeuronSpec | str:
    """Constants of v <- v + dt / tau_mem * (v_leak - v + i), where i is the synaptic current."""
    parameters = module.p
    rate, v_leak = extract_number(parameters.tau_mem_inv), extract_number(parameters.v_leak)
    if rate is None or v_leak is None or _get_current_decay(module) is None:
        return "its constants differ between neurons"
    if v_leak != extract_number(parameters.v_reset):
        return "its membrane starts at another value than it is reset to"
    rate *= module.dt
    return _build_spec(parameters, alpha=1.0 - rate, beta=rate, v_leak=v_leak, soft=False)


def _build_box_spec(module: Any) -> NeuronSpec | str:
    """Constants of v <- v + dt / tau_mem * (v_leak - v + x)."""
    parameters = module.p
    rate, v_leak = extract_number(parameters.tau_mem_inv), extract_number(parameters.v_leak)
    if rate is None or v_leak is None:
        return "its constants differ between neurons"
    rate *= module.dt
    method = getattr(parameters.reset_method, "__name__", "")
    if method not in ("reset_value", "reset_subtract"):
        return "its reset is user-defined"
    soft = method == "reset_subtract"
    if v_leak != (0.0 if soft else extract_number(parameters.v_reset)):
        return "its membrane starts at another value than it is reset to"
    return _build_spec(parameters, alpha=1.0 - rate, beta=rate, v_leak=v_leak, soft=soft)


def _build_iaf_spec(module: Any) -> NeuronSpec | str:
    """Constants of v <- v + x."""
    return _build_spec(module.p, alpha=1.0, beta=1.0, v_leak=0.0, soft=False)


def _build_spec(parameters: Any, *, alpha: float, beta: float, v_leak: float, soft: bool) -> NeuronSpec | str:
    threshold, v_reset = extract_number(parameters.v_th), extract_number(parameters.v_reset)
    if threshold is None or v_reset is None:
        return "its thresholds differ between neurons"
    return NeuronSpec(
        alpha=alpha, beta=beta, delta=beta * v_leak, v_threshold=exceed(threshold),
        v_reset=None if soft else v_reset, v_subtract=threshold if soft else None,
    )  # fmt: skip


_CELL = NeuronEntry(
    spec=None, output="binary", max_value=1, states=(), count_returned_states=lambda module: 1,
    is_single_step=True,
)  # fmt: skip
_SEQUENCE = replace(_CELL, is_single_step=False)
_CURRENT = "it has a second state (synaptic current)"
_RECURRENT = "its spikes are fed back into it"
_REASONS = {
    "LIF": _CURRENT,
    "LIFEx": "its charge is exponential",
    "LIFAdEx": "its charge is exponential and adaptive",
    "LIFAdExRefrac": "its charge is exponential and adaptive",
    "LIFRefrac": "it has a refractory period",
    "LSNN": "its thresholds adapt",
    "Izhikevich": "it has a second state and a quadratic charge",
}
_INTEGRATOR = replace(_CELL, output="real", max_value=None, reason="it outputs its membrane, not spikes")
_ENCODER = replace(_CELL, count_returned_states=lambda module: 0, reason="it encodes numbers as spikes")
_ENTRIES = {
    "LIFBoxCell": replace(
        _CELL, spec=_build_box_spec, make_state=partial(_make_state, "lif_box", "LIFBoxFeedForwardState")
    ),
    "IAFCell": replace(
        _CELL, spec=_build_iaf_spec, make_state=partial(_make_state, "iaf", "IAFFeedForwardState")
    ),
    "IAF": replace(_SEQUENCE, reason="it takes all time steps and returns its state"),
    **{f"{name}Cell": replace(_CELL, reason=reason) for name, reason in _REASONS.items()},
    **{name: replace(_SEQUENCE, reason=reason) for name, reason in _REASONS.items()},
    **{f"{name}RecurrentCell": replace(_CELL, reason=_RECURRENT) for name in _REASONS},
    **{f"{name}Recurrent": replace(_SEQUENCE, reason=_RECURRENT) for name in _REASONS},
    "LIFCell": replace(
        _CELL,
        spec=_build_lif_spec,
        make_state=partial(_make_state, "lif", "LIFFeedForwardState"),
        get_current_decay=_get_current_decay,
    ),
    "CobaLIFCell": replace(_CELL, reason="its currents depend on conductances"),
    "LICell": _INTEGRATOR,
    "LIBoxCell": _INTEGRATOR,
    "LILinearCell": _INTEGRATOR,
    "LI": replace(_INTEGRATOR, is_single_step=False),
    **{name: _ENCODER for name in ("ConstantCurrentLIFEncoder", "PoissonEncoder", "PoissonEncoderStep")},
    **{name: _ENCODER for name in ("SpikeLatencyLIFEncoder", "SpikeLatencyEncoder")},
}

"""snnTorch's neurons by name.

A call takes one time step. The neuron fires where the membrane is above the threshold, the next step applies
the reset, and the membrane that the neuron stores and returns is the value before the reset.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sparseflow.spiking.backends.spec import NeuronSpec
from sparseflow.spiking.graph.neurons.entry import (
    NeuronEntry,
    OutputDescription,
    classify_surrogate,
    exceed,
    extract_number,
)


def find_entry(cls: type) -> NeuronEntry | None:
    """Return the entry of one of snnTorch's own classes; None for other classes."""
    return _ENTRIES.get(cls.__name__) if cls.__module__.startswith("snntorch._neurons.") else None


def _build_leaky_spec(module: Any) -> NeuronSpec | str:
    """Constants of v <- beta * v + x."""
    beta = extract_number(module.beta)
    if beta is None:
        return "its decay rates differ between neurons"
    spec = _build_spec(module, alpha=min(max(beta, 0.0), 1.0), gain=1.0)
    if isinstance(spec, str) or module.reset_delay or module.reset_mechanism == "none":
        return spec
    if module.reset_mechanism == "zero" and spec.v_threshold > 0.0:
        return replace(spec, delays_reset=False)
    return "its reset depends on two steps (reset_delay=False)"


def _build_lapicque_spec(module: Any) -> NeuronSpec | str:
    """Constants of v <- (1 - time_step / RC) * v + time_step / C * x."""
    resistance, capacitance = extract_number(module.R), extract_number(module.C)
    time_step = extract_number(module.time_step)
    if resistance is None or capacitance is None or time_step is None:
        return "its constants differ between neurons"
    if module.reset_mechanism == "zero":
        return "its reset sets the membrane to zero for a whole step"
    rate = time_step / (resistance * capacitance)
    return _build_spec(module, alpha=1.0 - rate, gain=resistance * rate)


def _build_spec(module: Any, *, alpha: float, gain: float) -> NeuronSpec | str:
    threshold = extract_number(module.threshold)
    if threshold is None:
        return "its thresholds differ between neurons"
    if module.inhibition:
        return "only the neuron with the largest membrane fires (inhibition=True)"
    if module.state_quant:
        return "its membrane is quantized (state_quant)"
    spec = NeuronSpec(
        alpha=alpha, beta=gain, delta=0.0, v_threshold=exceed(threshold), v_reset=None, v_subtract=threshold,
        delays_reset=True,
    )  # fmt: skip
    if module.reset_mechanism == "zero":
        return replace(spec, v_reset=0.0)
    return spec if module.reset_mechanism == "subtract" else replace(spec, v_subtract=0.0)


def _describe_output(module: Any) -> OutputDescription:
    factor = extract_number(getattr(module, "graded_spikes_factor", 1.0))
    fired = classify_surrogate(module.spike_grad)
    if fired not in ("strict", "heaviside", "binary"):
        return "real", None, "its surrogate function (spike_grad) does not output spikes"
    if factor != 1.0:
        return "real", None, "its spikes are scaled (graded_spikes_factor)"
    return "binary", 1, None if fired == "strict" else "its surrogate function is not a step above zero"


def _count_states(number: int) -> Callable[[Any], int]:
    return lambda module: 0 if module.init_hidden and not module.output else number


_LEAKY = NeuronEntry(
    spec=_build_leaky_spec,
    output="binary",
    max_value=1,
    describe_output=_describe_output,
    states=("mem",),
    count_returned_states=_count_states(1),
    resets=("reset_mem", "init_leaky", "init_lapicque", "init_synaptic", "init_alpha"),
    is_single_step=True,
    restarts=True,
)
_ENTRIES = {
    "Leaky": _LEAKY,
    "Lapicque": replace(_LEAKY, spec=_build_lapicque_spec),
    "Synaptic": replace(
        _LEAKY,
        spec=None,
        reason="it has a second state (synaptic current)",
        states=("mem", "syn"),
        count_returned_states=_count_states(2),
    ),
    "Alpha": replace(
        _LEAKY,
        spec=None,
        reason="it has three states (membrane and two currents)",
        states=("mem", "syn_exc", "syn_inh"),
        count_returned_states=_count_states(3),
    ),
    "RLeaky": replace(
        _LEAKY,
        spec=None,
        reason="its spikes are fed back into it",
        states=("mem", "spk"),
        resets=(),
    ),
    "RSynaptic": replace(
        _LEAKY,
        spec=None,
        reason="its spikes are fed back into it",
        states=("mem", "syn", "spk"),
        count_returned_states=_count_states(2),
        resets=(),
    ),
}

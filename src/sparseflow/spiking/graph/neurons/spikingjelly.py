"""spikingjelly's neurons by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch

from sparseflow.spiking.backends.spec import NeuronSpec
from sparseflow.spiking.graph.neurons.entry import (
    NeuronEntry,
    NeuronOutputKind,
    OutputDescription,
    SpecBuilder,
    classify_surrogate,
)

_NEURONS = "spikingjelly.activation_based.neuron"
_SURROGATES = "spikingjelly.activation_based.surrogate"


def find_entry(cls: type) -> NeuronEntry | None:
    """Return the entry of one of spikingjelly's own classes; None for other classes."""
    if cls.__module__ == "spikingjelly.activation_based.encoding" and cls.__name__ == "PoissonEncoder":
        return NeuronEntry(spec=None, output="binary", max_value=1, reason="it samples its spikes at random")
    return _ENTRIES.get(cls.__name__) if cls.__module__.startswith(_NEURONS) else None


def _build_leaky_spec(module: Any, rate: float) -> NeuronSpec | str:
    """Constants of v <- v + rate * (x - (v - v_reset)), or with x outside the rate."""
    v_threshold, v_reset = module.v_threshold, module.v_reset
    if not isinstance(v_threshold, (int, float)):
        return "its threshold is a tensor"
    if not (v_reset is None or isinstance(v_reset, (int, float))):
        return "its reset value is a tensor"
    at_rest = module._memories_rv.get("v")
    v_rest = 0.0 if v_reset is None else float(v_reset)
    if isinstance(at_rest, torch.Tensor) or at_rest != v_rest:
        return f"a reset sets its membrane to {at_rest} instead of {v_rest}"
    return NeuronSpec(
        alpha=1.0 - rate,
        beta=rate if getattr(module, "decay_input", False) else 1.0,
        delta=v_rest * rate,
        v_threshold=float(v_threshold),
        v_reset=None if v_reset is None else v_rest,
    )


def _build_if_spec(module: Any) -> NeuronSpec | str:
    return _build_leaky_spec(module, 0.0)


def _build_lif_spec(module: Any) -> NeuronSpec | str:
    if not isinstance(module.tau, (int, float)):
        return "its tau is a tensor"
    return _build_leaky_spec(module, 1.0 / module.tau)


def _build_parametric_lif_spec(module: Any) -> NeuronSpec | str:
    weight = module.w
    if weight.numel() != 1 or weight.is_meta:
        return "its tau is not a single known number"
    return _build_leaky_spec(module, float(weight.detach().sigmoid()))


_LINEAR: dict[str, SpecBuilder] = {
    "IFNode": _build_if_spec,
    "SimpleIFNode": _build_if_spec,
    "LIFNode": _build_lif_spec,
    "SimpleLIFNode": _build_lif_spec,
    "SLTTLIFNode": _build_lif_spec,
    "OTTTLIFNode": _build_lif_spec,
    "ParametricLIFNode": _build_parametric_lif_spec,
}
_NONLINEAR_BINARY: dict[str, str] = {
    "HalfThresholdIFNode": "a reset sets its membrane to half of the threshold",
    "ILIFNode": "it fires integers",
    "QIFNode": "its charge is quadratic",
    "EIFNode": "its charge is exponential",
    "IzhikevichNode": "it has a second state and a quadratic charge",
    "RAFNode": "it has a second state (resonate and fire)",
    "KLIFNode": "its charge passes a ReLU",
    "ComplementaryLIFNode": "it has a second state (complementary membrane)",
    "CUBALIFNode": "it has a second state (current)",
    "MPBNLIFNode": "it normalises its membrane",
    "GatedLIFNode": "its gates change from step to step",
    "ActivationAwareIFNode": "its thresholds differ between channels",
    "PSN": "it mixes all time steps at once",
    "MaskedPSN": "it mixes several time steps at once",
    "SlidingPSN": "it mixes several time steps at once",
    "BaseNode": "`BaseNode` defines no dynamics",
    "SimpleBaseNode": "`SimpleBaseNode` defines no dynamics",
}
_NONLINEAR_REAL: dict[str, str] = {
    "LIAFNode": "it outputs an activation of its membrane, not spikes",
    "TernaryIFNode": "it fires -1, 0 and 1",
    "TernaryLIFNode": "it fires -1, 0 and 1",
    "STBIFNode": "it fires -1, 0 and 1, scaled",
    "DSRIFNode": "it fires multiples of its threshold",
    "DSRLIFNode": "it fires multiples of its threshold",
    "FewSpikeNode": "it outputs a weighted sum of spikes",
    "NoisyBaseNode": "it adds noise to its spikes",
    "FlexSN": "its dynamics are user-defined",
}


def _describe_output(module: Any, *, output: NeuronOutputKind, is_online: bool) -> OutputDescription:
    """Describe the output of a neuron, which depends on its surrogate function and mode."""
    if output == "real":
        return "real", None, None
    if is_online and module.training:
        return "real", None, "in training mode it outputs a trace with its spikes"
    surrogate = getattr(module, "surrogate_function", None)
    if is_online or surrogate is None:
        return "binary", 1, None
    fired = _classify_surrogate(surrogate)
    if fired == "heaviside":
        return "binary", 1, None
    if fired in ("binary", "strict"):
        return "binary", 1, "its surrogate function is not a step at zero"
    if isinstance(fired, int):
        return "integer", fired, "it fires integers"
    return "real", None, "its surrogate function does not output spikes (spiking=False?)"


def _classify_surrogate(
    surrogate: Callable[[torch.Tensor], torch.Tensor],
) -> Literal["heaviside", "strict", "binary"] | int | None:
    """Classify a surrogate function: spikingjelly's own by class, others by their values."""
    cls = type(surrogate)
    if cls.__module__ == _SURROGATES and getattr(surrogate, "spiking", True):
        if cls.__name__ == "MultiLevelSpikeCount":
            return int(getattr(surrogate, "max_spike_count"))  # noqa: B009 - not a member of nn.Module
        if cls.__name__ == "PoissonPass":
            return "binary"
        if "forward" not in vars(surrogate):
            return "heaviside"
    return classify_surrogate(surrogate)


def _make_entry(
    name: str, output: NeuronOutputKind, spec: SpecBuilder | None, reason: str | None = None
) -> NeuronEntry:
    is_online = name in ("OTTTLIFNode", "SLTTLIFNode")
    return NeuronEntry(
        spec=spec,
        output=output,
        max_value=1 if output == "binary" else None,
        reason=reason,
        describe_output=partial(_describe_output, output=output, is_online=is_online),
    )


_ENTRIES = {
    **{name: _make_entry(name, "binary", spec) for name, spec in _LINEAR.items()},
    **{name: _make_entry(name, "binary", None, reason) for name, reason in _NONLINEAR_BINARY.items()},
    **{name: _make_entry(name, "real", None, reason) for name, reason in _NONLINEAR_REAL.items()},
}

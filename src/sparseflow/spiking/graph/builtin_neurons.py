"""spikingjelly's neurons, known by name: what they put out, and the constants of those with linear dynamics.

Nothing here imports spikingjelly. A class is recognised by its module and name, and only if spikingjelly was
imported by somebody else; otherwise no network can hold its classes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from sparseflow.spiking.backends.spec import NeuronSpec

Output = Literal["binary", "integer", "real"]
SpecBuilder = Callable[[Any], "NeuronSpec | str"]

_NEURONS = "spikingjelly.activation_based.neuron"
_SURROGATES = "spikingjelly.activation_based.surrogate"
_BASES = ("BaseNode", "SimpleBaseNode")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is known about a class of neurons.

    Attributes:
        spec: The dynamics, or a function from a module to them or to the reason why it has none.
        output: What it puts out.
        max_value: The largest output; None for 'real'.
        reason: Why the class has no spec.
    """

    spec: NeuronSpec | SpecBuilder | None
    output: Output
    max_value: int | None = None
    reason: str | None = None


def known_entry(cls: type) -> Entry | None:
    """The entry of one of spikingjelly's own classes, by name; None for every other class."""
    module = cls.__module__
    if not module.startswith("spikingjelly.") or "spikingjelly" not in sys.modules:
        return None
    if module == "spikingjelly.activation_based.encoding":
        if cls.__name__ != "PoissonEncoder":
            return None
        return Entry(spec=None, output="binary", max_value=1, reason="it draws its spikes at random")
    if not module.startswith(_NEURONS):
        return None
    if cls.__name__ in _LINEAR:
        return Entry(spec=_LINEAR[cls.__name__], output="binary", max_value=1)
    if cls.__name__ in _OTHER_BINARY:
        return Entry(spec=None, output="binary", max_value=1, reason=_OTHER_BINARY[cls.__name__])
    if cls.__name__ in _OTHER_REAL:
        return Entry(spec=None, output="real", reason=_OTHER_REAL[cls.__name__])
    if cls.__name__ in _BASES:
        return Entry(spec=None, output="binary", max_value=1, reason=f"`{cls.__name__}` fixes no dynamics")
    return None


def _leaky(module: Any, rate: float) -> NeuronSpec | str:
    """Constants of v <- v + rate * (x - (v - v_reset)), or with x outside of the rate."""
    v_threshold, v_reset = module.v_threshold, module.v_reset
    if not isinstance(v_threshold, (int, float)):
        return "its threshold is a tensor"
    if not (v_reset is None or isinstance(v_reset, (int, float))):
        return "its reset value is a tensor"
    at_rest = module._memories_rv.get("v")
    rest = 0.0 if v_reset is None else float(v_reset)
    if isinstance(at_rest, torch.Tensor) or at_rest != rest:
        return f"a reset sets its membrane to {at_rest} instead of {rest}"
    return NeuronSpec(
        alpha=1.0 - rate,
        beta=rate if getattr(module, "decay_input", False) else 1.0,
        delta=rest * rate,
        v_threshold=float(v_threshold),
        v_reset=None if v_reset is None else rest,
    )


def _if_spec(module: Any) -> NeuronSpec | str:
    return _leaky(module, 0.0)


def _lif_spec(module: Any) -> NeuronSpec | str:
    return _leaky(module, 1.0 / module.tau) if isinstance(module.tau, (int, float)) else "its tau is a tensor"


def _parametric_lif_spec(module: Any) -> NeuronSpec | str:
    weight = module.w
    if weight.numel() != 1 or weight.is_meta:
        return "its tau is not one known number"
    return _leaky(module, float(weight.detach().sigmoid()))


_LINEAR: dict[str, SpecBuilder] = {
    "IFNode": _if_spec,
    "SimpleIFNode": _if_spec,
    "LIFNode": _lif_spec,
    "SimpleLIFNode": _lif_spec,
    "SLTTLIFNode": _lif_spec,
    "OTTTLIFNode": _lif_spec,
    "ParametricLIFNode": _parametric_lif_spec,
}
_OTHER_BINARY: dict[str, str] = {
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
}
_OTHER_REAL: dict[str, str] = {
    "LIAFNode": "it puts out an activation of its membrane, not spikes",
    "TernaryIFNode": "it fires -1, 0 and 1",
    "TernaryLIFNode": "it fires -1, 0 and 1",
    "STBIFNode": "it fires -1, 0 and 1, scaled",
    "DSRIFNode": "it fires multiples of its threshold",
    "DSRLIFNode": "it fires multiples of its threshold",
    "FewSpikeNode": "it puts out a weighted sum of spikes",
    "NoisyBaseNode": "it adds noise to its spikes",
    "FlexSN": "its dynamics are a function of the user's",
}


def known_output(module: nn.Module, parent: type, output: Output) -> tuple[Output, int | None, str | None]:
    """What one of spikingjelly's neurons puts out, which depends on its surrogate function and mode."""
    if output == "real":
        return "real", None, None
    online = parent.__name__ in ("OTTTLIFNode", "SLTTLIFNode")
    if online and module.training:
        return "real", None, "in training mode it puts out a trace beside its spikes"
    surrogate = getattr(module, "surrogate_function", None)
    if online or surrogate is None:
        return "binary", 1, None
    fired = fired_values(surrogate)
    if fired == "heaviside":
        return "binary", 1, None
    if fired == "binary":
        return "binary", 1, "its surrogate function is not a step at zero"
    if isinstance(fired, int):
        return "integer", fired, "it fires integers"
    return "real", None, "its surrogate function does not put out spikes (spiking=False?)"


def fired_values(
    surrogate: Callable[[torch.Tensor], torch.Tensor],
) -> Literal["heaviside", "binary"] | int | None:
    """What a surrogate function puts out in its forward pass.

    spikingjelly's own step functions are known by class; any other is evaluated on points around and far from
    zero, which settles it for a function that works element by element.

    Returns:
        'heaviside' for (x >= 0), 'binary' for another function into {0, 1}, the maximum when it puts out
        larger non-negative integers, None for anything else.
    """
    cls = type(surrogate)
    if cls.__module__ == _SURROGATES and getattr(surrogate, "spiking", True):
        if cls.__name__ == "MultiLevelSpikeCount":
            return int(getattr(surrogate, "max_spike_count"))  # noqa: B009 - not a member of nn.Module
        if cls.__name__ == "PoissonPass":
            return "binary"
        if "forward" not in vars(surrogate):
            return "heaviside"
    steps = torch.logspace(-30, 6, 73, dtype=torch.float64).float()
    grid = torch.cat([-steps, torch.zeros(1), steps, torch.linspace(-4, 4, 65)])
    if isinstance(surrogate, nn.Module):
        grid = grid.to(device_of(surrogate))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            fired = surrogate(grid)
            if not isinstance(fired, torch.Tensor) or fired.shape != grid.shape:
                return None
            if torch.equal(fired, (grid >= 0).to(fired)):
                return "heaviside"
            if bool(((fired == 0) | (fired == 1)).all()):
                return "binary"
            if bool(((fired >= 0) & (fired == fired.round())).all()) and float(fired.max()) <= 255:
                return int(fired.max())
    except Exception:
        return None
    return None


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's parameters and buffers; the CPU when it has none."""
    held = next(iter((*module.parameters(), *module.buffers())), None)
    return torch.device("cpu") if held is None else held.device

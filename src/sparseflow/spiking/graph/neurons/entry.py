"""`NeuronEntry`: what is known about a class of neurons, and tests of what their modules output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from sparseflow.spiking.backends.spec import NeuronSpec

NeuronOutputKind = Literal["binary", "integer", "real"]
SpecBuilder = Callable[[Any], "NeuronSpec | str"]
OutputDescription = tuple[NeuronOutputKind, int | None, str | None]
"""Kind of the output, its largest value (None for 'real'), and why that rules out a spec (or None)."""

MAX_COUNT = 255
"""Largest number of spikes per step that sparse layers can read."""

UNBOUNDED = MAX_COUNT + 1
"""Stands for the largest output of a neuron without a bound; layers run dense on more than `MAX_COUNT`."""


@dataclass(frozen=True, kw_only=True)
class NeuronEntry:
    """A class of neurons.

    Attributes:
        spec: The dynamics, or a function from a module to them or to the reason why there are none.
        output: Kind of the output.
        max_value: The largest output; None for 'real'.
        reason: Why the class has no spec.
        describe_output: Describes the output of a module, where it depends on more than the class.
        states: Attributes that hold the state, the membrane first; empty if a caller passes the state.
        count_returned_states: Counts the tensors of state that a module returns behind its spikes.
        make_state: Makes the state that a module returns from its membrane (and its current); None if that is
            the membrane.
        get_current_decay: Returns the decay of the synaptic current between input and membrane; None for
            neurons without one. The state is then (membrane, current).
        resets: Methods that set the state to rest and return it.
        is_single_step: Whether a call takes one time step; None if the attribute `step_mode` says it.
        restarts: Whether a membrane of another shape than the input counts as one at rest.
    """

    spec: NeuronSpec | SpecBuilder | None
    output: NeuronOutputKind
    max_value: int | None = None
    reason: str | None = None
    describe_output: Callable[[Any], OutputDescription] | None = None
    states: tuple[str, ...] = ("v",)
    count_returned_states: Callable[[Any], int] = lambda module: 0
    make_state: Callable[..., Any] | None = None
    get_current_decay: Callable[[Any], float | None] = lambda module: None
    resets: tuple[str, ...] = ()
    is_single_step: bool | None = None
    restarts: bool = False


def classify_surrogate(
    surrogate: Callable[[torch.Tensor], torch.Tensor],
) -> Literal["heaviside", "strict", "binary"] | int | None:
    """Classify the forward values of a surrogate function on points near and far from zero.

    That is conclusive for an elementwise function.

    Returns:
        'heaviside' for (x >= 0), 'strict' for (x > 0), 'binary' for another function into {0, 1}, the maximum
        if it yields larger non-negative integers, None for anything else.
    """
    steps = torch.logspace(-30, 6, 73, dtype=torch.float64).float()
    grid = torch.cat([-steps, torch.zeros(1), steps, torch.linspace(-4, 4, 65)])
    if isinstance(surrogate, nn.Module):
        grid = grid.to(get_module_device(surrogate))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            fired = surrogate(grid)
            if not isinstance(fired, torch.Tensor) or fired.shape != grid.shape:
                return None
            if torch.equal(fired, (grid >= 0).to(fired)):
                return "heaviside"
            if torch.equal(fired, (grid > 0).to(fired)):
                return "strict"
            if bool(((fired == 0) | (fired == 1)).all()):
                return "binary"
            if bool(((fired >= 0) & (fired == fired.round())).all()) and float(fired.max()) <= MAX_COUNT:
                return int(fired.max())
    except Exception:
        return None
    return None


def exceed(threshold: float) -> float:
    """Return the smallest float32 above `threshold`: a neuron that fires above it fires from there."""
    above = torch.nextafter(torch.tensor(threshold, dtype=torch.float32), torch.tensor(torch.inf))
    return float(above)


def extract_number(value: Any) -> float | None:
    """Return a number, or the one that all elements of a tensor are equal to; None for anything else."""
    if not isinstance(value, torch.Tensor):
        return float(value) if isinstance(value, (int, float)) else None
    if value.numel() == 0 or value.is_meta:
        return None
    first = value.detach().flatten()[0]
    return float(first) if value.numel() == 1 or bool((value == first).all()) else None


def get_module_device(module: nn.Module) -> torch.device:
    """Return the device of a module's parameters and buffers; the CPU if it has none."""
    tensor = next(iter((*module.parameters(), *module.buffers())), None)
    return torch.device("cpu") if tensor is None else tensor.device

"""`check_network`: does the optimized network compute what the network computes, and is it faster?"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from sparseflow.core.progress import Progress, subrange
from sparseflow.errors import InputError
from sparseflow.spiking.api import check_model, check_sample
from sparseflow.spiking.graph.module_state import (
    copy_neuron_states,
    preserve_state_without_grad,
    reset_neurons,
)
from sparseflow.spiking.profile.bench import BenchResult, Inputs, bench, get_shapes
from sparseflow.spiking.runtime.output_difference import Difference, compute_difference
from sparseflow.spiking.runtime.precision_casts import cast_tensors

MAX_MEAN_ERROR = {torch.float32: 1e-2, torch.float16: 1e-1, torch.bfloat16: 2e-1}
"""Default tolerance by precision; spikes that flip through different rounding cause such errors."""

_MAX_ERROR_RATIO = 2.0
"""Limit of an error in units of the difference between the network's own code in two precisions."""


@dataclass(frozen=True, kw_only=True)
class CallComparison:
    """One call of the optimized network, compared with the same call of the network's own code.

    Attributes:
        name: What was called, such as "from rest".
        shapes: Shapes of the inputs.
        outputs: Difference of the outputs; None if they cannot be compared.
        membranes: Difference of the states of all neurons after the call; None without states.
        num_predictions: Number of predicted classes: indices of the largest value along the last axis.
        num_changed: How many of them differ, apart from ties within the tolerance.
        problem: Why the call does not agree, as a clause; None if it agrees.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    outputs: Difference | None
    membranes: Difference | None
    num_predictions: int
    num_changed: int
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Result of `check_network`.

    Attributes:
        calls: Comparisons of outputs and membranes.
        rounding: The network's own code in float64, compared with itself in its own precision; None if it
            does not run in float64. A network in which a flipped spike changes all later layers has a large
            error here.
        tolerance: Largest accepted mean error, unless twice the error of `rounding` is larger.
        bench: Latencies, memory and layers.
    """

    calls: tuple[CallComparison, ...]
    rounding: CallComparison | None
    tolerance: float
    bench: BenchResult

    @property
    def agrees(self) -> bool:
        """Whether all calls agree."""
        return all(call.problem is None for call in self.calls)

    @property
    def is_slower(self) -> bool:
        """Whether the optimized network is significantly slower than the network's own code."""
        return self.bench.speedup_eager.high < 1.0

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {
            "agrees": self.agrees,
            "is_slower": self.is_slower,
            "tolerance": self.tolerance,
            "calls": [asdict(call) for call in self.calls],
            "rounding": None if self.rounding is None else asdict(self.rounding),
            "summary": self.bench.explanation.summary,
            **self.bench.to_dict(),
        }


def check_network(
    model: nn.Module,
    inputs: Inputs,
    *,
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
    rounds: int = 20,
    compile_baselines: bool = True,
    freeze: bool = False,
    offload_weights: bool = False,
    cache: bool = True,
    progress: Progress | None = None,
) -> CheckResult:
    """Optimize a network, compare its outputs and states with those of its own code, and measure both.

    The network is called from rest, then with its state carried over, after a reset, and with another batch
    size.

    Args:
        model: Network in eval mode; it is optimized in place.
        inputs: Typical inputs on the model's device.
        dtype, rounds, compile_baselines, freeze, offload_weights, cache, progress: See `bench`.
        tolerance: Largest accepted mean error of outputs and membranes, as a fraction of their mean size;
            spikes that flip through different rounding cause such errors. By default 0.01, or for
            `torch.float16` and `torch.bfloat16` 0.1 and 0.2.

    Raises:
        InputError: `tolerance` is negative.
        ModelError, SampleError: See `optimize`.
    """
    if tolerance is None:
        tolerance = MAX_MEAN_ERROR[dtype or torch.float32]
    if not tolerance >= 0:
        raise InputError(f"`tolerance` (={tolerance}) must not be negative")
    check_model(model)
    check_sample(model, inputs)
    reset_neurons(model)
    reference = copy.deepcopy(model)
    result = bench(
        model,
        [inputs],
        dtype=dtype,
        rounds=rounds,
        compile_baselines=compile_baselines,
        freeze=freeze,
        offload_weights=offload_weights,
        cache=cache,
        progress=subrange(progress, 0.0, 0.9),
    )
    if progress:
        progress("comparing outputs", 0.9)
    rounding = _compare_with_float64(reference, inputs, tolerance)
    calls = _compare_calls(reference, model, inputs, tolerance, rounding)
    if progress:
        progress("done", 1.0)
    return CheckResult(calls=tuple(calls), rounding=rounding, tolerance=tolerance, bench=result)


def _compare_with_float64(model: nn.Module, inputs: Inputs, tolerance: float) -> CallComparison | None:
    """Compare the network's own code in float64 with itself, from rest."""
    try:
        double = copy.deepcopy(model).double()
        reset_neurons(double)
        expected = _call(double, cast_tensors(inputs, torch.float64))
    except Exception:  # of the network's own code
        return None
    reset_neurons(model)
    actual = cast_tensors(_call(model, inputs), torch.float64)
    states = _list_states(double), cast_tensors(_list_states(model), torch.float64)
    return _compare("own code in float64", inputs, (expected, actual), states, tolerance, None)


def _compare_calls(
    reference: nn.Module,
    model: nn.Module,
    inputs: Inputs,
    tolerance: float,
    rounding: CallComparison | None,
) -> list[CallComparison]:
    flipped = tuple(x.flip(-1) for x in inputs)
    steps: list[tuple[str, Inputs, bool]] = [
        ("from rest", inputs, True),
        ("second call, not reset", flipped, False),
        ("third call, not reset", inputs, False),
        ("after a reset", inputs, True),
    ]
    resized = _change_batch_size(reference, inputs)
    if resized is not None:
        shapes = ", ".join("x".join(map(str, shape)) for shape in get_shapes(resized))
        steps += [(f"of shape {shapes}", resized, True), ("of the first shape again", inputs, True)]
    calls: list[CallComparison] = []
    for name, call_inputs, resets in steps:
        if resets:
            reset_neurons(reference)
            reset_neurons(model)
        calls.append(_compare_call(name, reference, model, call_inputs, tolerance, rounding))
    reset_neurons(model)
    return calls


def _change_batch_size(model: nn.Module, inputs: Inputs) -> Inputs | None:
    """Return inputs of another size along the batch axis, or else another one; None if the model fails."""
    axes = (1, 0) if inputs[0].dim() >= 5 else (0, 1)
    for axis in axes[: inputs[0].dim()]:
        size = inputs[0].shape[axis]
        resized = tuple(
            x if x.dim() <= axis or x.shape[axis] != size
            else x.narrow(axis, 0, (size + 1) // 2) if size > 1 else torch.cat([x, x.flip(-1)], axis)
            for x in inputs
        )  # fmt: skip
        try:
            with preserve_state_without_grad(model):
                reset_neurons(model)
                model(*resized)
        except Exception:  # of the network's own code
            continue
        return resized
    return None


def _compare_call(
    name: str,
    reference: nn.Module,
    model: nn.Module,
    inputs: Inputs,
    tolerance: float,
    rounding: CallComparison | None,
) -> CallComparison:
    expected = _call(reference, inputs)
    try:
        actual = _call(model, inputs)
    except Exception as error:
        return CallComparison(
            name=name, shapes=get_shapes(inputs), outputs=None, membranes=None, num_predictions=0,
            num_changed=0, problem=f"the optimized network raises {type(error).__name__}: {error}",
        )  # fmt: skip
    states = _list_states(reference), _list_states(model)
    return _compare(name, inputs, (expected, actual), states, tolerance, rounding)


def _compare(
    name: str,
    inputs: Inputs,
    outputs: tuple[Any, Any],
    states: tuple[Any, Any],
    tolerance: float,
    rounding: CallComparison | None,
) -> CallComparison:
    """Compare (expected, actual) outputs and states."""
    num_predictions, num_changed = _compare_predictions(*outputs, tolerance)
    comparison = CallComparison(
        name=name,
        shapes=get_shapes(inputs),
        outputs=compute_difference(*outputs),
        membranes=compute_difference(*states),
        num_predictions=num_predictions,
        num_changed=num_changed,
        problem=None,
    )
    return replace(comparison, problem=_find_problem(comparison, tolerance, rounding))


def _find_problem(call: CallComparison, tolerance: float, rounding: CallComparison | None) -> str | None:
    if call.outputs is None:
        return "the outputs have other types or shapes"
    if call.membranes is None:
        return "the neurons have other states"
    if call.num_changed > (0 if rounding is None else _MAX_ERROR_RATIO * rounding.num_changed):
        return f"{call.num_changed} of {call.num_predictions} predictions differ"
    for name in ("outputs", "membranes"):
        error = getattr(call, name).mean_error
        expected = None if rounding is None else getattr(rounding, name)
        limit = tolerance if expected is None else max(tolerance, _MAX_ERROR_RATIO * expected.mean_error)
        if not error <= limit:
            return f"the {name} differ by {100 * error:.2g} % of their mean size"
    return None


def _call(model: nn.Module, inputs: Inputs) -> Any:
    """Call a network; random numbers are the same in each call."""
    devices = [inputs[0].device] if inputs[0].is_cuda else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(0)
        return model(*inputs)


def _list_states(model: nn.Module) -> list[dict[str, Any]]:
    return list(copy_neuron_states(model).values())


def _compare_predictions(expected: Any, actual: Any, tolerance: float) -> tuple[int, int]:
    """Return the number of predictions of all outputs, and of those that differ and are no ties."""
    num_predictions = num_changed = 0
    for first, second in zip(tree_flatten(expected)[0], tree_flatten(actual)[0], strict=False):
        if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
            continue
        if first.shape != second.shape or first.dim() < 2 or first.shape[-1] < 2:
            continue
        highest, runner_up = first.double().topk(2, dim=-1).values.unbind(-1)
        differs = first.argmax(-1) != second.argmax(-1)
        is_tie = highest - runner_up <= tolerance * float(first.abs().max())
        num_predictions += differs.numel()
        num_changed += int((differs & ~is_tie).sum())
    return num_predictions, num_changed

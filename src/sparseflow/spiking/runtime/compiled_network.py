"""`CompiledNetwork`: a dense network compiled by torch, which runs from rest."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sparseflow.spiking.backends.precision import full_precision
from sparseflow.spiking.graph.module_state import reset_neurons
from sparseflow.spiking.runtime.cuda_graphs import GraphReplay
from sparseflow.spiking.runtime.dense_network import DenseNetwork, UnsupportedNetworkError
from sparseflow.spiking.runtime.membranes import Membranes
from sparseflow.spiking.runtime.output_difference import compute_difference
from sparseflow.spiking.runtime.plan import Plan

MIN_ERROR_LIMIT = 0.01
"""Mean error of outputs, as a fraction of their mean size, that flips of spikes at the threshold explain."""

MAX_ERROR_RATIO = 2.0
"""Limit of the error in units of the plan's, whose groups were checked one by one.

In some networks a flip changes all later layers, so that every rounding yields other outputs.
"""


class CompiledNetwork:
    """A network compiled for inputs of one shape; on a GPU, one CUDA graph.

    Args:
        network: The network.
        inputs: Tensors of the shape, dtype and device of later inputs.
        reset: Leave the neurons at rest instead of storing their membranes.
        starts_at_rest: See `Membranes`.

    Raises:
        Exception: torch cannot compile the network; the type depends on the problem.
    """

    def __init__(
        self,
        network: DenseNetwork,
        inputs: tuple[torch.Tensor, ...],
        *,
        reset: bool = False,
        starts_at_rest: bool = False,
    ) -> None:
        self._network, self._reset = network, reset
        self._membranes = Membranes(network.neurons, starts_at_rest=starts_at_rest)
        self._num_threads = torch.get_num_threads()
        # The conditions that torch would check at each call are checked by the caller and by `can_run`.
        options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        self._compiled = torch.compile(network.module, fullgraph=True, dynamic=False, options=options)
        self._replay: GraphReplay | None = None
        if inputs[0].is_cuda:
            self._replay = GraphReplay(
                self._run, inputs, network.neurons, reset=reset, starts_at_rest=starts_at_rest
            )
        else:
            self._run(*inputs)

    def _run(self, *inputs: torch.Tensor) -> Any:
        with full_precision(self._network.dtype):
            output, membranes = self._compiled(*(x.contiguous() for x in inputs))
        if not self._reset:
            self._membranes.set(membranes)
        return output

    @property
    def nbytes(self) -> int:
        """Bytes of its own weights."""
        module = self._network.module
        return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))

    def list_used_parameters(self) -> set[nn.Parameter]:
        """List the parameters that a run reads: its own, and those that it shares with the network."""
        return set(self._network.module.parameters())

    def refresh(self) -> bool:
        """Take over the network's current weights; return whether that is possible."""
        return self._network.refresh()

    def can_run(self) -> bool:
        """Return whether the network runs from rest, and torch has as many threads as when it compiled."""
        return self._membranes.are_at_rest() and torch.get_num_threads() == self._num_threads

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Run the network on `inputs` and store the membranes in its neurons."""
        return self._run(*inputs) if self._replay is None else self._replay(*inputs)


def compile_network(
    plan: Plan, inputs: tuple[torch.Tensor, ...], original: Callable[..., Any], *, reset: bool = False
) -> CompiledNetwork | str:
    """Compile the dense form of a plan's network, which may take minutes.

    Args:
        plan: The plan; its neurons are reset.
        inputs: Inputs of the network.
        original: Runs the network as it is.
        reset: See `CompiledNetwork`.

    Returns:
        The compiled network, or a clause that says why there is none.
    """
    try:
        network = DenseNetwork(plan.graph, plan.dtype, torch.channels_last, keeps_membranes=not reset)
        reset_neurons(plan.graph.model)
        ignore_missing_triton()
        with warnings.catch_warnings(action="ignore"):  # of the compiler, about settings and its own code
            compiled = CompiledNetwork(network, inputs, reset=reset, starts_at_rest=plan.starts_at_rest)
        outputs = []
        for run in (original, plan.run, compiled):
            reset_neurons(plan.graph.model)
            outputs.append(run(*inputs))
        of_plan, of_compiled = (compute_difference(outputs[0], output) for output in outputs[1:])
    except UnsupportedNetworkError as reason:
        return str(reason)
    except Exception as problem:  # compilers raise many types
        return f"torch.compile raises {type(problem).__name__}: {str(problem).strip().splitlines()[0]}"
    if of_plan is None or of_compiled is None:
        return "its outputs have other types or shapes"
    if not of_compiled.mean_error <= max(MIN_ERROR_LIMIT, MAX_ERROR_RATIO * of_plan.mean_error):
        return f"its outputs differ by {of_compiled.mean_error:.2g} of their size"
    return compiled


def ignore_missing_triton() -> None:
    """Suppress the warning of torch.compile that Triton is missing, which code for CPUs does not need."""
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)

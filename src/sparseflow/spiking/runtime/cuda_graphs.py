"""CUDA graphs: one launch for many kernels.

`capture_replay` captures a callable. `GraphReplay` captures a whole network with inputs and its state:
membranes are assigned to the neurons after each replay. A network that was not reset since its last run
must run without the graph, from its membranes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from sparseflow.spiking.backends.packed.variant_timing import capture_graph
from sparseflow.spiking.runtime.membranes import Membranes


def capture_replay(work: Callable[[], object]) -> Callable[[], object]:
    """Return a replay of `work`, or `work` itself if it cannot be captured (for example, if it waits for the
    device).
    """
    try:
        graph, _ = capture_graph(work)
    except RuntimeError:
        torch.cuda.synchronize(torch.cuda.current_device())
        return work
    return graph.replay


class GraphReplay:
    """A plan as one CUDA graph, for inputs of one shape.

    Args:
        run: The plan's run, from inputs to output; it must not wait for the device.
        inputs: Tensors of the shape, dtype and device of later inputs.
        neurons: The modules whose `v` the plan writes; at rest when the graph is captured.
        reset: Leave the neurons at rest instead of storing their membranes.
        starts_at_rest: See `Membranes`.

    Raises:
        RuntimeError: The run cannot be captured.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        inputs: Sequence[torch.Tensor],
        neurons: Sequence[Any],
        *,
        reset: bool = False,
        starts_at_rest: bool = False,
    ) -> None:
        self._inputs = [x.clone() for x in inputs]
        self._membranes = Membranes(neurons, starts_at_rest=starts_at_rest)
        rest_values = self._membranes.get()

        def work() -> Any:
            self._membranes.set(rest_values)
            return run(*self._inputs)

        self._graph, self._output = capture_graph(work)
        self._final_membranes = self._membranes.get()
        self._reset = reset
        if reset:
            self._membranes.set(rest_values)

    def can_run(self) -> bool:
        """Return whether the network runs from rest."""
        return self._membranes.are_at_rest()

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Replay on `inputs`.

        The output is a copy; the membranes are the graph's own tensors, which the next replay overwrites.
        """
        for buffer, x in zip(self._inputs, inputs, strict=True):
            buffer.copy_(x)
        self._graph.replay()
        if not self._reset:
            self._membranes.set(self._final_membranes)
        if isinstance(self._output, torch.Tensor):
            return self._output.clone()
        return tree_map_only(torch.Tensor, torch.Tensor.clone, self._output)

"""CUDA graphs: one launch for many kernels.

`captured` makes a callable replay what it did while it was watched. `Replay` does the same for a whole
network with inputs, and keeps what the network keeps: membranes are handed back to the neurons after each
replay. A network that was not reset since is to be run without the graph, from the membranes it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

WARMUP = 3


def captured(work: Callable[[], object]) -> Callable[[], object]:
    """A replay of `work`, or `work` itself when it cannot be captured (it waits for the device, say)."""
    try:
        graph, _ = _capture(work)
    except RuntimeError:
        torch.cuda.synchronize(torch.cuda.current_device())
        return work
    return graph.replay


def _capture(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


class Replay:
    """A network's plan as one CUDA graph, for inputs of one shape.

    Args:
        run: The plan's run, from inputs to output; must not wait for the device.
        inputs: Tensors of the shape, dtype and device to come.
        neurons: The modules whose `v` the plan writes; at rest when the graph is captured.

    Raises:
        RuntimeError: The run cannot be captured.
    """

    def __init__(
        self, run: Callable[..., Any], inputs: Sequence[torch.Tensor], neurons: Sequence[Any]
    ) -> None:
        self._neurons = list(neurons)
        self._rest = [neuron.v for neuron in self._neurons]
        self._inputs = [x.clone() for x in inputs]

        def work() -> Any:
            for neuron, rest in zip(self._neurons, self._rest, strict=True):
                neuron.v = rest
            return run(*self._inputs)

        self._graph, self._output = _capture(work)
        self._membranes = [neuron.v for neuron in self._neurons]
        # spikingjelly keeps memories in a registry of their own; reading that is quick, neuron.v is not.
        self._held = [
            neuron.__dict__["_memories"] if "v" in neuron.__dict__.get("_memories", ()) else neuron.__dict__
            for neuron in self._neurons
        ]

    def at_rest(self) -> bool:
        """Whether the network was reset since it last ran."""
        return not any(isinstance(held["v"], torch.Tensor) for held in self._held)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Replay on `inputs`. The output is a copy; the membranes are the graph's own tensors, which the next
        replay overwrites."""
        for held, given in zip(self._inputs, inputs, strict=True):
            held.copy_(given)
        self._graph.replay()
        for held, v in zip(self._held, self._membranes, strict=True):
            held["v"] = v
        return tree_map_only(torch.Tensor, torch.Tensor.clone, self._output)

"""Memory of a graph: its weights, and the peak of the tensors that are alive at the same time.

A tensor is alive from the node that writes it to the last node that reads it; inputs and outputs of the model
are alive for the full run. A view shares the memory of its input, and an element-wise operator writes over an
input of the same size that is not read again, as in onnxruntime. Other buffers that a kernel allocates for
itself and the fragmentation of the allocator are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sparseflow.latency.graph.analysis import Graph, Node
from sparseflow.latency.graph.kernels import TensorSpec

_VIEW_OPS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"})

_IN_PLACE_OPS = frozenset(
    {
        "Add", "Sub", "Mul", "Div", "Relu", "LeakyRelu", "Elu", "Clip", "Sigmoid", "HardSigmoid", "Tanh",
        "Exp", "Log", "Sqrt", "Neg", "Abs", "Reciprocal", "Erf", "QuickGelu", "FusedConv", "NhwcFusedConv",
    }
)  # fmt: skip
"""Operators whose first output may use the memory of an input; a convolution that of its sum."""

_BUFFERED_OPS = frozenset({"Gelu", "FastGelu", "BiasGelu"})
"""Operators of onnxruntime that use a buffer of the size of their output."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of one run of a model, in bytes.

    Attributes:
        weight_bytes: All weights, each once.
        activation_bytes: Peak of inputs, outputs and intermediate tensors.
    """

    weight_bytes: int
    activation_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Weights and activations."""
        return self.weight_bytes + self.activation_bytes


def estimate_memory(graph: Graph) -> MemoryEstimate:
    """Estimate the memory of a graph whose nodes run one after another."""
    weights: dict[str, int] = {}
    last_reads: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        for position, (name, tensor) in enumerate(zip(node.reads, node.kernel.inputs, strict=True)):
            if position in node.kernel.constants:
                weights[name] = tensor.bytes
            last_reads[name] = index
    permanent = {tensor.name: tensor.bytes for tensor in (*graph.inputs, *graph.outputs)}
    live_bytes = peak_bytes = sum(permanent.values())
    # A buffer has the name of its first tensor.
    buffers = {name: name for name in permanent}
    users = {name: {name} for name in permanent}
    num_bytes = dict(permanent)
    for index, node in enumerate(graph.nodes):
        for name, tensor in _iter_outputs(node):
            if name in permanent:
                continue
            reusable = (
                buffers[read]
                for read, source in zip(node.reads, node.kernel.inputs, strict=True)
                if read in buffers
                and _shares_memory(
                    node, name, source.bytes == tensor.bytes,
                    is_last=last_reads[read] == index and users[buffers[read]] == {read} - permanent.keys(),
                )
            )  # fmt: skip
            buffer = next(reusable, name)
            if buffer == name:
                num_bytes[name], users[name] = tensor.bytes, set()
                live_bytes += tensor.bytes
            buffers[name] = buffer
            users[buffer].add(name)
        buffered = node.kernel.outputs[0].bytes if node.kernel.node_op in _BUFFERED_OPS else 0
        peak_bytes = max(peak_bytes, live_bytes + buffered)
        for name in {*node.reads, *node.writes} - permanent.keys():
            if name in buffers and last_reads.get(name, index) <= index:
                buffer = buffers.pop(name)
                users[buffer].discard(name)
                live_bytes -= 0 if users[buffer] else num_bytes[buffer]
    return MemoryEstimate(weight_bytes=sum(weights.values()), activation_bytes=peak_bytes)


def _iter_outputs(node: Node) -> Iterator[tuple[str, TensorSpec]]:
    """Yield name and description of each tensor that a node writes."""
    yield from zip(node.writes, (t for t in node.kernel.outputs if t.present), strict=True)


def _shares_memory(node: Node, output: str, equal_size: bool, *, is_last: bool) -> bool:
    """Return whether an output uses the memory of an input.

    Args:
        node: The node.
        output: Name of the output.
        equal_size: Whether the input has the same number of bytes.
        is_last: Whether nothing reads the memory of the input afterwards.
    """
    if output != node.writes[0] or not equal_size:
        return False
    return node.kernel.node_op in _VIEW_OPS or (is_last and node.kernel.node_op in _IN_PLACE_OPS)

"""Dense baselines of a network, against which the optimized network is measured.

`build_baselines` builds all dense settings worth trying on a device from the network's graph: eager,
channels-last, with BatchNorm folded into the convolutions, with the neurons as plain fused loops, compiled;
on a GPU also TF32, fp16 and bf16, spikingjelly's own fused neurons, and all of it as one CUDA graph. All of
them compute what the network computes from rest. The fastest of them is the baseline.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from sparseflow.spiking.backends.precision import get_model_dtype
from sparseflow.spiking.backends.selection import select_backend
from sparseflow.spiking.graph.analysis import SpikeGraph
from sparseflow.spiking.graph.fusion_matcher import FusionMatcher, fold_conv_match
from sparseflow.spiking.graph.simplification import simplify_network
from sparseflow.spiking.runtime.compiled_network import ignore_missing_triton
from sparseflow.spiking.runtime.cuda_graphs import GraphReplay
from sparseflow.spiking.runtime.dense_network import DenseNetwork, UnsupportedNetworkError
from sparseflow.spiking.runtime.plan import Plan
from sparseflow.spiking.runtime.precision_casts import cast_tensors

Forward = Callable[..., Any]
"""A function from the inputs of a network to its output."""

FUSED_DENSE = "our fused neuron, dense, fp16 channels_last, CUDA graph"
"""Name of the setting that shares SparseFlow's neuron kernel but neither packs nor skips. It is reported
but is not a baseline, because it is not available without SparseFlow.
"""

EAGER = "eager"
"""Name of the setting that runs the network as it is."""


def fold_network(graph: SpikeGraph) -> fx.GraphModule:
    """Copy a network with BatchNorm folded into its convolutions; its own neurons stay.

    Args:
        graph: The network's analysis.

    Raises:
        ValueError: The network was not traced.
    """
    if graph.module is None:
        raise ValueError("only a traced network can be folded")
    original: dict[str, nn.Module] = dict(graph.module.named_modules())
    folded = copy.deepcopy(graph.module)
    nodes = {node.name: node for node in folded.graph.nodes}
    for match in FusionMatcher(graph).find_groups():
        for conv in (*match.sources, *match.dense_convs):
            if conv.bn_node is None:
                continue
            weight, bias = fold_conv_match(conv, original)
            module = folded.get_submodule(conv.name)
            assert isinstance(module, nn.Conv2d)
            module.weight = nn.Parameter(weight.to(module.weight.dtype), requires_grad=False)
            module.bias = nn.Parameter(bias.to(module.weight.dtype), requires_grad=False)
            bn = nodes[conv.bn_node.name]
            bn.replace_all_uses_with(nodes[conv.node.name])
            folded.graph.erase_node(bn)
    folded.graph.lint()
    folded.recompile()
    return folded.eval()


class _OutputOnly(nn.Module):
    """A module without the second of its two outputs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.module(*inputs)[0]


def make_dense_module(graph: SpikeGraph) -> nn.Module:
    """Make a module of plain operations that computes what the network computes from rest.

    A network with neurons of unknown dynamics keeps its neurons.
    """
    try:
        network = DenseNetwork(simplify_network(graph), get_model_dtype(graph.model))
    except UnsupportedNetworkError:
        return fold_network(graph)
    return copy.deepcopy(_OutputOnly(network.module))


def build_baselines(
    model: nn.Module, graph: SpikeGraph, *sample: torch.Tensor, compile: bool = True
) -> dict[str, Forward]:
    """Build all dense settings to try on the sample's device: name -> forward that starts from rest.

    Args:
        model: The network, not optimized; its state is reset before each call.
        graph: Its analysis.
        sample: Inputs; CUDA graphs are captured for their shapes.
        compile: Also try `torch.compile`.
    """
    if sample[0].is_cuda:
        return _build_gpu_baselines(model, graph, sample, compile=compile)
    baselines: dict[str, Forward] = {EAGER: make_stateless(model)}
    channels_last = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    baselines["channels_last"] = _with_channels_last(make_stateless(channels_last))
    if graph.module is None:
        return baselines
    folded = make_dense_module(graph)
    baselines["folded"] = make_stateless(folded)
    folded_channels_last = copy.deepcopy(folded).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    baselines["folded, channels_last"] = _with_channels_last(make_stateless(folded_channels_last))
    if compile:
        ignore_missing_triton()
        for name, module in (("folded", folded), ("folded, channels_last", folded_channels_last)):
            baseline = make_stateless(torch.compile(copy.deepcopy(module)))  # type: ignore[arg-type]
            baselines[f"{name}, compiled"] = _with_channels_last(baseline) if "last" in name else baseline
    return baselines


def _build_gpu_baselines(
    model: nn.Module, graph: SpikeGraph, sample: tuple[torch.Tensor, ...], *, compile: bool
) -> dict[str, Forward]:
    """Build the dense settings on a GPU.

    "tf32" is float32 with TF32 convolutions, PyTorch's default.
    """
    baselines: dict[str, Forward] = {EAGER: make_stateless(model)}
    if graph.module is None:
        return baselines
    folded = fold_network(graph)
    for name, dtype in (("tf32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        for layout in (torch.contiguous_format, torch.channels_last):
            cast_network = copy.deepcopy(folded).to(dtype=dtype, memory_format=layout)  # type: ignore[call-overload]
            label = f"{name} {'NCHW' if layout == torch.contiguous_format else 'channels_last'}, folded"
            eager = _with_cast(make_stateless(cast_network), dtype, layout)
            baselines[f"{label}, CUDA graph"] = _with_cuda_graph(eager, sample)
    baselines[FUSED_DENSE] = _with_cuda_graph(_make_dense_plan(graph, sample[0], torch.float16), sample)
    if compile:
        half = make_dense_module(graph).to(dtype=torch.float16, memory_format=torch.channels_last)  # type: ignore[call-overload]
        baseline = _with_cast(make_stateless(torch.compile(half)), torch.float16, torch.channels_last)  # type: ignore[arg-type]
        baselines["fp16 channels_last, folded, compiled, CUDA graph"] = _with_cuda_graph(baseline, sample)
    return baselines


def _make_dense_plan(graph: SpikeGraph, x: torch.Tensor, dtype: torch.dtype) -> Forward:
    """Make a plan that runs each group as a library convolution plus the fused neuron, without skipping."""
    backend = select_backend(x, graph.model, dtype)
    assert backend is not None
    plan = Plan(graph, backend)
    for group in plan.groups:
        group.mode, group.output_form = "dense", "dense"
    return make_stateless(graph.model, plan.run)


def _with_cast(forward: Forward, dtype: torch.dtype, layout: torch.memory_format) -> Forward:
    def run(*inputs: torch.Tensor) -> Any:
        outputs = forward(*cast_tensors([_set_layout(x, layout) for x in inputs], dtype))
        return cast_tensors(outputs, inputs[0].dtype if inputs[0].is_floating_point() else torch.float32)

    return run


def _with_channels_last(forward: Forward) -> Forward:
    return lambda *inputs: forward(*(_set_layout(x, torch.channels_last) for x in inputs))


def _set_layout(x: torch.Tensor, layout: torch.memory_format) -> torch.Tensor:
    return x.contiguous(memory_format=layout) if x.dim() == 4 else x


def _with_cuda_graph(forward: Forward, sample: tuple[torch.Tensor, ...]) -> Forward:
    """Run `forward` as one CUDA graph, captured on the first call."""
    replays: list[GraphReplay] = []

    def run(*inputs: torch.Tensor) -> Any:
        if not replays:
            replays.append(GraphReplay(forward, sample, ()))
        return replays[0](*inputs)

    return run


def make_stateless(model: nn.Module, forward: Forward | None = None) -> Forward:
    """Wrap `forward` (by default the model's) to reset the model before each call, without gradients."""
    # Collected once: walking the modules takes 0.2 ms, which is not part of the network's latency.
    stateful = [module for module in model.modules() if callable(getattr(module, "reset", None))]
    run_model = model if forward is None else forward

    def run(*inputs: torch.Tensor) -> Any:
        for module in stateful:
            module.reset()  # type: ignore[operator]
        with torch.no_grad():
            return run_model(*inputs)

    return run

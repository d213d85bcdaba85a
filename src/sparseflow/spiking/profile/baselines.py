"""The strongest dense form of a network: what an accelerated one is measured against.

`dense_forms` builds every dense setting worth trying on a device from the network's own graph: as it is,
channels-last, with BatchNorm folded into the convolutions, with the neurons as plain fused loops, compiled;
on a GPU also TF32, fp16 and bf16, spikingjelly's own fused neurons, and all of it as one CUDA graph. All of
them compute what the network computes from rest. The fastest of them is the baseline.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import torch
from torch import fx, nn

from sparseflow.spiking.backends.selection import backend_for
from sparseflow.spiking.backends.spec import NeuronSpec
from sparseflow.spiking.graph import SpikeGraph
from sparseflow.spiking.graph.fusion_matcher import GroupFinder, fold_match
from sparseflow.spiking.graph.module_state import reset
from sparseflow.spiking.runtime.cuda_graphs import Replay
from sparseflow.spiking.runtime.plan import Plan

Forward = Callable[[torch.Tensor], torch.Tensor]

OUR_DENSE = "our fused neuron, dense, fp16 channels_last, CUDA graph"
"""Name of the form that shares our neuron kernel but neither packs nor skips; told, but not a baseline:
nobody has it without SparseFlow."""

EAGER = "eager"
"""Name of the network as its user runs it today: float32, NCHW, nothing folded."""


class PlainNeuron(nn.Module):
    """A neuron from rest as a loop of plain operations over T, which compilers fuse.

    Args:
        spec: The dynamics.
        single: Input has no time axis.

    Input and output: float [T, N, C, H, W] (any memory format; channels-last stays so).
    """

    def __init__(self, spec: NeuronSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        rows = x.permute(0, 1, 3, 4, 2) if x.dim() == 5 else x
        v = torch.full_like(rows[0], spec.v_rest)
        spikes = []
        for t in range(rows.shape[0]):
            v = spec.alpha * v + spec.beta * rows[t]
            if spec.delta:
                v = v + spec.delta
            fired = (v >= spec.v_threshold).to(x.dtype)
            spikes.append(fired)
            v = (
                v - fired * spec.v_threshold
                if spec.v_reset is None
                else torch.where(fired > 0, spec.v_reset, v)
            )
        out = torch.stack(spikes)
        return out.permute(0, 1, 4, 2, 3) if x.dim() == 5 else out


def folded_twin(graph: SpikeGraph, *, plain: bool = True) -> fx.GraphModule:
    """A copy of the network with BatchNorm folded.

    Args:
        graph: The network's analysis.
        plain: Put a `PlainNeuron` in place of each known neuron in step mode 'm', which starts every call
            from rest. Otherwise the network's own neurons stay.

    Raises:
        ValueError: The network was not traced.
    """
    if graph.module is None:
        raise ValueError("only a traced network has a folded twin")
    original: dict[str, nn.Module] = dict(graph.module.named_modules())
    twin = copy.deepcopy(graph.module)
    nodes = {node.name: node for node in twin.graph.nodes}
    for match in GroupFinder(graph).groups():
        spec = graph.neurons[match.neuron_name].spec
        neuron = original[match.neuron_name]
        if plain and spec is not None and getattr(neuron, "step_mode", "m") == "m":
            _replace(twin, match.neuron_name, PlainNeuron(spec))
        for conv in (*match.sources, *match.dense_convs):
            if conv.bn_node is None:
                continue
            weight, bias = fold_match(conv, original)
            module = twin.get_submodule(conv.name)
            assert isinstance(module, nn.Conv2d)
            module.weight = nn.Parameter(weight.to(module.weight.dtype), requires_grad=False)
            module.bias = nn.Parameter(bias.to(module.weight.dtype), requires_grad=False)
            bn = nodes[conv.bn_node.name]
            bn.replace_all_uses_with(nodes[conv.node.name])
            twin.graph.erase_node(bn)
    twin.graph.lint()
    twin.recompile()
    return twin.eval()


def _replace(module: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent) if parent else module, leaf, new)


def dense_forms(
    model: nn.Module, graph: SpikeGraph, sample: torch.Tensor, *, compiled: bool = True
) -> dict[str, Forward]:
    """Every dense setting to try on the sample's device: name to a forward that starts from rest.

    Args:
        model: The network itself, not optimised; its memories are reset before each call.
        graph: Its analysis.
        sample: An input; CUDA graphs are captured on its shape.
        compiled: Try `torch.compile` too.
    """
    if sample.device.type == "cuda":
        return _gpu_forms(model, graph, sample, compiled=compiled)
    forms: dict[str, Forward] = {EAGER: from_rest(model)}
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    forms["channels_last"] = _channels_last(from_rest(last))
    if graph.module is None:
        return forms
    twin = folded_twin(graph)
    forms["folded"] = from_rest(twin)
    twin_last = copy.deepcopy(twin).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    forms["folded, channels_last"] = _channels_last(from_rest(twin_last))
    if compiled:
        # On a CPU torch remarks that Triton is missing, which no CPU code needs.
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
        for name, module in (("folded", twin), ("folded, channels_last", twin_last)):
            form = from_rest(torch.compile(copy.deepcopy(module)))  # type: ignore[arg-type]
            forms[f"{name}, compiled"] = _channels_last(form) if "last" in name else form
    return forms


def _gpu_forms(
    model: nn.Module, graph: SpikeGraph, sample: torch.Tensor, *, compiled: bool
) -> dict[str, Forward]:
    """Dense settings on a GPU.

    "tf32" is float32 with TF32 convolutions, which is also what eager PyTorch does unless told otherwise.
    """
    forms: dict[str, Forward] = {EAGER: from_rest(model)}
    if graph.module is None:
        return forms
    own = folded_twin(graph, plain=False)
    for name, dtype in (("tf32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        for layout in (torch.contiguous_format, torch.channels_last):
            twin = copy.deepcopy(own).to(dtype=dtype, memory_format=layout)  # type: ignore[call-overload]
            label = f"{name} {'NCHW' if layout == torch.contiguous_format else 'channels_last'}, folded"
            eager = _cast(from_rest(twin), dtype, layout)
            forms[f"{label}, CUDA graph"] = _graphed(eager, sample)
    forms[OUR_DENSE] = _graphed(_dense_plan(graph, sample, torch.float16), sample)
    if compiled:
        half = folded_twin(graph).to(dtype=torch.float16, memory_format=torch.channels_last)  # type: ignore[call-overload]
        form = _cast(from_rest(torch.compile(half)), torch.float16, torch.channels_last)  # type: ignore[arg-type]
        forms["fp16 channels_last, folded, compiled, CUDA graph"] = _graphed(form, sample)
    return forms


def _dense_plan(graph: SpikeGraph, sample: torch.Tensor, dtype: torch.dtype) -> Forward:
    """Every group as the library's convolution with our fused neuron behind it: nothing is skipped."""
    backend = backend_for(sample, graph.model, dtype)
    assert backend is not None
    plan = Plan(graph, backend)
    for group in plan.groups:
        group.way, group.emit = "dense", "dense"

    def run(x: torch.Tensor) -> torch.Tensor:
        reset(graph.model)
        with torch.no_grad():
            return plan.run(x)

    return run


def _cast(forward: Forward, dtype: torch.dtype, layout: torch.memory_format) -> Forward:
    def run(x: torch.Tensor) -> torch.Tensor:
        fits = x.dim() == 4
        return forward(x.to(dtype=dtype, memory_format=layout) if fits else x.to(dtype)).to(x.dtype)

    return run


def _graphed(forward: Forward, sample: torch.Tensor) -> Forward:
    """`forward` as one CUDA graph, captured when first called."""
    made: list[Replay] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        if not made:
            made.append(Replay(forward, (sample,), ()))
        return made[0](x)

    return run


def from_rest(model: nn.Module) -> Forward:
    """`model` from rest at every call, without gradients."""
    # Found once: walking a network's modules costs a fifth of a millisecond, which is not the network's time.
    stateful = [module for module in model.modules() if callable(getattr(module, "reset", None))]

    def run(x: torch.Tensor) -> torch.Tensor:
        for module in stateful:
            module.reset()  # type: ignore[operator]
        with torch.no_grad():
            return model(x)

    return run


def _channels_last(forward: Forward) -> Forward:
    def run(x: torch.Tensor) -> torch.Tensor:
        return forward(x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x)

    return run

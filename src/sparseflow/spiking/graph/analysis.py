"""Analysis of a network: trace it, propagate spike values, and describe its convolutions."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn

from sparseflow.core.checks import check_one_of
from sparseflow.errors import ModelError, SampleError
from sparseflow.spiking.graph.forward_reads import ForwardReads
from sparseflow.spiking.graph.module_state import preserve_state
from sparseflow.spiking.graph.observation import observe_run
from sparseflow.spiking.graph.propagation import ValuePropagation, check_neuron_output
from sparseflow.spiking.graph.registry import NeuronInfo, get_neuron_info
from sparseflow.spiking.graph.sites import ConvSite, Refusal, SpikeLayer, describe_site
from sparseflow.spiking.graph.tracing import (
    Sample,
    UntraceableError,
    get_forward_reads,
    split_arguments,
    trace,
    trace_once,
)
from sparseflow.spiking.graph.values import SpikeValue

AnalysisMethod = Literal["auto", "fx", "hooks"]


@dataclass(frozen=True, kw_only=True)
class SpikeGraph:
    """Result of the analysis of a network.

    Attributes:
        model: The network, unmodified.
        module: The traced network, which shares the model's modules and state; None if it was not traced.
        values: What is known about each fx node by name, at any time it is read (in-place operations change
            values); without a traced network, about each layer's output by module name.
        neurons: The network's neurons by module name, in order.
        sites: The Conv2d, ConvTranspose2d, Conv1d and Linear modules, in order.
        method: 'fx' for a traced network, 'hooks' for one that was observed while it ran the sample.
        trace_error: Why tracing failed, if it did.
        reads: The Python values that the traced network depends on; None if it was not traced.
        warnings: What the analysis could not determine, one sentence each.
    """

    model: nn.Module
    module: fx.GraphModule | None
    values: Mapping[str, SpikeValue]
    neurons: Mapping[str, NeuronInfo]
    sites: tuple[ConvSite, ...]
    method: Literal["fx", "hooks"]
    trace_error: str | None = None
    reads: ForwardReads | None = None
    warnings: tuple[str, ...] = ()

    @property
    def replaceable(self) -> tuple[ConvSite, ...]:
        """The convolutions that a sparse one can replace."""
        return tuple(site for site in self.sites if site.replaceable)

    def __str__(self) -> str:
        rows = [("convolution", "k", "s", "channels", "input", "fed by", "verdict")]
        for site in self.sites:
            kind = site.value.kind if site.value.kind != "integer" else f"0…{site.value.max_value}"
            rows.append((
                site.name,
                f"{site.kernel_size[0]}x{site.kernel_size[1]}",
                str(site.stride[0]),
                f"{site.in_channels}>{site.out_channels}",
                kind,
                ", ".join(site.fed_by) or "-",
                "sparse" if site.replaceable else f"{site.refusal}: {site.reason}",
            ))  # fmt: skip
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
            for row in rows
        ]
        head = (
            f"{type(self.model).__name__}: {len(self.neurons)} neurons, {len(self.replaceable)} of "
            f"{len(self.sites)} convolutions can be sparse (by {self.method})"
        )
        tail = [f"! {sentence}" for sentence in self.warnings]
        if self.trace_error:
            tail.append(f"! not traced: {self.trace_error}")
        return "\n".join([head, *lines, *tail])


def analyze(model: nn.Module, sample: Sample | None = None, *, method: AnalysisMethod = "auto") -> SpikeGraph:
    """Find which convolutions of `model` read spikes. The model is not modified.

    Verdicts do not depend on the sample's numbers: they are the same with and without a sample, if the
    network can be traced without one.

    Args:
        model: The network, in eval mode (an active dropout makes its output dense).
        sample: Its input: a tensor, a tuple or list of positional arguments, or a mapping of keyword
            arguments. With it, shapes are recorded and the traced network is checked against the model.
        method: 'fx' traces; 'hooks' observes one run of the sample; 'auto' traces and falls back to
            observing.

    Returns:
        The analysis. If tracing fails and there is no sample, all convolutions are refused as
        'untraceable-without-sample'.

    Raises:
        ModelError: `model` is not a module.
        SampleError: The model cannot run the sample.
        UntraceableError: `method` is 'fx' and tracing failed.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected a torch.nn.Module, got {type(model).__name__}")
    check_one_of(("auto", "fx", "hooks"), method=method)
    neurons = {
        name: info for name, module in model.named_modules() if (info := get_neuron_info(module)) is not None
    }
    error: UntraceableError | None = None
    if method != "hooks":
        try:
            return _analyze_by_tracing(model, sample, neurons)
        except UntraceableError as caught:
            error = caught
        if method == "fx":
            raise error
    if sample is None:
        return _refuse_all(model, neurons, error)
    return _analyze_by_observation(model, sample, neurons, error)


def _analyze_by_tracing(
    model: nn.Module, sample: Sample | None, neurons: dict[str, NeuronInfo]
) -> SpikeGraph:
    warnings: list[str] = []
    if sample is None:
        module = _trace_with_guessed_input(model, neurons, warnings)
        shapes: dict[str, tuple[int, ...]] = {}
    else:
        module = trace(model, sample)
        shapes = _check_traced_module(model, module, sample, neurons, warnings)
    propagation = ValuePropagation(module, neurons)
    calls: dict[str, list[SpikeValue]] = {}
    for name, node, value in propagation.inputs:
        source = node.all_input_nodes[0].name if node.all_input_nodes else ""
        calls.setdefault(name, []).append(value.with_shape(shapes.get(source)))
    values = {name: value.with_shape(shapes.get(name)) for name, value in propagation.values.items()}
    called = {str(node.target) for node in module.graph.nodes if node.op == "call_module"}
    warnings += _collect_warnings(module, neurons, called)
    return SpikeGraph(
        model=model,
        module=module,
        values=values,
        neurons=neurons,
        sites=_collect_sites(model, calls, called),
        method="fx",
        reads=get_forward_reads(module),
        warnings=tuple(warnings),
    )


def describe_unfused_neurons(graph: SpikeGraph, name: str) -> list[str]:
    """Describe, one clause each, the neurons behind a layer that run their own code, and why."""
    if graph.module is None:
        return []
    layers = {site.name for site in graph.sites}
    nodes = [n for n in graph.module.graph.nodes if n.op == "call_module" and n.target == name]
    visited = set(nodes)
    clauses: dict[str, None] = {}
    while nodes:
        for user in nodes.pop().users:
            target = str(user.target) if user.op == "call_module" else ""
            neuron = graph.neurons.get(target)
            if neuron is not None and neuron.spec is None:
                clauses[f"the neuron `{target}` behind it runs its own code: {neuron.reason}"] = None
            elif neuron is None and target not in layers and user not in visited:
                visited.add(user)
                nodes.append(user)
    return list(clauses)


def _describe_uncalled_neurons(neurons: Iterable[str], called: set[str]) -> list[str]:
    names = [f"`{name}`" for name in neurons if name not in called]
    if not names:
        return []
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return [f"the forward pass does not call {listed}"]


def _collect_warnings(module: fx.GraphModule, neurons: Iterable[str], called: set[str]) -> list[str]:
    notes = _describe_uncalled_neurons(neurons, called)
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in (torch.conv2d, torch.nn.functional.conv2d):
            notes.append(f"`{node.name}` calls conv2d directly; only modules are replaced")
    return notes


def _collect_sites(
    model: nn.Module, calls: dict[str, list[SpikeValue]], called: set[str]
) -> tuple[ConvSite, ...]:
    sites = []
    for name, module in model.named_modules():
        if not isinstance(module, SpikeLayer):
            continue
        absent = (Refusal.NOT_CALLED, "the forward pass does not call it")
        parents = [name[:end] for end, letter in enumerate(name) if letter == "."]
        if opaque := next((parent for parent in parents if parent in called), None):
            absent = (Refusal.OPAQUE, f"inside `{opaque}`, which the analysis does not look into")
        sites.append(describe_site(name, module, calls.get(name, []), absent))
    return tuple(sites)


def _refuse_all(
    model: nn.Module, neurons: dict[str, NeuronInfo], error: UntraceableError | None
) -> SpikeGraph:
    message = "analysis by hooks needs a sample" if error is None else str(error)
    absent = (Refusal.UNTRACEABLE, "the network cannot be traced without a sample; give one")
    sites = [
        describe_site(name, module, [], absent)
        for name, module in model.named_modules()
        if isinstance(module, SpikeLayer)
    ]
    return SpikeGraph(
        model=model,
        module=None,
        values={},
        neurons=neurons,
        sites=tuple(sites),
        method="hooks",
        trace_error=message,
    )


def _analyze_by_observation(
    model: nn.Module, sample: Sample, neurons: dict[str, NeuronInfo], error: UntraceableError | None
) -> SpikeGraph:
    observer = observe_run(model, sample, neurons)
    return SpikeGraph(
        model=model,
        module=None,
        values=observer.values,
        neurons=neurons,
        sites=_collect_sites(model, observer.inputs, observer.called),
        method="hooks",
        trace_error=None if error is None else str(error),
        warnings=(
            "one run was observed; branches that it did not take are not analyzed",
            *_describe_uncalled_neurons(neurons, observer.called),
        ),
    )


class _ShapeRecorder(fx.Interpreter):
    """Runs a traced network, records the shape of each tensor and checks the outputs of neurons."""

    def __init__(self, module: fx.GraphModule, neurons: Mapping[str, NeuronInfo]) -> None:
        super().__init__(module)
        self._neurons = neurons
        self.shapes: dict[str, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.shapes[n.name] = tuple(result.shape)
        if n.op == "call_module" and str(n.target) in self._neurons:
            check_neuron_output(str(n.target), self._neurons[str(n.target)], result)
        return result


def _check_traced_module(
    model: nn.Module,
    module: fx.GraphModule,
    sample: Sample,
    neurons: Mapping[str, NeuronInfo],
    warnings: list[str],
) -> dict[str, tuple[int, ...]]:
    """Run model and traced network twice each on the sample, with state kept in between, and compare.

    Returns the shapes by node name; raises an UntraceableError if the outputs differ.
    """
    args, kwargs = split_arguments(sample)
    reads = get_forward_reads(module)
    with torch.no_grad():
        try:
            with preserve_state(model):
                expected = [model(*args, **kwargs), model(*args, **kwargs)]
                changed = reads.find_change()
        except Exception as error:
            raise SampleError(f"{type(model).__name__} cannot run the sample: {error}") from error
        if changed and reads.side_effect is None:
            reads.side_effect = f"changes {changed}"
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        interpreter = _ShapeRecorder(module, neurons)
        try:
            actual = _run_repeatedly(model, lambda: interpreter.run(*bound.arguments.values()))
        except ModelError:
            raise
        except Exception as error:
            raise UntraceableError(f"the traced network cannot run the sample: {error}") from error
        if not _is_equal(expected, actual):
            if _is_equal(expected, _run_repeatedly(model, lambda: model(*args, **kwargs))):
                raise UntraceableError("the traced network does not compute what the model computes")
            warnings.append("the model's output differs between runs, so the traced network is not checked")
    return interpreter.shapes


def _run_repeatedly(model: nn.Module, run: Any) -> list[Any]:
    with preserve_state(model):
        return [run(), run()]


def _is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.shape == second.shape and bool(
            ((first == second) | (first.isnan() & second.isnan())).all()
        )
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(_is_equal(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_is_equal(first[key], second[key]) for key in first)
    try:
        return type(first) is type(second) and bool(first == second)
    except RuntimeError:  # objects that compare tensors
        return False


def _trace_with_guessed_input(
    model: nn.Module, neurons: Mapping[str, NeuronInfo], warnings: list[str]
) -> fx.GraphModule:
    """Trace without a sample; answer queries of shapes with those of a guessed image.

    The graph asserts the answers it depends on, so it refuses inputs of another shape.
    """
    try:
        return trace(model)
    except UntraceableError as error:
        first = error
    for image in _guess_images(model):
        try:
            module = trace_once(model, image, run=True)
            _check_traced_module(model, module, image, neurons, [])
            warnings.append(f"no sample: an input of shape {tuple(image.shape)} was assumed")
            return module
        except SampleError:
            continue
        except UntraceableError:
            raise first from None
    raise first


def _guess_images(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield zero images of common shapes that the network may accept."""
    tensor = next(iter((*model.parameters(), *model.buffers())), None)
    channel_counts = [
        m.in_channels for m in model.modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d))
    ]
    if tensor is None or tensor.is_meta or not channel_counts:
        return
    steps = getattr(model, "T", 2)
    leading_shapes = [(1,), (steps if isinstance(steps, int) else 2, 1)]
    if any(getattr(module, "step_mode", "s") == "m" for module in model.modules()):
        leading_shapes.reverse()
    # The stem is usually the first convolution; otherwise it reads few channels.
    for num_channels in dict.fromkeys(
        [channel_counts[0], *(channels for channels in (3, 1, 2) if channels in channel_counts)]
    ):
        for size in (32, 28, 16, 64, 48, 96, 128, 224):
            for leading in leading_shapes:
                yield torch.zeros(
                    *leading, num_channels, size, size, device=tensor.device, dtype=tensor.dtype
                )

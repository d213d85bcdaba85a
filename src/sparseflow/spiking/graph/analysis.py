"""Analyse a network: trace it, walk it, judge its convolutions."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx, nn

from sparseflow.errors import ModelError, SampleError
from sparseflow.spiking.graph.module_state import kept_state
from sparseflow.spiking.graph.observation import observe
from sparseflow.spiking.graph.propagation import Walk, check_output
from sparseflow.spiking.graph.registry import NeuronInfo, neuron_info
from sparseflow.spiking.graph.sites import ConvSite, Read, Refusal, site
from sparseflow.spiking.graph.tracing import Sample, UntraceableError, call_arguments, trace, trace_once
from sparseflow.spiking.graph.values import Value

Method = Literal["auto", "fx", "hooks"]


@dataclass(frozen=True, kw_only=True)
class SpikeGraph:
    """What analysis found out about a network.

    Attributes:
        model: The network, untouched.
        module: The traced network (it shares the model's modules and state); None when it was not traced.
        values: What is known about each fx node by name, at whatever time it is read (in-place operations
            change values); without a traced network, about each layer's output by module name.
        neurons: The network's neurons by module name, in order.
        sites: Every Conv2d (and ConvTranspose2d) of the network, in order.
        method: 'fx' for a traced network, 'hooks' for one that was watched while it ran the sample.
        trace_error: Why tracing failed, when it did.
        ambiguous: What the analysis could not settle, one sentence each.
    """

    model: nn.Module
    module: fx.GraphModule | None
    values: Mapping[str, Value]
    neurons: Mapping[str, NeuronInfo]
    sites: tuple[ConvSite, ...]
    method: Literal["fx", "hooks"]
    trace_error: str | None = None
    ambiguous: tuple[str, ...] = ()

    @property
    def replaceable(self) -> tuple[ConvSite, ...]:
        """The convolutions for which a sparse one may stand in."""
        return tuple(found for found in self.sites if found.replaceable)

    def __str__(self) -> str:
        rows = [("convolution", "k", "s", "channels", "input", "fed by", "verdict")]
        for found in self.sites:
            kind = found.value.kind if found.value.kind != "integer" else f"0…{found.value.max_value}"
            rows.append((
                found.name,
                f"{found.kernel_size[0]}x{found.kernel_size[1]}",
                str(found.stride[0]),
                f"{found.in_channels}>{found.out_channels}",
                kind,
                ", ".join(found.fed_by) or "-",
                "sparse" if found.replaceable else f"{found.refusal}: {found.reason}",
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
        tail = [f"! {sentence}" for sentence in self.ambiguous]
        if self.trace_error:
            tail.append(f"! not traced: {self.trace_error}")
        return "\n".join([head, *lines, *tail])


def analyze(model: nn.Module, sample: Sample | None = None, *, method: Method = "auto") -> SpikeGraph:
    """Find which convolutions of `model` read spikes.

    The model is left as it was, bit for bit. Verdicts do not rest on the sample's numbers: they are the same
    with and without one, as long as the network can be traced without.

    Args:
        model: The network, in eval mode (an active dropout is taken for what it is).
        sample: Its input: a tensor, a tuple or list of positional arguments, or a mapping of keyword ones.
            With it, shapes are recorded and the traced network is checked against the model.
        method: 'fx' traces; 'hooks' watches one run of the sample; 'auto' traces and falls back on watching.

    Returns:
        What was found. When nothing could be traced and there is no sample to watch, every convolution is
        refused as 'untraceable-without-sample'.

    Raises:
        ModelError: `model` is not a module.
        SampleError: The model cannot run the sample.
        UntraceableError: `method` is 'fx' and tracing failed.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if method not in ("auto", "fx", "hooks"):
        raise ValueError(f"`method` (={method!r}) must be 'auto', 'fx' or 'hooks'")
    neurons = {
        name: info for name, module in model.named_modules() if (info := neuron_info(module)) is not None
    }
    error: UntraceableError | None = None
    if method != "hooks":
        try:
            return _by_tracing(model, sample, neurons)
        except UntraceableError as caught:
            error = caught
        if method == "fx":
            raise error
    if sample is None:
        return _unknown(model, neurons, error)
    return _by_watching(model, sample, neurons, error)


def _by_tracing(model: nn.Module, sample: Sample | None, neurons: dict[str, NeuronInfo]) -> SpikeGraph:
    ambiguous: list[str] = []
    if sample is None:
        module = _trace_by_guess(model, neurons, ambiguous)
        shapes: dict[str, tuple[int, ...]] = {}
    else:
        module = trace(model, sample)
        shapes = _check(model, module, sample, neurons, ambiguous)
    walk = Walk(module, neurons)
    reads: dict[str, list[Read]] = {}
    for name, node, value in walk.inputs:
        source = node.all_input_nodes[0].name if node.all_input_nodes else ""
        reads.setdefault(name, []).append(Read(node=node.name, value=value.with_shape(shapes.get(source))))
    values = {name: value.with_shape(shapes.get(name)) for name, value in walk.values.items()}
    called = {str(node.target) for node in module.graph.nodes if node.op == "call_module"}
    ambiguous += _left_over(module, neurons, called)
    return SpikeGraph(
        model=model,
        module=module,
        values=values,
        neurons=neurons,
        sites=_sites(model, reads, called),
        method="fx",
        ambiguous=tuple(ambiguous),
    )


def _silent(neurons: Iterable[str], called: set[str]) -> list[str]:
    """One sentence about the neurons that the forward pass leaves out."""
    names = [f"`{name}`" for name in neurons if name not in called]
    if not names:
        return []
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return [f"the forward pass does not call {shown}"]


def _left_over(module: fx.GraphModule, neurons: Iterable[str], called: set[str]) -> list[str]:
    """What a reader should know beside the verdicts."""
    notes = _silent(neurons, called)
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in (torch.conv2d, torch.nn.functional.conv2d):
            notes.append(f"`{node.name}` calls conv2d directly; only modules are replaced")
    return notes


def _sites(model: nn.Module, reads: dict[str, list[Read]], called: set[str]) -> tuple[ConvSite, ...]:
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            continue
        absent = (Refusal.NOT_CALLED, "the forward pass does not call it")
        parents = [name[:end] for end, letter in enumerate(name) if letter == "."]
        if opaque := next((parent for parent in parents if parent in called), None):
            absent = (Refusal.OPAQUE, f"inside `{opaque}`, which is one unit to the analysis")
        found.append(site(name, module, reads.get(name, []), absent))
    return tuple(found)


def _unknown(model: nn.Module, neurons: dict[str, NeuronInfo], error: UntraceableError | None) -> SpikeGraph:
    why = "nothing was run: analysis by hooks needs a sample" if error is None else str(error)
    absent = (Refusal.UNTRACEABLE, "the network cannot be traced without a sample; give one")
    sites = [
        site(name, module, [], absent)
        for name, module in model.named_modules()
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d))
    ]
    # Whatever else is wrong with a convolution, the missing sample comes first.
    sites = [replace(s, refusal=absent[0], reason=absent[1], replaceable=False) for s in sites]
    return SpikeGraph(
        model=model,
        module=None,
        values={},
        neurons=neurons,
        sites=tuple(sites),
        method="hooks",
        trace_error=why,
    )


def _by_watching(
    model: nn.Module, sample: Sample, neurons: dict[str, NeuronInfo], error: UntraceableError | None
) -> SpikeGraph:
    seen = observe(model, sample, neurons)
    reads = {name: [Read(node=None, value=value) for value in values] for name, values in seen.inputs.items()}
    return SpikeGraph(
        model=model,
        module=None,
        values=seen.values,
        neurons=neurons,
        sites=_sites(model, reads, seen.called),
        method="hooks",
        trace_error=None if error is None else str(error),
        ambiguous=(
            "one run was watched; branches that it did not take are not judged",
            *_silent(neurons, seen.called),
        ),
    )


# --- the sample's run ---------------------------------------------------------------------------------------


class _Shapes(fx.Interpreter):
    """Runs a traced network, notes the shape of every tensor and checks what neurons put out."""

    def __init__(self, module: fx.GraphModule, neurons: Mapping[str, NeuronInfo]) -> None:
        super().__init__(module)
        self._neurons = neurons
        self.shapes: dict[str, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.shapes[n.name] = tuple(result.shape)
        if n.op == "call_module" and str(n.target) in self._neurons:
            check_output(str(n.target), self._neurons[str(n.target)], result)
        return result


def _check(
    model: nn.Module,
    module: fx.GraphModule,
    sample: Sample,
    neurons: Mapping[str, NeuronInfo],
    ambiguous: list[str],
) -> dict[str, tuple[int, ...]]:
    """Run model and traced network twice each on the sample, with state kept between, and compare.

    Returns:
        Shapes by node name.

    Raises:
        SampleError: The model cannot run the sample.
        UntraceableError: The two differ.
        ModelError: A neuron put out what it was declared not to.
    """
    args, kwargs = call_arguments(sample)
    with torch.no_grad():
        try:
            expected = _two_runs(model, lambda: model(*args, **kwargs))
        except Exception as error:
            raise SampleError(f"{type(model).__name__} cannot run the sample: {error}") from error
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        interpreter = _Shapes(module, neurons)
        try:
            found = _two_runs(model, lambda: interpreter.run(*bound.arguments.values()))
        except ModelError:
            raise
        except Exception as error:
            raise UntraceableError(f"the traced network cannot run the sample: {error}") from error
        if not _equal(expected, found):
            if _equal(expected, _two_runs(model, lambda: model(*args, **kwargs))):
                raise UntraceableError("the traced network does not compute what the model computes")
            ambiguous.append("the model's output differs from run to run, so the traced network is unchecked")
    return interpreter.shapes


def _two_runs(model: nn.Module, run: Any) -> list[Any]:
    with kept_state(model):
        return [run(), run()]


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and bool(((left == right) | (left.isnan() & right.isnan())).all())
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(_equal(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    return type(left) is type(right) and bool(left == right)


def _trace_by_guess(
    model: nn.Module, neurons: Mapping[str, NeuronInfo], ambiguous: list[str]
) -> fx.GraphModule:
    """Trace without a sample; where the network asks for shapes, answer with those of a made-up image.

    The graph asserts the answers that it rests on, so it refuses inputs of another form.
    """
    try:
        return trace(model)
    except UntraceableError as error:
        first = error
    for image in _made_up_images(model):
        try:
            module = trace_once(model, image, run=True)
            _check(model, module, image, neurons, [])
            ambiguous.append(f"without a sample, an input of shape {tuple(image.shape)} was assumed")
            return module
        except SampleError:
            continue
        except UntraceableError:
            raise first from None
    raise first


def _made_up_images(model: nn.Module) -> Iterator[torch.Tensor]:
    """Black images of common forms that the network may accept."""
    held = next(iter((*model.parameters(), *model.buffers())), None)
    depths = [m.in_channels for m in model.modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d))]
    if held is None or held.is_meta or not depths:
        return
    steps = getattr(model, "T", 2)
    forms = [(1,), (steps if isinstance(steps, int) else 2, 1)]
    if any(getattr(module, "step_mode", "s") == "m" for module in model.modules()):
        forms.reverse()
    # The stem is mostly the first convolution; where it is not, it reads few channels.
    for depth in dict.fromkeys([depths[0], *(few for few in (3, 1, 2) if few in depths)]):
        for size in (32, 28, 16, 64, 48, 96, 128, 224):
            for leading in forms:
                yield torch.zeros(*leading, depth, size, size, device=held.device, dtype=held.dtype)

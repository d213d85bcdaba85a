"""`optimize`, `restore`, `layer_times`, `profile_layers`: accelerate a network, undo it, and measure it.

The network keeps its parameters and state_dict keys. Its `forward` becomes an `AcceleratedForward`. Under
the static policy, and if a network cannot be traced, single convolutions become `SparseConv2d` modules that
share the same parameters instead.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from sparseflow.core.progress import Progress
from sparseflow.errors import InputError, ModelError, SampleError
from sparseflow.spiking.accelerated import (
    AcceleratedForward,
    MeasureTime,
    get_accelerated_forward,
    limit_threads_after_fork,
)
from sparseflow.spiking.autotune.candidates import MAX_FLIP_FRACTION
from sparseflow.spiking.autotune.decision_cache import DecisionCache
from sparseflow.spiking.autotune.dispatch import Policy
from sparseflow.spiking.backends.selection import select_backend
from sparseflow.spiking.graph.analysis import analyze
from sparseflow.spiking.graph.module_state import preserve_state_without_grad
from sparseflow.spiking.graph.registry import is_spiking_neuron
from sparseflow.spiking.nir_import import NirGraph, import_nir, is_nir_graph
from sparseflow.spiking.profile.firing import FiringStats, profile_firing


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """Profile of one convolution.

    Attributes:
        name: Module name.
        fed_by: Names of the neurons that feed it.
        values: Kind of its input values, such as `"binary"`.
        replaceable: Whether it can be replaced by a sparse group.
        reason: Why it cannot be replaced; None if it can.
        latency_ms: Latency of its group in the optimized network; None without a group.
        firing: Firing statistics of its input; None if it was not called.
    """

    name: str
    fed_by: tuple[str, ...]
    values: str
    replaceable: bool
    reason: str | None
    latency_ms: float | None
    firing: FiringStats | None

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types; the fields of `firing` become fields of the record."""
        record: dict[str, Any] = {**asdict(self), "fed_by": list(self.fed_by)}
        firing = record.pop("firing")
        return record | (firing or {})


def optimize(
    model: nn.Module | NirGraph,
    sample: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
    *,
    policy: Policy = "measured",
    dtype: torch.dtype | None = None,
    reset: bool = False,
    compile: bool | None = None,
    measure: MeasureTime = "call",
    freeze: bool = False,
    offload_weights: bool = False,
    cache: bool | str | Path = True,
    progress: Progress | None = None,
) -> nn.Module:
    """Accelerate a trained spiking network. Returns `model` itself, or the network of a NIR graph.

    Weights, modules and constants of neurons may change afterwards; the next call detects it, unless
    `freeze` is True. Only values written through a tensor's `.data` are not detected: call `optimize` again
    after that. If an error is raised, the model is unchanged.

    Args:
        model: A network in eval mode whose neurons are known: those of spikingjelly, snnTorch, norse and
            sinabs, or registered ones. A `nir.NIRGraph` becomes one by `import_nir`.
        sample: A typical input, or a tuple of inputs. With it, everything is tuned now; without it, on the
            first call. Each new input shape is tuned when it first occurs.
        policy: "measured" times all ways to run a layer and selects the fastest, never one slower than the
            network's own; "static" replaces by feature-map height (32 and up: blocks of 16; 16 to 31: 8; 8
            to 15: 4; below: unchanged).
        dtype: On a GPU, the precision of the network's layers: torch.float16 or torch.bfloat16 trade accuracy
            for speed. Inputs, outputs and membranes keep theirs. By default the model's own; a float32 model
            stays as accurate as float32.
        reset: Reset the network after each call, so that each call starts from rest. This takes less time
            than spikingjelly's `functional.reset_net`.
        compile: Whether the dense network compiled by torch.compile is a candidate for the sample's shape,
            unless the sparse network is much faster than the dense one. Compiling takes seconds to minutes,
            once per process. By default True, or False if the environment variable SPARSEFLOW_COMPILE is 0.
        measure: When inputs of another shape than the sample's are measured. "call": in their first call,
            which takes seconds. "never": they follow the decisions about the last shape that was measured.
            "background": so do their first calls, while a thread measures them on a copy of the network.
        freeze: Treat weights, modules, hooks and whatever the forward reads as constants. Calls do not look
            for changes, which saves time where a network is small, and compute no gradients. After a change,
            call `optimize` again.
        offload_weights: Move the parameters that no call reads any more to slower memory, because the network
            runs with copies of them that were prepared: from a CPU to a temporary file that is memory-mapped,
            from a GPU to page-locked memory of the host. They keep their device and can be used as before,
            more slowly; `restore` moves them back.
        cache: Cache decisions on disk; a path names the file.
        progress: Called with a message and the fraction done during tuning; without a sample, during later
            tuning.

    Raises:
        ModelError: `model` is not a module, is in training mode or on `meta`, has NaN or Inf weights, or no
            spiking neuron.
        SampleError: The sample does not match the model or its device, or the static policy has none.
        InputError: `policy`, `dtype` or `measure` is unknown, `cache` is no file name, or `offload_weights`
            is True under the static policy, which prepares no weights.
        MissingExtraError: A package for this device is not installed.
    """
    if policy not in ("measured", "static"):
        raise InputError(f"`policy` (={policy!r}) must be 'measured' or 'static'")
    if dtype not in (None, *MAX_FLIP_FRACTION):
        raise InputError(f"`dtype` (={dtype!r}) must be torch.float32, torch.float16 or torch.bfloat16")
    if not isinstance(cache, (bool, str, Path)):
        raise InputError(f"`cache` (={cache!r}) must be True, False or the name of a file")
    if measure not in ("call", "background", "never"):
        raise InputError(f"`measure` (={measure!r}) must be 'call', 'background' or 'never'")
    if offload_weights and policy == "static":
        raise InputError(
            "`offload_weights` requires policy='measured'; the static policy prepares no weights"
        )
    decision_cache = DecisionCache(None if cache is True else Path(cache)) if cache else None
    options: dict[str, Any] = {
        "policy": policy, "dtype": dtype, "reset": reset, "measure": measure, "cache": decision_cache,
        "freeze": freeze, "offload_weights": offload_weights, "progress": progress,
    }  # fmt: skip
    if is_nir_graph(model):
        model = import_nir(model)
    if not isinstance(model, nn.Module):
        raise ModelError(f"`model` must be a torch.nn.Module, not {type(model).__name__}")
    with install_forward(model, sample, **options) as (forward, inputs):
        if inputs is not None and policy == "measured":
            if compile is None:
                compile = os.environ.get("SPARSEFLOW_COMPILE") != "0"
            forward.tune(inputs, compile=compile)
            forward.progress = None
    return model


@contextmanager
def install_forward(
    model: nn.Module,
    sample: torch.Tensor | tuple[torch.Tensor, ...] | None,
    *,
    policy: Policy = "measured",
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Iterator[tuple[AcceleratedForward, tuple[torch.Tensor, ...] | None]]:
    """Analyze a network and install an accelerated forward; undo this if the body raises an error.

    Args:
        model, sample, policy, dtype: See `optimize`.
        options: Further arguments of `AcceleratedForward`.

    Yields:
        The forward, and the sample as a tuple.
    """
    check_model(model)
    limit_threads_after_fork()
    inputs = _to_inputs(sample)
    previous = model.__dict__.get("forward")
    previous = previous if isinstance(previous, AcceleratedForward) else None
    if previous is not None:
        previous.uninstall()
    forward: AcceleratedForward | None = None
    try:
        if inputs is not None:
            check_sample(model, inputs)
        elif policy == "measured" and (weight := next(model.parameters(), None)) is not None:
            select_backend(weight, model, dtype)  # raises now, not in the first call, if a package is missing
        graph = analyze(model, inputs)
        forward = AcceleratedForward(model, graph, inputs, policy=policy, dtype=dtype, **options)
        forward.install()
        yield forward, inputs
    except BaseException:
        if forward is not None:
            forward.uninstall()
        if previous is not None:
            previous.reinstall()
        raise


def restore(model: nn.Module) -> nn.Module:
    """Restore the original modules and forward. Returns `model`.

    Warns if there is nothing to restore.

    Raises:
        ModelError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"`model` must be a torch.nn.Module, not {type(model).__name__}")
    forward = model.__dict__.get("forward")
    if not isinstance(forward, AcceleratedForward):
        replaced = "; its `forward` was replaced after sparseflow.optimize" if forward is not None else ""
        warnings.warn(
            f"this {type(model).__name__} is not optimized{replaced}: nothing to restore", stacklevel=2
        )
    elif forward.model is model:
        forward.uninstall()
    else:  # a shallow copy of an optimized network
        del model.__dict__["forward"]
    return model


def layer_times(model: nn.Module, *inputs: torch.Tensor) -> dict[str, float]:
    """Time each group of an optimized network on `inputs`, one run: name -> milliseconds.

    The network's state is restored. On a GPU this waits for each group.

    Raises:
        ModelError: `model` was not optimized.
    """
    return get_accelerated_forward(model).measure_layer_times(inputs)


def profile_layers(model: nn.Module, *inputs: torch.Tensor) -> list[LayerProfile]:
    """Profile the convolutions of a spiking network, which is optimized in place.

    Args:
        model: Spiking network in evaluation mode.
        inputs: Inputs of the model.

    Raises:
        ModelError, SampleError: See `optimize`.
    """
    check_model(model)
    check_sample(model, inputs)
    graph = analyze(model, inputs)
    firing = profile_firing(model, inputs, [site.name for site in graph.sites])
    optimize(model, inputs)
    times = layer_times(model, *inputs)
    return [
        LayerProfile(
            name=site.name,
            fed_by=tuple(site.fed_by),
            values=site.value.kind,
            replaceable=site.replaceable,
            reason=site.reason,
            latency_ms=times.get(site.name),
            firing=firing.get(site.name),
        )
        for site in graph.sites
    ]


def check_model(model: object) -> None:
    """Raise a ModelError if `model` cannot be optimized; see `optimize`."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"`model` must be a torch.nn.Module, not {type(model).__name__}")
    if model.training:
        raise ModelError("the model is in training mode; call model.eval() before sparseflow.optimize(model)")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ModelError(f"`{name}` has no shape yet; run the model once to initialize it")
        if tensor.is_meta:
            raise ModelError(f"`{name}` is on the meta device; load the weights first")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ModelError(
                f"`{name}` contains NaN or Inf, which skipping zeros would hide (0 * NaN); fix the weights"
            )
    if not any(is_spiking_neuron(module) for module in model.modules()):
        raise ModelError(
            f"this {type(model).__name__} has no spiking neuron; those of spikingjelly, snnTorch, norse and "
            "sinabs are built in, register others with sparseflow.register_neuron(cls)"
        )


def check_sample(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Run the model once on the sample and restore its state.

    Raises:
        SampleError: The sample is on another device, or the model cannot run it.
    """
    device = next((p.device for p in model.parameters()), None)
    for tensor in inputs:
        if device is not None and tensor.device != device:
            raise SampleError(f"the sample is on {tensor.device}, the model on {device}; move one of them")
    try:
        with preserve_state_without_grad(model):
            model(*inputs)
    except Exception as error:
        shapes = ", ".join(str(tuple(t.shape)) for t in inputs)
        types = ", ".join(str(t.dtype) for t in inputs)
        raise SampleError(f"the model cannot run a sample of shape {shapes}, {types}: {error}") from error


def _to_inputs(sample: Any) -> tuple[torch.Tensor, ...] | None:
    if sample is None:
        return None
    inputs = tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)
    for item in inputs:
        if not isinstance(item, torch.Tensor):
            raise SampleError(f"`sample` must be a tensor or a tuple of tensors, not {type(item).__name__}")
    return inputs

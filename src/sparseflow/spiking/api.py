"""`optimize`, `restore`: put the accelerated forward in front of a network, and take it away again.

The network keeps its parameters and state_dict keys. Its `forward` becomes an `Accelerated` callable
(`accelerated.py`). Under the static policy, and where a network cannot be traced, single convolutions become
`SparseConv2d` objects around the same parameters instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from sparseflow.errors import InputError, ModelError, SampleError
from sparseflow.spiking.accelerated import Accelerated, Progress, accelerated
from sparseflow.spiking.autotune.candidates import MOST_FLIPS
from sparseflow.spiking.autotune.decision_cache import DecisionCache
from sparseflow.spiking.autotune.dispatch import Policy
from sparseflow.spiking.backends.selection import backend_for
from sparseflow.spiking.graph import analyze
from sparseflow.spiking.graph.module_state import untouched
from sparseflow.spiking.graph.registry import is_spiking_neuron


def optimize(
    model: nn.Module,
    sample: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
    *,
    policy: Policy = "measured",
    dtype: torch.dtype | None = None,
    cache: bool | Path = True,
    progress: Progress | None = None,
) -> nn.Module:
    """Make a trained spiking network faster. Returns `model` itself, accelerated.

    Weights, modules and neurons' constants may change afterwards; the next call notices. Only numbers written
    through a tensor's `.data` go unnoticed: optimise again after that.

    Args:
        model: A network in eval mode whose neurons are known (spikingjelly's, or registered ones).
        sample: An input (or a tuple of inputs) like those to come. With it, everything is measured now;
            without, on the first call, and again for each new input shape.
        policy: "measured" times every way a layer can run and keeps the fastest, never one slower than the
            network's own; "static" replaces by feature-map height (32 and up: blocks of 16; 16 to 31: 8;
            8 to 15: 4; below: left alone).
        dtype: On a GPU, the precision of weights inside groups: torch.float16 or torch.bfloat16 to trade
            accuracy for speed. By default the model's own; a float32 model stays as accurate as float32.
        cache: Remember decisions on disk; a path names the file.
        progress: Told about each measurement of this call; without a sample, about those of later ones.

    Whatever is raised, the model is then as it was.

    Raises:
        ModelError: Not a module; in training mode; on `meta`; NaN or Inf weights; no spiking neuron.
        SampleError: The sample does not fit the model or its device, or the static policy has none.
        InputError: `policy` or `dtype` is unknown.
        MissingExtraError: What runs on this device is not installed.
    """
    if policy not in ("measured", "static"):
        raise InputError(f"`policy` (={policy!r}) must be 'measured' or 'static'")
    if dtype not in (None, *MOST_FLIPS):
        raise InputError(f"`dtype` (={dtype!r}) must be torch.float32, torch.float16 or torch.bfloat16")
    check_model(model)
    inputs = _as_inputs(sample)
    before = model.__dict__.get("forward")
    before = before if isinstance(before, Accelerated) else None
    if before is not None:
        before.uninstall()
    accelerated: Accelerated | None = None
    try:
        if inputs is not None:
            check_sample(model, inputs)
        elif policy == "measured" and (weight := next(model.parameters(), None)) is not None:
            backend_for(weight, model, dtype)  # what is missing should be said now, not in the first call
        graph = analyze(model, inputs)
        store = DecisionCache(cache if isinstance(cache, Path) else None) if cache else None
        accelerated = Accelerated(
            model, graph, inputs, policy=policy, dtype=dtype, cache=store, progress=progress
        )
        accelerated.install()
        if inputs is not None and policy == "measured":
            accelerated.measure(inputs)
            accelerated.progress = None
    except BaseException:
        if accelerated is not None:
            accelerated.uninstall()
        if before is not None:
            before.reinstall()
        raise
    return model


def restore(model: nn.Module) -> nn.Module:
    """Put the original modules and forward back. Returns `model`, which need not have been optimised."""
    accelerated = model.__dict__.get("forward")
    if isinstance(accelerated, Accelerated):
        accelerated.uninstall()
    return model


def layer_times(model: nn.Module, *inputs: torch.Tensor) -> dict[str, float]:
    """Milliseconds that each group of an optimised network takes on `inputs`, one run, by name.

    The network's memories are left as they were. On a GPU each group is waited for.

    Raises:
        ModelError: `model` was not optimised.
    """
    return accelerated(model).times(inputs)


def check_model(model: object) -> None:
    """Refuse what cannot be optimised, naming what is wrong.

    Raises:
        ModelError: See `optimize`.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"`model` must be a torch.nn.Module, not {type(model).__name__}")
    if model.training:
        raise ModelError("the model is in training mode; call model.eval() before sparseflow.optimize(model)")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ModelError(f"`{name}` has no shape yet; run the model once, so that it gets one")
        if tensor.is_meta:
            raise ModelError(f"`{name}` is on the meta device and holds no numbers; load the weights first")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ModelError(
                f"`{name}` holds NaN or Inf, which skipping zeros would hide (0 * NaN); mend the weights"
            )
    if not any(is_spiking_neuron(module) for module in model.modules()):
        raise ModelError(
            f"no spiking neuron was found in this {type(model).__name__}; spikingjelly's neurons are known, "
            "register others with sparseflow.register_neuron(cls)"
        )


def check_sample(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Run the model once on the sample, leaving no trace.

    Raises:
        SampleError: The sample is on another device, or the model cannot take it.
    """
    device = next((p.device for p in model.parameters()), None)
    for tensor in inputs:
        if device is not None and tensor.device != device:
            raise SampleError(f"the sample is on {tensor.device}, the model on {device}; move one of them")
    try:
        with untouched(model):
            model(*inputs)
    except Exception as error:
        shapes = ", ".join(str(tuple(t.shape)) for t in inputs)
        types = ", ".join(str(t.dtype) for t in inputs)
        raise SampleError(f"the model cannot take a sample of shape {shapes}, {types}: {error}") from error


def _as_inputs(sample: Any) -> tuple[torch.Tensor, ...] | None:
    if sample is None:
        return None
    inputs = tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)
    for item in inputs:
        if not isinstance(item, torch.Tensor):
            raise SampleError(f"`sample` must be a tensor or a tuple of tensors, not {type(item).__name__}")
    return inputs

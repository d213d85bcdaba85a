"""`save_plan`, `load_plan`: keep the decisions of `optimize` for other processes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from sparseflow.core import device as devices
from sparseflow.core.artifact import Artifact
from sparseflow.core.config import StrictModel
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError, ModelError
from sparseflow.spiking.accelerated import get_accelerated_forward, make_input_key
from sparseflow.spiking.api import install_forward
from sparseflow.spiking.autotune.decision_cache import Decision, ShapeDecisions
from sparseflow.spiking.autotune.dispatch import describe_versions
from sparseflow.spiking.graph.registry import is_spiking_neuron


class SavedShape(StrictModel):
    """Decisions about inputs of one shape.

    Attributes:
        inputs: Shape and data type of each input.
        decisions: The decisions.
    """

    inputs: list[tuple[list[int], str]]
    decisions: ShapeDecisions


class SavedPlan(Artifact):
    """Decisions of `optimize` about one network on one kind of device.

    Attributes:
        network: Digest of the network's neurons and parameters.
        device: The device that the decisions were measured on.
        versions: Versions of the packages that run the candidates.
        dtype: `dtype` of `optimize`; None for the network's own.
        reset: `reset` of `optimize`.
        shapes: The decisions by input shape.
    """

    FORMAT: ClassVar[str] = "sparseflow.spiking.plan"
    VERSION: ClassVar[int] = 1
    HINT: ClassVar[str] = "create it with sparseflow.spiking.save_plan(model, path)"

    network: str
    device: str
    versions: str
    dtype: str | None
    reset: bool
    shapes: list[SavedShape]


def save_plan(model: nn.Module, path: str | Path) -> None:
    """Save the decisions about an optimized network, for `load_plan` in another process.

    Args:
        model: A network that was optimized with a sample or has run since.
        path: The file, JSON. It holds no weights.

    Raises:
        ModelError: The model was not optimized, or nothing was measured yet.
        OSError: The file cannot be written.
    """
    forward = get_accelerated_forward(model)
    decisions = forward.list_decisions()
    if not decisions:
        raise ModelError("nothing was measured yet; run the model once, or pass a sample to optimize()")
    shapes = [
        SavedShape(
            inputs=[(list(shape), str(dtype).removeprefix("torch.")) for shape, dtype, _ in key],
            decisions=shape_decisions,
        )
        for key, shape_decisions in decisions.items()
    ]
    device = next(iter(decisions))[0][2]
    SavedPlan(
        network=_compute_digest(model),
        device=devices.describe_device(str(device)).key(),
        versions=describe_versions(),
        dtype=None if forward.dtype is None else str(forward.dtype).removeprefix("torch."),
        reset=forward.reset,
        shapes=shapes,
    ).save(path)


def load_plan(
    model: nn.Module,
    path: str | Path,
    sample: torch.Tensor | tuple[torch.Tensor, ...],
    *,
    freeze: bool = False,
    offload_weights: bool = False,
    progress: Progress | None = None,
) -> nn.Module:
    """Accelerate a network by saved decisions, without measuring. Returns `model` itself.

    Inputs of the other shapes in the file are not measured, either; a compiled network is compiled for the
    sample's shape only.

    Args:
        model: The network, as for `optimize`; its weights may differ from those it was measured with.
        path: A file of `save_plan`.
        sample: A typical input, or a tuple of inputs.
        freeze, offload_weights: See `optimize`.
        progress: Called with a message and the fraction done.

    Raises:
        FileFormatError: The file is damaged or is no plan.
        InputError: The plan is of another network, another device, other versions of packages or other input
            shapes.
        ModelError, SampleError: See `optimize`.
    """
    plan = SavedPlan.load(path)
    options: dict[str, Any] = {
        "reset": plan.reset, "freeze": freeze, "offload_weights": offload_weights, "cache": None,
        "progress": progress,
    }  # fmt: skip
    dtype = None if plan.dtype is None else getattr(torch, plan.dtype)
    with install_forward(model, sample, dtype=dtype, **options) as (forward, inputs):
        assert inputs is not None
        device = inputs[0].device
        _check_conditions(plan, model, device)
        forward.loaded_decisions = {
            tuple((tuple(size), getattr(torch, name), device) for size, name in shape.inputs): ShapeDecisions(
                network=_mark_as_cached(shape.decisions.network),
                groups={name: _mark_as_cached(item) for name, item in shape.decisions.groups.items()},
            )
            for shape in plan.shapes
        }
        decisions = forward.loaded_decisions.get(make_input_key(inputs))
        if decisions is None:
            saved = ", ".join(str([size for size, _ in shape.inputs]) for shape in plan.shapes)
            shapes = [list(x.shape) for x in inputs]
            raise InputError(
                f"the plan has no decisions about inputs of the shapes {shapes}, but about {saved}; pass "
                "such a sample, or call sparseflow.optimize(model, sample)"
            )
        forward.tune(inputs, compile=True, decisions=decisions)
        forward.progress = None
    return model


def _check_conditions(plan: SavedPlan, model: nn.Module, device: torch.device) -> None:
    """Raise an InputError if the decisions were made about something else than is present."""
    conditions = {
        "another network": (plan.network, _compute_digest(model)),
        "another device": (plan.device, devices.describe_device(device).key()),
        "other versions": (plan.versions, describe_versions()),
    }
    for name, (saved, current) in conditions.items():
        if saved != current:
            raise InputError(
                f"the plan was saved for {name} ({saved}, now {current}); call "
                "sparseflow.optimize(model, sample) and save it again"
            )


def _compute_digest(model: nn.Module) -> str:
    """Compute a digest of a network's neurons and the shapes of its parameters, which `optimize` leaves."""
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    neurons = [(name, type(m).__name__) for name, m in model.named_modules() if is_spiking_neuron(m)]
    return hashlib.sha256(f"{type(model).__name__}{shapes}{neurons}".encode()).hexdigest()[:32]


def _mark_as_cached(decision: Decision) -> Decision:
    return decision.model_copy(update={"from_cache": True})

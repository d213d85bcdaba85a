"""Verifies that an executed plan computes the model's outputs and moves the planned bytes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparseflow.codesign.design.decision import HardwareDecision
from sparseflow.codesign.execution.launch import launch
from sparseflow.codesign.execution.local import LocalExecutor
from sparseflow.codesign.execution.ranks import RankExecutor
from sparseflow.codesign.execution.rewrite import apply_rewrite
from sparseflow.codesign.workload.layers import to_float
from sparseflow.codesign.workload.splits import RewritePlan, compute_transfer_bytes
from sparseflow.core.layers import LayeredModel, LayerNode
from sparseflow.errors import InputError, RunError

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2,
}  # fmt: skip
"""Maximum difference of logits relative to max(1, largest logit)."""


def run_unpartitioned(model: LayeredModel, samples: Tensor) -> Tensor:
    """Compute the logits of a model that runs layer by layer on one device."""
    with torch.no_grad():
        state = model.initial_state(samples)
        for layer in model.describe_layers(len(samples)):
            state = model.run_layer(layer.id, state)
    return state["logits"]


def compute_error(output: Tensor, reference: Tensor) -> float:
    """Compute the largest difference relative to max(1, largest logit), on the CPU in float64."""
    expected, actual = reference.double().cpu(), output.double().cpu()
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1.0))


def check_model(model: LayeredModel, planned: Sequence[LayerNode]) -> None:
    """Check that a model has the planned layers; weights are not compared.

    Args:
        model: The model.
        planned: Layers of the plan.

    Raises:
        InputError: The layers differ.
    """
    actual = model.describe_layers(planned[0].batch_size if planned else 1)
    if len(actual) != len(planned):
        raise InputError(f"the plan has {len(planned)} layers, the model has {len(actual)}")
    differences = [
        (layer.name, details)
        for layer, planned_layer in zip(actual, planned, strict=True)
        if (details := _describe_differences(layer, planned_layer))
    ]
    if differences:
        name, details = differences[0]
        num_others = len(differences) - 1
        more = f", and {num_others} other layers differ" if num_others else ""
        raise InputError(
            f"the plan belongs to another model: {name} has {', '.join(details)}{more}; use the model of "
            "the plan"
        )


def _describe_differences(layer: LayerNode, planned: LayerNode) -> list[str]:
    """Describe the fields in which a layer differs from the planned one."""
    differences: list[str] = []
    for field in fields(LayerNode):
        value, expected = (_to_number(getattr(node, field.name)) for node in (layer, planned))
        if value != expected:
            differences.append(f"`{field.name}` {value} (planned: {expected})")
    return differences


def _to_number(value: object) -> object:
    """Convert a tensor to a float; return other values as they are."""
    return to_float(value) if isinstance(value, Tensor) else value


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """Result of a verification.

    Attributes:
        errors: `"rewritten"`, `"local"` or `"ranks"` -> largest difference of logits; see `compute_error`.
        moved_bytes: `"planned"`, `"local"` or `"ranks"` -> bytes that a batch moves between slots.
        splits: Number of split layers.
        slots: Number of used slots.
    """

    errors: dict[str, float]
    moved_bytes: dict[str, int]
    splits: int
    slots: int

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {
            "error": self.errors, "moved_bytes": self.moved_bytes, "splits": self.splits, "slots": self.slots
        }  # fmt: skip


def verify(
    model: LayeredModel,
    decision: HardwareDecision,
    samples: Tensor,
    *,
    planned: Sequence[LayerNode] | None = None,
    device: torch.device | str = "cpu",
    ranks: bool = False,
) -> VerifyResult:
    """Run a model unpartitioned, rewritten and on its slots, and compare logits and moved bytes.

    The rewritten model runs on one device. The local executor runs all slots in this process,
    and the rank executor runs each slot in its own process.

    Args:
        model: The model, of any precision; it is not modified.
        decision: Slots and splits of the layers.
        samples: A batch.
        planned: Layers for which the decision was made, such as those of `load_plan`. A model with other
            shapes, FLOPs or bytes is refused, even if the plan could run it.
        device: Device of all slots, or with `ranks` of each process; `"cuda"` is the GPU of each process.
        ranks: Also run each slot in its own process.

    Raises:
        InputError: The decision belongs to another model.
        RunError: Logits differ by more than rounding, the moved bytes differ from the plan, or undoing the
            rewrite did not restore the model.
    """
    layers = model.describe_layers(len(samples))
    _check_layer_names(decision.layer_names, [layer.name for layer in layers])
    if planned is not None:
        check_model(model, planned)
    assignment, plan = list(decision.assign_layers(layers)), decision.rewrite_plan
    reference = run_unpartitioned(model, samples)
    errors = {"rewritten": _check_rewrite(model, layers, plan, samples, reference)}
    local = LocalExecutor(model, assignment, plan, devices=device)
    errors["local"] = compute_error(local.run([samples])[0], reference)
    transfers = {"local": {pair: size for pair, size in local.moved_bytes.items() if size}}
    num_slots = len(local.schedule.slots)
    if ranks:
        results = launch(partial(_run_on_rank, model, assignment, plan, samples), num_slots, device=device)
        errors["ranks"] = max(compute_error(logits, reference) for logits, _ in results if logits is not None)
        transfers["ranks"] = {pair: size for _, sent in results for pair, size in sent.items() if size}
    _check_errors(errors, TOLERANCES[reference.dtype])
    planned_bytes = compute_transfer_bytes(layers, assignment, plan)
    _check_transfers(transfers, planned_bytes)
    return VerifyResult(
        errors=errors,
        moved_bytes={
            name: sum(pairs.values()) for name, pairs in {"planned": planned_bytes, **transfers}.items()
        },
        splits=0 if plan is None else len(plan.splits),
        slots=num_slots,
    )


def _check_layer_names(planned: Sequence[str], actual: Sequence[str]) -> None:
    """Raise InputError if the plan and the model have different layers."""
    if planned != actual:
        different = ", ".join(sorted({*planned} ^ {*actual})[:3]) or "the order"
        raise InputError(
            f"the plan has {len(planned)} layers ({', '.join(planned[:3])}, …), the model has "
            f"{len(actual)}; different: {different}; use the model of the plan"
        )


def _check_errors(errors: Mapping[str, float], tolerance: float) -> None:
    """Raise RunError if the logits of an executor differ by more than `tolerance`, or are not finite."""
    for name, error in errors.items():
        if not error <= tolerance:
            raise RunError(f"{name}: logits differ by {error:.3g} (relative); expected at most {tolerance:g}")


def _check_transfers(
    transfers: Mapping[str, Mapping[tuple[int, int], int]], planned: Mapping[tuple[int, int], int]
) -> None:
    """Raise RunError if an executor moved other bytes between two slots than planned."""
    for name, pairs in transfers.items():
        if pairs != planned:
            raise RunError(f"{name}: moved {pairs} bytes between slots; expected {planned}")


def _check_rewrite(
    model: LayeredModel,
    layers: Sequence[LayerNode],
    plan: RewritePlan | None,
    samples: Tensor,
    reference: Tensor,
) -> float:
    """Compute the error of the rewritten model.

    Raises:
        RunError: Undoing the rewrite did not restore the model.
    """
    splittable_ids = [layer.id for layer in layers if layer.splittable]
    states_before = [copy.deepcopy(model.get_layer(layer_id).state_dict()) for layer_id in splittable_ids]
    with apply_rewrite(model, plan or RewritePlan(splits=())):
        error = compute_error(run_unpartitioned(model, samples), reference)
    states_after = [model.get_layer(layer_id).state_dict() for layer_id in splittable_ids]
    is_restored = all(
        torch.equal(before[name], after[name])
        for before, after in zip(states_before, states_after, strict=True)
        for name in before
    )
    if not is_restored or not torch.equal(run_unpartitioned(model, samples), reference):
        raise RunError("undoing the rewrite did not restore the model")
    return error


def _run_on_rank(
    model: LayeredModel,
    assignment: list[int],
    plan: RewritePlan | None,
    samples: Tensor,
    device: torch.device,
) -> tuple[Tensor | None, dict[tuple[int, int], int]]:
    """Run the slot of this process.

    Returns:
        Logits, None unless this slot computes them; and the bytes that it sent, by pair of slots.
    """
    with RankExecutor(model, assignment, plan, device=device) as executor:
        outputs = executor.run([samples])
        return (outputs[0].cpu() if outputs else None), dict(executor.moved_bytes)

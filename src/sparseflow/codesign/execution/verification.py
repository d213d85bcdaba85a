"""Whether a plan that is run computes what the model does, and moves what was planned."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparseflow.codesign.design.decision import Decision
from sparseflow.codesign.execution import LocalExecutor, RankExecutor, launch
from sparseflow.codesign.execution.rewrite import apply
from sparseflow.codesign.workload.layers import number
from sparseflow.codesign.workload.splits import RewritePlan, plan_bytes
from sparseflow.core.layers import LayeredModel, LayerNode
from sparseflow.errors import InputError, RunError

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2,
}  # fmt: skip
"""Largest difference of logits, over max(1, largest logit)."""


def whole(model: LayeredModel, samples: Tensor) -> Tensor:
    """Logits of a model that is run layer by layer, on one device."""
    with torch.no_grad():
        state = model.initial_state(samples)
        for layer in model.describe_layers(len(samples)):
            state = model.run_layer(layer.id, state)
    return state["logits"]


def error_of(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over max(1, largest logit), compared on the CPU in float64."""
    wide, other = wanted.double().cpu(), found.double().cpu()
    return float((other - wide).abs().max() / wide.abs().max().clamp_min(1.0))


def check_model(model: LayeredModel, planned: Sequence[LayerNode]) -> None:
    """Whether a model is one that layers were listed of; weights are not looked at.

    Args:
        model: The model.
        planned: Its layers, for batches of some size.

    Raises:
        InputError: It is another one; says what differs.
    """
    there = model.describe_layers(planned[0].batch if planned else 1)
    if len(there) != len(planned):
        raise InputError(f"the plan is of {len(planned)} layers and the model has {len(there)}")
    wrong = [
        (own, f"`{field.name}` {found} (planned: {wanted})")
        for own, other in zip(there, planned, strict=True)
        for field in fields(LayerNode)
        if (found := _plain(getattr(own, field.name))) != (wanted := _plain(getattr(other, field.name)))
    ]
    if wrong:
        first = wrong[0][0]
        told = ", ".join(what for layer, what in wrong if layer is first)
        others = len({layer.id for layer, _ in wrong}) - 1
        raise InputError(
            f"the plan is of another model: {first.name} has {told}"
            f"{f', and {others} other layers differ' if others else ''}; name the model that was planned for"
        )


def _plain(value: object) -> object:
    """A layer's figure, without gradients where it has some."""
    return number(value) if isinstance(value, Tensor) else value


def verify(
    model: LayeredModel,
    decision: Decision,
    samples: Tensor,
    *,
    planned: Sequence[LayerNode] | None = None,
    device: torch.device | str = "cpu",
    ranks: bool = False,
) -> dict[str, Any]:
    """Run a model whole, rewritten, and on its slots.

    Args:
        model: Any precision; left as it is.
        decision: What runs where.
        samples: A batch.
        planned: Layers that the decision was taken for, such as those of `load_plan`: a model whose layers
            have other shapes, operations or bytes is refused, even where the plan could run it.
        device: Of all slots, or, with `ranks`, of each process: `"cuda"` is each its own GPU.
        ranks: Whether each slot is a process of its own, too.

    Returns:
        `error`, the largest difference of logits over max(1, largest logit), by executor; `moved_bytes` for a
        batch, as planned and by executor; `splits`, how many layers are split.

    Raises:
        InputError: The decision is of another model.
        RunError: Logits differ by more than rounding, other bytes were moved than planned, or undoing the
            rewrite left something behind.
    """
    layers = model.describe_layers(len(samples))
    names, there = decision.names, [layer.name for layer in layers]
    if names != there:
        differ = ", ".join(sorted({*names} ^ {*there})[:3]) or "the order"
        raise InputError(
            f"the plan is of {len(names)} layers ({', '.join(names[:3])}, …) and the model has "
            f"{len(layers)}, or others; see {differ}: name the model that was planned for"
        )
    if planned is not None:
        check_model(model, planned)
    homes, plan = list(decision.homes(layers)), decision.rewrite_plan
    due = plan_bytes(layers, homes, plan)
    wanted = whole(model, samples)
    errors, moved = {}, {"planned": sum(due.values())}
    before = [copy.deepcopy(model.get_layer(layer.id).state_dict()) for layer in layers if layer.splittable]
    with apply(model, plan or RewritePlan(splits=())):
        errors["rewritten"] = error_of(whole(model, samples), wanted)
    after = [model.get_layer(layer.id).state_dict() for layer in layers if layer.splittable]
    same = all(
        torch.equal(one[name], other[name]) for one, other in zip(before, after, strict=True) for name in one
    )
    if not same or not torch.equal(whole(model, samples), wanted):
        raise RunError("undoing the rewrite did not give the model back as it was")
    local = LocalExecutor(model, homes, plan, devices=device)
    errors["local"] = error_of(local.run([samples])[0], wanted)
    counted = {"local": {pair: size for pair, size in local.moved.items() if size}}
    if ranks:
        count = len(local.schedule.slots)
        told = launch(partial(_on_ranks, model, homes, plan, samples), count, device=device)
        errors["ranks"] = max(error_of(logits, wanted) for logits, _ in told if logits is not None)
        counted["ranks"] = {pair: size for _, sent in told for pair, size in sent.items() if size}
    tolerance = TOLERANCES[wanted.dtype]
    for name, error in errors.items():
        if not error <= tolerance:
            raise RunError(f"{name}: logits differ by {error:.3g} (relative), more than {tolerance:g}")
    for name, pairs in counted.items():
        moved[name] = sum(pairs.values())
        if pairs != due:
            raise RunError(f"{name}: moved {pairs} bytes between slots; planned were {due}")
    return {
        "error": errors, "moved_bytes": moved, "splits": 0 if plan is None else len(plan.splits),
        "slots": len(local.schedule.slots),
    }  # fmt: skip


def _on_ranks(
    model: LayeredModel, homes: list[int], plan: RewritePlan | None, samples: Tensor, device: torch.device
) -> tuple[Tensor | None, dict[tuple[int, int], int]]:
    """This process' slot: the logits where it has them, and what it sent."""
    with RankExecutor(model, homes, plan, device=device) as executor:
        found = executor.run([samples])
        return (found[0].cpu() if found else None), dict(executor.moved)

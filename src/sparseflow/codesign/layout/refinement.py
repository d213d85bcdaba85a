"""Continuous refinement of a layout by gradient descent; only legal improvements are kept."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflow.codesign.layout.wafer import WaferLayout
from sparseflow.errors import InputError

CLEARANCE_MM = 0.02
"""Additional clearance during optimization, because penalties act only after chips come too close."""

PENALTY_GROWTH = 1000.0
"""Growth of the overlap penalty from the first to the last step."""


@dataclass(frozen=True, kw_only=True)
class RefineResult:
    """Result of a refinement.

    Attributes:
        before: Weighted sum of comm and therm of the initial layout.
        after: That of the final layout, at most `before`; None without a legal layout.
        was_legal: Whether the initial layout was legal.
        improved: Whether the layout was changed.
        steps: Number of steps.
    """

    before: float
    after: float | None
    was_legal: bool
    improved: bool
    steps: int


def refine_layout(
    layout: WaferLayout,
    traffic_bytes: Tensor,
    tdp_w: Tensor,
    *,
    present: Tensor | None = None,
    steps: int = 300,
    step_mm: float = 0.5,
) -> RefineResult:
    """Refine a layout in place by gradient descent.

    Adam minimizes all terms with growing penalties for boundary and overlap. The legal positions with the
    lowest weighted sum of comm and therm are kept if they improve the initial layout; otherwise it is
    unchanged. Any legal layout improves an illegal one.

    Args:
        layout: The layout.
        traffic_bytes: Bytes from each chip to each other, [S, S].
        tdp_w: Power of each chip, W, [S].
        present: Probability that a slot contains a chip, [S]; see `WaferLayout.forward`.
        steps: Number of steps.
        step_mm: Approximate movement in the first step, mm; decreases to a twentieth.

    Raises:
        InputError: A shape is wrong, or `steps` or `step_mm` is out of range.
    """
    if steps < 1 or not 0.0 < step_mm < math.inf:
        raise InputError(
            f"`steps` (={steps}) must be at least 1 and `step_mm` (={step_mm}) above 0 and finite"
        )
    weights, positions = layout.weights, layout.positions_mm
    traffic, tdp = traffic_bytes.detach(), tdp_w.detach()
    occupancy = None if present is None else present.detach()

    def evaluate() -> float:
        with torch.no_grad():
            terms = layout.compute_terms(traffic, tdp, present=occupancy)
            return float(weights.comm * terms["comm"] + weights.therm * terms["therm"])

    was_legal, before = layout.is_legal(present=occupancy), evaluate()
    best_cost = before if was_legal else math.inf
    best_positions = initial_positions = positions.detach().clone()
    optimizer = torch.optim.Adam([positions], lr=step_mm)
    gradient = positions.grad
    try:
        for step in range(steps):
            progress = step / max(1, steps - 1)
            optimizer.param_groups[0]["lr"] = step_mm * 0.05**progress
            optimizer.zero_grad()
            terms = layout.compute_terms(traffic, tdp, present=occupancy, clearance_mm=CLEARANCE_MM)
            penalty = PENALTY_GROWTH**progress
            loss = (
                penalty * (weights.boundary * terms["boundary"] + weights.overlap * terms["overlap"])
                + weights.comm * terms["comm"]
                + weights.therm * terms["therm"]
            )
            (positions.grad,) = torch.autograd.grad(loss, [positions])
            optimizer.step()
            cost = evaluate()
            # The cheap comparison comes before the expensive legality check.
            if cost < best_cost and layout.is_legal(present=occupancy):
                best_cost, best_positions = cost, positions.detach().clone()
    finally:
        with torch.no_grad():
            positions.copy_(best_positions)
        positions.grad = gradient
    improved = not torch.equal(best_positions, initial_positions)
    return RefineResult(
        before=before,
        after=best_cost if math.isfinite(best_cost) else None,
        was_legal=was_legal,
        improved=improved,
        steps=steps,
    )

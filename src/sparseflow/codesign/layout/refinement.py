"""From sites to anywhere: a few hundred steps of gradient descent that keep only what is legal and better."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflow.codesign.layout.wafer import WaferLayout
from sparseflow.errors import InputError

CLEARANCE_MM = 0.02
"""Room that steps keep beyond what is legal: a penalty only holds once chips are a little too close."""

STIFFENING = 1000.0
"""Times which overlaps count more at the last step than at the first."""


@dataclass(frozen=True, kw_only=True)
class Refined:
    """What refining did.

    Attributes:
        before: Weighted sum of comm and therm at first.
        after: At the end; below `before` or the same, or None if there was and is no legal layout.
        was_legal: Whether the first layout was.
        improved: Whether the layout was changed.
        steps: Steps made.
    """

    before: float
    after: float | None
    was_legal: bool
    improved: bool
    steps: int


def refine(
    layout: WaferLayout,
    traffic_bytes: Tensor,
    tdp_w: Tensor,
    *,
    present: Tensor | None = None,
    steps: int = 300,
    step_mm: float = 0.5,
) -> Refined:
    """Move chips a little, so that ways get shorter and hot chips come apart; the layout is changed in place.

    Adam steps on all terms, with boundary and overlap counting ever more. Of all places on the way the legal
    ones with the least weighted sum of comm and therm are kept, if that is less than at first; otherwise the
    layout stays as it was. From a layout that is not legal, any legal one is an improvement.

    Args:
        layout: The layout.
        traffic_bytes: From each chip to each, [S, S].
        tdp_w: Power of each chip, W, [S].
        present: Probability that a slot is not empty, [S]; see `WaferLayout.forward`.
        steps: How many.
        step_mm: About how far a chip moves in the first of them; they shrink to a twentieth.

    Raises:
        InputError: A shape is wrong, or `steps` or `step_mm` is out of range.
    """
    if steps < 1 or not 0.0 < step_mm < math.inf:
        raise InputError(
            f"`steps` (={steps}) must be at least 1 and `step_mm` (={step_mm}) above 0 and finite"
        )
    weights, places = layout.weights, layout.positions_mm
    traffic, tdp = traffic_bytes.detach(), tdp_w.detach()
    there = None if present is None else present.detach()

    def worth() -> float:
        with torch.no_grad():
            terms = layout.terms(traffic, tdp, present=there)
            return float(weights.comm * terms["comm"] + weights.therm * terms["therm"])

    was_legal, before = layout.legal(present=there), worth()
    least = before if was_legal else math.inf
    kept = first = places.detach().clone()
    optimizer = torch.optim.Adam([places], lr=step_mm)
    gradient = places.grad
    try:
        for step in range(steps):
            share = step / max(1, steps - 1)
            optimizer.param_groups[0]["lr"] = step_mm * 0.05**share
            optimizer.zero_grad()
            terms = layout.terms(traffic, tdp, present=there, clearance_mm=CLEARANCE_MM)
            stiff = STIFFENING**share
            loss = (
                stiff * (weights.boundary * terms["boundary"] + weights.overlap * terms["overlap"])
                + weights.comm * terms["comm"]
                + weights.therm * terms["therm"]
            )
            (places.grad,) = torch.autograd.grad(loss, [places])
            optimizer.step()
            found = worth()
            # Judging is cheap, and whether a layout is legal is not.
            if found < least and layout.legal(present=there):
                least, kept = found, places.detach().clone()
    finally:
        with torch.no_grad():
            places.copy_(kept)
        places.grad = gradient
    improved = not torch.equal(kept, first)
    return Refined(
        before=before, after=least if math.isfinite(least) else None, was_legal=was_legal, improved=improved,
        steps=steps,
    )  # fmt: skip

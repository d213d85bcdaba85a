"""Differentiable wafer layout and its refinement by gradient descent.

Chips are circles around their diagonals. With positions x, half diagonals r, margin m, wafer radius R,
distances d[i, j] and w the probability that a slot contains a chip, the terms are

    boundary = sum_i   w_i · relu(|x_i| + r_i + m - R)²                   / u²
    overlap  = sum_i<j w_i w_j · relu(r_i + r_j + m - d[i, j])²           / u²
    comm     = sum_ij  w_i w_j · T[i, j] · d[i, j]                        / (T_all · R)
    therm    = sum_i≠j w_i w_j · tdp_i · tdp_j · exp(-d[i, j] / sigma)    / tdp_all²

where u is the largest diagonal plus margin, and T_all and tdp_all are reference traffic and power. All terms
are dimensionless: an overlap by a tenth of a chip is 0.01, and comm is the mean distance of a byte in radii.
A layout without boundary and overlap terms is legal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparseflow.codesign.layout.sites import Wafer, parse_chip_sizes
from sparseflow.core.checks import check_at_least, check_non_negative, check_positive
from sparseflow.errors import InputError

TOLERANCE_MM = 1e-3
"""Overlap that counts as rounding, mm."""

_TINY = 1e-6
"""Keeps gradients of zero distances and ratios of zero totals finite."""


_CLEARANCE_MM = 0.02
"""Additional clearance during optimization, because penalties act only after chips come too close."""

_PENALTY_GROWTH = 1000.0
"""Growth of the overlap penalty from the first to the last step."""


@dataclass(frozen=True, kw_only=True)
class LayoutWeights:
    """Weights of the loss terms.

    Attributes:
        boundary: Chips beyond the edge.
        overlap: Overlapping chips.
        comm: Communication distance.
        therm: Hot chips close together.
    """

    boundary: float = 10.0
    overlap: float = 10.0
    comm: float = 1.0
    therm: float = 1.0

    def __post_init__(self) -> None:
        check_non_negative(**vars(self))


class WaferLayout(nn.Module):
    """Learnable positions of chips on a wafer.

    Args:
        wafer: The wafer.
        sizes_mm: Width and height of each chip, mm, [S, 2], or sides of square chips, [S].
        sigma_mm: Thermal interaction length, mm.
        positions_mm: Initial positions, mm, [S, 2]; by default a spiral around the center, legal if it fits.
        weights: Weights of the loss terms.
        traffic_total_bytes: Reference traffic; by default the total of each call, without gradient.
        tdp_total_w: Reference power; likewise. Set both if the loss must depend on their magnitude.

    Attributes:
        positions_mm: Centers (x, y), mm, parameter, [S, 2].

    Raises:
        InputError: Shapes differ, or a value is out of range.
    """

    unit_mm: Tensor
    half_mm: Tensor

    def __init__(
        self,
        wafer: Wafer,
        sizes_mm: Any,
        *,
        sigma_mm: float,
        positions_mm: Any = None,
        weights: LayoutWeights | None = None,
        traffic_total_bytes: float | None = None,
        tdp_total_w: float | None = None,
    ) -> None:
        super().__init__()
        sizes = parse_chip_sizes(sizes_mm)
        totals = {"traffic_total_bytes": traffic_total_bytes, "tdp_total_w": tdp_total_w}
        check_positive(
            sigma_mm=sigma_mm, **{name: total for name, total in totals.items() if total is not None}
        )
        self.wafer, self.weights, self.sigma_mm = wafer, weights or LayoutWeights(), sigma_mm
        self._traffic_total, self._tdp_total = traffic_total_bytes, tdp_total_w
        diagonals = np.hypot(*sizes.T)
        self.register_buffer("half_mm", torch.as_tensor(diagonals / 2.0, dtype=torch.float32))
        self.register_buffer("unit_mm", torch.tensor(diagonals.max() + wafer.margin_mm, dtype=torch.float32))
        if positions_mm is None:
            positions_mm = _make_spiral(len(sizes), float(diagonals.max()) + wafer.margin_mm)
        self.positions_mm = nn.Parameter(self._check_positions(positions_mm))

    def forward(
        self,
        traffic_bytes: Tensor,
        tdp_w: Tensor,
        *,
        present: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss.

        Args:
            traffic_bytes: Bytes from each chip to each other, [S, S].
            tdp_w: Power of each chip, W, [S].
            present: Probability that a slot contains a chip, [S]; 1 by default.

        Returns:
            The weighted sum of the terms, differentiable with respect to positions and arguments, and the
            detached terms by name.

        Raises:
            InputError: A shape is wrong.
        """
        terms = self.compute_terms(traffic_bytes, tdp_w, present=present)
        weights = self.weights
        loss = sum(
            (getattr(weights, name) * value for name, value in terms.items()), self.positions_mm.new_zeros(())
        )
        return loss, {name: value.detach() for name, value in terms.items()}

    def compute_terms(
        self,
        traffic_bytes: Tensor,
        tdp_w: Tensor,
        *,
        present: Tensor | None = None,
        clearance_mm: float = 0.0,
    ) -> dict[str, Tensor]:
        """Compute the unweighted terms boundary, overlap, comm and therm, scalars.

        Args:
            traffic_bytes: [S, S].
            tdp_w: W, [S].
            present: [S].
            clearance_mm: Clearance in addition to the margin, mm.
        """
        x = self.positions_mm
        chips = len(x)
        half = self.half_mm
        occupancy = torch.ones_like(x[:, 0]) if present is None else present
        for name, value, shape in (
            ("traffic_bytes", traffic_bytes, (chips, chips)), ("tdp_w", tdp_w, (chips,)),
            ("present", occupancy, (chips,)),
        ):  # fmt: skip
            if tuple(value.shape) != shape:
                raise InputError(f"`{name}` has shape {tuple(value.shape)}; expected {shape}")
        margin_mm = self.wafer.margin_mm + clearance_mm
        excess = torch.relu(_norm(x) + half + (margin_mm - self.wafer.radius_mm))
        distances = _norm(x[:, None] - x[None, :])
        pair_occupancy = occupancy[:, None] * occupancy[None, :]
        overlap = torch.relu(half[:, None] + half[None, :] + margin_mm - distances)
        # Each pair once, without the diagonal.
        pairs = torch.ones_like(pair_occupancy).triu(1)
        traffic_all = self._traffic_total or traffic_bytes.detach().sum().clamp_min(_TINY)
        tdp_all = self._tdp_total or tdp_w.detach().sum().clamp_min(_TINY)
        heat = torch.outer(tdp_w, tdp_w) * torch.exp(-distances / self.sigma_mm)
        off_diagonal = pairs + pairs.mT
        return {
            "boundary": (occupancy * excess**2).sum() / self.unit_mm**2,
            "overlap": (pair_occupancy * pairs * overlap**2).sum() / self.unit_mm**2,
            "comm": (pair_occupancy * off_diagonal * traffic_bytes * distances).sum()
            / (traffic_all * self.wafer.radius_mm),
            "therm": (pair_occupancy * off_diagonal * heat).sum() / tdp_all**2,
        }

    @torch.no_grad()
    def find_violations(self, *, present: Tensor | None = None) -> tuple[str, ...]:
        """Describe all violations, one sentence each; empty if the layout is legal.

        Args:
            present: See `forward`; slots below 0.5 count as empty.
        """
        x = self.positions_mm.double().cpu()
        half = self.half_mm.double().cpu()
        occupancy = torch.ones(len(x)) if present is None else present.cpu()
        if not torch.isfinite(x).all():
            return ("a position is not finite",)
        margin = self.wafer.margin_mm
        chips = torch.nonzero(occupancy >= 0.5).flatten().tolist()
        out = (x.norm(dim=1) + half + margin - self.wafer.radius_mm).tolist()
        violations = [f"chip {i} is {out[i]:.3g} mm beyond the edge" for i in chips if out[i] > TOLERANCE_MM]
        close = (
            half[:, None]
            + half[None, :]
            + margin
            - torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
        )
        for first, second in torch.nonzero((close > TOLERANCE_MM).triu(1)).tolist():
            if occupancy[first] >= 0.5 and occupancy[second] >= 0.5:
                violations.append(f"chips {first} and {second} are {close[first, second]:.3g} mm too close")
        return tuple(violations)

    def is_legal(self, *, present: Tensor | None = None) -> bool:
        """Whether all chips are inside the wafer and far enough apart; see `find_violations`."""
        return not self.find_violations(present=present)

    def _check_positions(self, positions_mm: Any) -> Tensor:
        positions = torch.as_tensor(np.asarray(positions_mm, np.float64), dtype=torch.float32).clone()
        if tuple(positions.shape) != (len(self.half_mm), 2) or not torch.isfinite(positions).all():
            raise InputError(
                f"`positions_mm` must be finite with shape ({len(self.half_mm)}, 2); got "
                f"{tuple(positions.shape)}"
            )
        return positions


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
    check_at_least(1, steps=steps)
    check_positive(step_mm=step_mm)
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
            terms = layout.compute_terms(traffic, tdp, present=occupancy, clearance_mm=_CLEARANCE_MM)
            penalty = _PENALTY_GROWTH**progress
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


def _norm(vectors: Tensor) -> Tensor:
    return torch.sqrt((vectors**2).sum(-1) + _TINY**2)


def _make_spiral(count: int, pitch: float) -> np.ndarray:
    """Positions at least a pitch apart around the origin (Vogel's spiral), [count, 2]."""
    number = np.arange(count)
    # The closest points of Vogel's spiral, 0 and 3, are at least 1.53 steps apart.
    far, turn = pitch / 1.5 * np.sqrt(number + 0.5), number * math.pi * (3.0 - math.sqrt(5.0))
    return np.stack([far * np.cos(turn), far * np.sin(turn)], 1)

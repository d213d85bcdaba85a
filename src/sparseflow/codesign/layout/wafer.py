"""A layout that can be differentiated: chips anywhere on the wafer, and what is wrong or dear about it.

Chips are circles around their diagonals. With x the places, r half the diagonals, m the margin, R the wafer's
radius, d[i, j] the distances and w the probability that a slot is not empty, the terms are

    boundary = sum_i   w_i · relu(|x_i| + r_i + m - R)²                   / u²
    overlap  = sum_i<j w_i w_j · relu(r_i + r_j + m - d[i, j])²           / u²
    comm     = sum_ij  w_i w_j · T[i, j] · d[i, j]                        / (T_all · R)
    therm    = sum_i≠j w_i w_j · tdp_i · tdp_j · exp(-d[i, j] / sigma)    / tdp_all²

where u is the largest diagonal with its margin, T_all the traffic and tdp_all the power that count as 1. So
all are free of units: an overlap by a tenth of a chip is 0.01, comm is the mean way of a byte in radii, and
therm is the share of the power's square that stands close together. A layout without boundary and overlap is
legal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparseflow.codesign.layout.qap.problem import checked_permutation
from sparseflow.codesign.layout.sites import Sites, Wafer, chip_sizes
from sparseflow.errors import InputError

TOLERANCE_MM = 1e-3
"""Overlaps up to here are rounding."""

_TINY = 1e-6
"""Keeps the gradient of a distance finite where two chips stand in one place, and shares of nothing 0."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What each term counts in the loss.

    Attributes:
        boundary: Chips over the edge.
        overlap: Chips over each other.
        comm: Ways of the traffic.
        therm: Hot chips close together.
    """

    boundary: float = 10.0
    overlap: float = 10.0
    comm: float = 1.0
    therm: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0.0 <= getattr(self, field.name) < math.inf:
                raise InputError(
                    f"`{field.name}` (={getattr(self, field.name)}) must be 0 or more, and finite"
                )


class WaferLayout(nn.Module):
    """Places of chips on a wafer, to be learnt.

    Args:
        wafer: The wafer.
        sizes_mm: Width and height of each chip, [S, 2], or the sides of square ones, [S].
        sigma_mm: Distance over which chips warm each other.
        positions_mm: Where they stand at first, [S, 2]; by default on a spiral around the centre, legal if
            there is room for it.
        weights: What each term counts.
        traffic_total_bytes: Traffic that counts as 1; by default that of each call, whatever its gradient.
        tdp_total_w: Power that counts as 1; likewise. Give both where the loss must see how large they are.

    Attributes:
        positions_mm: Centres, x and y, parameter, [S, 2].

    Raises:
        InputError: The arrays do not fit each other or hold what they cannot.
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
        weights: Weights | None = None,
        traffic_total_bytes: float | None = None,
        tdp_total_w: float | None = None,
    ) -> None:
        super().__init__()
        sizes = chip_sizes(sizes_mm)
        for name, value in (
            ("sigma_mm", sigma_mm), ("traffic_total_bytes", traffic_total_bytes),
            ("tdp_total_w", tdp_total_w),
        ):  # fmt: skip
            if value is not None and not 0.0 < value < math.inf:
                raise InputError(f"`{name}` (={value}) must be above 0 and finite")
        self.wafer, self.weights, self.sigma_mm = wafer, weights or Weights(), sigma_mm
        self._traffic_total, self._tdp_total = traffic_total_bytes, tdp_total_w
        diagonals = np.hypot(*sizes.T)
        self.register_buffer("half_mm", torch.as_tensor(diagonals / 2.0, dtype=torch.float32))
        self.register_buffer("unit_mm", torch.tensor(diagonals.max() + wafer.margin_mm, dtype=torch.float32))
        if positions_mm is None:
            positions_mm = _spiral(len(sizes), float(diagonals.max()) + wafer.margin_mm)
        self.positions_mm = nn.Parameter(self._places(positions_mm))

    def forward(
        self,
        traffic_bytes: Tensor,
        tdp_w: Tensor,
        *,
        present: Tensor | None = None,
        half_mm: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What is wrong or dear about the layout.

        Args:
            traffic_bytes: From each chip to each, [S, S].
            tdp_w: Power of each chip, W, [S].
            present: Probability that a slot is not empty, 0 … 1, [S]; by default 1.
            half_mm: Half the diagonal of each chip where that is learnt, too, [S]; by default of `sizes_mm`.

        Returns:
            The weighted sum of the terms, a scalar through which gradients flow into the places and into
            whatever is handed in, and the terms by name, without gradients.

        Raises:
            InputError: A shape is not as above.
        """
        terms = self.terms(traffic_bytes, tdp_w, present=present, half_mm=half_mm)
        weights = self.weights
        loss = sum(
            (getattr(weights, name) * value for name, value in terms.items()), self.positions_mm.new_zeros(())
        )
        return loss, {name: value.detach() for name, value in terms.items()}

    def terms(
        self,
        traffic_bytes: Tensor,
        tdp_w: Tensor,
        *,
        present: Tensor | None = None,
        half_mm: Tensor | None = None,
        clearance_mm: float = 0.0,
    ) -> dict[str, Tensor]:
        """The terms without their weights: boundary, overlap, comm and therm, scalars.

        Args:
            traffic_bytes: [S, S].
            tdp_w: W, [S].
            present: 0 … 1, [S].
            half_mm: [S].
            clearance_mm: Room to keep beyond the margin.
        """
        x = self.positions_mm
        chips = len(x)
        half = self.half_mm if half_mm is None else half_mm
        there = torch.ones_like(x[:, 0]) if present is None else present
        for name, value, shape in (
            ("traffic_bytes", traffic_bytes, (chips, chips)), ("tdp_w", tdp_w, (chips,)),
            ("present", there, (chips,)), ("half_mm", half, (chips,)),
        ):  # fmt: skip
            if tuple(value.shape) != shape:
                raise InputError(f"`{name}` has the shape {tuple(value.shape)} and must have {shape}")
        room = self.wafer.margin_mm + clearance_mm
        out = torch.relu(_length(x) + half + (room - self.wafer.radius_mm))
        apart = _length(x[:, None] - x[None, :])
        both = there[:, None] * there[None, :]
        close = torch.relu(half[:, None] + half[None, :] + room - apart)
        # Each pair once, and no chip with itself.
        pairs = torch.ones_like(both).triu(1)
        traffic_all = self._traffic_total or traffic_bytes.detach().sum().clamp_min(_TINY)
        tdp_all = self._tdp_total or tdp_w.detach().sum().clamp_min(_TINY)
        warm = torch.outer(tdp_w, tdp_w) * torch.exp(-apart / self.sigma_mm)
        others = pairs + pairs.mT
        return {
            "boundary": (there * out**2).sum() / self.unit_mm**2,
            "overlap": (both * pairs * close**2).sum() / self.unit_mm**2,
            "comm": (both * others * traffic_bytes * apart).sum() / (traffic_all * self.wafer.radius_mm),
            "therm": (both * others * warm).sum() / tdp_all**2,
        }

    @torch.no_grad()
    def place(self, sites: Sites, assignment: Any) -> None:
        """Put chips on sites.

        Args:
            sites: M sites.
            assignment: Site of each chip, [S], or a permutation of all sites that begins with them, [M].

        Raises:
            InputError: It is neither, or two chips share a site.
        """
        given = np.asarray(assignment)
        chips = len(self.positions_mm)
        if given.shape not in ((chips,), (len(sites),)) or given.dtype.kind not in "iu":
            raise InputError(
                f"an assignment of {chips} chips to {len(sites)} sites is [{chips}] or [{len(sites)}] of "
                f"integers; given: {given.dtype}, shape {given.shape}"
            )
        if ((given < 0) | (given >= len(sites))).any() or len(np.unique(given)) != len(given):
            raise InputError(
                f"sites must be from 0 to {len(sites) - 1}, each for one chip; given: {given.tolist()}"
            )
        if len(given) == len(sites):
            given = checked_permutation(given, len(sites))
        self.positions_mm.copy_(torch.as_tensor(sites.positions_mm[given[:chips]]))

    @torch.no_grad()
    def check(self, *, present: Tensor | None = None, half_mm: Tensor | None = None) -> tuple[str, ...]:
        """What is wrong with the layout, a sentence each; nothing if it is legal.

        Args:
            present: As in `forward`; slots below 0.5 count as empty.
            half_mm: As in `forward`.
        """
        x = self.positions_mm.double().cpu()
        half = (self.half_mm if half_mm is None else half_mm).double().cpu()
        there = torch.ones(len(x)) if present is None else present.cpu()
        if not torch.isfinite(x).all():
            return ("a place is not finite",)
        margin = self.wafer.margin_mm
        chips = torch.nonzero(there >= 0.5).flatten().tolist()
        out = (x.norm(dim=1) + half + margin - self.wafer.radius_mm).tolist()
        wrong = [f"chip {i} is {out[i]:.3g} mm over the edge" for i in chips if out[i] > TOLERANCE_MM]
        close = (
            half[:, None]
            + half[None, :]
            + margin
            - torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
        )
        for first, second in torch.nonzero((close > TOLERANCE_MM).triu(1)).tolist():
            if there[first] >= 0.5 and there[second] >= 0.5:
                wrong.append(f"chips {first} and {second} are {close[first, second]:.3g} mm too close")
        return tuple(wrong)

    def legal(self, *, present: Tensor | None = None, half_mm: Tensor | None = None) -> bool:
        """Whether no chip is over the edge and none over or too close to another; see `check`."""
        return not self.check(present=present, half_mm=half_mm)

    def _places(self, positions_mm: Any) -> Tensor:
        found = torch.as_tensor(np.asarray(positions_mm, np.float64), dtype=torch.float32).clone()
        if tuple(found.shape) != (len(self.half_mm), 2) or not torch.isfinite(found).all():
            raise InputError(
                f"`positions_mm` must be finite and have the shape ({len(self.half_mm)}, 2); given: "
                f"{tuple(found.shape)}"
            )
        return found


def _length(vectors: Tensor) -> Tensor:
    return torch.sqrt((vectors**2).sum(-1) + _TINY**2)


def _spiral(count: int, pitch: float) -> np.ndarray:
    """Places at least a pitch apart, around the origin (Vogel's spiral), [count, 2]."""
    number = np.arange(count)
    # The nearest two of Vogel's spiral, 0 and 3, are 1.53 steps apart or more.
    far, turn = pitch / 1.5 * np.sqrt(number + 0.5), number * math.pi * (3.0 - math.sqrt(5.0))
    return np.stack([far * np.cos(turn), far * np.sin(turn)], 1)

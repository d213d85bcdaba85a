"""Sites for chips on a circular wafer: a square grid of equal sites.

Chips are treated as circles around their diagonals, so any chip fits on any site in any orientation. The
pitch is the largest diagonal plus a margin on both sides; a site is valid if the largest chip on it keeps the
margin to the edge. Of four grid offsets (center on a site, between two, or between four) the one with the
most sites is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparseflow.core.checks import check_non_negative, check_positive
from sparseflow.errors import InputError

MAX_SITES = 2048
"""Maximum number of sites; larger distance matrices are impractical to search."""

_RADIUS_TOLERANCE = 1e-9
"""Relative rounding tolerance of the radius."""


@dataclass(frozen=True, kw_only=True)
class Wafer:
    """A circular wafer around the origin.

    Attributes:
        radius_mm: Usable radius, mm.
        margin_mm: Clearance around every chip and to the edge, mm.
    """

    radius_mm: float = 150.0
    margin_mm: float = 1.0

    def __post_init__(self) -> None:
        check_positive(radius_mm=self.radius_mm)
        check_non_negative(margin_mm=self.margin_mm)


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteGrid:
    """Sites of a wafer, row by row from the top, each row from the left.

    Attributes:
        wafer: The wafer.
        positions_mm: Centers (x, y), mm, float64, [M, 2].
        pitch_mm: Distance between neighbors, mm.
    """

    wafer: Wafer
    positions_mm: np.ndarray
    pitch_mm: float

    def __len__(self) -> int:
        return len(self.positions_mm)

    @property
    def distances_mm(self) -> np.ndarray:
        """Pairwise distances, mm, float64, [M, M]."""
        return pairwise_distances_mm(self.positions_mm)

    def select_central(self, count: int) -> np.ndarray:
        """Select the `count` sites closest to the center, in row order, int64, [count].

        Raises:
            InputError: There are fewer sites.
        """
        if not 0 <= count <= len(self):
            raise InputError(f"`count` (={count}) exceeds the number of sites, {len(self)}")
        # Rounded, so that equal distances tie on every machine; ties are resolved in row order.
        distances = np.round(np.hypot(*self.positions_mm.T) / self.pitch_mm, 6)
        return np.sort(np.argsort(distances, kind="stable")[:count])


def build_site_grid(wafer: Wafer, sizes_mm: Any, *, max_sites: int | None = None) -> SiteGrid:
    """Build the sites of a wafer for given chips.

    Args:
        wafer: The wafer.
        sizes_mm: Width and height of each chip, mm, [S, 2], or sides of square chips, [S].
        max_sites: Keep only this many sites, closest to the center; all by default.

    Raises:
        InputError: A size is not positive, there are fewer sites than chips, or there are more than
            `MAX_SITES` sites and `max_sites` is not given.
    """
    sizes = parse_chip_sizes(sizes_mm)
    diagonal = float(np.hypot(*sizes.T).max())
    pitch, reach = diagonal + 2.0 * wafer.margin_mm, wafer.radius_mm - diagonal / 2.0 - wafer.margin_mm
    if reach < 0.0:
        raise InputError(
            f"a chip with a diagonal of {diagonal:.4g} mm and a margin of {wafer.margin_mm:.4g} mm does not "
            f"fit on a wafer with a radius of {wafer.radius_mm:.4g} mm; use smaller chips or a larger wafer"
        )
    if max_sites is not None and max_sites < len(sizes):
        raise InputError(f"`max_sites` (={max_sites}) must be at least the number of chips, {len(sizes)}")
    if max_sites is None:
        _check_num_sites(math.pi * reach * reach / (pitch * pitch) / 2.0)
    grids = [
        _make_grid(pitch, reach * (1.0 + _RADIUS_TOLERANCE), x, y, max_sites)
        for x in (0.0, 0.5)
        for y in (0.0, 0.5)
    ]
    positions = max(grids, key=len)
    if max_sites is None:
        _check_num_sites(len(positions))
    if len(positions) < len(sizes):
        raise InputError(
            f"{len(sizes)} chips exceed the {len(positions)} sites that fit with a pitch of {pitch:.4g} "
            f"mm on a wafer with a radius of {wafer.radius_mm:.4g} mm; use fewer or smaller chips (the "
            f"largest has a diagonal of {diagonal:.4g} mm), a smaller margin or a larger wafer"
        )
    sites = SiteGrid(wafer=wafer, positions_mm=positions, pitch_mm=pitch)
    if max_sites is None or max_sites >= len(sites):
        return sites
    return SiteGrid(wafer=wafer, positions_mm=positions[sites.select_central(max_sites)], pitch_mm=pitch)


def parse_chip_sizes(sizes_mm: Any) -> np.ndarray:
    """Convert chip sizes to width and height, mm, float64, [S, 2].

    Args:
        sizes_mm: [S, 2], or sides of square chips, [S].

    Raises:
        InputError: There are no chips, the shape is wrong, or a size is not positive.
    """
    try:
        sizes = np.asarray(sizes_mm, np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"`sizes_mm` must contain numbers: {error}") from error
    if sizes.ndim == 1:
        sizes = np.stack([sizes, sizes], 1)
    if sizes.ndim != 2 or sizes.shape[1] != 2 or not len(sizes):
        raise InputError(
            f"`sizes_mm` has shape {np.shape(sizes_mm)}; expected [S, 2], or [S] for square chips, with at "
            "least one chip"
        )
    wrong = ~((sizes > 0.0) & np.isfinite(sizes)).all(1)
    if wrong.any():
        chip = int(np.flatnonzero(wrong)[0])
        raise InputError(
            f"chip {chip} has the size {sizes[chip, 0]:g} mm × {sizes[chip, 1]:g} mm; both must be above 0 "
            "and finite"
        )
    return sizes


def pairwise_distances_mm(positions_mm: np.ndarray) -> np.ndarray:
    """Pairwise distances of positions [M, 2], [M, M]."""
    offsets = positions_mm[:, None] - positions_mm[None, :]
    return np.hypot(offsets[..., 0], offsets[..., 1])


def _make_grid(pitch: float, reach: float, x: float, y: float, max_sites: int | None) -> np.ndarray:
    """Centers within `reach` of the origin of a grid shifted by x and y pitches, [M, 2]."""
    count = math.floor(reach / pitch) + 1
    if max_sites is not None:
        # The closest sites lie within a square of this size.
        count = min(count, math.isqrt(max_sites) + 2)
    columns = (np.arange(-count - 1, count + 1) + x) * pitch
    rows = (np.arange(-count - 1, count + 1) + y)[::-1] * pitch
    positions = np.stack(np.meshgrid(columns, rows), -1).reshape(-1, 2)
    return positions[np.hypot(*positions.T) <= reach]


def _check_num_sites(count: float) -> None:
    if count > MAX_SITES:
        raise InputError(
            f"there are at least {count:.0f} sites; expected at most {MAX_SITES}; keep the central ones with "
            "`max_sites`"
        )

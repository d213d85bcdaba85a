"""Where chips may stand on a circular wafer: a square grid of sites, all of one size.

Chips are taken as circles around their diagonals, so that any may stand on any site, whichever way it is
turned. The pitch is the largest diagonal and a margin on either side of it; a site counts if the largest chip
on it stays a margin away from the wafer's edge. Of the four ways to lay the grid (its middle on a site,
between two, or between four) the one with most sites is taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparseflow.errors import InputError

MOST_SITES = 2048
"""More would make matrices of distances that no search gets through."""

_ROUNDING = 1e-9
"""Share of the radius that a site may stand too far out: by rounding."""


@dataclass(frozen=True, kw_only=True)
class Wafer:
    """A circular wafer around the origin.

    Attributes:
        radius_mm: Radius of what may be used.
        margin_mm: Room to keep around every chip and to the edge.
    """

    radius_mm: float = 150.0
    margin_mm: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.radius_mm < math.inf:
            raise InputError(f"`radius_mm` (={self.radius_mm}) must be above 0 and finite")
        if not 0.0 <= self.margin_mm < math.inf:
            raise InputError(f"`margin_mm` (={self.margin_mm}) must be 0 or more, and finite")


@dataclass(frozen=True, kw_only=True, eq=False)
class Sites:
    """Sites of a wafer, row by row from the top, each row from the left.

    Attributes:
        wafer: The wafer.
        positions_mm: Centres, x and y, float64, [M, 2].
        pitch_mm: Distance of neighbours.
    """

    wafer: Wafer
    positions_mm: np.ndarray
    pitch_mm: float

    def __len__(self) -> int:
        return len(self.positions_mm)

    @property
    def distances_mm(self) -> np.ndarray:
        """Distance of any two, float64, [M, M]."""
        return distances_mm(self.positions_mm)

    def middle(self, count: int) -> np.ndarray:
        """The `count` sites nearest to the wafer's centre, row by row, int64, [count].

        Raises:
            InputError: There are not so many.
        """
        if not 0 <= count <= len(self):
            raise InputError(f"there are {len(self)} sites, and {count} are asked for")
        # Rounded, so that sites of one ring are alike on every machine; they are then taken row by row.
        far = np.round(np.hypot(*self.positions_mm.T) / self.pitch_mm, 6)
        return np.sort(np.argsort(far, kind="stable")[:count])


def grid_sites(wafer: Wafer, sizes_mm: Any, *, most: int | None = None) -> Sites:
    """The sites of a wafer for given chips.

    Args:
        wafer: The wafer.
        sizes_mm: Width and height of each chip, [S, 2], or the sides of square ones, [S].
        most: Keep only so many sites, those nearest to the centre; by default all.

    Raises:
        InputError: A size is not a positive number, there are more chips than sites, `most` is less than
            there are chips, or there are more than 2048 sites and `most` is not given.
    """
    sizes = chip_sizes(sizes_mm)
    diagonal = float(np.hypot(*sizes.T).max())
    pitch, reach = diagonal + 2.0 * wafer.margin_mm, wafer.radius_mm - diagonal / 2.0 - wafer.margin_mm
    if reach < 0.0:
        raise InputError(
            f"a chip with a diagonal of {diagonal:.4g} mm and a margin of {wafer.margin_mm:.4g} mm does not "
            f"fit on a wafer with a radius of {wafer.radius_mm:.4g} mm; use smaller chips or a larger wafer"
        )
    if most is not None and most < len(sizes):
        raise InputError(f"`most` (={most}) leaves fewer sites than there are chips, {len(sizes)}")
    if most is None and math.pi * reach * reach / (pitch * pitch) > 2.0 * MOST_SITES:
        _refuse_many(math.pi * reach * reach / (pitch * pitch))
    grids = [_grid(pitch, reach * (1.0 + _ROUNDING), x, y, most) for x in (0.0, 0.5) for y in (0.0, 0.5)]
    positions = max(grids, key=len)
    if most is None and len(positions) > MOST_SITES:
        _refuse_many(len(positions))
    if len(positions) < len(sizes):
        raise InputError(
            f"there are {len(sizes)} chips and {len(positions)} sites: so many with a pitch of {pitch:.4g} "
            f"mm fit on a wafer with a radius of {wafer.radius_mm:.4g} mm; use fewer or smaller chips (the "
            f"largest has a diagonal of {diagonal:.4g} mm), a smaller margin or a larger wafer"
        )
    sites = Sites(wafer=wafer, positions_mm=positions, pitch_mm=pitch)
    if most is None or most >= len(sites):
        return sites
    return Sites(wafer=wafer, positions_mm=positions[sites.middle(most)], pitch_mm=pitch)


def chip_sizes(sizes_mm: Any) -> np.ndarray:
    """Width and height of each chip, float64, [S, 2].

    Args:
        sizes_mm: [S, 2], or the sides of square chips, [S].

    Raises:
        InputError: There is no chip, the shape is another, or a size is not a positive number.
    """
    try:
        found = np.asarray(sizes_mm, np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"sizes of chips must be numbers in mm: {error}") from error
    if found.ndim == 1:
        found = np.stack([found, found], 1)
    if found.ndim != 2 or found.shape[1] != 2 or not len(found):
        raise InputError(
            f"sizes of chips have the shape {np.shape(sizes_mm)}; give [S, 2], or [S] for square ones, of at "
            "least one chip"
        )
    wrong = ~((found > 0.0) & np.isfinite(found)).all(1)
    if wrong.any():
        chip = int(np.flatnonzero(wrong)[0])
        raise InputError(
            f"chip {chip} measures {found[chip, 0]:g} mm × {found[chip, 1]:g} mm; both must be above 0 and "
            "finite"
        )
    return found


def distances_mm(positions_mm: np.ndarray) -> np.ndarray:
    """Distance of any two places, [M, M], of places [M, 2]."""
    apart = positions_mm[:, None] - positions_mm[None, :]
    return np.hypot(apart[..., 0], apart[..., 1])


def _grid(pitch: float, reach: float, x: float, y: float, most: int | None) -> np.ndarray:
    """Centres within `reach` of the origin of a grid that is shifted by x and y pitches, [M, 2]."""
    count = math.floor(reach / pitch) + 1
    if most is not None:
        # A square of so many is all that the nearest can need.
        count = min(count, math.isqrt(most) + 2)
    columns = (np.arange(-count - 1, count + 1) + x) * pitch
    rows = (np.arange(-count - 1, count + 1) + y)[::-1] * pitch
    places = np.stack(np.meshgrid(columns, rows), -1).reshape(-1, 2)
    return places[np.hypot(*places.T) <= reach]


def _refuse_many(count: float) -> None:
    raise InputError(
        f"there are about {count:.0f} sites, and {MOST_SITES} are the most; keep those in the middle with "
        "`most`"
    )

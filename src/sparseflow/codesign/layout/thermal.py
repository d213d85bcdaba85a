"""Steady-state temperatures of a wafer from a grid of thermal resistances.

Model assumptions:

-   The wafer is a disc of square cells; a cell belongs to it if its center does. Each cell has one
    temperature, shared by the silicon, the chips on it and the spreader below.
-   Heat flows laterally through silicon and spreader in parallel; the conductance between square cells is the
    sum of conductivity times thickness. Chips do not conduct laterally.
-   Heat leaves each cell to the coolant through one area resistance: interface material, cold plate and
    coolant. There is no loss through the rim, the top or radiation.
-   The power of a chip is distributed uniformly over its area.
-   Conductivities do not depend on temperature.

Temperatures are therefore linear in power. Heat of a point source decays over `ThermalPackage.spread_mm`,
which is the natural sigma of a layout's thermal objective.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparseflow.codesign.layout.sites import Wafer, parse_chip_sizes
from sparseflow.core.checks import check_between, check_non_negative, check_positive
from sparseflow.core.extras import require
from sparseflow.errors import InputError

MAX_CELLS = 250_000
"""Maximum number of cells; more would take minutes and gigabytes."""


@dataclass(frozen=True, kw_only=True)
class ThermalPackage:
    """Thermal properties of wafer, spreader and cooling.

    Attributes:
        silicon_w_per_mk: Conductivity of the wafer, W/(m·K). 120 is silicon at about 75 °C, between 148 at
            300 K and 98.9 at 400 K (Incropera et al., Fundamentals of Heat and Mass Transfer, table A.1).
        silicon_mm: Thickness, mm; 0.775 for a 300 mm wafer (SEMI M1).
        spreader_w_per_mk: Conductivity of the spreader, W/(m·K); 400 is copper (Incropera et al.).
        spreader_mm: Its thickness, mm; 0 for none.
        resistance_mm2k_per_w: Area resistance from wafer to coolant. An assumption: 100 mm²·K/W is an
            interface of about 20 and a liquid-cooled cold plate of about 80.
        ambient_c: Coolant temperature, °C.
    """

    silicon_w_per_mk: float = 120.0
    silicon_mm: float = 0.775
    spreader_w_per_mk: float = 400.0
    spreader_mm: float = 2.0
    resistance_mm2k_per_w: float = 100.0
    ambient_c: float = 25.0

    def __post_init__(self) -> None:
        values = vars(self).copy()
        check_between(-math.inf, math.inf, ambient_c=values.pop("ambient_c"))
        check_non_negative(spreader_mm=values.pop("spreader_mm"))
        check_positive(**values)

    @property
    def sheet_w_per_k(self) -> float:
        """Conductance between neighboring square cells, W/K."""
        return 1e-3 * (self.silicon_w_per_mk * self.silicon_mm + self.spreader_w_per_mk * self.spreader_mm)

    @property
    def spread_mm(self) -> float:
        """Length over which a temperature difference decays to 1/e, mm."""
        return math.sqrt(self.sheet_w_per_k * self.resistance_mm2k_per_w)


@dataclass(frozen=True, kw_only=True, eq=False)
class ThermalMap:
    """Temperatures of a wafer.

    Attributes:
        temperature_c: Temperature of each cell, °C, NaN outside the disc, float64, [rows, columns]; rows
            start at the bottom.
        x_mm: Centers of the columns, mm, [columns].
        y_mm: Centers of the rows, mm, [rows].
        chip_peak_c: Highest temperature under each chip, °C, [S].
        peak_c: Highest temperature, °C.
        power_w: Total power of the chips, W.
        removed_w: Heat flow to the coolant, W; equal to `power_w`.
    """

    temperature_c: np.ndarray
    x_mm: np.ndarray
    y_mm: np.ndarray
    chip_peak_c: np.ndarray
    peak_c: float
    power_w: float
    removed_w: float


def solve_temperatures(
    wafer: Wafer,
    positions_mm: Any,
    sizes_mm: Any,
    power_w: Any,
    *,
    package: ThermalPackage | None = None,
    cell_mm: float | None = None,
) -> ThermalMap:
    """Solve for the steady-state temperatures.

    Args:
        wafer: The wafer.
        positions_mm: Centers of the chips, mm, [S, 2].
        sizes_mm: Width and height of each chip, mm, [S, 2], or sides of square chips, [S].
        power_w: Power of each chip, W, [S].
        package: Thermal properties.
        cell_mm: Side of a cell, mm; by default a fiftieth of the radius, or a quarter of the smallest chip
            side if that is smaller and the number of cells permits.

    Raises:
        InputError: Shapes differ, a value is negative or not finite, a chip covers no cell, or there are more
            than 250 000 cells.
        MissingExtraError: SciPy is missing.
    """
    package = package or ThermalPackage()
    positions, sizes, power = _check_arrays(positions_mm, sizes_mm, power_w)
    min_cell_mm = math.sqrt(math.pi * wafer.radius_mm**2 / MAX_CELLS)
    if cell_mm is None:
        cell_mm = max(min(wafer.radius_mm / 50.0, float(sizes.min()) / 4.0), 2.0 * min_cell_mm)
    if not min_cell_mm <= cell_mm <= wafer.radius_mm:
        raise InputError(
            f"`cell_mm` (={cell_mm}) must be from {min_cell_mm:.3g} ({MAX_CELLS} cells) to the "
            f"radius, {wafer.radius_mm:g}"
        )
    count = 2 * math.ceil(wafer.radius_mm / cell_mm)
    centers = (np.arange(count) - (count - 1) / 2.0) * cell_mm
    inside = np.hypot(centers[None, :], centers[:, None]) <= wafer.radius_mm
    number = np.full(inside.shape, -1)
    number[inside] = np.arange(inside.sum())
    heat, covered = np.zeros(inside.sum()), []
    for chip, (position, size) in enumerate(zip(positions, sizes, strict=True)):
        share = _cover_fraction(centers, cell_mm, position, size)[inside]
        cells = np.flatnonzero(share)
        if not len(cells):
            raise InputError(
                f"chip {chip} at ({position[0]:g}, {position[1]:g}) mm covers no cell of the wafer with "
                f"a radius of {wafer.radius_mm:g} mm"
            )
        heat[cells] += power[chip] * share[cells] / share.sum()
        covered.append(cells)
    to_coolant = cell_mm**2 / package.resistance_mm2k_per_w
    rise = _solve_rise(number, package.sheet_w_per_k, to_coolant, heat)
    temperature_c = np.full(inside.shape, np.nan)
    temperature_c[inside] = package.ambient_c + rise
    return ThermalMap(
        temperature_c=temperature_c,
        x_mm=centers,
        y_mm=centers,
        chip_peak_c=np.array([package.ambient_c + rise[cells].max() for cells in covered]),
        peak_c=float(package.ambient_c + rise.max()),
        power_w=float(power.sum()),
        removed_w=float(to_coolant * rise.sum()),
    )


def _check_arrays(
    positions_mm: Any, sizes_mm: Any, power_w: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    sizes = parse_chip_sizes(sizes_mm)
    positions, power = np.asarray(positions_mm, np.float64), np.asarray(power_w, np.float64)
    if positions.shape != (len(sizes), 2) or power.shape != (len(sizes),):
        raise InputError(
            f"`positions_mm` has shape {positions.shape} and `power_w` {power.shape} for {len(sizes)} "
            f"chips; expected [{len(sizes)}, 2] and [{len(sizes)}]"
        )
    if not np.isfinite(positions).all():
        raise InputError("`positions_mm` must be finite")
    for chip, value in enumerate(power.tolist()):
        check_non_negative(**{f"power_w[{chip}]": value})
    return positions, sizes, power


def _cover_fraction(centers: np.ndarray, cell: float, position: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Fraction of each cell covered by a chip, [rows, columns]."""
    axis_cover = []
    for axis in range(2):
        low, high = position[axis] - size[axis] / 2.0, position[axis] + size[axis] / 2.0
        overlap = np.minimum(centers + cell / 2.0, high) - np.maximum(centers - cell / 2.0, low)
        # Overlaps of touching edges are rounding errors.
        axis_cover.append(np.where(overlap > 1e-9 * cell, overlap / cell, 0.0))
    return axis_cover[1][:, None] * axis_cover[0][None, :]


def _solve_rise(number: np.ndarray, conductance: float, to_coolant: float, heat: np.ndarray) -> np.ndarray:
    """Solve for the temperature rise of each cell above the coolant, K.

    Args:
        number: Index of each cell, -1 outside, [rows, columns].
        conductance: Conductance between neighbors, W/K.
        to_coolant: Conductance from a cell to the coolant, W/K.
        heat: Power of each cell, W, [cells].
    """
    sparse = require("scipy.sparse", "codesign")
    linalg = require("scipy.sparse.linalg", "codesign")
    pairs = [
        np.stack([a.ravel(), b.ravel()])
        for a, b in ((number[:, :-1], number[:, 1:]), (number[:-1], number[1:]))
    ]
    first, second = np.concatenate(pairs, 1)
    valid = (first >= 0) & (second >= 0)
    first, second = first[valid], second[valid]
    cells = len(heat)
    coupling = sparse.coo_array(
        (np.full(2 * len(first), conductance), (np.r_[first, second], np.r_[second, first])),
        shape=(cells, cells),
    ).tocsc()
    diagonal = np.bincount(np.r_[first, second], minlength=cells) * conductance + to_coolant
    return linalg.spsolve(sparse.diags_array(diagonal, format="csc") - coupling, heat)

"""Temperatures of a wafer at rest: a grid of thermal resistances.

What is modelled:

-   The wafer is a disc of square cells; a cell counts if its centre is on the disc. Each cell has one
    temperature, which is that of the silicon, of the chips on it and of the spreader under it.
-   Heat flows between neighbours through silicon and spreader side by side: the conductance between two
    square cells is conductivity times thickness, summed, whatever their size. Chips conduct nothing sideways.
-   Heat leaves every cell towards the coolant through one resistance over its area: interface material, cold
    plate and what the coolant itself warms up. Nothing leaves through the rim, the top or by radiation.
-   A chip's power is spread evenly over what it covers of the cells.
-   Conductivities do not depend on temperature, and nothing changes in time.

So temperatures are linear in power. Heat from a point decays within `Package.spread_mm`, which is also what
to take for the sigma of a layout's thermal objective.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from sparseflow.codesign.layout.sites import Wafer, chip_sizes
from sparseflow.core.extras import require
from sparseflow.errors import InputError

MOST_CELLS = 250_000
"""More would take the solver minutes and gigabytes."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """What carries heat away.

    Attributes:
        silicon_w_per_mk: Conductivity of the wafer, W/(m·K). 120 is silicon at about 75 °C, between 148 at
            300 K and 98.9 at 400 K (Incropera et al., Fundamentals of Heat and Mass Transfer, table A.1).
        silicon_mm: Thickness; 0.775 is that of a 300 mm wafer (SEMI M1).
        spreader_w_per_mk: Conductivity of the spreader; 400 is copper (likewise).
        spreader_mm: Its thickness; 0 for none.
        resistance_mm2k_per_w: From wafer to coolant, times area. An assumption, not a measurement: 100
            mm²·K/W is an interface of about 20 and a liquid-cooled cold plate of about 80.
        ambient_c: Temperature of the coolant, °C.
    """

    silicon_w_per_mk: float = 120.0
    silicon_mm: float = 0.775
    spreader_w_per_mk: float = 400.0
    spreader_mm: float = 2.0
    resistance_mm2k_per_w: float = 100.0
    ambient_c: float = 25.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            free, zero = field.name == "ambient_c", field.name == "spreader_mm"
            if not math.isfinite(value) or not (free or value > 0.0 or (zero and value == 0.0)):
                raise InputError(
                    f"`{field.name}` (={value}) must be finite" + ("" if free else " and above 0")
                )

    @property
    def sheet_w_per_k(self) -> float:
        """Conductance from one square cell to the next, W/K."""
        return 1e-3 * (self.silicon_w_per_mk * self.silicon_mm + self.spreader_w_per_mk * self.spreader_mm)

    @property
    def spread_mm(self) -> float:
        """Distance over which a difference in temperature falls to 1/e along a line."""
        return math.sqrt(self.sheet_w_per_k * self.resistance_mm2k_per_w)


@dataclass(frozen=True, kw_only=True, eq=False)
class ThermalMap:
    """Temperatures of a wafer.

    Attributes:
        temperature_c: Of each cell, °C, NaN outside of the disc, float64, [rows, columns]; rows from the
            bottom.
        x_mm: Centres of the columns, [columns].
        y_mm: Centres of the rows, [rows].
        chip_peak_c: Highest temperature of the cells that a chip covers, [S].
        peak_c: Highest temperature.
        power_w: What the chips give off.
        removed_w: What flows to the coolant; the same.
    """

    temperature_c: np.ndarray
    x_mm: np.ndarray
    y_mm: np.ndarray
    chip_peak_c: np.ndarray
    peak_c: float
    power_w: float
    removed_w: float


def temperatures(
    wafer: Wafer,
    positions_mm: Any,
    sizes_mm: Any,
    power_w: Any,
    *,
    package: Package | None = None,
    cell_mm: float | None = None,
) -> ThermalMap:
    """The temperatures at which as much heat leaves as the chips give off.

    Args:
        wafer: The wafer.
        positions_mm: Centres of the chips, [S, 2].
        sizes_mm: Width and height of each, [S, 2], or the sides of square ones, [S].
        power_w: What each gives off, W, [S].
        package: What carries heat away.
        cell_mm: Side of a cell; by default a fiftieth of the radius, or a quarter of the smallest chip's side
            where that is smaller and the cells do not become too many.

    Raises:
        InputError: The arrays do not fit each other, hold what is no number or a negative power, a chip
            covers no cell, or there would be more than 250 000 cells.
        MissingExtraError: scipy is not installed.
    """
    package = package or Package()
    positions, sizes, power = _checked(positions_mm, sizes_mm, power_w)
    least = math.sqrt(math.pi * wafer.radius_mm**2 / MOST_CELLS)
    if cell_mm is None:
        cell_mm = max(min(wafer.radius_mm / 50.0, float(sizes.min()) / 4.0), 2.0 * least)
    if not least <= cell_mm <= wafer.radius_mm:
        raise InputError(
            f"`cell_mm` (={cell_mm}) must be from {least:.3g}, which makes {MOST_CELLS} cells, to the "
            f"radius, {wafer.radius_mm:g}"
        )
    count = 2 * math.ceil(wafer.radius_mm / cell_mm)
    middles = (np.arange(count) - (count - 1) / 2.0) * cell_mm
    inside = np.hypot(middles[None, :], middles[:, None]) <= wafer.radius_mm
    number = np.full(inside.shape, -1)
    number[inside] = np.arange(inside.sum())
    heat, covered = np.zeros(inside.sum()), []
    for chip, (place, size) in enumerate(zip(positions, sizes, strict=True)):
        share = _cover(middles, cell_mm, place, size)[inside]
        cells = np.flatnonzero(share)
        if not len(cells):
            raise InputError(
                f"chip {chip} at ({place[0]:g}, {place[1]:g}) mm covers no cell of the wafer, whose radius "
                f"is {wafer.radius_mm:g} mm"
            )
        heat[cells] += power[chip] * share[cells] / share.sum()
        covered.append(cells)
    to_coolant = cell_mm**2 / package.resistance_mm2k_per_w
    rise = _solve(number, package.sheet_w_per_k, to_coolant, heat)
    found = np.full(inside.shape, np.nan)
    found[inside] = package.ambient_c + rise
    return ThermalMap(
        temperature_c=found,
        x_mm=middles,
        y_mm=middles,
        chip_peak_c=np.array([package.ambient_c + rise[cells].max() for cells in covered]),
        peak_c=float(package.ambient_c + rise.max()),
        power_w=float(power.sum()),
        removed_w=float(to_coolant * rise.sum()),
    )


def _checked(positions_mm: Any, sizes_mm: Any, power_w: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    sizes = chip_sizes(sizes_mm)
    positions, power = np.asarray(positions_mm, np.float64), np.asarray(power_w, np.float64)
    if positions.shape != (len(sizes), 2) or power.shape != (len(sizes),):
        raise InputError(
            f"positions of shape {positions.shape} and powers of shape {power.shape} do not fit {len(sizes)} "
            f"chips; give [{len(sizes)}, 2] and [{len(sizes)}]"
        )
    if not np.isfinite(positions).all():
        raise InputError("positions of chips must be finite")
    if not (np.isfinite(power) & (power >= 0.0)).all():
        chip = int(np.flatnonzero(~(np.isfinite(power) & (power >= 0.0)))[0])
        raise InputError(f"chip {chip} gives off {power[chip]:g} W; powers must be 0 or more, and finite")
    return positions, sizes, power


def _cover(middles: np.ndarray, cell: float, place: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Share of each cell that a chip covers, [rows, columns]."""
    along = []
    for axis in range(2):
        low, high = place[axis] - size[axis] / 2.0, place[axis] + size[axis] / 2.0
        overlap = np.minimum(middles + cell / 2.0, high) - np.maximum(middles - cell / 2.0, low)
        # What is left of edges that only touch is rounding.
        along.append(np.where(overlap > 1e-9 * cell, overlap / cell, 0.0))
    return along[1][:, None] * along[0][None, :]


def _solve(number: np.ndarray, sheet: float, to_coolant: float, heat: np.ndarray) -> np.ndarray:
    """How much warmer than the coolant each cell is.

    Args:
        number: Number of each cell, -1 where there is none, [rows, columns].
        sheet: Conductance between neighbours, W/K.
        to_coolant: From a cell to the coolant, W/K.
        heat: What each cell is given, W, [cells].
    """
    sparse = require("scipy.sparse", "codesign")
    linalg = require("scipy.sparse.linalg", "codesign")
    pairs = [
        np.stack([one.ravel(), other.ravel()])
        for one, other in ((number[:, :-1], number[:, 1:]), (number[:-1], number[1:]))
    ]
    first, second = np.concatenate(pairs, 1)
    both = (first >= 0) & (second >= 0)
    first, second = first[both], second[both]
    cells = len(heat)
    between = sparse.coo_array(
        (np.full(2 * len(first), sheet), (np.r_[first, second], np.r_[second, first])), shape=(cells, cells)
    ).tocsc()
    leaving = np.bincount(np.r_[first, second], minlength=cells) * sheet + to_coolant
    return linalg.spsolve(sparse.diags_array(leaving, format="csc") - between, heat)

"""Tests of `codesign.layout.thermal`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sparseflow.codesign.layout.sites import Wafer
from sparseflow.codesign.layout.thermal import ThermalMap, ThermalPackage, solve_temperatures
from sparseflow.errors import InputError

WAFER = Wafer(radius_mm=50.0, margin_mm=1.0)
PACKAGE = ThermalPackage(silicon_mm=0.8, spreader_mm=0.0, resistance_mm2k_per_w=200.0, ambient_c=20.0)


def heated(positions: Any, sizes: Any, power: Any, **settings: Any) -> ThermalMap:
    return solve_temperatures(
        WAFER, positions, sizes, power, **{"package": PACKAGE, "cell_mm": 1.0, **settings}
    )


def test_all_power_leaves_to_the_coolant() -> None:
    result = heated([[0, 0], [30.2, -11.7], [-20, 20]], [[10, 7.3], [5.5, 5.5], [12, 3]], [100.0, 40.0, 7.5])
    assert result.power_w == 147.5
    assert result.removed_w == pytest.approx(147.5, rel=1e-9)
    inside = np.isfinite(result.temperature_c)
    rise = result.temperature_c[inside] - PACKAGE.ambient_c
    assert rise.min() > 0.0
    assert (rise / PACKAGE.resistance_mm2k_per_w).sum() == pytest.approx(147.5, rel=1e-9)
    assert result.peak_c == result.temperature_c[inside].max() == result.chip_peak_c.max()


def test_even_power_gives_even_temperature() -> None:
    result = heated([[0, 0]], [[200.0, 200.0]], [500.0])
    inside = np.isfinite(result.temperature_c)
    expected = 20.0 + 500.0 * 200.0 / inside.sum()
    np.testing.assert_allclose(result.temperature_c[inside], expected, rtol=1e-9)
    assert inside.sum() == pytest.approx(math.pi * 50.0**2, rel=0.01)


def test_temperature_decays_over_spread() -> None:
    # A bar across the whole wafer: away from it and from the rim, a line's solution.
    result = heated([[0, 0]], [[1.0, 200.0]], [100.0], cell_mm=0.5)
    row = result.temperature_c[len(result.y_mm) // 2] - 20.0
    index = np.searchsorted(result.x_mm, [4.0, 12.0])
    x = result.x_mm[index]
    decay = (x[1] - x[0]) / math.log(row[index[0]] / row[index[1]])
    assert PACKAGE.spread_mm == pytest.approx(math.sqrt(0.120 * 0.8 * 200.0))
    assert decay == pytest.approx(PACKAGE.spread_mm, rel=0.02)


def test_temperatures_are_linear_in_power() -> None:
    positions, sizes = [[-12.0, 3.0], [14.0, 5.0]], [[8.0, 8.0], [6.0, 9.0]]
    both = heated(positions, sizes, [30.0, 50.0]).temperature_c - 20.0
    first = heated(positions, sizes, [30.0, 0.0]).temperature_c - 20.0
    second = heated(positions, sizes, [0.0, 25.0]).temperature_c - 20.0
    np.testing.assert_allclose(both, first + 2 * second, rtol=1e-9)


def test_rotation_keeps_temperatures() -> None:
    temperature_c = heated([[12.0, 20.0]], [[8.0, 4.0]], [60.0]).temperature_c
    # Rows run from the bottom.
    hottest = np.unravel_index(np.nanargmax(temperature_c), temperature_c.shape)
    assert hottest[0] > temperature_c.shape[0] // 2 and hottest[1] > temperature_c.shape[1] // 2
    turned = heated([[-20.0, 12.0]], [[4.0, 8.0]], [60.0]).temperature_c
    np.testing.assert_allclose(np.rot90(temperature_c, -1), turned, rtol=1e-9)


def test_finer_cells_converge() -> None:
    coarse, use_fine_split = (heated([[3.3, 1.2]], [10.0], [80.0], cell_mm=cell) for cell in (1.0, 0.5))
    assert coarse.peak_c - 20.0 == pytest.approx(use_fine_split.peak_c - 20.0, rel=0.02)


def test_distance_lowers_peak_temperature() -> None:
    combined = heated([[-6.0, 0.0], [6.0, 0.0]], [10.0, 10.0], [50.0, 50.0])
    distances = heated([[-25.0, 0.0], [25.0, 0.0]], [10.0, 10.0], [50.0, 50.0])
    assert distances.peak_c < combined.peak_c
    spread = heated(
        [[-6.0, 0.0], [6.0, 0.0]], [10.0, 10.0], [50.0, 50.0], package=ThermalPackage(ambient_c=20.0)
    )
    assert spread.peak_c < combined.peak_c


def test_default_cell_size() -> None:
    heat = solve_temperatures(WAFER, [[0, 0]], [2.0], [10.0])
    assert heat.x_mm[1] - heat.x_mm[0] == pytest.approx(0.5)
    coarse = solve_temperatures(WAFER, [[0, 0]], [30.0], [10.0])
    assert coarse.x_mm[1] - coarse.x_mm[0] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("positions", "sizes", "power", "settings", "message"),
    [
        ([[0, 0, 0]], [5.0], [1.0], {}, r"`positions_mm` has shape \(1, 3\)"),
        ([[0, 0]], [5.0], [1.0, 2.0], {}, r"`power_w` \(2,\)"),
        ([[0, math.nan]], [5.0], [1.0], {}, r"positions_mm"),
        ([[0, 0]], [5.0], [-1.0], {}, r"power_w\[0\]` \(=-1\.0\)"),
        ([[0, 0]], [5.0], [math.inf], {}, r"power_w\[0\]` \(=inf\)"),
        ([[0, 0], [90, 0]], [5.0, 5.0], [1.0, 1.0], {}, r"chip 1 at \(90, 0\) mm covers no cell"),
        ([[0, 0]], [0.0], [1.0], {}, r"chip 0 .*0 mm"),
        ([[0, 0]], [5.0], [1.0], {"cell_mm": 0.01}, r"`cell_mm` \(=0\.01\).*250000 cells"),
        ([[0, 0]], [5.0], [1.0], {"cell_mm": 51.0}, r"`cell_mm` \(=51\.0\)"),
    ],
)
def test_invalid_arguments_are_refused(
    positions: Any, sizes: Any, power: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        heated(positions, sizes, power, **settings)


@pytest.mark.parametrize(
    "values", [{"silicon_mm": 0.0}, {"resistance_mm2k_per_w": -1.0}, {"ambient_c": math.nan}]
)
def test_invalid_package_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(values))):
        ThermalPackage(**values)
    assert ThermalPackage(spreader_mm=0.0, ambient_c=-40.0).sheet_w_per_k == pytest.approx(0.093)

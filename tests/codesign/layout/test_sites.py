"""Tests of `codesign.layout.sites`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.codesign.layout.sites import Wafer, build_site_grid, parse_chip_sizes
from sparseflow.errors import InputError


@settings(deadline=None, max_examples=30)
@given(
    radius=st.floats(20.0, 200.0),
    margin=st.floats(0.0, 3.0),
    sizes=st.lists(st.tuples(st.floats(3.0, 25.0), st.floats(3.0, 25.0)), min_size=1, max_size=4),
)
def test_largest_chip_fits_on_every_site(
    radius: float, margin: float, sizes: list[tuple[float, float]]
) -> None:
    wafer = Wafer(radius_mm=radius, margin_mm=margin)
    diagonal = max(math.hypot(*size) for size in sizes)
    if diagonal / 2 + margin > radius:
        with pytest.raises(InputError):
            build_site_grid(wafer, sizes)
        return
    try:
        sites = build_site_grid(wafer, sizes)
    except InputError as error:
        assert f"{len(sizes)} chips" in str(error) or "2048" in str(error)
        return
    assert len(sites) >= len(sizes)
    assert sites.pitch_mm == pytest.approx(diagonal + 2 * margin)
    assert (np.hypot(*sites.positions_mm.T) + diagonal / 2 + margin <= radius * (1 + 1e-8)).all()
    distances = sites.distances_mm + 1e9 * np.eye(len(sites))
    assert distances.min() >= sites.pitch_mm * (1 - 1e-9)


def test_sites_are_in_row_order() -> None:
    sites = build_site_grid(Wafer(radius_mm=100.0, margin_mm=1.0), [20.0])
    x, y = sites.positions_mm.T
    assert (np.diff(y) <= 1e-9).all()
    assert (np.diff(x)[np.diff(y) > -1e-9] > 0).all()
    positions = {(round(a, 6), round(b, 6)) for a, b in zip(x, y, strict=True)}
    assert {(-a, b) for a, b in positions} == {(a, -b) for a, b in positions} == positions


@pytest.mark.parametrize(("radius", "count"), [(15.0, 1), (20.5, 2), (25.0, 4), (30.0, 5), (44.0, 12)])
def test_grid_offset_maximizes_number_of_sites(radius: float, count: int) -> None:
    # A diagonal of 20 and no margin: pitch 20, reach radius - 10.
    side = 20.0 / math.sqrt(2.0)
    assert len(build_site_grid(Wafer(radius_mm=radius, margin_mm=0.0), [side])) == count


def test_distances_match_positions() -> None:
    sites = build_site_grid(Wafer(radius_mm=60.0), [[10.0, 12.0], [8.0, 8.0]])
    for i, j in ((0, 0), (0, 1), (3, 1)):
        expected = math.dist(sites.positions_mm[i], sites.positions_mm[j])
        assert sites.distances_mm[i, j] == pytest.approx(expected)


def test_select_central() -> None:
    sites = build_site_grid(Wafer(), [20.0])
    far = np.hypot(*sites.positions_mm.T)
    for count in (0, 1, 5, 9, len(sites)):
        middle = sites.select_central(count)
        assert (np.diff(middle) > 0).all() and len(middle) == count
        overrides = np.setdiff1d(np.arange(len(sites)), middle)
        if count and len(overrides):
            assert far[middle].max() <= far[overrides].min() + 1e-6
    with pytest.raises(InputError, match="61"):
        sites.select_central(62)


def test_max_sites_keeps_central_sites() -> None:
    wafer = Wafer()
    all_items, subset = build_site_grid(wafer, [20.0]), build_site_grid(wafer, [20.0], max_sites=21)
    np.testing.assert_allclose(subset.positions_mm, all_items.positions_mm[all_items.select_central(21)])
    assert len(build_site_grid(wafer, [20.0], max_sites=500)) == len(all_items)
    tiny = build_site_grid(wafer, [0.1] * 30, max_sites=40)
    assert len(tiny) == 40
    assert np.hypot(*tiny.positions_mm.T).max() < 5 * tiny.pitch_mm


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            [20.0] * 62,
            r"62 chips exceed the 61 sites .* 30\.28 mm",
        ),
        ([300.0], r"diagonal of 424\.3 mm .* does not fit on a wafer with a radius of 150 mm"),
        ([1.0], r"at least \d+ sites; expected at most 2048.*`max_sites`"),
        ([1e-6], r"2048"),
        ([4.0], r"2048|^$"),
        ([[3.0, float("nan")]], r"chip 0 .*3 mm × nan mm"),
        ([5.0, 0.0], r"chip 1 .*0 mm × 0 mm"),
        ([5.0, -1.0], r"chip 1 .*-1 mm"),
        ([math.inf], r"chip 0 .*inf mm"),
        ([], r"shape \(0,"),
        (7.0, r"shape \(\)"),
        ([[1.0, 2.0, 3.0]], r"shape \(1, 3\)"),
        (["wide"], r"sizes_mm"),
    ],
)
def test_invalid_arguments_are_refused(sizes: Any, message: str) -> None:
    if sizes == [4.0]:
        assert 1000 < len(build_site_grid(Wafer(), sizes)) <= 2048
        return
    with pytest.raises(InputError, match=message):
        build_site_grid(Wafer(), sizes)


def test_select_more_sites_than_exist_is_refused() -> None:
    with pytest.raises(InputError, match=r"`max_sites` \(=3\)"):
        build_site_grid(Wafer(), [5.0] * 4, max_sites=3)


@pytest.mark.parametrize("values", [{"radius_mm": 0.0}, {"radius_mm": math.nan}, {"margin_mm": -1.0}])
def test_invalid_wafer_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(values))):
        Wafer(**values)


def test_sizes_of_square_chips() -> None:
    np.testing.assert_array_equal(parse_chip_sizes([2, 3]), [[2.0, 2.0], [3.0, 3.0]])

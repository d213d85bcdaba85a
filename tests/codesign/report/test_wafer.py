"""Tests of `codesign.report.wafer`."""

from __future__ import annotations

import re

import numpy as np
import pytest

from sparseflow.codesign.layout.pareto import LayoutFront, compute_pareto_front
from sparseflow.codesign.layout.sites import Wafer, build_site_grid
from sparseflow.codesign.layout.thermal import solve_temperatures
from sparseflow.codesign.report.wafer import plot_front, plot_wafer
from sparseflow.errors import InputError

WAFER = Wafer(radius_mm=60.0)
SIZES = [[14.0, 10.0], [10.0, 10.0], [12.0, 16.0]]
PLACES = [[-25.0, 10.0], [0.0, -20.0], [28.0, 12.0]]
TRAFFIC = np.array([[9.0, 5e6, 0.0], [1e6, 0.0, 1e3], [2e6, 0.0, 0.0]])


def test_plot_wafer_with_links_and_heat() -> None:
    heat = solve_temperatures(WAFER, PLACES, SIZES, [30.0, 80.0, 20.0])
    figure = plot_wafer(
        WAFER,
        PLACES,
        SIZES,
        names=["big", "hot <1>", "tall"],
        traffic_bytes=TRAFFIC,
        heat=heat,
        caption="So.",
    )
    assert figure.title == "Layout" and figure.caption == "So."
    assert "3 chips on a wafer with a radius of 60 mm" in figure.alt
    assert "the busiest link, big to hot <1>, is 39.1 mm long" in figure.alt
    assert f"The hottest chip is hot <1> with {heat.chip_peak_c[1]:.1f} °C" in figure.alt
    for text in ("big", "hot &lt;1&gt;", "tall", "°C", f"hottest, {heat.chip_peak_c[1]:.1f} °C"):
        assert text in figure.svg
    # The page's colours, so that it can be read on a dark page, too.
    assert {"--ink", "--paper", "--after"} <= set(re.findall(r"var\((--\w+)\)", figure.svg))
    assert len(figure.svg) < 300_000


def test_plot_wafer_labels_stay_inside_chips() -> None:
    names = ["0: a chip with a long name", "1: another", "2: third"]
    figure = plot_wafer(WAFER, PLACES, SIZES, names=names, caption="So.")
    texts = set(re.findall(r"<text[^>]*>([^<]*)</text>", figure.svg))
    assert {"0", "1", "2"} <= texts and not texts & set(names)
    assert figure.caption == "So. Chips: 0: a chip with a long name, 1: another, 2: third."
    assert (
        "0: a chip with a long name"
        in plot_wafer(WAFER, PLACES, SIZES, names=names, traffic_bytes=TRAFFIC).alt
    )


def test_plot_wafer_link_width_shows_traffic() -> None:
    figure = plot_wafer(WAFER, PLACES, SIZES, traffic_bytes=TRAFFIC)
    widths = re.findall(r"stroke: var\(--after\)[^\"]*stroke-width: ([\d.]+)", figure.svg)
    # Both ways together: 6 MB, 2 MB, and 1 kB that is too faint to draw.
    assert sorted(float(width) for width in widths) == pytest.approx([5.0 / 3.0, 5.0], rel=1e-3)


def test_plot_wafer_with_chips_only() -> None:
    figure = plot_wafer(WAFER, PLACES, SIZES)
    assert figure.alt == "3 chips on a wafer with a radius of 60 mm."
    assert "var(--after)" not in figure.svg
    cold = solve_temperatures(WAFER, PLACES, SIZES, [0.0, 0.0, 0.0])
    assert "with 25.0 °C" in plot_wafer(WAFER, PLACES, SIZES, heat=cold).alt


def small_front() -> LayoutFront:
    sites = build_site_grid(WAFER, SIZES)
    return compute_pareto_front(sites, TRAFFIC, [30.0, 80.0, 20.0], sigma_mm=20.0, iterations=50)


def test_plot_front_marks_knee() -> None:
    front = small_front()
    figure = plot_front(front)
    assert f"{len(front.layouts)} undominated layouts" in figure.alt
    assert f"{front.best.comm:.3g} and {front.best.therm:.3g}" in figure.alt
    for text in ("layouts", "knee", "plain grid", "communication"):
        assert text in figure.svg


def test_plot_wafer_with_wrong_shapes_is_refused() -> None:
    with pytest.raises(InputError, match=r"\(2, 2\)"):
        plot_wafer(WAFER, PLACES[:2], SIZES)
    with pytest.raises(InputError, match="2"):
        plot_wafer(WAFER, PLACES, SIZES, names=["a", "b"])
    with pytest.raises(InputError, match=r"\(2, 2\)"):
        plot_wafer(WAFER, PLACES, SIZES, traffic_bytes=np.zeros((2, 2)))

"""Figures of a layout: the wafer with chips, links and heat, and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparseflow.codesign.layout.pareto import LayoutFront
from sparseflow.codesign.layout.sites import Wafer, pairwise_distances_mm, parse_chip_sizes
from sparseflow.codesign.layout.thermal import ThermalMap
from sparseflow.core.report.svg import (
    AFTER,
    BAD,
    BEFORE,
    GOOD,
    GRID,
    INK,
    MUTED,
    PAPER,
    STYLE,
    Figure,
    from_matplotlib,
)
from sparseflow.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_LINK_WIDTH_PT = 5.0
"""Width of the busiest link."""

_MIN_LINK_SHARE = 0.01
"""Links with less traffic relative to the busiest are not drawn."""

_FONT_PT, _MIN_FONT_PT = 7.5, 5.5
"""Size of the labels of chips."""

_LETTER_SHARE = 0.62
"""Mean width of a letter relative to the font size."""

_AXES_PT = 300.0
"""Width of the axes beside a color bar."""

_NUM_LEVELS = 11
"""Number of contour levels."""

_NUM_GRID_POINTS = 72
"""Contour resolution per axis; higher values make pages large."""


def plot_wafer(
    wafer: Wafer,
    positions_mm: Any,
    sizes_mm: Any,
    *,
    names: Sequence[str] | None = None,
    traffic_bytes: Any = None,
    heat: ThermalMap | None = None,
    title: str = "Layout",
    caption: str = "",
) -> Figure:
    """Plot the wafer: chips as rectangles, links as wide as their traffic, temperatures in the background.

    Args:
        wafer: The wafer.
        positions_mm: Centers of the chips, mm, [S, 2].
        sizes_mm: Width and height of each chip, mm, [S, 2], or sides of square chips, [S].
        names: Label of each chip; its index by default.
        traffic_bytes: Bytes from each chip to each other, [S, S]; without it no links are drawn.
        heat: Temperatures; see `layout.solve_temperatures`.
        title: Title.
        caption: Caption.

    Raises:
        InputError: Shapes differ.
    """
    sizes, positions = parse_chip_sizes(sizes_mm), np.asarray(positions_mm, np.float64)
    chips = len(sizes)
    labels = [str(chip) for chip in range(chips)] if names is None else list(names)
    traffic = np.zeros((chips, chips)) if traffic_bytes is None else np.asarray(traffic_bytes, np.float64)
    if positions.shape != (chips, 2) or len(labels) != chips or traffic.shape != (chips, chips):
        raise InputError(
            f"{title}: `positions_mm` has shape {positions.shape}, `names` {len(labels)} entries and "
            f"`traffic_bytes` shape {traffic.shape} for {chips} chips"
        )
    reach = 1.03 * wafer.radius_mm
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas
    from matplotlib.patches import Circle, Rectangle

    with mpl.rc_context({**STYLE, "axes.grid": False}):
        # pyplot would select a backend and keep every figure alive.
        figure = Canvas(figsize=(7.6 if heat is not None else 6.4, 6.2))
        axes = figure.add_subplot()
        edge = Circle((0.0, 0.0), wafer.radius_mm, fill=False, edgecolor=MUTED, linewidth=1.4)
        axes.add_patch(edge)
        if heat is not None:
            _draw_heat(axes, heat, wafer.radius_mm, edge)
        both = traffic + traffic.T
        np.fill_diagonal(both, 0.0)
        busiest = float(both.max())
        for first, second in zip(*np.nonzero(np.triu(both)), strict=True):
            share = both[first, second] / busiest
            if share >= _MIN_LINK_SHARE:
                axes.plot(
                    positions[[first, second], 0], positions[[first, second], 1], color=AFTER, alpha=0.75,
                    linewidth=max(0.4, _MAX_LINK_WIDTH_PT * share), solid_capstyle="round",
                )  # fmt: skip
        hottest = None if heat is None else int(np.argmax(heat.chip_peak_c))
        visible, size_pt = _fit_labels(labels, sizes[:, 0] * _AXES_PT / (2.0 * reach))
        for index, ((x, y), (width, height), label) in enumerate(zip(positions, sizes, visible, strict=True)):
            # Dark text on a light box is readable on every background.
            chip = Rectangle(
                (x - width / 2.0, y - height / 2.0), width, height, facecolor=PAPER, alpha=0.82, zorder=3,
                edgecolor=BAD if index == hottest else INK, linewidth=2.0 if index == hottest else 1.0,
            )  # fmt: skip
            axes.add_patch(chip)
            axes.text(x, y, label, ha="center", va="center", fontsize=size_pt, color=INK, zorder=4)
        if heat is not None and hottest is not None:
            axes.plot([], [], "s", markeredgecolor=BAD, markerfacecolor=PAPER, markeredgewidth=2.0,
                      label=f"hottest, {heat.chip_peak_c[hottest]:.1f} °C")  # fmt: skip
            axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.0)
        axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", xlabel="mm")
        axes.tick_params(colors=MUTED)
        if visible != labels:
            caption = f"{caption} Chips: {', '.join(labels)}.".strip()
        return from_matplotlib(
            figure, title=title, alt=_describe_wafer(wafer, positions, labels, both, heat), caption=caption
        )


def plot_front(front: LayoutFront, *, title: str = "Communication and heat", caption: str = "") -> Figure:
    """Plot all layouts of a Pareto front with its knee and the plain grid.

    Args:
        front: The front.
        title: Title.
        caption: Caption.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    comm, therm = ([getattr(layout, name) for layout in front.layouts] for name in ("comm", "therm"))
    with mpl.rc_context(STYLE):
        figure = Canvas(figsize=(7.2, 4.4))
        axes = figure.add_subplot()
        axes.plot(
            [comm[0], comm[-1]], [therm[0], therm[-1]], color=GRID, linewidth=1.2, linestyle=(0, (4, 3))
        )
        axes.plot(comm, therm, "o-", color=AFTER, markersize=5, linewidth=1.2, label="layouts")
        axes.plot([front.grid.comm], [front.grid.therm], "s", color=BEFORE, markersize=7, label="plain grid")
        axes.plot([front.best.comm], [front.best.therm], "D", color=GOOD, markersize=8, label="knee")
        axes.grid(True, axis="both")
        axes.set_xlabel("communication, plain grid = 1")
        axes.set_ylabel("heat, plain grid = 1")
        axes.legend(loc="upper right")
        words = (
            f"{len(front.layouts)} undominated layouts: communication from {comm[0]:.3g} to {comm[-1]:.3g} "
            f"and heat from {therm[0]:.3g} to {therm[-1]:.3g}, relative to the plain grid. At the knee they "
            f"are {front.best.comm:.3g} and {front.best.therm:.3g}; the plain grid is at "
            f"{front.grid.comm:.3g} and {front.grid.therm:.3g}."
        )
        return from_matplotlib(figure, title=title, alt=words, caption=caption)


def _fit_labels(labels: Sequence[str], widths_pt: np.ndarray) -> tuple[list[str], float]:
    """Select labels and a font size that fit all chips: the names, else the numbers before their colons.

    Args:
        labels: Names, such as `"3: systolic"`.
        widths_pt: Width of each chip in the figure, points, [S].
    """
    numbers = [label.partition(":")[0] if ":" in label else str(index) for index, label in enumerate(labels)]
    names = list(labels)
    for visible in (names, numbers):
        lengths = np.array([max(len(label), 1) for label in visible])
        size_pt = min(_FONT_PT, float((widths_pt / (_LETTER_SHARE * lengths)).min()))
        if size_pt >= _MIN_FONT_PT:
            return visible, size_pt
    return numbers, _MIN_FONT_PT


def _draw_heat(axes: Axes, heat: ThermalMap, radius: float, edge: Any) -> None:
    """Draw temperatures over the square, clipped to the wafer."""
    cell = float(heat.x_mm[1] - heat.x_mm[0])
    grid = np.linspace(-radius - cell, radius + cell, _NUM_GRID_POINTS)
    x, y = np.meshgrid(grid, grid)
    # Points outside the cells get the temperature of the closest cell on the ray from the center.
    inward = np.minimum(1.0, (radius - cell) / np.maximum(np.hypot(x, y), cell))
    column, row = (
        np.rint((inward * coordinates - heat.x_mm[0]) / cell).astype(int).clip(0, len(heat.x_mm) - 1)
        for coordinates in (x, y)
    )
    levels = np.linspace(
        np.nanmin(heat.temperature_c), max(heat.peak_c, 1e-6 + np.nanmin(heat.temperature_c)), _NUM_LEVELS
    )
    contours = axes.contourf(
        grid, grid, heat.temperature_c[row, column], levels=levels, cmap="YlOrRd", zorder=0
    )
    contours.set_clip_path(edge)
    bar = axes.figure.colorbar(contours, ax=axes, shrink=0.8, label="°C", format="%.3g")
    bar.outline.set_visible(False)


def _describe_wafer(
    wafer: Wafer, positions: np.ndarray, labels: Sequence[str], both: np.ndarray, heat: ThermalMap | None
) -> str:
    words = [f"{len(labels)} chips on a wafer with a radius of {wafer.radius_mm:g} mm."]
    if both.any():
        first, second = (int(index) for index in np.unravel_index(np.argmax(both), both.shape))
        distances = pairwise_distances_mm(positions)
        mean = float((both * distances).sum() / both.sum())
        words.append(
            f"A byte travels {mean:.3g} mm on average; the busiest link, {labels[first]} to "
            f"{labels[second]}, is {distances[first, second]:.3g} mm long."
        )
    if heat is not None:
        hottest = int(np.argmax(heat.chip_peak_c))
        words.append(f"The hottest chip is {labels[hottest]} with {heat.chip_peak_c[hottest]:.1f} °C.")
    return " ".join(words)

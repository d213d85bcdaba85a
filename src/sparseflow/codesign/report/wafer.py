"""Pictures of a layout for a report: the wafer with its chips, links and heat, and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparseflow.codesign.layout.pareto import Front
from sparseflow.codesign.layout.sites import Wafer, chip_sizes, distances_mm
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

_WIDEST_PT = 5.0
"""Width of the busiest link."""

_FAINTEST = 0.01
"""Share of the busiest link's traffic below which a link is not drawn."""

_LEVELS = 11
"""Borders of colours."""

_GRID = 72
"""Points, each way, between which the borders of colours are drawn: more make a page heavy."""


def wafer_picture(
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
    """The wafer from above: chips as rectangles, links as wide as their traffic, temperatures beneath.

    Args:
        wafer: The wafer.
        positions_mm: Centres of the chips, [S, 2].
        sizes_mm: Width and height of each, [S, 2], or the sides of square ones, [S].
        names: What each chip is called; its number by default.
        traffic_bytes: From each chip to each, [S, S]; without it no links are drawn.
        heat: Temperatures; see `thermal.temperatures`.
        title: Heading.
        caption: A sentence below it.

    Raises:
        InputError: The arrays do not fit each other.
    """
    sizes, positions = chip_sizes(sizes_mm), np.asarray(positions_mm, np.float64)
    chips = len(sizes)
    labels = [str(chip) for chip in range(chips)] if names is None else list(names)
    traffic = np.zeros((chips, chips)) if traffic_bytes is None else np.asarray(traffic_bytes, np.float64)
    if positions.shape != (chips, 2) or len(labels) != chips or traffic.shape != (chips, chips):
        raise InputError(
            f"{title}: positions of shape {positions.shape}, {len(labels)} names and traffic of shape "
            f"{traffic.shape} do not fit {chips} chips"
        )
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas
    from matplotlib.patches import Circle, Rectangle

    with mpl.rc_context({**STYLE, "axes.grid": False}):
        # Not through pyplot: it would choose a backend and keep every figure alive.
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
            if share >= _FAINTEST:
                axes.plot(
                    positions[[first, second], 0], positions[[first, second], 1], color=AFTER, alpha=0.75,
                    linewidth=max(0.4, _WIDEST_PT * share), solid_capstyle="round",
                )  # fmt: skip
        for (x, y), (width, height), label in zip(positions, sizes, labels, strict=True):
            # Paper beneath ink can be read on a light page and a dark one, whatever the heat.
            chip = Rectangle(
                (x - width / 2.0, y - height / 2.0), width, height, facecolor=PAPER, edgecolor=INK,
                linewidth=1.0, alpha=0.82, zorder=3,
            )  # fmt: skip
            axes.add_patch(chip)
            axes.text(x, y, label, ha="center", va="center", fontsize=7.5, color=INK, zorder=4)
        reach = 1.03 * wafer.radius_mm
        axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", xlabel="mm")
        axes.tick_params(colors=MUTED)
        return from_matplotlib(
            figure, title=title, alt=_wafer_words(wafer, positions, labels, both, heat), caption=caption
        )


def front_picture(front: Front, *, title: str = "Short ways or cool chips", caption: str = "") -> Figure:
    """Every layout of a front as a dot, its knee and the plain grid marked.

    Args:
        front: The front.
        title: Heading.
        caption: A sentence below it.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    comm, therm = ([getattr(one, name) for one in front.layouts] for name in ("comm", "therm"))
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
            f"{len(front.layouts)} layouts of which none is better in both: communication from {comm[0]:.3g} "
            f"to {comm[-1]:.3g} of the plain grid's, heat from {therm[0]:.3g} to {therm[-1]:.3g}. At the "
            f"knee they are {front.best.comm:.3g} and {front.best.therm:.3g}; the plain grid is at "
            f"{front.grid.comm:.3g} and {front.grid.therm:.3g}."
        )
        return from_matplotlib(figure, title=title, alt=words, caption=caption)


def _draw_heat(axes: Axes, heat: ThermalMap, radius: float, edge: Any) -> None:
    """Colours over the whole square, cut off along the circle."""
    cell = float(heat.x_mm[1] - heat.x_mm[0])
    around = np.linspace(-radius - cell, radius + cell, _GRID)
    x, y = np.meshgrid(around, around)
    # What lies beyond the cells has the temperature of the last cell on the way there.
    inward = np.minimum(1.0, (radius - cell) / np.maximum(np.hypot(x, y), cell))
    column, row = (
        np.rint((inward * places - heat.x_mm[0]) / cell).astype(int).clip(0, len(heat.x_mm) - 1)
        for places in (x, y)
    )
    levels = np.linspace(
        np.nanmin(heat.temperature_c), max(heat.peak_c, 1e-6 + np.nanmin(heat.temperature_c)), _LEVELS
    )
    drawn = axes.contourf(
        around, around, heat.temperature_c[row, column], levels=levels, cmap="YlOrRd", zorder=0
    )
    drawn.set_clip_path(edge)
    bar = axes.figure.colorbar(drawn, ax=axes, shrink=0.8, label="°C", format="%.3g")
    bar.outline.set_visible(False)
    hottest = np.unravel_index(np.nanargmax(heat.temperature_c), heat.temperature_c.shape)
    axes.plot(
        [heat.x_mm[hottest[1]]], [heat.y_mm[hottest[0]]], "x", color=BAD, markersize=7, zorder=5,
        label=f"hottest, {heat.peak_c:.1f} °C",
    )  # fmt: skip
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.0)


def _wafer_words(
    wafer: Wafer, positions: np.ndarray, labels: Sequence[str], both: np.ndarray, heat: ThermalMap | None
) -> str:
    words = [f"{len(labels)} chips on a wafer with a radius of {wafer.radius_mm:g} mm."]
    if both.any():
        first, second = (int(place) for place in np.unravel_index(np.argmax(both), both.shape))
        apart = distances_mm(positions)
        mean = float((both * apart).sum() / both.sum())
        words.append(
            f"A byte travels {mean:.3g} mm on average; the busiest link, {labels[first]} to "
            f"{labels[second]}, is {apart[first, second]:.3g} mm long."
        )
    if heat is not None:
        hottest = int(np.argmax(heat.chip_peak_c))
        words.append(f"The hottest chip is {labels[hottest]} with {heat.chip_peak_c[hottest]:.1f} °C.")
    return " ".join(words)

"""The kinds of figure that reports use: bars, intervals, every sample as a dot, curves, parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

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

WIDTH_IN = 9.6

_COLOURS = (AFTER, BEFORE, GOOD, BAD, INK, MUTED)
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)))
"""Curves beyond the last colour have the colours again, in dashes."""


def plot_before_after(
    title: str,
    labels: Sequence[str],
    before: Sequence[float],
    after: Sequence[float],
    *,
    unit: str,
    names: tuple[str, str] = ("before", "after"),
    alt: str = "",
    caption: str = "",
) -> Figure:
    """Two horizontal bars a label, such as a layer's time before and after.

    Args:
        title: Heading.
        labels: One a pair of bars, top to bottom.
        before: The first bar of each pair, in `unit`.
        after: The second, in `unit`.
        unit: Unit of both, written at the axis.
        names: What the two bars are called.
        alt: What the figure says in words; made from the totals when empty.
        caption: A sentence below it.

    Raises:
        InputError: The lists differ in length or are empty.
    """
    if not labels or not len(labels) == len(before) == len(after):
        raise InputError(
            f"{title}: {len(labels)} labels, {len(before)} and {len(after)} values; "
            "there must be as many of each, and at least one"
        )
    with open_axes(rows=len(labels), row_in=0.42) as (figure, axes):
        places = range(len(labels))
        height = 0.36
        axes.barh([p - height / 2 for p in places], before, height=height, color=BEFORE, label=names[0])
        axes.barh([p + height / 2 for p in places], after, height=height, color=AFTER, label=names[1])
        for place, first, second in zip(places, before, after, strict=True):
            for offset, value in ((-height / 2, first), (height / 2, second)):
                axes.annotate(
                    f"{value:.3g}",
                    (value, place + offset),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                    color=MUTED,
                )
        axes.set_yticks(list(places), labels)
        axes.invert_yaxis()
        axes.set_xlim(0, max([*before, *after, 1e-9]) * 1.12)
        axes.set_xlabel(unit)
        _legend(axes, 2)
        total = f"{sum(before):.4g} {unit} {names[0]} and {sum(after):.4g} {unit} {names[1]} in all"
        return from_matplotlib(
            figure, title=title, alt=alt or f"{len(labels)} pairs of bars: {total}.", caption=caption
        )


def plot_intervals(
    title: str,
    labels: Sequence[str],
    medians: Sequence[float],
    lows: Sequence[float],
    highs: Sequence[float],
    *,
    unit: str,
    reference: float | None = None,
    alt: str = "",
    caption: str = "",
) -> Figure:
    """One dot with its interval a label, such as speed-ups; above `reference` is good, below is bad.

    Args:
        title: Heading.
        labels: One a dot, top to bottom.
        medians: The dots, in `unit`.
        lows: Lower ends, in `unit`.
        highs: Upper ends, in `unit`.
        unit: Unit, written at the axis.
        reference: Where to draw the line between better and worse; None for no line.
        alt: What the figure says in words; made from the values when empty.
        caption: A sentence below it.

    Raises:
        InputError: The lists differ in length or are empty.
    """
    if not labels or not len(labels) == len(medians) == len(lows) == len(highs):
        raise InputError(
            f"{title}: {len(labels)} labels, {len(medians)} medians, {len(lows)} and {len(highs)} ends; "
            "there must be as many of each, and at least one"
        )
    with open_axes(rows=len(labels), row_in=0.34) as (figure, axes):
        for place, (median, low, high) in enumerate(zip(medians, lows, highs, strict=True)):
            colour = (
                AFTER
                if reference is None
                else GOOD
                if low > reference
                else BAD
                if high < reference
                else MUTED
            )
            axes.plot([low, high], [place, place], color=colour, linewidth=2.4, solid_capstyle="round")
            axes.plot([median], [place], "o", color=colour, markersize=6.5, markeredgecolor=PAPER)
        if reference is not None:
            axes.axvline(reference, color=INK, linewidth=1, linestyle=(0, (3, 3)))
        axes.set_yticks(list(range(len(labels))), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.margins(x=0.08)
        axes.set_xlabel(unit)
        words = "; ".join(
            f"{label} {median:.3g} ({low:.3g} to {high:.3g})"
            for label, median, low, high in zip(labels, medians, lows, highs, strict=True)
        )
        return from_matplotlib(figure, title=title, alt=alt or f"In {unit}: {words}.", caption=caption)


def plot_samples(
    title: str,
    times: Mapping[str, Sequence[float]],
    *,
    unit: str = "ms",
    alt: str = "",
    caption: str = "",
) -> Figure:
    """Every sample of each candidate as a dot, and a bar at its median: spread and outliers, nothing hidden.

    Args:
        title: Heading.
        times: Candidate -> its samples, in `unit`; top to bottom. The last one has the colour of what is new.
        unit: Unit, written at the axis.
        alt: What the figure says in words; made from the medians when empty.
        caption: A sentence below it.

    Raises:
        InputError: There is no candidate, or one has no sample.
    """
    if not times or not all(len(values) for values in times.values()):
        raise InputError(
            f"{title}: each candidate needs samples; given: { {k: len(v) for k, v in times.items()} }"
        )
    import numpy as np

    # A fixed seed: the scatter only keeps dots apart, and the same run must draw the same page.
    jitter = np.random.default_rng(0)
    with open_axes(rows=len(times), row_in=0.55) as (figure, axes):
        medians = []
        for place, values in enumerate(times.values()):
            medians.append(float(np.median(values)))
            colour = AFTER if place == len(times) - 1 else BEFORE
            heights = place + jitter.uniform(-0.26, 0.26, len(values))
            axes.plot(values, heights, "o", color=colour, markersize=3, alpha=0.55, markeredgewidth=0)
            axes.plot([medians[-1]] * 2, [place - 0.36, place + 0.36], color=INK, linewidth=2)
        axes.set_yticks(list(range(len(times))), list(times))
        axes.set_ylim(len(times) - 0.5, -0.5)
        axes.margins(x=0.05)
        axes.set_xlabel(unit)
        words = "; ".join(
            f"{name}: median {median:.4g} {unit} of {len(values)} samples"
            for (name, values), median in zip(times.items(), medians, strict=True)
        )
        return from_matplotlib(figure, title=title, alt=alt or f"{words}.", caption=caption)


def plot_predicted_vs_measured(
    title: str,
    groups: Mapping[str, Sequence[tuple[float, float]]],
    *,
    unit: str = "ms",
    band: float = 0.10,
    alt: str = "",
    caption: str = "",
) -> Figure:
    """Each prediction as a dot over what was measured, on logarithmic axes with the line of equality.

    Args:
        title: Heading.
        groups: Name -> (measured, predicted), both in `unit` and above 0.
        unit: Unit, written at the axes.
        band: Share around equality that is shaded.
        alt: What the figure says in words; made from the shares within the band when empty.
        caption: A sentence below it.

    Raises:
        InputError: There is no dot, or one is not above 0 or not finite.
    """
    dots = [dot for group in groups.values() for dot in group]
    if not dots or not all(0.0 < value < math.inf for dot in dots for value in dot):
        raise InputError(f"{title}: predictions and measurements above 0 are needed, {len(dots)} were given")
    low, high = min(map(min, dots)) / 1.25, max(map(max, dots)) * 1.25
    with open_axes(rows=1, row_in=4.6) as (figure, axes):
        axes.fill_between(
            [low, high], [(1 - band) * low, (1 - band) * high], [(1 + band) * low, (1 + band) * high],
            color=GRID, linewidth=0, label=f"±{100 * band:.0f} %",
        )  # fmt: skip
        axes.plot([low, high], [low, high], color=MUTED, linewidth=1, linestyle=(0, (3, 3)))
        colours = (AFTER, BEFORE, GOOD, BAD, INK)
        for place, (name, group) in enumerate(groups.items()):
            colour = colours[place % len(colours)]
            axes.plot(
                [m for m, _ in group], [p for _, p in group], "o", color=colour, markersize=5, alpha=0.8,
                markeredgewidth=0, label=name,
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        set_plain_log_ticks(axes.xaxis)
        set_plain_log_ticks(axes.yaxis)
        axes.grid(True, axis="both")
        axes.set_xlabel(f"measured, {unit}")
        axes.set_ylabel(f"predicted, {unit}")
        _legend(axes, len(groups) + 1)
        words = "; ".join(
            f"{name}: {sum(abs(p - m) / m <= band for m, p in group)} of {len(group)} within "
            f"{100 * band:.0f} %"
            for name, group in groups.items()
            if group
        )
        return from_matplotlib(figure, title=title, alt=alt or f"{words}.", caption=caption)


def plot_curves(
    title: str,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    alt: str = "",
    caption: str = "",
) -> Figure:
    """Lines over a common axis, such as losses over steps.

    Args:
        title: Heading.
        series: Name -> places along x and values, as many of both.
        x: What the horizontal axis is, with its unit.
        y: What the vertical axis is, with its unit.
        log_x: Draw the horizontal axis logarithmically.
        log_y: Likewise the vertical one.
        alt: What the figure says in words; made from where the lines end when empty.
        caption: A sentence below it.

    Raises:
        InputError: There is no series, or one is empty or has lists of two lengths.
    """
    lengths = {name: (len(places), len(values)) for name, (places, values) in series.items()}
    if not lengths or any(first != second or not first for first, second in lengths.values()):
        raise InputError(f"{title}: as many places as values, and some, are needed; there are {lengths}")
    with open_axes(rows=1, row_in=3.2) as (figure, axes):
        for number, (name, (places, values)) in enumerate(series.items()):
            colour = _COLOURS[number % len(_COLOURS)]
            dashes = _DASHES[number // len(_COLOURS) % len(_DASHES)]
            axes.plot(places, values, color=colour, linestyle=dashes, linewidth=1.6, label=name)
        if log_x:
            axes.set_xscale("log")
            set_plain_log_ticks(axes.xaxis)
        if log_y:
            axes.set_yscale("log")
            set_plain_log_ticks(axes.yaxis)
        axes.grid(axis="y")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        _legend(axes, 4)
        words = "; ".join(f"{name} ends at {values[-1]:.3g}" for name, (_, values) in series.items())
        return from_matplotlib(figure, title=title, alt=alt or f"{y} over {x}: {words}.", caption=caption)


def plot_stacked_bars(
    title: str,
    labels: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    *,
    unit: str,
    alt: str = "",
    caption: str = "",
) -> Figure:
    """One horizontal bar a label, made of parts, such as where time goes.

    Args:
        title: Heading.
        labels: One a bar, top to bottom.
        parts: Name -> one value a bar, in `unit`, left to right.
        unit: Unit, written at the axis.
        alt: What the figure says in words; made from the values when empty.
        caption: A sentence below it.

    Raises:
        InputError: There is no bar or no part, or a part has another number of values than there are bars.
    """
    if not labels or not parts or any(len(values) != len(labels) for values in parts.values()):
        lengths = {name: len(values) for name, values in parts.items()}
        raise InputError(f"{title}: {len(labels)} bars need as many values of each part; there are {lengths}")
    with open_axes(rows=len(labels), row_in=0.42) as (figure, axes):
        left = [0.0] * len(labels)
        for number, (name, values) in enumerate(parts.items()):
            colour = _COLOURS[number % len(_COLOURS)]
            axes.barh(range(len(labels)), values, left=left, height=0.6, color=colour, label=name)
            left = [before + value for before, value in zip(left, values, strict=True)]
        axes.set_yticks(list(range(len(labels))), labels)
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        _legend(axes, 6)
        words = "; ".join(
            f"{label}: " + ", ".join(f"{name} {values[place]:.3g}" for name, values in parts.items())
            for place, label in enumerate(labels)
        )
        return from_matplotlib(figure, title=title, alt=alt or f"In {unit}: {words}.", caption=caption)


@contextmanager
def open_axes(*, rows: int, row_in: float) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, high enough for `rows` rows, in SparseFlow's style."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    with mpl.rc_context(STYLE):
        # Not through pyplot: it would choose a backend and keep every figure alive.
        figure = Canvas(figsize=(WIDTH_IN, 0.75 + rows * row_in))
        yield figure, figure.add_subplot()


def set_plain_log_ticks(axis: Any) -> None:
    """Numbers on a logarithmic axis, not the usual powers of ten: these are mathematics, which the page's
    style does not set."""
    from matplotlib.ticker import LogFormatter

    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def _legend(axes: Any, columns: int) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0, handlelength=1.1)

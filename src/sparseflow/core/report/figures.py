"""Plots of report pages: bar pairs, intervals, samples, curves, stacked bars, predicted against measured."""

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

_COLORS = (AFTER, BEFORE, GOOD, BAD, INK, MUTED)
_LINE_WIDTH_SHARE = 0.007
"""Width of a line relative to the height of the axes; closer curves cannot be told apart."""
_DIMMED_SHARE, _DIMMED_GRAY = 0.3, 0.7
"""Share of their own brightness, and gray level of the rest, of patches that a mask drops."""
_MAX_MARKERS = 24
"""Longest curve whose points are marked."""
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)))
"""Line styles; curves beyond the last color reuse the colors with the next style."""


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
    """Plot two horizontal bars per label, such as the time of a layer before and after.

    Args:
        title: Heading.
        labels: Labels of the pairs, top to bottom.
        before: First bar of each pair, in `unit`.
        after: Second bar of each pair, in `unit`.
        unit: Unit of the axis.
        names: Legend of the two bars.
        alt: Text alternative; generated from the totals if empty.
        caption: Sentence below the heading.

    Raises:
        InputError: The sequences differ in length or are empty.
    """
    if not labels or not len(labels) == len(before) == len(after):
        raise InputError(
            f"{title}: {len(labels)} labels, {len(before)} and {len(after)} values; "
            "expected the same number of each, at least one"
        )
    with open_axes(rows=len(labels), row_in=0.42) as (figure, axes):
        height = 0.36
        for values, offset, color, name in (
            (before, -height / 2, BEFORE, names[0]),
            (after, height / 2, AFTER, names[1]),
        ):
            positions = [index + offset for index in range(len(labels))]
            bars = axes.barh(positions, values, height=height, color=color, label=name)
            axes.bar_label(
                bars, [format_value(value) for value in values], padding=4, fontsize=8, color=MUTED
            )
        axes.set_yticks(list(range(len(labels))), labels)
        axes.invert_yaxis()
        axes.set_xlim(0, max([*before, *after, 1e-9]) * 1.12)
        axes.set_xlabel(unit)
        _legend(axes, 2)
        total = f"{sum(before):.4g} {unit} {names[0]} and {sum(after):.4g} {unit} {names[1]} in total"
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
    """Plot a dot with an interval per label, such as speedups; above `reference` is good, below is bad.

    Args:
        title: Heading.
        labels: Labels of the dots, top to bottom.
        medians: Dots, in `unit`.
        lows: Lower interval ends, in `unit`.
        highs: Upper interval ends, in `unit`.
        unit: Unit of the axis.
        reference: Position of the line between better and worse; None for no line.
        alt: Text alternative; generated from the values if empty.
        caption: Sentence below the heading.

    Raises:
        InputError: The sequences differ in length or are empty.
    """
    if not labels or not len(labels) == len(medians) == len(lows) == len(highs):
        raise InputError(
            f"{title}: {len(labels)} labels, {len(medians)} medians, {len(lows)} and {len(highs)} ends; "
            "expected the same number of each, at least one"
        )
    with open_axes(rows=len(labels), row_in=0.34) as (figure, axes):
        for position, (median, low, high) in enumerate(zip(medians, lows, highs, strict=True)):
            if reference is None:
                color = AFTER
            else:
                color = GOOD if low > reference else BAD if high < reference else MUTED
            axes.plot([low, high], [position, position], color=color, linewidth=2.4, solid_capstyle="round")
            axes.plot([median], [position], "o", color=color, markersize=6.5, markeredgecolor=PAPER)
        if reference is not None:
            axes.axvline(reference, color=INK, linewidth=1, linestyle=(0, (3, 3)))
        axes.set_yticks(list(range(len(labels))), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.margins(x=0.08)
        axes.set_xlabel(unit)
        text = "; ".join(
            f"{label} {median:.3g} ({low:.3g} to {high:.3g})"
            for label, median, low, high in zip(labels, medians, lows, highs, strict=True)
        )
        return from_matplotlib(figure, title=title, alt=alt or f"In {unit}: {text}.", caption=caption)


def plot_samples(
    title: str,
    times: Mapping[str, Sequence[float]],
    *,
    unit: str = "ms",
    alt: str = "",
    caption: str = "",
) -> Figure:
    """Plot every sample of each candidate as a dot, with a bar at its median.

    Args:
        title: Heading.
        times: Samples of each candidate in `unit`, top to bottom. The last candidate is highlighted.
        unit: Unit of the axis.
        alt: Text alternative; generated from the medians if empty.
        caption: Sentence below the heading.

    Raises:
        InputError: There are no candidates, or a candidate has no samples.
    """
    if not times or not all(len(values) for values in times.values()):
        counts = {name: len(values) for name, values in times.items()}
        raise InputError(f"{title}: each candidate needs samples; number of samples: {counts}")
    import numpy as np

    # A fixed seed, so that the same run renders the same page.
    jitter = np.random.default_rng(0)
    with open_axes(rows=len(times), row_in=0.55) as (figure, axes):
        medians = []
        for position, values in enumerate(times.values()):
            medians.append(float(np.median(values)))
            color = AFTER if position == len(times) - 1 else BEFORE
            heights = position + jitter.uniform(-0.26, 0.26, len(values))
            axes.plot(values, heights, "o", color=color, markersize=3, alpha=0.55, markeredgewidth=0)
            axes.plot([medians[-1]] * 2, [position - 0.36, position + 0.36], color=INK, linewidth=2)
        axes.set_yticks(list(range(len(times))), list(times))
        axes.set_ylim(len(times) - 0.5, -0.5)
        axes.margins(x=0.05)
        axes.set_xlabel(unit)
        text = "; ".join(
            f"{name}: median {median:.4g} {unit} of {len(values)} samples"
            for (name, values), median in zip(times.items(), medians, strict=True)
        )
        return from_matplotlib(figure, title=title, alt=alt or f"{text}.", caption=caption)


def plot_predicted_vs_measured(
    title: str,
    groups: Mapping[str, Sequence[tuple[float, float]]],
    *,
    unit: str = "ms",
    band: float = 0.10,
    alt: str = "",
    caption: str = "",
) -> Figure:
    """Plot predictions against measurements on logarithmic axes with the line of equality.

    Args:
        title: Heading.
        groups: Pairs (measured, predicted) by group name, in `unit` and above 0.
        unit: Unit of the axes.
        band: Relative width of the shaded band around equality.
        alt: Text alternative; generated from the shares within the band if empty.
        caption: Sentence below the heading.

    Raises:
        InputError: There are no pairs, or a value is not positive and finite.
    """
    pairs = [pair for group in groups.values() for pair in group]
    if not pairs or not all(0.0 < value < math.inf for pair in pairs for value in pair):
        raise InputError(f"{title}: expected positive, finite pairs; got {pairs[:3]} of {len(pairs)} pairs")
    low, high = min(map(min, pairs)) / 1.25, max(map(max, pairs)) * 1.25
    with open_axes(rows=1, row_in=4.6) as (figure, axes):
        axes.fill_between(
            [low, high], [(1 - band) * low, (1 - band) * high], [(1 + band) * low, (1 + band) * high],
            color=GRID, linewidth=0, label=f"±{100 * band:.0f} %",
        )  # fmt: skip
        axes.plot([low, high], [low, high], color=MUTED, linewidth=1, linestyle=(0, (3, 3)))
        colors = (AFTER, BEFORE, GOOD, BAD, INK)
        for index, (name, group) in enumerate(groups.items()):
            color = colors[index % len(colors)]
            axes.plot(
                [m for m, _ in group], [p for _, p in group], "o", color=color, markersize=5, alpha=0.8,
                markeredgewidth=0, label=name,
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        set_plain_log_ticks(axes.xaxis)
        set_plain_log_ticks(axes.yaxis)
        axes.grid(True, axis="both")
        axes.set_xlabel(f"measured, {unit}")
        axes.set_ylabel(f"predicted, {unit}")
        _legend(axes, len(groups) + 1)
        text = "; ".join(
            f"{name}: {sum(abs(p - m) / m <= band for m, p in group)} of {len(group)} within "
            f"{100 * band:.0f} %"
            for name, group in groups.items()
            if group
        )
        return from_matplotlib(figure, title=title, alt=alt or f"{text}.", caption=caption)


def plot_curves(
    title: str,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    intervals: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    alt: str = "",
    caption: str = "",
) -> Figure:
    """Plot lines over a common axis, such as losses over steps.

    Curves that cannot be told apart are drawn once, with all of their names in the legend. A curve of one
    point is a dot; `Page.curves` shows a table instead if all curves are.

    Args:
        title: Heading.
        series: x and y values of each line, of equal length.
        x: Label of the horizontal axis with its unit.
        y: Label of the vertical axis with its unit.
        log_x: Whether the horizontal axis is logarithmic.
        intervals: Lower and upper interval ends of the y values, by line.
        alt: Text alternative; generated from the last values if empty.
        caption: Sentence below the heading.

    Raises:
        InputError: There are no series, or a series is empty or has different numbers of x and y values.
    """
    lengths = {name: (len(xs), len(ys)) for name, (xs, ys) in series.items()}
    if not lengths or any(first != second or not first for first, second in lengths.values()):
        raise InputError(f"{title}: expected equal, positive numbers of x and y values; got {lengths}")
    with open_axes(rows=1, row_in=3.2) as (figure, axes):
        for index, names in enumerate(_group_curves(series)):
            xs, ys = series[names[0]]
            if intervals is not None and names[0] in intervals:
                axes.vlines(xs, *intervals[names[0]], color=_COLORS[index % len(_COLORS)], linewidth=1.2)
            axes.plot(
                xs, ys, color=_COLORS[index % len(_COLORS)],
                linestyle=_DASHES[index // len(_COLORS) % len(_DASHES)], linewidth=1.6,
                marker="o" if len(xs) <= _MAX_MARKERS else "", markersize=4, label=", ".join(names),
            )  # fmt: skip
        if log_x:
            axes.set_xscale("log")
            set_plain_log_ticks(axes.xaxis)
        elif all(float(value).is_integer() for xs, _ in series.values() for value in xs):
            _set_integer_ticks(axes.xaxis)
        axes.grid(axis="y")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        _legend(axes, 4)
        text = "; ".join(f"{name} ends at {ys[-1]:.3g}" for name, (_, ys) in series.items())
        return from_matplotlib(figure, title=title, alt=alt or f"{y} over {x}: {text}.", caption=caption)


def plot_frames(
    title: str,
    clips: Sequence[Any],
    masks: Sequence[Any],
    *,
    alt: str = "",
    caption: str = "",
) -> Figure:
    """Plot the frames of clips with the patches that a mask keeps; the other patches are gray.

    Args:
        title: Heading.
        clips: Frames of each clip, [T, H, W] or [T, H, W, 3], with values from 0 to 1.
        masks: Patches of each clip that are kept, bool, [T, h, w], where h divides H and w divides W.
        alt: Text alternative; generated from the shares of kept patches if empty.
        caption: Sentence below the heading.

    Raises:
        InputError: There are no clips, or shapes do not match.
    """
    import numpy as np

    frames = [np.asarray(clip, np.float64) for clip in clips]
    selected = [np.asarray(mask, bool) for mask in masks]
    shapes = [(clip.shape, mask.shape) for clip, mask in zip(frames, selected, strict=False)]
    if not frames or len(frames) != len(selected) or not all(_fits_patches(*pair) for pair in shapes):
        raise InputError(
            f"{title}: {len(frames)} clips and {len(selected)} masks with shapes {shapes}; expected "
            "[T, H, W] or [T, H, W, 3] and [T, h, w], where h divides H and w divides W"
        )
    columns = max(len(clip) for clip in frames)
    with open_axes(rows=len(frames), row_in=WIDTH_IN / columns) as (figure, axes):
        axes.remove()
        grid = figure.subplots(
            len(frames), columns, squeeze=False, gridspec_kw={"wspace": 0.06, "hspace": 0.06}
        )
        for row, clip, mask in zip(grid, frames, selected, strict=True):
            for axis in row:
                axis.set_axis_off()
            for axis, frame, patches in zip(row, clip, mask, strict=False):
                repeats = np.array(frame.shape[:2]) // patches.shape
                color = frame if frame.ndim == 3 else np.repeat(frame[..., None], 3, axis=-1)
                is_kept = np.kron(patches, np.ones(repeats)).astype(bool)[..., None]
                dimmed = _DIMMED_SHARE * color + (1.0 - _DIMMED_SHARE) * _DIMMED_GRAY
                # Each pixel is a pixel of the file; the browser scales it.
                axis.imshow(np.where(is_kept, color, dimmed).clip(0.0, 1.0), interpolation="none")
        text = "; ".join(f"clip {index}: {mask.mean():.0%}" for index, mask in enumerate(selected, start=1))
        return from_matplotlib(
            figure, title=title, alt=alt or f"Frames of clips. Kept patches, {text}.", caption=caption
        )


def _fits_patches(clip: tuple[int, ...], mask: tuple[int, ...]) -> bool:
    return (
        len(clip) in (3, 4)
        and len(mask) == 3
        and clip[0] == mask[0] > 0
        and all(
            size and patches and size % patches == 0
            for size, patches in zip(clip[1:3], mask[1:], strict=True)
        )
        and clip[3:] in ((), (3,))
    )


def plot_history(
    title: str,
    labels: Sequence[str],
    values: Sequence[float],
    intervals: Sequence[tuple[float | None, float | None]],
    *,
    unit: str,
    target: float | None = None,
    alt: str = "",
    caption: str = "",
) -> Figure:
    """Plot a value over revisions, oldest first, with the intervals that are known.

    Args:
        title: Heading.
        labels: Label of each revision.
        values: Value at each revision, in `unit`.
        intervals: Interval ends of each value; None where there is no interval.
        unit: Unit of the axis.
        target: Position of a line that shows the target; None for no line.
        alt: Text alternative; generated from the values if empty.
        caption: Sentence below the heading.

    Raises:
        InputError: The sequences differ in length, or there are fewer than two revisions.
    """
    if len(values) < 2 or not len(labels) == len(values) == len(intervals):
        raise InputError(
            f"{title}: {len(labels)} labels, {len(values)} values and {len(intervals)} intervals; expected "
            "the same number of each, at least two"
        )
    with open_axes(rows=1, row_in=1.8) as (figure, axes):
        axes.plot(range(len(values)), values, "o-", color=AFTER, linewidth=1.6, markersize=5)
        for position, (low, high) in enumerate(intervals):
            if low is not None and high is not None:
                axes.plot([position, position], [low, high], color=AFTER, linewidth=2.4, alpha=0.5)
        if target is not None:
            axes.axhline(target, color=INK, linewidth=1, linestyle=(0, (3, 3)), label="target")
            _legend(axes, 1)
        axes.grid(axis="y")
        axes.grid(False, axis="x")
        axes.set_xticks(range(len(labels)), labels)
        axes.margins(x=0.08, y=0.2)
        axes.set_ylabel(unit)
        text = "; ".join(
            f"{label.replace(chr(10), ', ')}: {value:.4g}"
            for label, value in zip(labels, values, strict=True)
        )
        return from_matplotlib(figure, title=title, alt=alt or f"In {unit}: {text}.", caption=caption)


def plot_stacked_bars(
    title: str,
    labels: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    *,
    unit: str,
    remainder: str = "",
    alt: str = "",
    caption: str = "",
) -> Figure:
    """Plot one stacked horizontal bar per label, such as the parts of a run time.

    Parts that are 0 in all bars are not in the legend.

    Args:
        title: Heading.
        labels: Labels of the bars, top to bottom.
        parts: Values of each part, one per bar, in `unit`, left to right.
        unit: Unit of the axis.
        remainder: Name of the part that stands for idle or other time, drawn in the color of the grid lines.
        alt: Text alternative; generated from the values if empty.
        caption: Sentence below the heading.

    Raises:
        InputError: There are no bars or parts, or a part does not have one value per bar.
    """
    if not labels or not parts or any(len(values) != len(labels) for values in parts.values()):
        lengths = {name: len(values) for name, values in parts.items()}
        raise InputError(f"{title}: each part needs {len(labels)} values, one per bar; got {lengths}")
    with open_axes(rows=len(labels), row_in=0.42) as (figure, axes):
        starts = [0.0] * len(labels)
        for index, (name, values) in enumerate(parts.items()):
            if not any(values):
                continue
            color = GRID if name == remainder else _COLORS[index % len(_COLORS)]
            axes.barh(range(len(labels)), values, left=starts, height=0.6, color=color, label=name)
            starts = [start + value for start, value in zip(starts, values, strict=True)]
        axes.set_yticks(list(range(len(labels))), labels)
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        _legend(axes, 6)
        text = "; ".join(
            f"{label}: " + ", ".join(f"{name} {values[index]:.3g}" for name, values in parts.items())
            for index, label in enumerate(labels)
        )
        return from_matplotlib(figure, title=title, alt=alt or f"In {unit}: {text}.", caption=caption)


def _group_curves(series: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> list[list[str]]:
    """Group the names of curves that cannot be told apart."""
    finite = [y for _, ys in series.values() for y in ys if math.isfinite(y)]
    tolerance = _LINE_WIDTH_SHARE * (max(finite) - min(finite)) if finite else 0.0
    groups: list[list[str]] = []
    for name, (xs, ys) in series.items():
        for group in groups:
            other_xs, other_ys = series[group[0]]
            if list(xs) == list(other_xs) and all(
                abs(y - other) <= tolerance for y, other in zip(ys, other_ys, strict=True)
            ):
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def format_value(value: float) -> str:
    """Format a number with three significant digits, and one from 1000 to a billion as an integer."""
    return f"{value:,.0f}".replace(",", "\u202f") if 1e3 <= abs(value) < 1e9 else f"{value:.3g}"


@contextmanager
def open_axes(*, rows: int, row_in: float) -> Iterator[tuple[Any, Any]]:
    """Open a Matplotlib figure with axes for `rows` rows of `row_in` inches, in the style of the pages."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    with mpl.rc_context(STYLE):
        # Without pyplot, which selects a backend and keeps every figure alive.
        figure = Canvas(figsize=(WIDTH_IN, 0.75 + rows * row_in))
        yield figure, figure.add_subplot()


def set_plain_log_ticks(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers; the page does not render math text."""
    from matplotlib.ticker import LogFormatter

    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def _set_integer_ticks(axis: Any) -> None:
    """Place ticks at integers only, such as epochs and steps."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _legend(axes: Any, columns: int) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0, handlelength=1.1)

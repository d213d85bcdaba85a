"""Options, tables and pictures of sweeps over shapes and loads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparseflow.cli.options import check_out_file
from sparseflow.cli.output import make_table

if TYPE_CHECKING:
    from rich.table import Table

    from sparseflow.core.report import Figure
    from sparseflow.latency.model.predictor import Prediction
    from sparseflow.latency.sweeps import SweepPoint

_LOAD_STEP = 0.1
_MAX_LOADS = 200


def _check_picture(path: Path | None) -> Path | None:
    from sparseflow.core.report import check_picture_path

    if path is not None:
        check_picture_path(path)
    return check_out_file(path)


SweepOption = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="NAME=VALUES",
        help="Predict at several extents of an open dimension, such as batch=1,2,4,8, or shapes of an input, "
        "such as images=1,3,224,224:1,3,320,320. Repeatable: all combinations.",
    ),
]
LoadRangeOption = Annotated[
    str | None,
    typer.Option(
        "--loads", metavar="START:STOP[:STEP]", help="Predict at several loads, such as 0:0.9 or 0:0.9:0.3."
    ),
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        callback=_check_picture,
        help="Picture of `--sweep` or `--loads` to write: .png or .svg.",
    ),
]


def parse_sweeps(options: Sequence[str] | None) -> dict[str, list[tuple[int, ...]]]:
    """Parse `--sweep` options.

    Raises:
        InputError: An option is not a name and integers, or a name is repeated.
    """
    from sparseflow.errors import InputError

    sweeps: dict[str, list[tuple[int, ...]]] = {}
    for option in options or []:
        name, _, text = option.rpartition("=")
        # Colons separate shapes, commas alone separate extents.
        shapes = text.split(":") if ":" in text else text.split(",")
        try:
            values = [tuple(int(extent) for extent in shape.split(",")) for shape in shapes]
        except ValueError:
            values = []
        if not name or not values or min(map(min, values)) < 0 or name in sweeps:
            raise InputError(
                f"`--sweep {option}` must be NAME=EXTENTS, such as batch=1,2,4, or NAME=SHAPES, such as "
                "images=1,3,224,224:1,3,320,320, with each name once"
            )
        sweeps[name] = values
    return sweeps


def parse_load_range(option: str) -> list[float]:
    """Parse `--loads`.

    Raises:
        InputError: The option is not an increasing range in [0, 1].
    """
    from sparseflow.errors import InputError

    try:
        start, stop, *steps = (float(part) for part in option.split(":"))
        (step,) = steps or [_LOAD_STEP]
    except ValueError:
        start, stop, step = math.nan, math.nan, math.nan
    if not (0.0 <= start <= stop <= 1.0 and step > 0.0 and (stop - start) / step <= _MAX_LOADS):
        raise InputError(
            f"`--loads {option}` must be START:STOP or START:STOP:STEP with 0 <= START <= STOP <= 1 and at "
            f"most {_MAX_LOADS} steps, such as 0:0.9"
        )
    count = math.floor((stop - start) / step + 1e-9)
    return [round(start + index * step, 9) for index in range(count + 1)]


def make_sweep_table(title: str, points: Sequence[SweepPoint]) -> Table:
    names = list(points[0].sizes)
    rows = [(*map(_format_shape, point.sizes.values()), *_format_point(point)) for point in points]
    columns = (*(f">{name}" for name in names), ">mean ms", ">interval ms", ">items/s", ">memory MB", "note")
    return make_table(columns, rows, title=title)


def make_load_table(title: str, metric: str, predictions: Sequence[Prediction]) -> Table:
    rows = [
        (
            f"{100 * p.load[metric]:.0f} %",
            f"{p.mean_ms:.3f}",
            f"{p.p50_ms:.3f}",
            f"{p.p95_ms:.3f}",
            format_interval(*p.interval),
            f"{p.slowdown:.2f}x",
        )
        for p in predictions
    ]
    columns = (f">{metric}", ">mean ms", ">p50 ms", ">p95 ms", ">interval ms", ">slowdown")
    return make_table(columns, rows, title=title)


def plot_sweep(title: str, points: Sequence[SweepPoint]) -> Figure:
    """Plot the mean latency and its interval; over numbers if one dimension was swept, else over labels."""
    from sparseflow.core.report import plot_curves, plot_intervals

    predicted = [(point.sizes, point.prediction) for point in points if point.prediction is not None]
    means = [prediction.mean_ms for _, prediction in predicted]
    lows = [prediction.interval[0] for _, prediction in predicted]
    highs = [prediction.interval[1] for _, prediction in predicted]
    # Without a bound the interval ends at the mean.
    highs = [mean if math.isinf(high) else high for mean, high in zip(means, highs, strict=True)]
    if len(points[0].sizes) == 1 and all(
        len(shape) == 1 for sizes, _ in predicted for shape in sizes.values()
    ):
        ((name, _),) = points[0].sizes.items()
        extents = [sizes[name][0] for sizes, _ in predicted]
        curves = {"mean": means, "interval from": lows, "interval to": highs}
        return plot_curves(
            title, {label: (extents, values) for label, values in curves.items()}, x=name, y="latency, ms"
        )
    labels = [_format_sizes(sizes) for sizes, _ in predicted]
    return plot_intervals(title, labels, means, lows, highs, unit="ms")


def plot_loads(title: str, metric: str, predictions: Sequence[Prediction]) -> Figure:
    from sparseflow.core.report import plot_curves

    percent = [100 * p.load[metric] for p in predictions]
    curves = {
        "mean": [p.mean_ms for p in predictions],
        "p50": [p.p50_ms for p in predictions],
        "p95": [p.p95_ms for p in predictions],
    }
    return plot_curves(
        title, {name: (percent, ms) for name, ms in curves.items()}, x=f"{metric}, %", y="latency, ms"
    )


def format_interval(low_ms: float, high_ms: float, *, separator: str = "–") -> str:
    return f"{low_ms:.3f}{separator}{'unbounded' if math.isinf(high_ms) else f'{high_ms:.3f}'}"


def _format_point(point: SweepPoint) -> tuple[str, str, str, str, str]:
    """Format mean, interval, items per second, memory and a note."""
    if point.prediction is None or point.items_per_s is None:
        return "–", "–", "–", "–", point.problem or ""
    prediction = point.prediction
    note = f"{100 * (1.0 - prediction.coverage):.0f} % is a guess" if prediction.is_guess else ""
    return (
        f"{prediction.mean_ms:.3f}",
        format_interval(*prediction.interval),
        f"{point.items_per_s:.4g}",
        f"{prediction.memory.peak_bytes / 1e6:.1f}",
        note,
    )


def _format_sizes(sizes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {_format_shape(shape)}" for name, shape in sizes.items())


def _format_shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))

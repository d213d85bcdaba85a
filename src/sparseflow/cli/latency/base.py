"""What the latency wing's commands share: the application and its options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sparseflow.latency.campaign import Telemetry

app = typer.Typer(
    name="latency", help="Latency: what an ONNX model takes on a loaded device.", no_args_is_help=True
)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Provider = Annotated[str, typer.Option(help="What runs it: cpu or cuda.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape", help="Shape of an input that leaves extents open: name=1,3,224,224. Several times."
    ),
]
Url = Annotated[str | None, typer.Option(help="The Prometheus server, http://127.0.0.1:9090.")]
Labels = Annotated[
    list[str] | None, typer.Option("--label", help="What picks the device there: gpu=0. Several times.")
]
MaxAge = Annotated[float, typer.Option(help="Seconds after which a sample there is stale.")]
PredictorFile = Annotated[Path, typer.Option(help="The predictor, as `latency train` wrote it.")]


@app.callback()
def latency() -> None:
    """Latency: what an ONNX model takes on a loaded device."""


def shapes_of(given: list[str] | None) -> dict[str, tuple[int, ...]]:
    """`["input=1,3,224,224"]` as input -> shape."""
    from sparseflow.errors import InputError

    found: dict[str, tuple[int, ...]] = {}
    for text in given or []:
        name, equals, extents = text.rpartition("=")
        try:
            shape = tuple(int(extent) for extent in extents.split(","))
        except ValueError:
            shape = ()
        if not name or not equals or not shape or min(shape) < 1:
            raise InputError(
                f"`--shape {text}` must be an input's name and its extents, such as input=1,3,224,224"
            )
        found[name] = shape
    return found


def counting(progress: Callable[[str, float], None]) -> Callable[[str, int, int], None]:
    """Adapt a progress callback to one that takes (message, done, total)."""
    return lambda what, done, total: progress(what, done / max(total, 1))


def clock(timestamp_s: float) -> str:
    """A time of day, as people read it."""
    from datetime import datetime

    return datetime.fromtimestamp(timestamp_s).astimezone().isoformat(timespec="seconds")


def labels_of(given: list[str] | None) -> dict[str, str]:
    """`["gpu=0"]` as label -> value."""
    from sparseflow.errors import InputError

    found: dict[str, str] = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"`--label {text}` must be a label's name and value, such as gpu=0")
        found[name] = value
    return found


def telemetry_of(source: str, url: str | None, labels: list[str] | None, max_age: float) -> Telemetry:
    """Where load is read from, as the options say."""
    from sparseflow.latency.campaign import Telemetry

    return Telemetry(source=source, url=url, labels=labels_of(labels) or None, max_age_s=max_age)

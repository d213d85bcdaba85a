"""Application, options and parsers that the latency commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sparseflow.cli.options import open_device, parse_device

if TYPE_CHECKING:
    from sparseflow.latency.inference_config import InferenceConfig
    from sparseflow.latency.measure.config import TelemetryConfig
    from sparseflow.latency.measure.peaks import Peaks
    from sparseflow.latency.model.predictor import Predictor

app = typer.Typer(
    name="latency",
    help="Latency: predict the latency of ONNX models on idle and loaded devices.",
    no_args_is_help=True,
)

ModelArgument = Annotated[Path, typer.Argument(help="ONNX model.")]
UrlOption = Annotated[
    str | None, typer.Option("--url", help="Prometheus server, such as http://127.0.0.1:9090.")
]
LabelsOption = Annotated[
    list[str] | None,
    typer.Option("--label", help="Prometheus label of the device, such as gpu=0. Repeatable."),
]
Stressor = Literal["cpu-fma", "cpu-stream", "gpu-matmul", "gpu-copy"]
StressorOption = Annotated[Stressor | None, typer.Option("--stressor", help="Kind of load.")]

OptLevel = Literal["disable", "basic", "extended", "all"]
_OPT_LEVEL = typer.Option("--opt-level", help="Graph optimization level of onnxruntime.")
OptLevelOption = Annotated[OptLevel, _OPT_LEVEL]
OptionalOptLevelOption = Annotated[OptLevel | None, _OPT_LEVEL]

WindowOption = Annotated[float, typer.Option("--window-s", help="Time to average the load over, seconds.")]
MaxAgeOption = Annotated[
    float, typer.Option("--max-age-s", help="Age after which a Prometheus sample is stale, seconds.")
]
MetricsOption = Annotated[
    list[str] | None, typer.Option("--metric", help="Metric to read; by default all. Repeatable.")
]
PredictorOption = Annotated[
    Path | None,
    typer.Option(
        "--predictor",
        metavar="FILE",
        help="Predictor; by default predictor.json in this directory, else the calibrated or shipped one of "
        "this machine, else a first answer from its peaks.",
    ),
]


@app.callback()
def latency() -> None:
    """Latency: predict the latency of ONNX models on idle and loaded devices.

    Shipped configurations: resnet18, quickstart, all.
    """


def parse_shapes(values: Sequence[str] | None) -> dict[str, tuple[int, ...]]:
    """Parse `--shape` options such as `input=1,3,224,224`.

    Raises:
        InputError: A value is not a name and extents of at least 0.
    """
    from sparseflow.errors import InputError

    shapes: dict[str, tuple[int, ...]] = {}
    for value in values or []:
        name, _, extents = value.rpartition("=")
        try:
            shape = tuple(int(extent) for extent in extents.split(","))
        except ValueError:
            shape = ()
        if not name or not shape or min(shape) < 0:
            raise InputError(f"`--shape {value}` must be NAME=EXTENTS, such as input=1,3,224,224")
        shapes[name] = shape
    return shapes


def parse_inputs(values: Sequence[str] | None) -> dict[str, str]:
    """Parse `--input` options such as `size=1,64` or `mask=mask.npy`, name -> text.

    Raises:
        InputError: A value is not a name and a value.
    """
    from sparseflow.errors import InputError

    inputs: dict[str, str] = {}
    for value in values or []:
        name, _, text = value.rpartition("=")
        if not name or not text:
            raise InputError(f"`--input {value}` must be NAME=VALUE, such as size=1,64 or mask=mask.npy")
        inputs[name] = text
    return inputs


def parse_labels(values: Sequence[str] | None) -> dict[str, str]:
    """Parse `--label` options such as `gpu=0`.

    Raises:
        InputError: A value is not a name and a value.
    """
    from sparseflow.errors import InputError

    labels: dict[str, str] = {}
    for value in values or []:
        name, equals, label = value.partition("=")
        if not equals:
            raise InputError(f"`--label {value}` must be NAME=VALUE, such as gpu=0")
        labels[name] = label
    return labels


def parse_provider(device: str) -> tuple[str, int]:
    """Parse `--device` as an execution provider of onnxruntime, `"cpu"` or `"cuda"`, and a GPU index.

    Raises:
        InputError: The name is not a device.
    """
    kind, index = parse_device(device)
    if kind == "auto":
        selected = open_device(device)
        kind, index = selected.type, selected.index
    return kind, index or 0


def parse_gpu(device: str | None, *, required: str) -> int:
    """Parse `--device` where the input implies whether it is a CPU or a GPU; returns the GPU index.

    Raises:
        InputError: The device is not of the kind `required`, `"cpu"` or `"cuda"`.
    """
    from sparseflow.errors import InputError

    if device is None:
        return 0
    provider, gpu = parse_provider(device)
    if provider != required:
        raise InputError(f"`--device {device}` does not fit the input, which needs {required}")
    return gpu


def select_telemetry(
    context: typer.Context,
    config: InferenceConfig,
    *,
    live: str | None,
    url: str | None,
    labels: list[str] | None,
    max_age_s: float,
) -> TelemetryConfig | None:
    """Return the source of the current load: that of a configuration, with the options of the command line.

    Raises:
        InputError: An option of Prometheus is set, and the source is another one.
    """
    from sparseflow.errors import InputError
    from sparseflow.latency.measure.config import TelemetryConfig

    telemetry = config.telemetry
    if live is not None and (telemetry is None or telemetry.source != live):
        telemetry = TelemetryConfig(source=live)
    if (url is not None or labels) and (telemetry is None or telemetry.source != "prometheus"):
        raise InputError(f"`--url` and `--label` need `--live prometheus` (got --live {live})")
    options = {
        "url": url,
        "labels": parse_labels(labels) or None,
        "max_age_s": max_age_s if is_set(context, "max_age_s") else None,
    }
    changes = {name: value for name, value in options.items() if value is not None}
    return telemetry and telemetry.model_copy(update=changes)


def is_set(context: typer.Context, name: str) -> bool:
    """Return whether an option is on the command line, so that its value is not the default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def select_predictor(
    file: Path | None, device: str | None, *, peaks: Peaks | None = None
) -> tuple[Predictor, int]:
    """Return the predictor of `find_predictor`, and the index of the GPU of `--device`."""
    from sparseflow.latency.first_answer import find_predictor

    provider, gpu = parse_provider(device or "cpu")
    predictor = find_predictor(file, provider=provider, gpu=gpu, peaks=peaks)
    return predictor, parse_gpu(device, required="cpu" if predictor.fingerprint.kind == "cpu" else "cuda")


def format_time(timestamp_s: float) -> str:
    """Format a POSIX timestamp as local time."""
    from datetime import datetime

    return datetime.fromtimestamp(timestamp_s).astimezone().isoformat(timespec="seconds")


def format_age(timestamp_s: float) -> str:
    """Format the time since a POSIX time in its largest unit, such as `3 days`."""
    import time

    age_s = max(time.time() - timestamp_s, 0.0)
    for unit, unit_s in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if age_s >= 2.0 * unit_s:
            return f"{age_s / unit_s:.0f} {unit}"
    return f"{age_s:.0f} seconds"

"""`run`, `stress`, `collect`, `load`, `exporter`, `dashboard`: latency measurements, idle and under load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sparseflow.cli.latency.base import (
    LabelsOption,
    MaxAgeOption,
    MetricsOption,
    ModelArgument,
    OptionalOptLevelOption,
    StressorOption,
    UrlOption,
    WindowOption,
    app,
    format_time,
    parse_gpu,
    parse_inputs,
    parse_labels,
    parse_provider,
    parse_shapes,
)
from sparseflow.cli.options import (
    ClusterOption,
    ConfigOption,
    DeviceOption,
    HostOption,
    InferredDeviceOption,
    InputValuesOption,
    JsonOption,
    LoadsOption,
    OutDirOption,
    OutFileOption,
    PortOption,
    SeedOption,
    ShapesOption,
    ThreadsOption,
    split_list,
)
from sparseflow.cli.output import emit, fail, make_table
from sparseflow.cli.progress import progress_bar

if TYPE_CHECKING:
    from rich.table import Table

    from sparseflow.latency.measure.collection import CollectionSummary


@app.command("run")
def run_model(
    model: ModelArgument,
    device: DeviceOption = "cpu",
    runtime: Annotated[
        Literal["onnxruntime", "openvino"], typer.Option(help="Runtime; openvino runs on the CPU.")
    ] = "onnxruntime",
    warmup: Annotated[
        int, typer.Option(min=0, help="Runs before the first sample; with 0 the first run is a sample.")
    ] = 5,
    loops: Annotated[int, typer.Option(min=1, help="Number of samples.")] = 50,
    opt_level: OptionalOptLevelOption = None,
    threads: ThreadsOption = None,
    shape: ShapesOption = None,
    value: InputValuesOption = None,
    conv_search: Annotated[
        Literal["EXHAUSTIVE", "HEURISTIC", "DEFAULT"],
        typer.Option(help="Algorithm search of cuDNN convolutions."),
    ] = "EXHAUSTIVE",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Time a model or an extracted kernel with inputs and outputs on the device; keep all samples.

    The default optimization level is all for a model and disable for a kernel.
    """
    from sparseflow.errors import InputError
    from sparseflow.latency.measure.runner import Runner

    provider, gpu = parse_provider(device)
    if runtime == "openvino":
        if provider != "cpu":
            raise InputError(f"`--runtime openvino` runs on the CPU (got --device {device})")
        provider = runtime
    runner = Runner(
        model,
        provider,
        level=opt_level,
        threads=threads,
        shapes=parse_shapes(shape),
        inputs=parse_inputs(value),
        conv_search=conv_search,
        gpu=gpu,
        seed=seed,
    )
    timing = runner.measure(warmup=warmup, loops=loops)
    search = f", {timing.conv_search}" if timing.conv_search else ""
    statistics = timing.summarize()
    emit(
        timing.to_dict(),
        as_json,
        make_table(
            [name.removesuffix("_ms") for name in statistics],
            [[f"{value_ms:.4f} ms" for value_ms in statistics.values()]],
            title=f"{timing.model}, {timing.provider}, {timing.level}{search}",
        ),
        f"{len(timing.latency_ms)} samples after {warmup} warm-up runs ({timing.warmup_ms:.1f} ms), "
        f"{format_time(timing.start_s)} to {format_time(timing.end_s)}; CPU time / wall time "
        f"{timing.cpu_ratio:.2f}",
    )


@app.command()
def stress(
    stressor: StressorOption = None,
    load: LoadsOption = None,
    duration_s: Annotated[float, typer.Option(min=0.1, help="Time to hold each level, seconds.")] = 10.0,
    timeout_s: Annotated[float, typer.Option(min=0.0, help="Maximum time to reach a level, seconds.")] = 30.0,
    threads: ThreadsOption = None,
    device: InferredDeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load a CPU or GPU to a share that is measured and corrected; show the achieved share.

    The default load is 0.6, the default stressor cpu-fma or, with a GPU as device, gpu-matmul. On a CPU other
    work counts to the load, and only what is missing is added. A load that is not reached is held as it is.
    """
    from sparseflow.core.load.workloads import DEFAULT_KINDS
    from sparseflow.latency.measure.stress import hold_levels

    kind = stressor or DEFAULT_KINDS["cpu" if device is None else parse_provider(device)[0]]
    gpu = parse_gpu(device, required="cpu" if kind.startswith("cpu-") else "cuda")
    with progress_bar() as progress:
        result = hold_levels(
            kind,
            load or [0.6],
            duration_s=duration_s,
            timeout_s=timeout_s,
            threads=threads,
            device=f"cuda:{gpu}",
            progress=progress,
        )
    rows = [
        (
            f"{level.target:.2f}",
            f"{level.achieved:.3f}",
            "–" if level.other_work is None else f"{level.other_work:.3f}",
            f"{level.duty:.3f}",
        )
        for level in result.levels
    ]
    columns = (">target", ">achieved", ">by other work", ">duty")
    emit(result.to_dict(), as_json, make_table(columns, rows, title=kind))


@app.command()
def collect(
    config: ConfigOption,
    out: OutDirOption,
    devices: Annotated[
        str | None, typer.Option(help="GPUs to split the collection over, e.g. cuda:0,cuda:1.")
    ] = None,
    cluster: ClusterOption = None,
    num_parts: Annotated[
        int | None, typer.Option(min=1, help="Parts to split the collection into on the cluster.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure kernels and models at several levels of load, and record the load.

    Each part is written to its own directory; `latency train` takes all of them. A file that fails is
    reported and does not stop the others; the exit code is then 1.
    """
    from sparseflow.latency.measure.collection import collect as run_collection
    from sparseflow.latency.measure.config import load_collection_config
    from sparseflow.latency.measure.fanout import fan_out

    settings = load_collection_config(config)
    with progress_bar() as progress:
        if devices is None and cluster is None and num_parts is None:
            parts = [run_collection(settings, out, progress=progress)]
        else:
            gpus = [parse_gpu(device, required="cuda") for device in split_list(devices) or []]
            parts = fan_out(settings, out, gpus=gpus, cluster=cluster, parts=num_parts, progress=progress)
    records = [part.to_dict() for part in parts]
    emit(
        records[0] if len(records) == 1 else {"parts": records},
        as_json,
        *(item for part in parts for item in (_level_table(part), _format_counts(part))),
        *(f"failed: {name}: {problem}" for part in parts for name, problem in part.problems.items()),
    )
    num_failed = sum(len(part.problems) for part in parts)
    if num_failed:
        fail(f"{num_failed} files could not be measured", code=1)


@app.command()
def load(
    source: Annotated[
        Literal["host", "gpm", "prometheus"],
        typer.Option(help="Source of the load; gpm reads an NVIDIA GPU through NVML."),
    ] = "host",
    url: UrlOption = None,
    label: LabelsOption = None,
    metric: MetricsOption = None,
    window_s: WindowOption = 1.0,
    max_age_s: MaxAgeOption = 30.0,
    device: InferredDeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the current load of a device as the predictor reads it; fails if it is missing or stale."""
    from sparseflow.core.telemetry.readers import open_reader

    reader = open_reader(
        source,
        device=f"cuda:{parse_gpu(device, required='cuda' if source == 'gpm' else 'cpu')}",
        metrics=metric,
        url=url,
        labels=parse_labels(label),
        max_age_s=max_age_s,
    )
    reading = reader.read(window_s)
    emit(
        reading.to_row(prefix=""),
        as_json,
        f"{reading.device} by {reading.source}, {reading.interval_s:.2f} s up to "
        f"{format_time(reading.timestamp_s)}",
        make_table(
            ("metric", ">share"), [(name, f"{100 * share:.1f} %") for name, share in reading.shares.items()]
        ),
    )


@app.command()
def exporter(
    source: Annotated[
        Literal["host", "gpm"], typer.Option(help="Source of the load; gpm reads an NVIDIA GPU through NVML.")
    ] = "host",
    metric: MetricsOption = None,
    interval_s: Annotated[float, typer.Option(help="Duration of one reading, seconds.")] = 1.0,
    device: InferredDeviceOption = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 9400,
    as_json: JsonOption = False,
) -> None:
    """Export this machine's load to Prometheus under DCGM's metric names until it is stopped."""
    from sparseflow.core.telemetry.readers import open_reader
    from sparseflow.latency.measure.exporter import Exporter, serve

    gpu = parse_gpu(device, required="cuda" if source == "gpm" else "cpu")
    reader = open_reader(source, device=f"cuda:{gpu}", metrics=metric)

    def announce(url: str) -> None:
        emit(
            {"url": url, "source": source, "metrics": list(reader.metrics)},
            as_json,
            f"serving {', '.join(reader.metrics)} at {url}; stop with Ctrl-C",
        )

    serve(Exporter(reader, host=host, port=port, interval_s=interval_s), ready=announce)


@app.command()
def dashboard(out: OutFileOption = Path("dashboard.json"), as_json: JsonOption = False) -> None:
    """Write a Grafana dashboard of the metrics of the exporter and of the DCGM exporter."""
    from sparseflow.core.files import write_json
    from sparseflow.latency.measure.dashboard import make_dashboard

    content = make_dashboard()
    write_json(out, content, indent=2)
    emit(
        {"path": str(out), "title": content["title"], "panels": len(content["panels"])},
        as_json,
        f"{len(content['panels'])} panels: {out}; import it in Grafana",
    )


def _level_table(part: CollectionSummary) -> Table:
    rows = [
        (
            f"{row['level']:.2f}",
            "–" if row["load"] is None else f"{row['load']:.3f}",
            f"{row['stress_alone']:.3f}",
            f"{row['stress_achieved']:.3f}",
            "–" if row["slowdown"] is None else f"{row['slowdown']:.2f}x",
        )
        for row in part.levels
    ]
    columns = (">target load", ">load", ">stressor alone", ">stressor with the work", ">slowdown")
    return make_table(columns, rows, title=str(part.path))


def _format_counts(part: CollectionSummary) -> str:
    drift = "–" if part.drift is None else f"{100 * part.drift:.1f} %"
    return (
        f"{part.targets} items, {part.rows} rows ({part.added} new, {part.failed} failed), drift of the "
        f"reference {drift}"
    )

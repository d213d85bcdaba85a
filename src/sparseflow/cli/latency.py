"""`sparseflow latency`: the commands of the latency wing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sparseflow.latency.graph import Graph
    from sparseflow.latency.kernels import Tensor

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

USAGE_ERRORS = ("InputError", "ModelError", "FileFormatError", "SampleError", "MissingExtraError")


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


def _counting(tell: Callable[[str, float], None]) -> Callable[[str, int, int], None]:
    return lambda what, done, total: tell(what, done / max(total, 1))


@app.command()
def export(
    config: Annotated[
        str, typer.Argument(help="A zoo's YAML file, or one that is shipped: resnet18, quickstart, all.")
    ] = "resnet18",
    out: Annotated[Path, typer.Option(help="Folder that gets the models.")] = Path("models"),
    provider: Provider = "cpu",
    as_json: Json = False,
) -> None:
    """Export a zoo of models to ONNX, and optimise each for the provider that will run it.

    What is whole on disk is kept. A model that fails is reported, and the others go on.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from sparseflow.cli.progress import bar
    from sparseflow.latency import zoo

    with bar() as tell:
        results = zoo.export(config, out, provider=provider, progress=_counting(tell))
    if as_json:
        typer.echo(json.dumps({"models": [result.to_dict() for result in results]}, ensure_ascii=False))
    else:
        table = Table("model", "state", "file", title=escape(f"{config} → {out}"), title_justify="left")
        for result in results:
            state = "failed" if result.problem else "kept" if result.kept else "exported"
            table.add_row(escape(result.name), state, escape(result.problem or str(result.path)))
        Console().print(table)
    failed = [result for result in results if result.problem]
    if failed:
        message = f"sparseflow: {len(failed)} of {len(results)} models were not exported: {failed[0].problem}"
        typer.secho(message, err=True, fg=typer.colors.RED)
        raise typer.Exit(2 if all(result.error in USAGE_ERRORS for result in failed) else 1)


@app.command()
def analyze(
    model: Annotated[Path, typer.Argument(help="An ONNX file.")],
    provider: Provider = "cpu",
    level: Annotated[
        str, typer.Option(help="What onnxruntime may optimise: disable, basic, extended, all.")
    ] = "all",
    shape: Shapes = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder that gets graph.json, kernels/ and the optimised graph.")
    ] = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Show every kernel once, not every node.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what onnxruntime will run: every node with its shapes, work and fused kernel."""
    from rich.console import Console

    from sparseflow.latency.graph import analyze as look

    graph = look(model, provider, level, shapes=shapes_of(shape), out=out)
    if as_json:
        summary = {"counts": graph.counts(), "flops": graph.flops, "bytes_moved": graph.bytes_moved}
        typer.echo(json.dumps({**graph.to_dict(), "summary": summary}, ensure_ascii=False))
        return
    console = Console()
    console.print(_kernel_table(graph) if kernels else _node_table(graph))
    named = ", ".join(f"{count} {name}" for name, count in graph.counts().items())
    console.print(
        f"{len(graph.nodes)} nodes, {len(graph.kernels)} kernels, {graph.flops / 1e9:.2f} GFLOP, "
        f"{graph.bytes_moved / 1e6:.1f} MB: {named}",
        markup=False,
    )
    if out is not None:
        console.print(f"written to {out}", markup=False)


def _table(graph: Graph, *headings: str) -> Any:
    """An empty table about a graph; on a narrow screen numbers and the kernel's name stay whole."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(f"{graph.model_path}, {graph.provider}, {graph.level}"), title_justify="left")
    for heading in headings:
        number = heading in ("#", "nodes", "MFLOP", "MB")
        table.add_column(
            heading,
            overflow="fold",
            justify="right" if number else "left",
            no_wrap=number or heading == "kernel",
        )
    return table


def _node_table(graph: Graph) -> Any:
    from rich.markup import escape

    numbers = {node.name: index for index, node in enumerate(graph.nodes)}
    table = _table(graph, "#", "kernel", "node", "inputs", "outputs", "MFLOP", "MB", "after")
    for node in graph.nodes:
        kernel = node.kernel
        table.add_row(
            str(numbers[node.name]),
            kernel.op,
            escape(f"{kernel.domain}.{kernel.node_op}".removeprefix(".").removeprefix("com.microsoft.")),
            _shapes(kernel.inputs, kernel.constants),
            _shapes(kernel.outputs),
            f"{kernel.flops / 1e6:.2f}{'' if kernel.flops_known else ' ?'}",
            f"{kernel.bytes_moved / 1e6:.3f}",
            ", ".join(str(numbers[name]) for name in node.inputs),
        )
    return table


def _kernel_table(graph: Graph) -> Any:
    uses = graph.uses()
    table = _table(graph, "kernel", "nodes", "inputs", "outputs", "MFLOP", "MB")
    for kernel in graph.kernels:
        table.add_row(
            kernel.id,
            str(uses[kernel.id]),
            _shapes(kernel.inputs, kernel.constants),
            _shapes(kernel.outputs),
            f"{kernel.flops / 1e6:.2f}{'' if kernel.flops_known else ' ?'}",
            f"{kernel.bytes_moved / 1e6:.3f}",
        )
    return table


def _shapes(tensors: tuple[Tensor, ...], constants: tuple[int, ...] = ()) -> str:
    """Shapes of what flows; weights are left to the JSON."""
    return "  ".join(
        "×".join(map(str, tensor.shape)) or "scalar"
        for position, tensor in enumerate(tensors)
        if tensor.present and position not in constants
    )


@app.command()
def extract(
    target: Annotated[
        Path, typer.Argument(help="An ONNX file, an analysed graph, or one kernel's record beside it.")
    ],
    out: Annotated[Path, typer.Option(help="Folder that gets kernels/.")] = Path("extracted"),
    provider: Annotated[str | None, typer.Option(help="What runs it: cpu or cuda; the graph's own.")] = None,
    check: Annotated[bool, typer.Option(help="Compare each node with the tensor inside the graph.")] = True,
    kernel: Annotated[list[str] | None, typer.Option(help="Id of a kernel; several times.")] = None,
    shape: Shapes = None,
    seed: Annotated[int, typer.Option(help="What the model's inputs are drawn from.")] = 0,
    as_json: Json = False,
) -> None:
    """Write each kernel as a model of its own, and compare it with the tensor inside the whole graph."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from sparseflow.cli.progress import bar
    from sparseflow.latency.extract import extract as take

    with bar() as tell:
        results = take(
            target, out, provider=provider, check=check, only=kernel or (), shapes=shapes_of(shape),
            seed=seed, progress=_counting(tell),
        )  # fmt: skip
    nodes, matched = sum(r.nodes for r in results), sum(r.matched for r in results)
    good = sum(r.ok for r in results)
    if as_json:
        summary = {"kernels": len(results), "ok": good, "nodes": nodes, "matched": matched}
        found = [result.to_dict() for result in results]
        typer.echo(json.dumps({"summary": summary, "kernels": found}, ensure_ascii=False))
    else:
        table = Table("kernel", "nodes", "matched", "largest error", "note", title_justify="left")
        for result in results:
            error = result.relative_error
            table.add_row(
                escape(result.kernel_id),
                str(result.nodes),
                f"{result.matched} of {result.checked}" if result.checked else "–",
                "–" if error is None else f"{error:.1e}",
                escape(result.problem or ""),
            )
        console = Console()
        console.print(table)
        console.print(f"{good} of {len(results)} kernels, {matched} of {nodes} nodes match", markup=False)
    if good < len(results):
        problem = next(result.problem for result in results if not result.ok)
        typer.secho(
            f"sparseflow: {len(results) - good} of {len(results)} kernels failed: {problem}",
            err=True,
            fg=typer.colors.RED,
        )
        raise typer.Exit(1)


@app.command()
def load(
    source: Annotated[str, typer.Option(help="host, gpm (an NVIDIA GPU by NVML) or prometheus.")] = "host",
    url: Annotated[str | None, typer.Option(help="The Prometheus server, http://127.0.0.1:9090.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="What picks the device there: gpu=0. Several times.")
    ] = None,
    metric: Annotated[list[str] | None, typer.Option(help="Read only this. Several times.")] = None,
    window: Annotated[float, typer.Option(help="Seconds to average over.")] = 1.0,
    max_age: Annotated[float, typer.Option(help="Seconds after which a sample there is stale.")] = 30.0,
    device: Annotated[str, typer.Option(help="The GPU that gpm reads.")] = "cuda",
    as_json: Json = False,
) -> None:
    """Show how busy a device is right now, as the predictor sees it. Missing or stale is an error."""
    from rich.console import Console
    from rich.table import Table

    from sparseflow.core.telemetry.readers import open_reader

    reader = open_reader(
        source, device=device, metrics=metric, url=url, labels=_labels(label), max_age_s=max_age
    )
    found = reader.read(window)
    if as_json:
        typer.echo(json.dumps(found.to_row(prefix=""), ensure_ascii=False))
        return
    console = Console()
    title = f"{found.device} by {found.source}, {found.interval_s:.2f} s up to {_clock(found.timestamp_s)}"
    console.print(title, markup=False)
    table = Table("metric", "share")
    for name, value in found.shares.items():
        table.add_row(name, f"{100 * value:.1f} %")
    console.print(table)


@app.command()
def exporter(
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 9400,
    listen: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets others in.")] = "127.0.0.1",
    source: Annotated[str, typer.Option(help="host, or gpm: an NVIDIA GPU by NVML.")] = "host",
    device: Annotated[str, typer.Option(help="The GPU that gpm reads.")] = "cuda",
    metric: Annotated[list[str] | None, typer.Option(help="Publish only this. Several times.")] = None,
    interval: Annotated[float, typer.Option(help="Seconds that one reading takes.")] = 1.0,
    as_json: Json = False,
) -> None:
    """Publish this machine's load under DCGM's names for Prometheus to scrape, until it is stopped."""
    from sparseflow.core.telemetry.readers import open_reader
    from sparseflow.errors import InputError
    from sparseflow.latency.exporter import Exporter, serve

    if source not in ("host", "gpm"):
        raise InputError(f"`--source` (={source}) must be host or gpm: what is published must be read here")
    reader = open_reader(source, device=device, metrics=metric)

    def ready(address: str) -> None:
        if as_json:
            typer.echo(json.dumps({"url": address, "source": source, "metrics": list(reader.metrics)}))
        else:
            typer.echo(f"serving {', '.join(reader.metrics)} at {address}; stop with Ctrl-C")

    serve(Exporter(reader, host=listen, port=port, interval_s=interval), ready=ready)


def _clock(timestamp_s: float) -> str:
    from datetime import datetime

    return datetime.fromtimestamp(timestamp_s).astimezone().isoformat(timespec="seconds")


def _labels(given: list[str] | None) -> dict[str, str]:
    from sparseflow.errors import InputError

    found: dict[str, str] = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"`--label {text}` must be a label's name and value, such as gpu=0")
        found[name] = value
    return found


@app.command("run")
def run_model(
    model: Annotated[Path, typer.Argument(help="An ONNX file: a model, or a kernel from `latency extract`.")],
    provider: Provider = "cpu",
    warmup: Annotated[
        int, typer.Option(min=0, help="Runs before the first sample; 0 keeps the first one.")
    ] = 5,
    loops: Annotated[int, typer.Option(min=1, help="Samples.")] = 50,
    level: Annotated[
        str | None,
        typer.Option(
            help="What onnxruntime may optimise: disable (the default of a kernel), …, all (of a model)."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads within an operator.")] = None,
    shape: Shapes = None,
    conv_search: Annotated[
        str, typer.Option(help="How cuDNN chooses: EXHAUSTIVE, HEURISTIC, DEFAULT.")
    ] = "EXHAUSTIVE",
    gpu: Annotated[int, typer.Option(min=0, help="Number of the GPU.")] = 0,
    seed: Annotated[int, typer.Option(help="What the inputs are drawn from.")] = 0,
    as_json: Json = False,
) -> None:
    """Time a model or a kernel, its inputs and outputs on the device; every sample is kept."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from sparseflow.latency.runner import Runner

    runner = Runner(
        model, provider, level=level, threads=threads, shapes=shapes_of(shape), conv_search=conv_search,
        gpu=gpu, seed=seed,
    )  # fmt: skip
    timing = runner.measure(warmup=warmup, loops=loops)
    if as_json:
        typer.echo(json.dumps(timing.to_dict(), ensure_ascii=False))
        return
    search = f", {timing.conv_search}" if timing.conv_search else ""
    title = f"{timing.model}, {timing.provider}, {timing.level}{search}"
    table = Table("mean", "p50", "p95", "p99", "min", "max", title=escape(title), title_justify="left")
    shown = (timing.mean_ms, *(timing.quantile_ms(q) for q in (0.5, 0.95, 0.99)))
    table.add_row(*(f"{value:.4f} ms" for value in (*shown, min(timing.latency_ms), max(timing.latency_ms))))
    console = Console()
    console.print(table)
    console.print(
        f"{len(timing.latency_ms)} runs after {warmup} of warm-up ({timing.warmup_ms:.1f} ms), from "
        f"{_clock(timing.start_s)} to {_clock(timing.end_s)}; CPU time / wall time {timing.cpu_ratio:.2f}",
        markup=False,
    )


@app.command()
def stress(
    kind: Annotated[str, typer.Option(help="cpu-fma, cpu-stream, gpu-matmul or gpu-copy.")] = "cpu-fma",
    level: Annotated[
        list[float] | None,
        typer.Option(help="Share of the device's time, 0 to 1; of several, one after the other."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="How long each level is kept once reached.")] = 10.0,
    workers: Annotated[int | None, typer.Option(min=1, help="CPUs to load; by default all.")] = None,
    device: Annotated[str, typer.Option(help="The GPU of a GPU load.")] = "cuda",
    timeout: Annotated[float, typer.Option(min=0.0, help="Longest wait for a level, seconds.")] = 30.0,
    as_json: Json = False,
) -> None:
    """Load a CPU or a GPU to a level that is measured and corrected, and show what is achieved.

    Exits with 1 where a level is not reached.
    """
    import time

    from sparseflow.cli.progress import bar
    from sparseflow.core.load import Stressor

    levels = level or [0.6]
    reached: list[dict[str, float]] = []
    with Stressor(kind, levels[0], workers=workers, device=device) as load, bar() as tell:
        for number, asked in enumerate(levels):
            load.set_level(asked)
            tell(f"{kind} {asked:g}: waiting until it is steady", number / len(levels))
            load.wait_until_steady(timeout)
            begin = time.monotonic()
            while (passed := time.monotonic() - begin) < seconds:
                share = (number + passed / seconds) / len(levels)
                tell(f"{kind} {asked:g}: achieved {load.achieved():.3f}, duty {load.duty():.3f}", share)
                time.sleep(min(0.25, seconds - passed))
            kept = load.between(begin, time.monotonic())
            reached.append({"asked": asked, "achieved": kept, "duty": load.duty()})
            if not as_json:
                typer.echo(f"asked {asked:.2f}  achieved {kept:.3f}  duty {load.duty():.3f}")
    if as_json:
        typer.echo(
            json.dumps({"kind": kind, "device": load.device, "cpus": list(load.cpus), "levels": reached})
        )


@app.command()
def collect(
    config: Annotated[Path, typer.Argument(help="A collection's YAML file.")],
    out: Annotated[
        Path, typer.Option(help="Folder of the collection; what is in it is gone on with.")
    ] = Path("collection"),
    as_json: Json = False,
) -> None:
    """Measure kernels and models at several levels of load, and read the load meanwhile.

    The same command goes on with a collection that was stopped, by whatever: no row is lost or repeated.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from sparseflow.cli.progress import bar
    from sparseflow.latency.campaign import read_config
    from sparseflow.latency.collect import collect as gather

    settings = read_config(config)
    with bar() as tell:
        found = gather(settings, out, progress=tell)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), ensure_ascii=False))
        return
    table = Table(
        "load asked", "alone", "beside the work", "slowdown", title=escape(str(out)), title_justify="left"
    )
    for row in found.levels:
        slowdown = row["slowdown"]
        table.add_row(
            f"{row['level']:.2f}", f"{row['stress_alone']:.3f}", f"{row['stress_achieved']:.3f}",
            "–" if slowdown is None else f"{slowdown:.2f}x",
        )  # fmt: skip
    console = Console()
    console.print(table)
    drift = "–" if found.drift is None else f"{100 * found.drift:.1f} %"
    console.print(
        f"{found.items} items, {found.rows} rows ({found.added} new, {found.failed} failed), drift of the "
        f"reference {drift}",
        markup=False,
    )

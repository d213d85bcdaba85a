"""`export`, `analyze` and `extract`: models, what they run, and each kernel alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparseflow.cli.latency.base import Json, Provider, Shapes, app, counting, shapes_of

if TYPE_CHECKING:
    from sparseflow.latency.graph import Graph
    from sparseflow.latency.kernels import Tensor

USAGE_ERRORS = ("InputError", "ModelError", "FileFormatError", "SampleError", "MissingExtraError")


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

    from sparseflow.cli.progress import progress_bar
    from sparseflow.latency import zoo

    with progress_bar() as progress:
        results = zoo.export(config, out, provider=provider, progress=counting(progress))
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

    from sparseflow.cli.progress import progress_bar
    from sparseflow.latency.extract import extract as take

    with progress_bar() as progress:
        results = take(
            target, out, provider=provider, check=check, only=kernel or (), shapes=shapes_of(shape),
            seed=seed, progress=counting(progress),
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

"""`export`, `analyze` and `extract`: models, their graphs and their kernels."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparseflow.cli.latency.base import (
    ModelArgument,
    OptLevelOption,
    app,
    parse_inputs,
    parse_provider,
    parse_shapes,
)
from sparseflow.cli.options import (
    ConfigOption,
    DeviceOption,
    InferredDeviceOption,
    InputValuesOption,
    JsonOption,
    OptionalOutDirOption,
    OutDirOption,
    SeedOption,
    ShapesOption,
)
from sparseflow.cli.output import emit, fail, make_table
from sparseflow.cli.progress import progress_bar

if TYPE_CHECKING:
    from rich.table import Table

    from sparseflow.latency.graph.analysis import Graph
    from sparseflow.latency.graph.kernels import KernelSpec, TensorSpec

_USAGE_ERRORS = ("InputError", "ModelError", "FileFormatError", "SampleError", "MissingExtraError")


@app.command()
def export(
    out: OutDirOption,
    config: ConfigOption = "resnet18",
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Export a zoo of models to ONNX and optimize each for the device.

    Complete files are kept. A model that fails is reported and does not stop the others.
    """
    from sparseflow.latency.graph import zoo

    provider, _ = parse_provider(device)
    with progress_bar() as progress:
        results = zoo.export_zoo(config, out, provider=provider, progress=progress)
    rows = [
        (
            result.name,
            "failed" if result.problem else "kept" if result.reused else "exported",
            result.problem or str(result.path),
        )
        for result in results
    ]
    emit(
        {"models": [result.to_dict() for result in results]},
        as_json,
        make_table(("model", "status", "file"), rows, title=f"{config} → {out}"),
    )
    failed = [result for result in results if result.problem]
    if failed:
        fail(
            f"{len(failed)} of {len(results)} exports failed: {failed[0].problem}",
            code=2 if all(result.error in _USAGE_ERRORS for result in failed) else 1,
        )


@app.command()
def analyze(
    model: ModelArgument,
    device: DeviceOption = "cpu",
    opt_level: OptLevelOption = "all",
    shape: ShapesOption = None,
    value: InputValuesOption = None,
    out: OptionalOutDirOption = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="List each kernel once instead of each node.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the graph that onnxruntime executes: nodes with shapes, FLOPs, bytes and fused kernels.

    The output directory receives graph.json, kernels/ and the optimized graph.
    """
    from sparseflow.latency.graph.analysis import analyze as analyze_model

    provider, _ = parse_provider(device)
    graph = analyze_model(
        model, provider, opt_level, shapes=parse_shapes(shape), inputs=parse_inputs(value), out_dir=out
    )
    counts = graph.count_ops()
    summary = {"counts": counts, "flops": graph.flops, "bytes_moved": graph.bytes_moved}
    emit(
        {**graph.to_dict(), "summary": summary},
        as_json,
        _kernel_table(graph) if kernels else _node_table(graph),
        f"{len(graph.nodes)} nodes, {len(graph.kernels)} kernels, {graph.flops / 1e9:.2f} GFLOP, "
        f"{graph.bytes_moved / 1e6:.1f} MB: "
        + ", ".join(f"{count} {kernel}" for kernel, count in counts.items()),
        *_describe_unknown_work(graph),
        *([] if out is None else [f"graph: {out}"]),
    )


@app.command()
def extract(
    target: Annotated[
        Path, typer.Argument(help="ONNX model, directory of an analyzed graph, or one kernel's JSON file.")
    ],
    out: OutDirOption,
    device: InferredDeviceOption = None,
    check: Annotated[bool, typer.Option(help="Compare each node with the tensor inside the graph.")] = True,
    kernel: Annotated[
        list[str] | None, typer.Option(help="Kernel to extract; by default all. Repeatable.")
    ] = None,
    shape: ShapesOption = None,
    value: InputValuesOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Write each kernel as its own model and compare its output with the tensor inside the full graph."""
    from sparseflow.latency.graph.extraction import extract as extract_kernels

    with progress_bar() as progress:
        results = extract_kernels(
            target,
            out,
            provider=None if device is None else parse_provider(device)[0],
            check=check,
            kernel_ids=kernel or (),
            shapes=parse_shapes(shape),
            inputs=parse_inputs(value),
            seed=seed,
            progress=progress,
        )
    num_nodes, num_matched = sum(r.nodes for r in results), sum(r.matched for r in results)
    num_ok = sum(result.ok for result in results)
    num_skipped = sum(r.nodes for r in results if r.skipped)
    summary = {
        "kernels": len(results),
        "ok": num_ok,
        "nodes": num_nodes,
        "matched": num_matched,
        "skipped": num_skipped,
    }
    rows = [
        (
            result.kernel_id,
            str(result.nodes),
            f"{result.matched} of {result.checked}" if result.checked else "–",
            "–" if result.relative_error is None else f"{result.relative_error:.1e}",
            result.problem or result.skipped or "",
        )
        for result in results
    ]
    emit(
        {"summary": summary, "kernels": [result.to_dict() for result in results]},
        as_json,
        make_table(("kernel", ">nodes", "matched", "largest error", "note"), rows),
        f"{num_ok} of {len(results)} kernels, {num_matched} of {num_nodes} nodes match"
        + (f"; {num_skipped} nodes cannot be models of their own" if num_skipped else ""),
    )
    failed = [result for result in results if not result.ok]
    if failed:
        fail(f"{len(failed)} of {len(results)} kernels failed: {failed[0].problem}", code=1)


def _describe_unknown_work(graph: Graph) -> list[str]:
    counts = Counter(node.kernel.op for node in graph.nodes if not node.kernel.flops_known)
    operators = ", ".join(f"{count} {op}" for op, count in counts.items())
    return [f"the sums omit the unknown work of: {operators}"] if counts else []


def _graph_title(graph: Graph) -> str:
    return f"{graph.model_path}, {graph.provider}, {graph.level}"


def _node_table(graph: Graph) -> Table:
    numbers = {node.name: index for index, node in enumerate(graph.nodes)}
    rows = [
        (
            str(numbers[node.name]),
            node.kernel.op,
            f"{node.kernel.domain}.{node.kernel.node_op}".removeprefix(".").removeprefix("com.microsoft."),
            *_format_work(node.kernel),
            ", ".join(str(numbers[name]) for name in node.inputs),
        )
        for node in graph.nodes
    ]
    columns = (">#", "kernel", "node", "inputs", "outputs", ">MFLOP", ">MB", "after")
    return make_table(columns, rows, title=_graph_title(graph), no_wrap=("#", "kernel", "MFLOP", "MB"))


def _kernel_table(graph: Graph) -> Table:
    uses = graph.count_kernel_uses()
    rows = [(kernel.id, str(uses[kernel.id]), *_format_work(kernel)) for kernel in graph.kernels]
    columns = ("kernel", ">nodes", "inputs", "outputs", ">MFLOP", ">MB")
    return make_table(columns, rows, title=_graph_title(graph), no_wrap=("kernel", "nodes", "MFLOP", "MB"))


def _format_work(kernel: KernelSpec) -> tuple[str, str, str, str]:
    """Format input shapes, output shapes, MFLOP and MB."""
    return (
        _format_shapes(kernel.inputs, kernel.constants),
        _format_shapes(kernel.outputs),
        f"{kernel.flops / 1e6:.2f}{'' if kernel.flops_known else ' ?'}",
        f"{kernel.bytes_moved / 1e6:.3f}",
    )


def _format_shapes(tensors: tuple[TensorSpec, ...], constants: tuple[int, ...] = ()) -> str:
    """Format the shapes of activations; weights are only in the JSON output."""
    return "  ".join(
        "×".join(map(str, tensor.shape)) or "scalar"
        for position, tensor in enumerate(tensors)
        if tensor.present and position not in constants
    )

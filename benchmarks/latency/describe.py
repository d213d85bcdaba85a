"""Kernel identities and extraction of many models at many shapes.

::

    export PYTHONPATH=src:.
    python benchmarks/latency/describe.py --out results/latency/describe-cpu.json
    python benchmarks/latency/describe.py --out part.json --models resnet18 --shapes 16x224 --check 1x224
    python benchmarks/latency/describe.py --out results/latency/describe-cuda.json --provider cuda

*Identities* (``--shapes``, BATCHxSIZE): every network is exported with an open batch dimension, fixed to each
shape and optimized. onnxruntime infers all shapes without running, so 128 images of 512 x 512 need no memory.
Each node's identity is computed from the file, independently of kernel ids, and both are compared over all
models and shapes.

*Extraction* (``--check``): every node of the graph optimized at that shape is run alone, with the tensors
that it reads inside the full graph, and its output is compared with the tensor there.

Rows are saved to ``--out`` after each case, and the identities as Parquet next to it; existing cases are
kept. The exit code is 1 if an id is shared or a node does not match.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from onnx import numpy_helper

from benchmarks.claims import Claim, record_claims
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic
from sparseflow.errors import SparseFlowError
from sparseflow.latency.graph import networks, onnx_file
from sparseflow.latency.graph.analysis import Graph, analyze
from sparseflow.latency.graph.extraction import extract

MODELS = list(networks.PRESETS)
SHAPES = [f"{batch}x{size}" for batch in (16, 64, 128) for size in (224, 320, 512)]
CHECKED = ["1x224", "1x320", "1x512"]
DIGITS = 16

Pairs = list[tuple[str, str, str]]
"""Distinct (case, kernel id, digest of the identity)."""


def export(model: str, size: int, path: Path) -> None:
    """Export a network to ONNX with an open batch dimension."""
    net = networks.build_network(networks.TRANSFORMERS, model, {}, image_size=size, seed=0)
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net,
            (images,),
            str(path),
            input_names=["input"],
            output_names=["output"],
            dynamic_axes={"input": {0: "batch"}, "output": {0: "batch"}},
            opset_version=17,
            dynamo=False,
        )


def list_identities(graph: Graph) -> list[tuple[str, str]]:
    """Return (id, digest of the identity) of every node of an analyzed graph.

    Identities are read from the optimized file. Types and shapes, which it lacks, come from each node's own
    kernel.
    """
    assert graph.optimized_path is not None
    model = onnx_file.load_model(graph.optimized_path)
    weights = {weight.name: weight for weight in model.graph.initializer}
    identities = []
    for node, read in zip(model.graph.node, graph.nodes, strict=True):
        kernel = read.kernel
        attributes = sorted(a.SerializeToString(deterministic=True).hex() for a in node.attribute)
        inputs = []
        for name, tensor in zip(node.input, kernel.inputs, strict=False):
            value: object = None
            if name in weights:
                array = numpy_helper.to_array(weights[name])
                small = array.dtype.kind == "i" and array.size <= 64
                value = (array.shape, str(array.dtype), array.tolist() if small else "weights")
            # Position of the first read of the same tensor.
            inputs.append((tensor.dtype, tensor.shape, value, list(node.input).index(name) if name else None))
        outputs = [(tensor.dtype, tensor.shape) for tensor in kernel.outputs]
        identity = repr((node.op_type, node.domain, attributes, inputs, outputs))
        identities.append((kernel.id, hashlib.sha256(identity.encode()).hexdigest()[:DIGITS]))
    return identities


def describe_case(
    model: str, shape: str, exported: Path, provider: str, folder: Path
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return one row of identities, and the identities."""
    batch, size = (int(part) for part in shape.split("x"))
    start_s = time.monotonic()
    graph = analyze(exported, provider, shapes={"input": (batch, 3, size, size)}, out_dir=folder)
    row = {
        "model": model,
        "shape": shape,
        "nodes": len(graph.nodes),
        "kernels": len(graph.kernels),
        "counts": graph.count_ops(),
        "gflop": round(graph.flops / 1e9, 3),
        "largest_tensor_gb": round(
            max(t.bytes for k in graph.kernels for t in (*k.inputs, *k.outputs)) / 1e9, 3
        ),
        "flops_unknown": sorted({k.node_op for k in graph.kernels if not k.flops_known}),
        "seconds": round(time.monotonic() - start_s, 2),
    }
    return row, list_identities(graph)


def check_case(
    model: str, shape: str, exported: Path, provider: str, folder: Path, threads: int
) -> dict[str, Any]:
    """Return one row of extraction."""
    batch, size = (int(part) for part in shape.split("x"))
    start_s = time.monotonic()
    graph = analyze(exported, provider, shapes={"input": (batch, 3, size, size)}, out_dir=folder)

    def report(message: str, fraction: float) -> None:
        if sys.stderr.isatty():
            print(f"\r  {100 * fraction:3.0f} % of nodes", end="", file=sys.stderr, flush=True)

    results = extract(graph, folder, threads=threads, progress=report)
    return {
        "model": model,
        "shape": shape,
        "kernels": len(results),
        "nodes": sum(r.nodes for r in results),
        "extracted": sum(r.path is not None for r in results),
        "matched": sum(r.matched for r in results),
        "largest_relative_error": max(r.relative_error or 0.0 for r in results),
        "problems": [f"{r.kernel_id}: {r.problem}" for r in results if not r.ok],
        "seconds": round(time.monotonic() - start_s, 2),
    }


def run_case(
    args: argparse.Namespace,
    record: dict[str, Any],
    pairs: Pairs,
    kind: str,
    model: str,
    shape: str,
    exported: Path,
) -> str:
    """Add one case to the record and its identities to `pairs`; return the outcome in words."""
    case, folder = f"{model} {shape}", exported.parent / f"{kind}{shape}"
    try:
        if kind == "rows":
            row, identities = describe_case(model, shape, exported, args.provider, folder)
            pairs += [(case, *pair) for pair in dict.fromkeys(identities)]
        else:
            row = check_case(model, shape, exported, args.provider, folder, args.threads)
    except SparseFlowError as error:
        record["failed"][f"{kind} {case}"] = message = f"{type(error).__name__}: {error}"
        return message
    record[kind][case] = row
    record["failed"].pop(f"{kind} {case}", None)
    matched = f", {row['matched']} match" if kind == "checks" else ""
    return f"{row['nodes']} nodes, {row['kernels']} kernels{matched}"


def load_pairs(path: Path, cases: set[str]) -> Pairs:
    """Read the identities of complete cases."""
    if not path.is_file():
        return []
    columns = pq.read_table(path).to_pydict()
    entries = zip(columns["case"], columns["kernel_id"], columns["identity"], strict=True)
    return [entry for entry in entries if entry[0] in cases]


def save_pairs(path: Path, pairs: Pairs) -> None:
    columns = zip(*pairs, strict=True) if pairs else ((), (), ())
    names = ("case", "kernel_id", "identity")
    table = pa.table(
        {name: pa.array(column, pa.string()) for name, column in zip(names, columns, strict=True)}
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_atomic(path, sink.getvalue().to_pybytes())


def summarize(record: dict[str, Any], pairs: Pairs) -> dict[str, Any]:
    """Count collisions over all cases, and matching nodes."""
    by_id: dict[str, set[str]] = defaultdict(set)
    by_identity: dict[str, set[str]] = defaultdict(set)
    for _, identifier, digest in pairs:
        by_id[identifier].add(digest)
        by_identity[digest].add(identifier)
    rows, checks = record["rows"].values(), record["checks"].values()
    return {
        "models": len({row["model"] for row in rows}),
        "shapes": len({row["shape"] for row in rows}),
        "nodes": sum(row["nodes"] for row in rows),
        "kernels": len(by_id),
        "identities": len(by_identity),
        "collisions": sum(len(digests) > 1 for digests in by_id.values()),
        "split_identities": sum(len(digests) > 1 for digests in by_identity.values()),
        "checked_nodes": sum(row["nodes"] for row in checks),
        "matched_nodes": sum(row["matched"] for row in checks),
        "largest_relative_error": max((row["largest_relative_error"] for row in checks), default=None),
        "failed": sorted(record["failed"]),
    }


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: kernel identities and extraction."""
    summary = record["summary"]
    kind = "cuda" if "cuda" in record["provider"].lower() else "cpu"
    command = f"python benchmarks/latency/describe.py --provider {kind}"
    if record["rows"]:
        yield Claim(
            id=f"latency/1-{kind}-identities",
            claim=f"Different kernels that share an id, of {summary['kernels']} kernels in "
            f"{summary['models']} models at {summary['shapes']} shapes.",
            value=summary["collisions"],
            unit="collisions",
            target="== 0",
            command=command,
            details={"graphs": len(record["rows"])},
        )
    if record["checks"]:
        yield Claim(
            id=f"latency/1-{kind}-extraction",
            claim=f"Optimized nodes of {summary['checked_nodes']} whose standalone output matches the tensor "
            "in the graph to 1e-4.",
            value=round(100.0 * summary["matched_nodes"] / summary["checked_nodes"], 2),
            unit="%",
            target=">= 100",
            command=command,
            details={"largest_relative_error": summary["largest_relative_error"]},
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file with rows, saved after each case")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=list(networks.PRESETS))
    parser.add_argument("--shapes", nargs="*", default=SHAPES, metavar="BATCHxSIZE")
    parser.add_argument("--check", nargs="*", default=CHECKED, metavar="BATCHxSIZE")
    parser.add_argument("--provider", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    record: dict[str, Any] = {"rows": {}, "checks": {}, "failed": {}}
    if args.out.is_file():
        record.update(json.loads(args.out.read_text(encoding="utf-8")))
    parquet_path = args.out.with_suffix(".parquet")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    pairs = load_pairs(parquet_path, set(record["rows"]))
    record["environment"] = collect_environment()
    record["onnx"], record["onnxruntime"] = onnx.__version__, onnxruntime.__version__
    record["provider"] = args.provider
    sizes = list(dict.fromkeys(shape.split("x")[1] for shape in (*args.shapes, *args.check)))
    start_s = time.monotonic()
    total = len(args.models) * (len(args.shapes) + len(args.check))
    num_done = 0
    for model in args.models:
        for size in sizes:
            requested = [("rows", s) for s in args.shapes if s.endswith(f"x{size}")]
            requested += [("checks", s) for s in args.check if s.endswith(f"x{size}")]
            missing = [(kind, shape) for kind, shape in requested if f"{model} {shape}" not in record[kind]]
            num_done += len(requested) - len(missing)
            if not missing:
                continue
            with tempfile.TemporaryDirectory(prefix="describe-") as name:
                exported = Path(name) / "model.onnx"
                export(model, int(size), exported)
                for kind, shape in missing:
                    message = run_case(args, record, pairs, kind, model, shape, exported)
                    save_pairs(parquet_path, pairs)
                    num_done += 1
                    print(
                        f"{num_done}/{total} {time.monotonic() - start_s:6.0f} s  {kind:6} {model} {shape}: "
                        f"{message}",
                        flush=True,
                    )
                    record["summary"] = summarize(record, pairs)
                    write_atomic(args.out, json.dumps(record, indent=1, sort_keys=True) + "\n")
    record["summary"] = summary = summarize(record, pairs)
    record_claims(make_claims(record), record, args.out)
    print(json.dumps(summary, indent=1))
    succeeded = (
        not summary["collisions"]
        and summary["matched_nodes"] == summary["checked_nodes"]
        and not summary["failed"]
    )
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())

"""Kernels of many models at many shapes: do two share an id, does each node run alone, what is it called?

::

    export PYTHONPATH=src:.
    python benchmarks/latency/describe.py --out results/latency/describe-cpu.json
    python benchmarks/latency/describe.py --out part.json --models resnet18 --shapes 16x224 --check 1x224
    python benchmarks/latency/describe.py --out results/latency/describe-cuda.json --provider cuda

*Identities* (``--shapes``, BATCHxSIZE): every network is exported with its batch open, fixed to each shape
and optimised; onnxruntime infers all shapes without running, so 128 images of 512 x 512 take no memory. Each
node's identity is spelt out anew from the file, independently of how an id is made, and the two are compared
over all models and shapes together.

*Extraction* (``--check``): every node of the graph optimised at that shape is run alone, with the tensors
that it reads inside the whole graph, and its output compared with the tensor there.

Rows are kept in ``--out`` after each case, the identities beside it as Parquet; what is there already is not
done again. The exit code is 1 when an id is shared or a node does not match.
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
from sparseflow.latency import onnx_file, sources
from sparseflow.latency.extract import extract
from sparseflow.latency.graph import Graph, analyze

MODELS = list(sources.PRESETS)
SHAPES = [f"{batch}x{size}" for batch in (16, 64, 128) for size in (224, 320, 512)]
CHECKED = ["1x224", "1x320", "1x512"]
DIGITS = 16

Pairs = list[tuple[str, str, str]]
"""(case, kernel's id, digest of its identity), each once."""


def export(model: str, size: int, path: Path) -> None:
    """The network as ONNX, its batch left open."""
    net = sources.build(sources.TRANSFORMERS, model, {}, size=size, seed=0)
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


def identities(graph: Graph) -> list[tuple[str, str]]:
    """(id, digest of everything that makes the kernel) of every node of an analysed graph.

    Read from the optimised file. Types and shapes, which that does not hold, are those of each node's own
    kernel, before kernels of one id are put together.
    """
    assert graph.optimised_path is not None
    model = onnx_file.load(graph.optimised_path)
    weights = {weight.name: weight for weight in model.graph.initializer}
    found = []
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
            # Where the same tensor was read before: reading one twice is not reading two.
            inputs.append((tensor.dtype, tensor.shape, value, list(node.input).index(name) if name else None))
        outputs = [(tensor.dtype, tensor.shape) for tensor in kernel.outputs]
        spelt = repr((node.op_type, node.domain, attributes, inputs, outputs))
        found.append((kernel.id, hashlib.sha256(spelt.encode()).hexdigest()[:DIGITS]))
    return found


def describe(
    model: str, shape: str, exported: Path, provider: str, folder: Path
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """One row of identities."""
    batch, size = (int(part) for part in shape.split("x"))
    begun = time.monotonic()
    graph = analyze(exported, provider, shapes={"input": (batch, 3, size, size)}, out=folder)
    row = {
        "model": model,
        "shape": shape,
        "nodes": len(graph.nodes),
        "kernels": len(graph.kernels),
        "counts": graph.counts(),
        "gflop": round(graph.flops / 1e9, 3),
        "largest_tensor_gb": round(
            max(t.bytes for k in graph.kernels for t in (*k.inputs, *k.outputs)) / 1e9, 3
        ),
        "flops_unknown": sorted({k.node_op for k in graph.kernels if not k.flops_known}),
        "seconds": round(time.monotonic() - begun, 2),
    }
    return row, identities(graph)


def check(
    model: str, shape: str, exported: Path, provider: str, folder: Path, threads: int
) -> dict[str, Any]:
    """One row of extraction."""
    batch, size = (int(part) for part in shape.split("x"))
    begun = time.monotonic()
    graph = analyze(exported, provider, shapes={"input": (batch, 3, size, size)}, out=folder)

    def tell(what: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r  {done}/{total} nodes", end="", file=sys.stderr, flush=True)

    results = extract(graph, folder, threads=threads, progress=tell)
    return {
        "model": model,
        "shape": shape,
        "kernels": len(results),
        "nodes": sum(r.nodes for r in results),
        "extracted": sum(r.path is not None for r in results),
        "matched": sum(r.matched for r in results),
        "largest_relative_error": max(r.relative_error or 0.0 for r in results),
        "problems": [f"{r.kernel_id}: {r.problem}" for r in results if not r.ok],
        "seconds": round(time.monotonic() - begun, 2),
    }


def load_pairs(path: Path, cases: set[str]) -> Pairs:
    """What was kept of the cases that are whole."""
    if not path.is_file():
        return []
    columns = pq.read_table(path).to_pydict()
    kept = zip(columns["case"], columns["kernel_id"], columns["identity"], strict=True)
    return [entry for entry in kept if entry[0] in cases]


def save_pairs(path: Path, pairs: Pairs) -> None:
    columns = zip(*pairs, strict=True) if pairs else ((), (), ())
    names = ("case", "kernel_id", "identity")
    table = pa.table(
        {name: pa.array(column, pa.string()) for name, column in zip(names, columns, strict=True)}
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_atomic(path, sink.getvalue().to_pybytes())


def summarise(record: dict[str, Any], pairs: Pairs) -> dict[str, Any]:
    """Collisions over all cases together, and how many nodes matched."""
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
        "collisions": sum(len(found) > 1 for found in by_id.values()),
        "split_identities": sum(len(found) > 1 for found in by_identity.values()),
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
    parser.add_argument("--out", type=Path, required=True, help="JSON file with rows, kept after each case")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=list(sources.PRESETS))
    parser.add_argument("--shapes", nargs="*", default=SHAPES, metavar="BATCHxSIZE")
    parser.add_argument("--check", nargs="*", default=CHECKED, metavar="BATCHxSIZE")
    parser.add_argument("--provider", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    record: dict[str, Any] = {"rows": {}, "checks": {}, "failed": {}}
    if asked.out.is_file():
        record.update(json.loads(asked.out.read_text(encoding="utf-8")))
    beside = asked.out.with_suffix(".parquet")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    pairs = load_pairs(beside, set(record["rows"]))
    record["environment"] = collect_environment()
    record["onnx"], record["onnxruntime"] = onnx.__version__, onnxruntime.__version__
    record["provider"] = asked.provider
    sizes = list(dict.fromkeys(shape.split("x")[1] for shape in (*asked.shapes, *asked.check)))
    begun = time.monotonic()
    total = len(asked.models) * (len(asked.shapes) + len(asked.check))
    done = 0
    for model in asked.models:
        for size in sizes:
            wanted = [("rows", s) for s in asked.shapes if s.endswith(f"x{size}")]
            wanted += [("checks", s) for s in asked.check if s.endswith(f"x{size}")]
            missing = [(kind, shape) for kind, shape in wanted if f"{model} {shape}" not in record[kind]]
            done += len(wanted) - len(missing)
            if not missing:
                continue
            with tempfile.TemporaryDirectory(prefix="describe-") as name:
                exported = Path(name) / "model.onnx"
                export(model, int(size), exported)
                for kind, shape in missing:
                    case = f"{model} {shape}"
                    try:
                        if kind == "rows":
                            row, found = describe(model, shape, exported, asked.provider, Path(name) / shape)
                            pairs += [(case, *pair) for pair in dict.fromkeys(found)]
                            save_pairs(beside, pairs)
                        else:
                            row = check(
                                model,
                                shape,
                                exported,
                                asked.provider,
                                Path(name) / f"check{shape}",
                                asked.threads,
                            )
                        record[kind][case] = row
                        record["failed"].pop(f"{kind} {case}", None)
                        said = f"{row['nodes']} nodes, {row['kernels']} kernels" + (
                            f", {row['matched']} match" if kind == "checks" else ""
                        )
                    except SparseFlowError as error:
                        record["failed"][f"{kind} {case}"] = said = f"{type(error).__name__}: {error}"
                    done += 1
                    print(
                        f"{done}/{total} {time.monotonic() - begun:6.0f} s  {kind:6} {case}: {said}",
                        flush=True,
                    )
                    record["summary"] = summarise(record, pairs)
                    write_atomic(asked.out, json.dumps(record, indent=1, sort_keys=True) + "\n")
    record["summary"] = whole = summarise(record, pairs)
    record_claims(make_claims(record), record, asked.out)
    print(json.dumps(whole, indent=1))
    good = (
        not whole["collisions"] and whole["matched_nodes"] == whole["checked_nodes"] and not whole["failed"]
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

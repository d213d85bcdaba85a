"""Count the kernels of ResNet-18 under a provider.

::

    python benchmarks/latency/resnet18.py models/resnet18_b1_224.onnx --provider cpu \\
        --out results/latency/resnet18-cpu.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, record_claims
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic
from sparseflow.latency.graph.analysis import analyze

CPU_COUNTS = {"Conv_Relu": 9, "Conv_Add_Relu": 8, "Conv": 3}


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claim of a record: number of kernels of each kind."""
    kind = "cuda" if record["provider"].startswith("CUDA") else "cpu"
    counts = record["counts"]
    yield Claim(
        id=f"latency/2-resnet18-{kind}",
        claim=f"Kernels of the optimized ResNet-18 graph under {record['provider']}.",
        value=", ".join(f"{count} {name}" for name, count in counts.items()),
        target=None if kind == "cuda" else "9 Conv_Relu, 8 Conv_Add_Relu, 3 Conv among them",
        met=kind == "cuda" or all(counts.get(name) == count for name, count in CPU_COUNTS.items()),
        command=f"sparseflow latency analyze resnet18.onnx --device {kind}",
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="ONNX file of ResNet-18")
    parser.add_argument("--provider", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    graph = analyze(args.model, args.provider)
    record = {
        "environment": collect_environment(args.provider),
        "provider": graph.provider,
        "onnxruntime": graph.ort_version,
        "level": graph.level,
        "counts": graph.count_ops(),
    }
    write_atomic(args.out, json.dumps(record, indent=1) + "\n")
    record_claims(make_claims(record), record, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

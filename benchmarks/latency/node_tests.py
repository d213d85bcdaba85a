"""Analysis and extraction of onnx's own node tests, one small model for each case of each operator.

::

    export PYTHONPATH=src:.
    python benchmarks/latency/node_tests.py --out runs/node-tests.jsonl
    python benchmarks/latency/node_tests.py --out runs/resize.jsonl --match resize --values test

A test counts if onnxruntime runs it with the inputs of the test. Each model is analyzed, its kernels are
extracted, and every node is compared with the tensor inside the full graph. With ``--values random`` only the
shapes of the test are used, as for a file without test data; with ``--values test`` also its values.

One row for each test is written to ``--out``. The exit code is 1 if a node does not match, or if a test
fails in another way than that its graph consists of constants.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from sparseflow.core.files import write_atomic
from sparseflow.errors import SparseFlowError
from sparseflow.latency.graph import session
from sparseflow.latency.graph.extraction import extract


def list_cases(match: str) -> list[Any]:
    """List the node tests whose name contains a text; their data is generated here."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [case for case in collect_testcases(None) if match in case.name]


def get_feeds(case: Any) -> dict[str, np.ndarray] | None:
    """Return the inputs of a test by name; None if one is not a tensor."""
    inputs, _ = case.data_sets[0]
    feeds = {}
    for info, value in zip(case.model.graph.input, inputs, strict=False):
        if isinstance(value, onnx.TensorProto):
            value = onnx.numpy_helper.to_array(value)
        if not isinstance(value, np.ndarray | np.generic):
            return None
        feeds[info.name] = np.asarray(value)
    return feeds


def can_run(case: Any, feeds: dict[str, np.ndarray]) -> bool:
    """Return whether onnxruntime runs a test."""
    try:
        opened = session.open_session(case.model.SerializeToString(), threads=1)
        session.run(opened, [output.name for output in opened.get_outputs()], feeds)
    except SparseFlowError:
        return False
    return True


def run_case(case: Any, feeds: dict[str, np.ndarray], values: str) -> dict[str, Any]:
    """Extract the kernels of a test; return a row with `status`, `message` and numbers of nodes."""
    row: dict[str, Any] = {"name": case.name, "nodes": 0, "matched": 0, "skipped": 0, "message": None}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(case.model.SerializeToString())
        inputs = feeds if values == "test" else None
        shapes = {name: value.shape for name, value in feeds.items()}
        try:
            results = extract(path, folder, shapes=shapes, inputs=inputs, threads=1)
        except SparseFlowError as error:
            status = "constant" if "contains no operators" in str(error) else "refused"
            return row | {"status": status, "message": str(error)}
    problems = [result.problem or result.kernel_id for result in results if not result.ok]
    return row | {
        "status": "differs" if problems else "ok",
        "message": "; ".join(problems) or None,
        "nodes": sum(result.nodes for result in results),
        "matched": sum(result.matched for result in results),
        "skipped": sum(result.nodes for result in results if result.skipped),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Analysis and extraction of onnx's own node tests.")
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines file of the rows")
    parser.add_argument("--match", default="", help="text in the names of the tests")
    parser.add_argument("--values", choices=("random", "test"), default="random", help="values of inputs")
    arguments = parser.parse_args()
    rows = []
    for case in list_cases(arguments.match):
        feeds = get_feeds(case)
        if feeds is not None and can_run(case, feeds):
            rows.append(run_case(case, feeds, arguments.values))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(arguments.out, "".join(json.dumps(row) + "\n" for row in rows))
    totals = {key: sum(row[key] for row in rows) for key in ("nodes", "matched", "skipped")}
    counts = Counter(row["status"] for row in rows)
    print(f"{len(rows)} tests run in onnxruntime: {dict(counts)}; {totals}")
    for row in rows:
        if row["status"] in ("refused", "differs"):
            print(f"{row['name']}: {row['message']}")
    return int(bool(counts["refused"] or counts["differs"]))


if __name__ == "__main__":
    sys.exit(main())

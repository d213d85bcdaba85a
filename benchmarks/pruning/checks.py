"""Run the tests behind the claims about the video loader, resume and gates, and record their outcomes.

::

    PYTHONPATH=src:. python benchmarks/pruning/checks.py --out results/pruning/checks.json

The tests cover UCF-101's loader on a generated tree of .avi files, a training that is killed in mid-epoch,
gradients of gates against finite differences, and the sparsity under a stronger loss.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.claims import Claim, record_claims
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic

ROOT = Path(__file__).resolve().parents[2]

LINES = {
    "loader": [
        "data/test_ucf101.py",
        "data/test_splits.py",
        "data/test_sampling.py",
        "data/test_video.py",
    ],
    "resume": ["training/test_train.py", "-k", "sigkill"],
    "gates": ["model/test_gates.py", "training/test_train.py", "-k", "test_gates or stronger_sparsity_loss"],
}


def run_tests(arguments: list[str]) -> list[dict[str, str]]:
    """Run pytest and return the outcome of each test: passed, failure, error or skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        args = [
            f"tests/pruning/{argument}" if argument.endswith(".py") else argument for argument in arguments
        ]
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *args], cwd=ROOT, check=False
        )
        # The report is written by our own pytest.
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return [
            {
                "test": f"{case.get('classname')}.{case.get('name')}",
                "outcome": next(
                    (kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None),
                    "passed",
                ),
            }
            for case in cases
        ]


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: outcomes of the video loader, resume and gate tests."""
    for name, slug, claim in (
        ("loader", "3-loader", "Passing tests of the video loader, of {count}, on a generated UCF-101 tree."),
        (
            "resume",
            "4-resume",
            "Trainings killed mid-epoch, of {count}, whose weights and history equal an uninterrupted run "
            "bit for bit on a CPU.",
        ),
        (
            "gates",
            "5-gates",
            "Passing tests of token gates, of {count}: gradients against finite differences, and monotone "
            "hard sparsity.",
        ),
    ):
        cases = record["lines"][name]
        passed = sum(case["outcome"] == "passed" for case in cases)
        yield Claim(
            id=f"pruning/{slug}",
            claim=claim.format(count=len(cases)),
            value=passed,
            unit="trainings" if name == "resume" else "tests",
            target=f">= {max(len(cases), 1)}",
            command="python benchmarks/pruning/checks.py --out results/pruning/checks.json",
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    record: dict[str, Any] = {"environment": collect_environment("cpu")}
    record["lines"] = {name: run_tests(arguments) for name, arguments in LINES.items()}
    for name, cases in record["lines"].items():
        passed = sum(case["outcome"] == "passed" for case in cases)
        print(f"{name}: {passed} of {len(cases)} passed")
    if args.out:
        write_atomic(args.out, json.dumps(record, indent=1) + "\n")
        record_claims(make_claims(record), record, args.out)
    return int(any(case["outcome"] != "passed" for cases in record["lines"].values() for case in cases))


if __name__ == "__main__":
    sys.exit(main())

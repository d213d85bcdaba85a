"""Round trip and validity of every schedule in label files (line 1).

::

    export PYTHONPATH=src:.
    python benchmarks/tuning/lines.py labels/spmm.tsv.gz labels/spmv.tsv.gz --out results/tuning/lines.json

A label file has the tab-separated columns matrix, schedule and latency_ms; its name contains the operator.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, record_claims
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic
from sparseflow.errors import FileFormatError
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.schedule import Schedule

PARSED = 10_000
"""Number of schedules in a timing of the parser."""

TIMES = 15


def lines_of(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        header, *rows = file.read().splitlines()
    position = header.split("\t").index("schedule")
    return [row.split("\t")[position] for row in rows]


def read(path: Path) -> dict[str, Any]:
    """Parse all schedules of one file and time the parser."""
    operator = next(item for name, item in OPERATORS.items() if name in path.name)
    lines = lines_of(path)
    refused: Counter[str] = Counter()
    problems: Counter[str] = Counter()
    same = runnable = 0
    for line in lines:
        try:
            schedule = Schedule.parse(line)
        except FileFormatError as error:
            refused[str(error)] += 1
            continue
        same += str(schedule) == line
        violations = schedule.find_violations(operator)
        runnable += not violations
        problems.update({problem.partition(":")[0] for problem in violations})
    subset = lines[:PARSED]
    seconds = []
    for _ in range(TIMES):
        start = time.perf_counter()
        for line in subset:
            Schedule.parse(line)
        seconds.append(time.perf_counter() - start)
    return {
        "file": path.name,
        "operator": operator.name,
        "rows": len(lines),
        "byte_for_byte": same,
        "refused": dict(refused),
        "runnable": runnable,
        "problems": dict(problems.most_common()),
        "parsed": len(subset),
        "seconds": seconds,
    }


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: schedules that are parsed and written."""
    files = record["files"]
    rows = sum(file["rows"] for file in files)
    command = "python benchmarks/tuning/lines.py LABELS --out results/tuning/lines.json"
    problems = Counter[str]()
    for file in files:
        problems.update(file["problems"])
    yield Claim(
        id="tuning/1-lines",
        claim=f"Rows of {rows} AutoSparse labels that round-trip byte for byte or are rejected for a named "
        "reason.",
        value=sum(file["byte_for_byte"] + sum(file["refused"].values()) for file in files),
        unit="rows",
        target=f">= {rows}",
        command=command,
        details={"runnable": sum(file["runnable"] for file in files), **problems},
    )
    yield Claim(
        id="tuning/1-speed",
        claim="Shortest time to parse 10,000 schedules, slower of the label files.",
        value=round(max(min(file["seconds"]) * 10_000 / file["parsed"] for file in files), 3),
        unit="s",
        target="< 1",
        command=command,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("labels", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"environment": collect_environment("cpu"), "files": [read(path) for path in args.labels]}
    for result in record["files"]:
        print({key: value for key, value in result.items() if key != "seconds"}, min(result["seconds"]))
    write_atomic(args.out, json.dumps(record, indent=1) + "\n")
    record_claims(make_claims(record), record, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Read every schedule of label files, write it again, and say which could not run and why (line 1).

::

    export PYTHONPATH=src
    python benchmarks/tuning/lines.py labels/spmm.tsv.gz labels/spmv.tsv.gz --out results/tuning/lines.json

A label file has the columns matrix, schedule and latency_ms, tab separated; its name holds its operator.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic
from sparseflow.errors import FileFormatError
from sparseflow.tuning.operators import OPERATORS
from sparseflow.tuning.schedule import Schedule

PARSED = 10_000
"""Schedules whose parsing is timed at once."""

TIMES = 15


def lines_of(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        header, *rows = file.read().splitlines()
    place = header.split("\t").index("schedule")
    return [row.split("\t")[place] for row in rows]


def read(path: Path) -> dict[str, Any]:
    """What came of one file."""
    operator = next(one for name, one in OPERATORS.items() if name in path.name)
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
        found = schedule.problems(operator)
        runnable += not found
        problems.update({problem.partition(":")[0] for problem in found})
    some = lines[:PARSED]
    seconds = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        for line in some:
            Schedule.parse(line)
        seconds.append(time.perf_counter() - begin)
    return {
        "file": path.name,
        "operator": operator.name,
        "rows": len(lines),
        "byte_for_byte": same,
        "refused": dict(refused),
        "runnable": runnable,
        "problems": dict(problems.most_common()),
        "parsed": len(some),
        "seconds": seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("labels", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    asked = parser.parse_args()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"environment": collect_environment("cpu"), "files": [read(path) for path in asked.labels]}
    for found in record["files"]:
        print({key: value for key, value in found.items() if key != "seconds"}, min(found["seconds"]))
    write_atomic(asked.out, json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Put what the tuning benchmarks measured into ``results/tuning``: one claim a figure.

::

    PYTHONPATH=src python benchmarks/tuning/record.py lines results/tuning/lines.json
    PYTHONPATH=src python benchmarks/tuning/record.py equal results/tuning/equal.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparseflow.core.claims import update

RESULTS = Path(__file__).parents[2] / "results"

Fields = dict[str, Any]


def lines(record: Fields) -> Iterator[Fields]:
    """Schedules read and written (line 1)."""
    files = record["files"]
    rows = sum(found["rows"] for found in files)
    named = sum(found["byte_for_byte"] + sum(found["refused"].values()) for found in files)
    problems = {name: count for found in files for name, count in found["problems"].items()}
    for name in problems:
        problems[name] = sum(found["problems"].get(name, 0) for found in files)
    told = ", ".join(f"{count} for {name}" for name, count in problems.items())
    yield {
        "id": "tuning/1-lines",
        "claim": f"rows of AutoSparse's labels that parse and are written byte for byte, or are refused for "
        f"a named reason, of {rows} ({sum(found['runnable'] for found in files)} can run; {told})",
        "value": named,
        "unit": "rows",
        "target": f">= {rows}",
        "met": named >= rows,
        "command": "python benchmarks/tuning/lines.py LABELS --out results/tuning/lines.json",
    }
    seconds = max(min(found["seconds"]) * 10_000 / found["parsed"] for found in files)
    yield {
        "id": "tuning/1-speed",
        "claim": "parsing 10,000 schedules, the slower of the files, the fastest of some runs",
        "value": round(seconds, 3),
        "unit": "s",
        "target": "< 1",
        "met": round(seconds, 3) < 1,
        "command": "python benchmarks/tuning/lines.py LABELS --out results/tuning/lines.json",
    }


def equal(record: Fields) -> Iterator[Fields]:
    """Random schedules against scipy (line 2)."""
    for name, found in record["summary"].items():
        right = found["outcomes"].get("equal", 0)
        largest = found["largest_error"]["float32"]
        yield {
            "id": f"tuning/2-{name}",
            "claim": f"random schedules of {name} ({found['distinct']} distinct) that ran and equal scipy, "
            f"of {found['drawn']}; largest error in float32 {largest:.1e} of the largest result",
            "value": round(100.0 * right / found["drawn"], 2),
            "unit": "%",
            "target": ">= 100",
            "met": right == found["drawn"],
            "command": "python benchmarks/tuning/equal.py --out results/tuning/equal.json",
        }


KINDS = {"lines": lines, "equal": equal}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("file", type=Path)
    asked = parser.parse_args()
    record = json.loads(asked.file.read_text(encoding="utf-8"))
    common = {
        "baseline": None,
        "device": record["environment"]["device"]["name"],
        "samples": str(asked.file.resolve().relative_to(RESULTS)),
        "git": record["environment"]["git"],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    for fields in KINDS[asked.kind](record):
        claim = update(RESULTS, common | fields)
        print(f"{'met' if claim.met else 'NOT MET'}  {claim.id}: {claim.value} {claim.unit} ({claim.target})")
    return 0


if __name__ == "__main__":
    sys.exit(main())

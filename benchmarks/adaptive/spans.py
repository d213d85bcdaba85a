r"""What plans of a trained model take, and how far apart those are that no other beats (line 2), as a record.

::

    PYTHONPATH=src python benchmarks/adaptive/spans.py --study runs/study --profile runs/profile.parquet \
        --out results/adaptive/spans.json

The study says how good each plan is and what those that were measured take alone, the profile what they take
beside others too. Nothing is computed here but which plans no other beats, and what these span.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparseflow.adaptive.grid_vqa.report import pareto
from sparseflow.adaptive.profile import Profile, Visit
from sparseflow.adaptive.study import findings
from sparseflow.adaptive.study.latencies import nearest, within
from sparseflow.core.files import write_atomic


def measured(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Plans that were measured, the quickest first, and whether another beats them."""
    rows = sorted((row for row in found["plans"] if row["measured"]), key=lambda row: row["p50_ms"])
    best = pareto([row["p50_ms"] for row in rows], [row["accuracy"] for row in rows])
    kept = ("id", "accuracy", "p5_ms", "p50_ms", "p95_ms")
    return [
        {name: row[name] for name in kept} | {"pareto": on, "samples_ms": row.get("samples_ms")}
        for row, on in zip(rows, best, strict=True)
    ]


def spans(
    profile: Profile, plans: Sequence[Mapping[str, Any]], size: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Of plans that no other beats, the dearest's median over the cheapest's: alone, and beside others.

    Args:
        profile: What requests took.
        plans: As `measured` gave them: id and accuracy.
        size: Tokens of the request; of lengths that were measured, the nearest counts.
    """
    accuracy = {row["id"]: row["accuracy"] for row in plans}
    taken: dict[tuple[int, float], dict[str, list[Visit]]] = {}
    for visit in profile.timed:
        if visit.plan.id in accuracy:
            taken.setdefault((visit.batch, visit.load), {}).setdefault(visit.plan.id, []).append(visit)
    found = []
    for (batch, load), of_plans in sorted(taken.items()):
        medians = {
            plan: statistics.median(
                visit.total_ms(within(visit, size["new_tokens"]))
                for visit in nearest(visits, size["text_tokens"])
            )
            for plan, visits in of_plans.items()
        }
        best = pareto(list(medians.values()), [accuracy[plan] for plan in medians])
        front = [median for median, on in zip(medians.values(), best, strict=True) if on]
        found.append(
            {
                "batch": batch, "load": load, "plans": len(medians), "pareto_plans": len(front),
                "least_ms": min(front), "most_ms": max(front), "span": max(front) / min(front),
            }
        )  # fmt: skip
    return found


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", type=Path, required=True, help="folder of the model's study")
    parser.add_argument("--profile", type=Path, required=True, help="Parquet file, of the same model")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    asked = parser.parse_args(given)
    found = findings.read(asked.study)
    plans = measured(found)
    front = [row["p50_ms"] for row in plans if row["pareto"]]
    record = {
        "environment": found["environment"], "plans": plans, "size": found["size"], "load": found["load"],
        "pareto_plans": len(front), "span": max(front) / min(front),
        "spans": spans(Profile.read(asked.profile), plans, found["size"]),
    }  # fmt: skip
    write_atomic(asked.out, json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n")
    print(f"{len(front)} of {len(plans)} measured plans are beaten by none; they span {record['span']:.2f}x")
    for each in record["spans"]:
        print(
            f"batch {each['batch']}, load {each['load']}: {each['pareto_plans']} of {each['plans']}, "
            f"{each['least_ms']:.2f} to {each['most_ms']:.2f} ms, {each['span']:.2f}x"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

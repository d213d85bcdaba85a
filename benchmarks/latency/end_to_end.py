"""Claims of the end-to-end tests of live prediction and of resumed collection.

The record holds pytest's outcomes: `{"passed": {test name: seconds}, "command": ..., "git": ...}`. ::

    python -m benchmarks.claims record benchmarks/latency/end_to_end.py results/latency/tests.json
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.claims import Claim


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: tests that passed."""
    for slug, test, claim in (
        (
            "5-prometheus",
            "follows_the_load",
            "Predictions follow the load of a running Prometheus server, and its absence is an error.",
        ),
        (
            "6-kills",
            "killed_ten_times",
            "A collection that is killed ten times ends with the rows of an uninterrupted one.",
        ),
    ):
        passed = any(test in name for name in record["passed"])
        yield Claim(
            id=f"latency/{slug}",
            claim=claim,
            value=passed,
            unit="passed",
            target="passed",
            met=passed,
            device=record.get("device", "CPU"),
            command=record["command"],
        )

"""Claims of the controller study that `sparseflow adaptive train` writes (`results.json`).

::

    cp runs/study/results.json results/adaptive/study.json
    python -m benchmarks.claims record benchmarks/adaptive/study.py results/adaptive/study.json
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.claims import Claim, device_suffix


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: controllers against training-free policies."""
    policies = {policy["name"]: policy for policy in record["policies"]}
    controllers = policies["controllers"]
    for row in record["compared"]:
        if (row["policy"], row["subset"]) != ("controllers", "all requests"):
            continue
        gain, baseline = row["goodput"], policies[row["baseline"]]
        yield Claim(
            id=f"adaptive/5-{row['baseline'].replace(' ', '-')}{device_suffix(record)}",
            claim=f"Goodput of the controllers minus that of the policy '{row['baseline']}'.",
            value=round(100.0 * gain["mean"], 2),
            unit="points",
            met=gain["low"] > 0.0,
            baseline=row["baseline"],
            command="make -C benchmarks/adaptive figures, which makes study.json",
            details={
                "low": round(100.0 * gain["low"], 2),
                "high": round(100.0 * gain["high"], 2),
                "goodput": round(controllers["goodput"]["mean"], 4),
                "goodput_baseline": round(baseline["goodput"]["mean"], 4),
                "goodput_oracle": round(policies["oracle"]["goodput"]["mean"], 4),
                "attainment": round(controllers["attainment"]["mean"], 4),
                "attainment_baseline": round(baseline["attainment"]["mean"], 4),
            },
        )

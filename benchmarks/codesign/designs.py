"""Claims of the joint training that `sparseflow codesign train --mode all` writes.

::

    python -m benchmarks.claims record benchmarks/codesign/designs.py results/codesign/designs.json
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.claims import Claim


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: joint training against its baselines."""
    modes = {mode["mode"]: mode for mode in record["modes"]}
    baseline = modes.pop("two-stage")
    for name, mode in modes.items():
        yield Claim(
            id=f"codesign/7-{name}",
            claim=f"Predicted energy-delay product of '{name}' over 'two-stage', geometric mean of "
            f"{mode['seeds']} seeds.",
            value=round(mode["ratio"], 3),
            unit="x",
            baseline="two-stage",
            command=record["command"],
            details={
                "low": round(mode["low"], 3),
                "high": round(mode["high"], 3),
                "accuracy": round(mode["accuracy"], 4),
                "accuracy_baseline": round(baseline["accuracy"], 4),
                "epochs_frozen_by_guard": mode["violations"],
            },
        )

"""Claims of the output of `sparseflow demo --json`.

::

    python -m benchmarks.claims record benchmarks/spiking/demo.py demo.json
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.claims import RESULTS, Claim, write_samples


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: speed and predictions of the shipped network on a CPU."""
    run = Path(record["run"])
    shutil.copyfile(run / "samples.parquet", RESULTS / "spiking" / "2-demo.parquet")
    write_samples("spiking/2-demo.json", record)
    environment = json.loads((run / "run.json").read_text(encoding="utf-8"))["environment"]
    common: dict[str, Any] = {
        "device": f"{environment['device']['name']}, {record['threads']} threads",
        "command": "sparseflow demo --json",
        "samples": "spiking/2-demo.parquet",
    }
    yield Claim(
        id="spiking/2-demo-speedup",
        claim=f"End-to-end speedup of the shipped network on a CPU, batches of {record['batch']} images.",
        value=round(record["speedup"], 3),
        unit="x",
        target=">= 1.3",
        baseline=record["baseline"],
        details=dict(
            zip(("low", "high"), (round(end, 3) for end in record["speedup_interval"]), strict=True)
        ),
        **common,
    )
    yield Claim(
        id="spiking/2-demo-predictions",
        claim=f"Predictions of the optimized network equal those of the original on all {record['images']} "
        "shipped images.",
        value=record["predictions_identical"],
        target="identical",
        met=record["predictions_identical"],
        baseline="the network as it is",
        **common,
    )

r"""What trained Grid-VQA models are worth (line 2), as one record.

::

    PYTHONPATH=src:. python benchmarks/adaptive/trained.py runs/seed-0 runs/seed-1 runs/seed-2 \
        --out results/adaptive/trained.json

The folders are of `sparseflow adaptive grid-vqa`, trained alike but for the seed. Nothing is computed here:
each training judged itself on the test.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, device_suffix, record_claims
from sparseflow.adaptive.grid_vqa.report import REPORT, read_report
from sparseflow.core.files import write_atomic
from sparseflow.errors import InputError

KEPT = ("accuracy", "by_kind", "blind", "samples", "plan_samples", "plans", "train_seconds", "environment")


def trained(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a training's folder tells, and its settings without the seed.

    Raises:
        InputError: It has not ended.
    """
    report = read_report(folder)
    if report is None:
        raise InputError(f"{folder} has no {REPORT}: let its training end first")
    settings = json.loads((folder / "settings.json").read_text("utf-8"))
    settings["images"].pop("archives", None)
    found = {"seed": settings["train"].pop("seed"), **{name: report.get(name) for name in KEPT}}
    return found, settings


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: accuracy of trained Grid-VQA models."""
    seeds = record["seeds"]
    worst = min(seeds, key=lambda seed: seed["accuracy"])
    blind = max(seed["blind"]["accuracy"] for seed in seeds)
    yield Claim(
        id=f"adaptive/2-accuracy{device_suffix(record)}",
        claim=f"Grid-VQA accuracy of {record['settings']['model']['depth']} blocks with the full plan, "
        f"worst of {len(seeds)} seeds.",
        value=round(100.0 * worst["accuracy"], 1),
        unit="%",
        target=">= 90",
        baseline=f"from the question alone: {100.0 * blind:.1f} %",
        command="make -C benchmarks/adaptive models, which makes trained.json",
        details={
            "seeds": ", ".join(f"{100.0 * seed['accuracy']:.1f} %" for seed in seeds),
            "questions": worst["samples"],
            **{f"accuracy_{kind}": round(share, 4) for kind, share in worst["by_kind"].items()},
            "max_train_minutes": round(max(seed["train_seconds"] for seed in seeds) / 60.0, 1),
        },
    )


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", help="of trainings")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    asked = parser.parse_args(given)
    seeds, settings = zip(*(trained(folder) for folder in asked.folders), strict=True)
    if any(each != settings[0] for each in settings):
        raise InputError("the trainings differ in more than their seeds")
    record = {"environment": seeds[0]["environment"], "settings": settings[0], "seeds": seeds}
    write_atomic(asked.out, json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n")
    record_claims(make_claims(record), record, asked.out)
    for each in seeds:
        print(
            f"seed {each['seed']}: {each['accuracy']:.1%} of {each['samples']} (blind "
            f"{each['blind']['accuracy']:.1%}) after {each['train_seconds']} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

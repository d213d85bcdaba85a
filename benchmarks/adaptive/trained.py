r"""Accuracy of trained Grid-VQA models, as one record (line 2).

::

    PYTHONPATH=src:. python benchmarks/adaptive/trained.py runs/seed-0 runs/seed-1 runs/seed-2 \
        --out results/adaptive/trained.json

The directories are outputs of `sparseflow adaptive grid-vqa` that differ only in the seed. The script only
collects the test results of each training.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, device_suffix, record_claims
from sparseflow.adaptive.grid_vqa.train import REPORT_FILE, load_report
from sparseflow.core.files import write_atomic
from sparseflow.errors import InputError

FIELDS = ("accuracy", "by_kind", "blind", "samples", "plan_samples", "plans", "train_seconds", "environment")


def read_training(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return results and settings (without the seed) of a training.

    Raises:
        InputError: The training is not complete.
    """
    report = load_report(folder)
    if report is None:
        raise InputError(f"{folder} has no {REPORT_FILE}: complete its training first")
    settings = json.loads((folder / "settings.json").read_text("utf-8"))
    settings["images"].pop("archives", None)
    record = {"seed": settings["train"].pop("seed"), **{name: report.get(name) for name in FIELDS}}
    return record, settings


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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", help="directories of trainings")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args(argv)
    seeds, settings = zip(*(read_training(folder) for folder in args.folders), strict=True)
    if any(seed_settings != settings[0] for seed_settings in settings):
        raise InputError("the settings of the trainings differ in more than the seed")
    record = {"environment": seeds[0]["environment"], "settings": settings[0], "seeds": seeds}
    write_atomic(args.out, json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n")
    record_claims(make_claims(record), record, args.out)
    for seed_result in seeds:
        print(
            f"seed {seed_result['seed']}: {seed_result['accuracy']:.1%} of {seed_result['samples']} (blind "
            f"{seed_result['blind']['accuracy']:.1%}) in {seed_result['train_seconds']} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

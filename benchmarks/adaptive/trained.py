r"""What trained Grid-VQA models are worth (line 2), as one record.

::

    PYTHONPATH=src python benchmarks/adaptive/trained.py runs/seed-0 runs/seed-1 runs/seed-2 \
        --out results/adaptive/trained.json

The folders are of `sparseflow adaptive grid-vqa`, trained alike but for the seed. Nothing is computed here:
each training judged itself on the test.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    for each in seeds:
        print(
            f"seed {each['seed']}: {each['accuracy']:.1%} of {each['samples']} (blind "
            f"{each['blind']['accuracy']:.1%}) after {each['train_seconds']} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

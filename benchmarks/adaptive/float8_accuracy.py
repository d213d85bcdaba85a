r"""Accuracy of a Grid-VQA model before and after its weights are stored in float8, as one record.

::

    PYTHONPATH=src:. python benchmarks/adaptive/float8_accuracy.py runs/seed-0/model \
        src/sparseflow/adaptive/data/cifar --archives cifar10-train.tar.gz cifar10-test.tar.gz \
        --device cuda --out results/adaptive/float8.json

Both models answer the same questions of the test split, with all blocks and experts at each tier.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.grid_vqa.evaluate import evaluate_plans
from sparseflow.adaptive.grid_vqa.task import GridVqaTask
from sparseflow.adaptive.plan.space import TIERS
from sparseflow.adaptive.profile import compute_weights_id
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic


def evaluate_model(
    model_dir: Path, archives: Sequence[Path], device: torch.device, count: int
) -> dict[str, Any]:
    """Return size and accuracy of a model."""
    task = GridVqaTask.open(model_dir, device=device, archives=archives)
    full = get_adapter(task.model).geometry.full_plan()
    plans = [replace(full, tier=tier) for tier in TIERS]
    correct = evaluate_plans(task.model, task.data, plans, split="test", count=count).correct
    weights = (model_dir / "model.safetensors").read_bytes()
    return {
        "model_id": compute_weights_id(task.model),
        "bytes": len(weights),
        "compressed_bytes": len(zlib.compress(weights)),
        "correct": dict(zip(TIERS, correct.sum(0).int().tolist(), strict=True)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="directory of the model as trained")
    parser.add_argument("after", type=Path, help="directory of the model in float8")
    parser.add_argument("--archives", type=Path, nargs="*", default=[], help="image archives of the training")
    parser.add_argument("--samples", type=int, default=2000, help="questions")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    record = {
        "environment": collect_environment(device),
        "samples": args.samples,
        "before": evaluate_model(args.before, args.archives, device, args.samples),
        "after": evaluate_model(args.after, args.archives, device, args.samples),
    }
    write_atomic(args.out, json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n")
    print(json.dumps({name: record[name] for name in ("before", "after")}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

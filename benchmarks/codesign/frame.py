"""What every benchmark here does first and last: its options, its circumstances, its record.

A benchmark is a script: it prints what it finds, keeps all samples in the file that `--out` names, and ends
with 1 where something is wrong. The record then says so under `failed`, and no claim is made of it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, record_claims
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic


def make_parser(
    doc: str | None, *, seed: str | None = None, required: bool = False
) -> argparse.ArgumentParser:
    """A parser that knows `--seed` and `--out`.

    Args:
        doc: The benchmark's docstring.
        seed: What the seed is of; everything by default.
        required: Whether there must be a file.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help=seed and f"of {seed}")
    parser.add_argument("--out", type=Path, required=required, help="JSON file")
    return parser


def start_record(args: argparse.Namespace, *, device: str = "cpu") -> dict[str, Any]:
    """What a record begins with: where and how it is measured. Files and folders are nobody's business."""
    settings = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
    settings.pop("out", None)
    # JSON knows no infinity.
    settings = {name: None if value == math.inf else value for name, value in settings.items()}
    return {"environment": collect_environment(device, seed=args.seed), "settings": settings}


def logits_tolerance(dtype: str, *, split: bool) -> float:
    """How far logits of a plan may be from the model's, over max(1, the largest), for a dtype of torch.

    Sums in another order differ by rounding; without splits nothing is summed anew.
    """
    import torch

    from sparseflow.codesign.execution.verification import TOLERANCES

    return TOLERANCES[getattr(torch, dtype)] if split else 0.0


def finish_record(
    args: argparse.Namespace,
    record: dict[str, Any],
    wrong: Sequence[str],
    make_claims: Callable[[dict[str, Any]], Iterable[Claim]],
) -> int:
    """Write the record to `--out`, merge its claims and return the exit status.

    Args:
        asked: Parsed options.
        record: Record of the benchmark.
        wrong: Failed checks, in words; a record with failed checks supports no claims.
        make_claims: Makes the claims of the record.
    """
    if wrong:
        record = record | {"failed": "; ".join(wrong)}
        print(f"failed: {record['failed']}")
    if args.out:
        write_atomic(args.out, json.dumps(record, separators=(",", ":")) + "\n")
        if not wrong:
            record_claims(make_claims(record), record, args.out)
    return int(bool(wrong))

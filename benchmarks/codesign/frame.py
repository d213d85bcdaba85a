"""Shared start and end of the benchmarks: options, environment and record.

A benchmark is a script. It prints its results, writes all samples to the file of `--out`, and exits with 1 if
a check fails. The record then lists the failures under `failed`, and no claim is derived from it.
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
    """Create a parser with `--seed` and `--out`.

    Args:
        doc: The benchmark's docstring.
        seed: What the seed is of; everything by default.
        required: Whether there must be a file.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help=seed and f"random seed of {seed}")
    parser.add_argument("--out", type=Path, required=required, help="output file (JSON)")
    return parser


def start_record(args: argparse.Namespace, *, device: str = "cpu") -> dict[str, Any]:
    """Start a record with the environment and the options; paths are omitted."""
    settings = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
    settings.pop("out", None)
    # JSON knows no infinity.
    settings = {name: None if value == math.inf else value for name, value in settings.items()}
    return {"environment": collect_environment(device, seed=args.seed), "settings": settings}


def logits_tolerance(dtype: str, *, split: bool) -> float:
    """Largest difference of the logits of a plan, relative to max(1, largest logit), for a torch dtype.

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

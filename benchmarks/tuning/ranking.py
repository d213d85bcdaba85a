"""Rank schedules by networks, boosted trees and at random: the record of `sparseflow tuning eval`.

::

    python benchmarks/tuning/ranking.py runs/eval --out results/tuning/ranking.json

An evaluation of some models, by `--models`, gives the claims of these models.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, record_claims
from sparseflow.core.files import write_atomic
from sparseflow.core.metrics import bootstrap_mean
from sparseflow.tuning.evaluation import SCORES_FILE
from sparseflow.tuning.model.comparison import BOOSTED, ENSEMBLE, FULL, PRETRAINED, read_comparison
from sparseflow.tuning.model.ranking import TOP_K

JOINT_SLUGS = {FULL: "full", PRETRAINED: "pretrained"}
"""Models that are trained on all operators together."""


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: networks against trees, random picks and single operators."""
    operators = list(record["pools"])
    common: dict[str, Any] = {
        "command": f"{record['command']}; python benchmarks/tuning/ranking.py RUN", "unit": "top-k score",
    }  # fmt: skip
    for operator in operators:
        models = JOINT_SLUGS | {f"{ENSEMBLE}_{operator}": "ensemble"}
        for model, slug in models.items():
            if model not in record["rankings"]:
                continue
            for other, end, baseline in (
                ("random", "random", "a random pick"),
                (f"{BOOSTED}_{operator}", "trees", "boosted trees"),
            ):
                gains = {f"top_{k}": compute_gain(record, operator, k, model, other) for k in TOP_K}
                means = [mean for mean, _, _ in gains.values()]
                # An ensemble is meant for the best schedule alone; joint training must lose nothing anywhere.
                is_joint = model in JOINT_SLUGS
                yield Claim(
                    id=f"tuning/5-{operator}-{slug}-{end}",
                    claim=f"{'Smallest top-k' if is_joint else 'Top-1'} score gain of {model} over "
                    f"{baseline} on {operator}, matrix families held out, {record['seeds']} trainings.",
                    value=round(min(means) if is_joint else means[TOP_K.index(1)], 3),
                    target="> 0",
                    baseline=baseline,
                    details=format_gains(gains),
                    **common,
                )
    for model, slug in JOINT_SLUGS.items():
        if model not in record["rankings"]:
            continue
        single = "AutoSparseNet" if model == FULL else model
        gains = {name: compute_gain(record, name, 1, model, f"{single}_{name}") for name in operators}
        yield Claim(
            id=f"tuning/5-joint-{slug}",
            claim=f"Smallest top-1 score gain of {model}, trained on all operators, over networks of one "
            "operator.",
            value=round(min(mean for mean, _, _ in gains.values()), 3),
            target=">= -0.01",
            baseline="networks of one operator",
            details=format_gains(gains),
            **common,
        )


def compute_gain(
    record: dict[str, Any], operator: str, k: int, model: str, other: str
) -> tuple[float, float, float]:
    """Compute the mean top-k score gain over matrices and its bootstrap interval.

    The score of a matrix is the mean over trainings; `"random"` is the expected score of a random pick.
    """
    column = TOP_K.index(k)
    scores = record["rankings"][model][operator]
    if other == "random":
        other_scores = {name: [pool["random"]] for name, pool in record["pools"][operator].items()}
    else:
        other_scores = record["rankings"][other][operator]
    gains = [
        statistics.mean(row[column] for row in scores[name])
        - statistics.mean(row[column] for row in other_scores[name])
        for name in scores
    ]
    low, high = bootstrap_mean(gains)
    return statistics.mean(gains), low, high


def format_gains(gains: dict[str, tuple[float, float, float]]) -> dict[str, str]:
    """Format each gain with its interval."""
    return {name: f"{mean:+.3f} ({low:+.3f} to {high:+.3f})" for name, (mean, low, high) in gains.items()}


def read_ranking(folder: Path) -> dict[str, Any]:
    """Read the folder of `sparseflow tuning eval` as one record with the scores of every ranking.

    `"pools"` holds the facts of each operator and matrix that do not depend on the model. `"rankings"` holds,
    by model, operator and matrix, one row per seed: top-k scores and the fraction of correctly ordered pairs.
    """
    pools: dict[str, Any] = {}
    rankings: dict[str, Any] = {}
    rows = sorted(read_comparison(folder), key=lambda row: row.seed)
    for row in rows:
        for score in row.scores:
            pools.setdefault(score.operator, {})[score.matrix] = {
                "known": score.pattern_known,
                "schedules": score.pool,
                "random": [round(score.random_top_k[k], 4) for k in TOP_K],
            }
            matrices = rankings.setdefault(row.entry, {}).setdefault(score.operator, {})
            matrices.setdefault(score.matrix, []).append(
                [round(value, 4) for value in (*(score.top_k[k] for k in TOP_K), score.pair_accuracy)]
            )
    record = json.loads((folder / SCORES_FILE).read_text(encoding="utf-8"))
    del record["scores_known"]
    seeds = len({row.seed for row in rows})
    return record | {"seeds": seeds, "top": TOP_K, "pools": pools, "rankings": rankings}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="output folder of `sparseflow tuning eval`")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    record = read_ranking(args.folder)
    write_atomic(args.out, json.dumps(record) + "\n")
    record_claims(make_claims(record), record, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

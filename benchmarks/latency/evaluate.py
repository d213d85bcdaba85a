"""Errors of a predictor on held-out kernels, networks and levels of load.

::

    export PYTHONPATH=src:.
    python benchmarks/latency/evaluate.py runs/study/collections/* --out results/latency/judged-cpu.json

Every number is stored with its predictions and measurements. *at_rest* and *beside_loads* predict each idle
or loaded model by a predictor without its network: without measurements of its cases and of kernels that only
it has (*strict*: without all of its kernels, including shared ones). *levels* predicts slowdowns at a level
by a predictor without measurements at that level. *intervals* is the share of measurements in 90 % intervals
that are fitted to the errors on other networks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, record_claims
from sparseflow.core.costmodel.splits import split_group_k_fold
from sparseflow.core.environment import get_git_revision
from sparseflow.core.files import write_atomic
from sparseflow.core.metrics import bootstrap_mean
from sparseflow.latency.measure.collection import read_plan
from sparseflow.latency.model import dataset, validation
from sparseflow.latency.model.dataset import LatencyDataset
from sparseflow.latency.model.fitting import fit_predictor
from sparseflow.latency.model.kernel_regressor import KINDS
from sparseflow.latency.model.validation import HeldOutPrediction

SPLITS = {
    "by_kernel": validation.predict_by_kernel,
    "by_network": validation.predict_by_network,
    "leaky": validation.predict_leaky,
}


def evaluate(data: LatencyDataset) -> dict[str, Any]:
    """Return all scores with their predictions and measurements."""
    start_s = time.monotonic()

    def log(message: str) -> None:
        print(f"{time.monotonic() - start_s:6.0f} s  {message}", flush=True)

    kernels: dict[str, Any] = {}
    for kind in KINDS:
        kernels[kind] = {}
        for split, predict in SPLITS.items():
            kernels[kind][split] = validation.compute_scores(predict(data, kind))
            log(f"{kind} {split}: {kernels[kind][split]}")
    kind = min(KINDS, key=lambda name: kernels[name]["by_kernel"]["mape"])
    record: dict[str, Any] = {"kind": kind, "kernels": kernels}
    predictors = validation.fit_without_each_network(data, kind)
    idle = validation.predict_idle(data, predictors)
    record["at_rest"] = describe_predictions(idle)
    record["at_rest_strict"] = describe_predictions(
        validation.predict_idle(data, validation.fit_without_each_network(data, kind, strict=True))
    )
    log(f"idle {record['at_rest']['scores']}, strict {record['at_rest_strict']['scores']}")
    loaded = validation.predict_under_load(data, predictors)
    if loaded:
        blind = validation.predict_under_load(data, predictors, ignore_load=True)
        record["beside_loads"] = describe_predictions(loaded)
        record["beside_loads_blind"] = validation.compute_scores(blind)
        record["achieved"] = compute_achieved(data)
        record["slowdowns"] = compute_slowdowns(data)
        record["intervals_beside_loads"] = compute_coverage(loaded)
        log(f"under load {record['beside_loads']['scores']}, load unknown {record['beside_loads_blind']}")
        record["levels"] = evaluate_levels(data, kind)
        log(f"held-out levels: {[(row['level'], row['error']) for row in record['levels']]}")
    record["intervals"] = compute_coverage([*idle, *loaded])
    log(f"coverage {record['intervals']:.3f}, under load {record.get('intervals_beside_loads')}")
    return record


def compute_coverage(predictions: Sequence[HeldOutPrediction]) -> float:
    """Return the share of measurements within intervals that are fitted to the other networks."""
    covered: list[bool] = []
    networks = [validation.get_network(p.name) for p in predictions]
    for train_indices, test_indices in split_group_k_fold(networks, len(set(networks))):
        compute_bounds = validation.fit_interval([predictions[n] for n in train_indices]).bounds
        for prediction in (predictions[n] for n in test_indices):
            low, high = compute_bounds(prediction.predicted_ms)
            covered.append(low <= prediction.measured_ms <= high)
    return sum(covered) / len(covered)


def describe_predictions(predictions: Sequence[HeldOutPrediction]) -> dict[str, Any]:
    """Return scores and rows."""
    rows = [[p.name, p.level, round(p.predicted_ms, 5), round(p.measured_ms, 5)] for p in predictions]
    return {
        "scores": validation.compute_scores(predictions),
        "columns": ["name", "level", "predicted_ms", "measured_ms"],
        "rows": rows,
    }


def compute_achieved(data: LatencyDataset) -> list[dict[str, Any]]:
    """Return the load that was achieved at each level while the measured work was idle.

    On a CPU other work counts to the level.
    """
    rows = []
    for level in list_levels(data):
        loads = [
            m.load["others"] if data.fingerprint.kind == "cpu" else m.achieved
            for m in data.loaded
            if m.level == level
        ]
        shares = sorted({round(share, 4) for share in loads})
        miss = max(abs(share - level) for share in shares)
        rows.append({"level": level, "blocks": shares, "largest_miss": miss})
    return rows


def compute_slowdowns(data: LatencyDataset) -> list[dict[str, Any]]:
    """Return the geometric mean over models of the mean slowdown at each level."""
    rows = []
    for level in list_levels(data):
        samples: dict[str, list[float]] = {}
        for measurement in data.loaded:
            if measurement.is_model and measurement.level == level:
                samples.setdefault(measurement.target, []).append(measurement.slowdown)
        means = {name: statistics.fmean(values) for name, values in samples.items()}
        rows.append({"level": level, "slowdown": statistics.geometric_mean(means.values()), "models": means})
    return rows


def evaluate_levels(data: LatencyDataset, kind: str) -> list[dict[str, Any]]:
    """Predict each level by a predictor without measurements at it."""
    levels = list_levels(data)
    rows = []
    for level in levels:
        predictor = fit_predictor(data, kind, levels=[other for other in levels if other != level])
        samples: dict[str, list[tuple[float, float]]] = {}
        for measurement in data.loaded:
            if measurement.is_model and measurement.level == level:
                graph = data.graphs[measurement.target]
                predicted = predictor.predict(graph, measurement.load).slowdown
                samples.setdefault(measurement.target, []).append((predicted, measurement.slowdown))
        means = {
            name: [statistics.fmean(p for p, _ in pairs), statistics.fmean(m for _, m in pairs)]
            for name, pairs in samples.items()
        }
        errors = [abs(predicted / measured - 1.0) for predicted, measured in means.values()]
        rows.append({"level": level, "error": statistics.fmean(errors), "models": means})
    return rows


def list_levels(data: LatencyDataset) -> list[float]:
    """List the levels of load, ascending."""
    return sorted({measurement.level for measurement in data.loaded})


MAX_ERROR_PERCENT = {"cpu": 8.0, "cuda": 5.0}
"""Target of the mean error on held-out networks, by device type."""


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: errors on held-out networks and kernels, idle and under load."""
    kind, networks = record["fingerprint"]["kind"], len(record["networks"])
    common: dict[str, Any] = {
        "device": record["fingerprint"]["name"],
        "command": "python benchmarks/latency/evaluate.py COLLECTIONS --out results/latency/judged-"
        + ("cpu.json" if kind == "cpu" else "h200.json"),
    }
    for key, slug, part in (
        ("at_rest", "rest", "the network and its own kernels held out"),
        ("at_rest_strict", "rest-strict", "the network and all of its kernels held out"),
    ):
        scores, strict = record[key]["scores"], key == "at_rest_strict"
        errors = [abs(row[2] / row[3] - 1.0) for row in record[key]["rows"]]
        low, high = bootstrap_mean(errors, [validation.get_network(row[0]) for row in record[key]["rows"]])
        models = f"{scores['count']} idle models of {networks} networks, {part}"
        yield Claim(
            id=f"latency/3-{kind}-{slug}",
            claim=f"Mean latency error of {models}.",
            value=round(100.0 * scores["mape"], 2),
            unit="%",
            target=None if strict else f"<= {MAX_ERROR_PERCENT[kind]:g}",
            details={"low": round(100.0 * low, 2), "high": round(100.0 * high, 2)},
            **common,
        )
        yield Claim(
            id=f"latency/3-{kind}-{slug}-within-10",
            claim=f"Latency predictions within 10 %, of {models}.",
            value=round(100.0 * scores["within_10"], 2),
            unit="%",
            target=None if strict else ">= 90",
            **common,
        )
    scores = record["kernels"][record["kind"]]["by_kernel"]
    yield Claim(
        id=f"latency/3-{kind}-kernels",
        claim=f"Mean error of the kernel regressor `{record['kind']}` on {scores['count']} held-out kernels.",
        value=round(100.0 * scores["mape"], 2),
        unit="%",
        target="<= 15",
        details={"mape_with_leaky_split": round(record["kernels"][record["kind"]]["leaky"]["mape"], 4)},
        **common,
    )
    if "levels" in record:
        yield from make_load_claims(record, kind, common)


def make_load_claims(record: dict[str, Any], kind: str, common: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims about models under load."""
    yield Claim(
        id=f"latency/4-{kind}-achieved",
        claim="Largest difference between achieved and requested load.",
        value=round(100.0 * max(row["largest_miss"] for row in record["achieved"]), 2),
        unit="points",
        target="<= 5",
        **common,
    )
    slowdowns = [1.0, *(row["slowdown"] for row in record["slowdowns"])]
    yield Claim(
        id=f"latency/4-{kind}-monotone",
        claim="Mean slowdown of models, idle and at each load, grows with the load.",
        value=" → ".join(f"{slowdown:.2f}" for slowdown in slowdowns),
        unit="x",
        target="growing",
        met=all(a < b for a, b in pairwise(slowdowns)),
        **common,
    )
    error, blind = record["beside_loads"]["scores"]["mape"], record["beside_loads_blind"]["mape"]
    yield Claim(
        id=f"latency/4-{kind}-blind",
        claim="Mean error under load without the load as an input over that with it, networks held out.",
        value=round(blind / error, 2),
        unit="x",
        target=">= 2",
        details={"mape_without_load": round(blind, 4), "mape_with_load": round(error, 4)},
        **common,
    )
    for row in record["levels"]:
        yield Claim(
            id=f"latency/4-{kind}-level-{round(100 * row['level'])}",
            claim=f"Mean error of a model's slowdown at load {row['level']:g}, predicted without "
            "measurements at that load.",
            value=round(100.0 * row["error"], 2),
            unit="%",
            target="<= 10",
            **common,
        )
    coverage = round(100.0 * record["intervals"], 2)
    yield Claim(
        id=f"latency/4-{kind}-intervals",
        claim="Latencies of models, idle and under load, within 90 % intervals that come from other "
        "networks.",
        value=coverage,
        unit="%",
        target="85 to 95",
        met=85.0 <= coverage <= 95.0,
        **common,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("collections", type=Path, nargs="+", help="directories written by `latency collect`")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    data = dataset.load_dataset(args.collections)
    record = {
        "fingerprint": data.fingerprint.to_dict(),
        "git": get_git_revision(),
        "collected": [
            {k: plan.environment.get(k) for k in ("time", "git", "device", "platform")}
            | {"rounds": plan.config["rounds"], "levels": plan.config["levels"]}
            for plan in map(read_plan, args.collections)
        ],
        "kernels_measured": len(data.list_kernels()),
        "models_measured": len(data.list_models()),
        "networks": validation.list_networks(data),
        **evaluate(data),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(args.out, json.dumps(record, sort_keys=True) + "\n")
    record_claims(make_claims(record), record, args.out)
    print(f"{args.out}: {args.out.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a predictor of a device is worth: learned from collections, judged on what was held out.

::

    export PYTHONPATH=src:.
    python benchmarks/latency/judge.py runs/study/collections/* --out results/latency/judged-cpu.json

Every number comes with the predictions and measurements that it is from. *at_rest* and *beside_loads* judge
each model by a predictor that was learned without its network: without any measurement of its cases and
without the kernels that only it has (*strict*: without all of its kernels, also those that others share).
*levels* judges slowdowns at a level by a predictor that saw no measurement at that level. *intervals* says
which share of measurements lies in 90 % intervals that were made from the errors on other networks.
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
from sparseflow.core.environment import get_git_revision
from sparseflow.core.files import write_atomic
from sparseflow.latency import dataset, validate
from sparseflow.latency.collect import read_plan
from sparseflow.latency.dataset import Dataset
from sparseflow.latency.learn import learn
from sparseflow.latency.model import KINDS
from sparseflow.latency.validate import Judged

SPLITS = {
    "by_kernel": validate.kernels_by_kernel,
    "by_network": validate.kernels_by_network,
    "leaky": validate.kernels_leaky,
}


def judge(data: Dataset) -> dict[str, Any]:
    """Every score, with what it is from."""
    begun = time.monotonic()

    def tell(what: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {what}", flush=True)

    kernels: dict[str, Any] = {}
    for kind in KINDS:
        kernels[kind] = {}
        for split, run in SPLITS.items():
            kernels[kind][split] = validate.scores(run(data, kind))
            tell(f"{kind} {split}: {kernels[kind][split]}")
    kind = min(KINDS, key=lambda one: kernels[one]["by_kernel"]["mape"])
    found: dict[str, Any] = {"kind": kind, "kernels": kernels}
    held = validate.without_each(data, kind)
    rest = validate.at_rest(data, held)
    found["at_rest"] = described(rest)
    found["at_rest_strict"] = described(
        validate.at_rest(data, validate.without_each(data, kind, strict=True))
    )
    tell(f"at rest {found['at_rest']['scores']}, strict {found['at_rest_strict']['scores']}")
    loaded = validate.beside_loads(data, held)
    if loaded:
        blind = validate.beside_loads(data, held, blind=True)
        found["beside_loads"] = described(loaded)
        found["beside_loads_blind"] = validate.scores(blind)
        found["achieved"] = achieved(data)
        found["slowdowns"] = slowdowns(data)
        found["intervals_beside_loads"] = validate.coverage(loaded)
        tell(f"beside loads {found['beside_loads']['scores']}, not told {found['beside_loads_blind']}")
        found["levels"] = levels(data, kind)
        tell(f"levels held out: {[(row['level'], row['error']) for row in found['levels']]}")
    found["intervals"] = validate.coverage([*rest, *loaded])
    tell(f"intervals hold {found['intervals']:.3f}, at loads {found.get('intervals_beside_loads')}")
    return found


def described(judged: Sequence[Judged]) -> dict[str, Any]:
    """Scores and rows."""
    rows = [[j.name, j.level, round(j.predicted_ms, 5), round(j.measured_ms, 5)] for j in judged]
    return {
        "scores": validate.scores(judged),
        "columns": ["name", "level", "predicted_ms", "measured_ms"],
        "rows": rows,
    }


def achieved(data: Dataset) -> list[dict[str, Any]]:
    """What the load got at each level while the measured work rested."""
    found = []
    for level in sorted({one.level for one in data.loaded}):
        shares = sorted({round(one.alone, 4) for one in data.loaded if one.level == level})
        found.append({"level": level, "blocks": shares, "largest_miss": max(abs(s - level) for s in shares)})
    return found


def slowdowns(data: Dataset) -> list[dict[str, Any]]:
    """Geometric mean over models of their mean latency beside a load over that at rest."""
    found = []
    for level in sorted({one.level for one in data.loaded}):
        here = {one.item: [] for one in validate.loaded_models(data) if one.level == level}
        for one in validate.loaded_models(data):
            if one.level == level:
                here[one.item].append(one.slowdown)
        each = {name: statistics.fmean(values) for name, values in here.items()}
        found.append({"level": level, "slowdown": statistics.geometric_mean(each.values()), "models": each})
    return found


def levels(data: Dataset, kind: str) -> list[dict[str, Any]]:
    """Each level judged by a predictor that saw no measurement at it."""
    every = sorted({one.level for one in data.loaded})
    found = []
    for level in every:
        predictor = learn(data, kind, levels=[other for other in every if other != level])
        rows: dict[str, list[tuple[float, float]]] = {}
        for one in validate.loaded_models(data):
            if one.level == level:
                said = predictor.predict(data.graphs[one.item], one.load).slowdown
                rows.setdefault(one.item, []).append((said, one.slowdown))
        each = {
            name: [statistics.fmean(p for p, _ in pairs), statistics.fmean(m for _, m in pairs)]
            for name, pairs in rows.items()
        }
        errors = [abs(predicted / measured - 1.0) for predicted, measured in each.values()]
        found.append({"level": level, "error": statistics.fmean(errors), "models": each})
    return found


MAX_ERROR_PERCENT = {"cpu": 8.0, "cuda": 5.0}
"""Target of the mean error on networks that were held out, by kind of device."""


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: errors on held-out networks and kernels, idle and under load."""
    kind, networks = record["fingerprint"]["kind"], len(record["networks"])
    common: dict[str, Any] = {
        "device": record["fingerprint"]["name"],
        "command": "python benchmarks/latency/judge.py COLLECTIONS --out results/latency/judged-"
        + ("cpu.json" if kind == "cpu" else "h200.json"),
    }
    for key, slug, part in (
        ("at_rest", "rest", "the network and its own kernels held out"),
        ("at_rest_strict", "rest-strict", "the network and all of its kernels held out"),
    ):
        scores, strict = record[key]["scores"], key == "at_rest_strict"
        models = f"{scores['count']} idle models of {networks} networks, {part}"
        yield Claim(
            id=f"latency/3-{kind}-{slug}",
            claim=f"Mean latency error of {models}.",
            value=round(100.0 * scores["mape"], 2),
            unit="%",
            target=None if strict else f"<= {MAX_ERROR_PERCENT[kind]:g}",
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
    parser.add_argument("collections", type=Path, nargs="+", help="folders that `latency collect` wrote")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    asked = parser.parse_args()
    data = dataset.load(asked.collections)
    record = {
        "fingerprint": data.fingerprint.to_dict(),
        "git": get_git_revision(),
        "collected": [
            {k: plan.environment.get(k) for k in ("time", "git", "device", "platform")}
            | {"rounds": plan.config["rounds"], "levels": plan.config["levels"]}
            for plan in map(read_plan, asked.collections)
        ],
        "kernels_measured": len(data.kernel_ids()),
        "models_measured": len(data.models()),
        "networks": validate.networks(data),
        **judge(data),
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(asked.out, json.dumps(record, sort_keys=True) + "\n")
    record_claims(make_claims(record), record, asked.out)
    print(f"{asked.out}: {asked.out.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

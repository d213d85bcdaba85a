"""How close the searches come to the best known costs of QAPLIB, and how many swaps they judge a second.

    python benchmarks/codesign/layout.py --qaplib FOLDER --device cpu --out results/codesign/layout-cpu.json
    python benchmarks/codesign/layout.py --qaplib FOLDER --device cuda --out results/codesign/layout-cuda.json

On one core each restart begins with another random permutation and has its own time; scipy's heuristics stand
beside it. With `--device cuda` the batch is then measured against one core in turns, in the same run and with
as many moves a restart. A batch is only worth a number if it is right: the cost of every permutation is
computed anew, in int64 on the CPU, and the first restarts must have found the same permutations as the core
did. `--warps` tries the batch with other numbers of warps a program.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import numpy as np
from frame import begun, ended, options
from scipy.optimize import quadratic_assignment

from benchmarks.claims import Claim
from sparseflow.codesign.layout import Assignment, Instance, assign, assign_batch, cost, read_qaplib
from sparseflow.core.environment import collect_environment

SAME = 4
"""Restarts of a batch whose permutations are compared with those of the core."""


def gap(value: float, instance: Instance) -> float | None:
    """Share above the best known cost."""
    return None if not instance.best_known else value / instance.best_known - 1.0


def summary(instance: Instance, costs: list[int], seconds: list[float], rates: list[float]) -> dict[str, Any]:
    gaps = [found for found in (gap(value, instance) for value in costs) if found is not None]
    return {
        "costs": costs, "seconds": [round(value, 4) for value in seconds],
        "swaps_per_s": [round(value) for value in rates],
        "best_gap": min(gaps, default=None), "mean_gap": mean(gaps) if gaps else None,
    }  # fmt: skip


def on_core(instance: Instance, method: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Restarts one by one."""
    found: list[Assignment] = [
        assign(
            instance.flow, instance.distance, method=method, restarts=1, seed=asked.seed + restart,
            iterations=asked.iterations,
        )
        for restart in range(asked.restarts)
    ]  # fmt: skip
    costs = [cost(instance.flow, instance.distance, one.permutation) for one in found]
    told = summary(
        instance, [int(value) for value in costs], [one.seconds for one in found],
        [one.evaluations / one.seconds for one in found],
    )  # fmt: skip
    return {**told, "lower_bound": found[0].lower_bound}


def by_scipy(instance: Instance, method: str, asked: argparse.Namespace) -> dict[str, Any]:
    costs, seconds = [], []
    for restart in range(asked.restarts):
        rng = np.random.default_rng([asked.seed, restart])
        options: dict[str, Any] = {"rng": rng}
        if method == "faq":
            options["P0"] = "randomized"
        begin = perf_counter()
        found = quadratic_assignment(instance.flow, instance.distance, method=method, options=options)
        seconds.append(perf_counter() - begin)
        costs.append(int(cost(instance.flow, instance.distance, found.col_ind)))
    return summary(instance, costs, seconds, [])


def against_core(instance: Instance, asked: argparse.Namespace) -> dict[str, Any]:
    """The batch and one core in turns, with as many moves a restart."""
    settings: dict[str, Any] = {"iterations": asked.moves, "seed": asked.seed}
    pair = (instance.flow, instance.distance)
    core, batch = [], []
    for _ in range(asked.rounds):
        core.append(assign(*pair, method="tabu", restarts=SAME, **settings))
        batch.append(assign_batch(*pair, restarts=asked.batch, device=asked.device, **settings))
    again = [cost(*pair, permutation) for permutation in batch[0].permutations]
    rates = {
        name: [one.evaluations / one.seconds for one in found]
        for name, found in (("core", core), ("batch", batch))
    }
    trials = []
    for warps in asked.warps:
        found = assign_batch(*pair, restarts=asked.batch, device=asked.device, warps=warps, **settings)
        trials.append({"warps": warps, "swaps_per_s": round(found.evaluations / found.seconds)})
    return {
        "restarts": asked.batch, "moves": asked.moves,
        "core_swaps_per_s": [round(value) for value in rates["core"]],
        "batch_swaps_per_s": [round(value) for value in rates["batch"]],
        "core_seconds": [round(one.seconds, 4) for one in core],
        "batch_seconds": [round(one.seconds, 4) for one in batch],
        "times": median(b / c for b, c in zip(rates["batch"], rates["core"], strict=True)),
        "costs_right": tuple(again) == batch[0].costs,
        "same_permutations": bool(np.array_equal(core[0].permutations, batch[0].permutations[:SAME])),
        "core_costs": list(core[0].costs),
        "batch_costs": sorted(Counter(batch[0].costs).items()),
        "best_gap": gap(batch[0].cost, instance), "mean_gap": gap(mean(batch[0].costs), instance),
        "warps": trials,
    }  # fmt: skip


def percent(value: float | None) -> str:
    return "      –" if value is None else f"{100 * value:6.3f}%"


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: quadratic assignment on QAPLIB."""
    command = f"python benchmarks/codesign/layout.py --qaplib … --device {record['settings']['device']}"
    instances = record["instances"]
    for name in ("nug12", "nug20", "nug30", "tai20a", "kra30a"):
        costs = instances[name]["methods"]["tabu"]["costs"]
        yield Claim(
            id=f"codesign/4-{name}",
            claim=f"Cost of {name} by tabu search, best of {len(costs)} restarts.",
            value=min(costs),
            target=f"<= {instances[name]['best_known']}",
            baseline="the known optimum",
            command=command,
        )
    costs = instances["sko49"]["methods"]["tabu"]["costs"]
    yield Claim(
        id="codesign/4-sko49",
        claim=f"Mean gap of sko49 to the best known cost, tabu search, {len(costs)} restarts.",
        value=round(100.0 * (mean(costs) / instances["sko49"]["best_known"] - 1.0), 3),
        unit="%",
        target="<= 0.2",
        baseline="the best known cost",
        command=command,
    )
    tabu = [instance["methods"]["tabu"] for instance in instances.values()]
    yield Claim(
        id="codesign/4-seconds",
        claim=f"Time of one tabu search on one core, slowest of {len(instances)} instances.",
        value=round(max(max(method["seconds"]) for method in tabu), 3),
        unit="s",
        target="<= 5",
        command=command,
    )
    yield Claim(
        id="codesign/4-core",
        claim="Swap evaluations per second of one core, slowest instance.",
        value=round(min(median(method["swaps_per_s"]) for method in tabu) / 1e6, 1),
        unit="million/s",
        target=">= 20",
        command=command,
    )
    batches = {name: instance["batch"] for name, instance in instances.items() if "batch" in instance}
    if batches:
        equal = all(batch["costs_right"] and batch["same_permutations"] for batch in batches.values())
        name, slowest = min(batches.items(), key=lambda item: item[1]["times"])
        yield Claim(
            id="codesign/4-batch",
            claim="Swap evaluations per second of batched restarts on a GPU over one core, instance with the "
            "smallest gain.",
            # Different results from those of the core count as no speedup.
            value=round(slowest["times"], 1) if equal else 0.0,
            unit="x",
            target=">= 20",
            baseline="one core, Numba",
            command=command,
            details={"instance": name, "restarts": slowest["restarts"], "bit_identical_to_core": equal},
        )


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--qaplib", type=Path, required=True, help="folder with *.qap files")
    parser.add_argument("--only", nargs="*", help="names of instances; all by default")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--restarts", type=int, default=5, help="of one core")
    parser.add_argument(
        "--iterations", type=int, help="of a restart of one core; by default those of `assign`"
    )
    parser.add_argument("--batch", type=int, default=2112, help="restarts of the batch")
    parser.add_argument("--moves", type=int, default=20_000, help="of a restart of the batch")
    parser.add_argument("--rounds", type=int, default=3, help="of the batch against one core")
    parser.add_argument("--warps", type=int, nargs="*", default=[], help="also try these numbers of warps")
    asked = parser.parse_args()
    files = sorted(file for file in asked.qaplib.glob("*.qap") if not asked.only or file.stem in asked.only)
    if not files:
        parser.error(f"there is no such *.qap file in {asked.qaplib}")
    told = begun(asked, device=asked.device) | {"instances": {}}
    if asked.device != "cpu":
        told["core"] = collect_environment("cpu", seed=asked.seed)
    wrong = []
    print(f"{'':10s} {'':14s} {'best':>10s} {'gap':>7s} {'mean gap':>8s} {'s/restart':>9s} {'M swaps/s':>9s}")
    for file in files:
        instance = read_qaplib(file)
        rows = {name: on_core(instance, name, asked) for name in ("tabu", "annealing")}
        rows |= {f"scipy {name}": by_scipy(instance, name, asked) for name in ("faq", "2opt")}
        known = {"n": instance.n, "optimum": instance.optimum, "best_known": instance.best_known}
        for name, row in rows.items():
            rate = f"{median(row['swaps_per_s']) / 1e6:9.1f}" if row["swaps_per_s"] else f"{'':9s}"
            print(
                f"{instance.name:10s} {name:14s} {min(row['costs']):10d} {percent(row['best_gap'])} "
                f"{percent(row['mean_gap']):>8s} {median(row['seconds']):9.3f} {rate}"
            )
        told["instances"][instance.name] = {**known, "methods": rows}
        if asked.device != "cpu":
            row = told["instances"][instance.name]["batch"] = against_core(instance, asked)
            right = row["costs_right"] and row["same_permutations"]
            wrong += [] if right else [f"{instance.name}: other costs or permutations than on the core"]
            print(
                f"{instance.name:10s} {'batch':14s} {row['batch_costs'][0][0]:10d} "
                f"{percent(row['best_gap'])} {percent(row['mean_gap']):>8s} "
                f"{median(row['batch_seconds']):9.3f} {median(row['batch_swaps_per_s']) / 1e6:9.1f}  "
                f"{row['times']:.1f} cores"
            )
            for trial in row["warps"]:
                print(f"{'':10s} {trial['warps']:3d} warps {trial['swaps_per_s'] / 1e6:44.1f}")
    return ended(asked, told, wrong, make_claims)


if __name__ == "__main__":
    sys.exit(main())

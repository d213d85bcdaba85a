"""Put what the codesign benchmarks measured into ``results/codesign``: one claim a figure.

::

    PYTHONPATH=src python benchmarks/codesign/record.py rewrite results/codesign/rewrite.json
    PYTHONPATH=src python benchmarks/codesign/record.py planner results/codesign/planner.json
    PYTHONPATH=src python benchmarks/codesign/record.py mapping results/codesign/mapping.json
    PYTHONPATH=src python benchmarks/codesign/record.py layout results/codesign/layout-cuda.json
    PYTHONPATH=src python benchmarks/codesign/record.py proxy results/codesign/proxy-cuda.json
    PYTHONPATH=src python benchmarks/codesign/record.py reality results/codesign/reality-2-b16.json
    PYTHONPATH=src python benchmarks/codesign/record.py designs results/codesign/designs.json
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from frame import logits_tolerance

from sparseflow.core.claims import record_command

RESULTS = Path(__file__).resolve().parents[2] / "results"

Fields = dict[str, Any]


def rewrite(record: Fields) -> Iterator[Fields]:
    """The rewritten model against the whole one (line 1)."""
    common = {"command": "python benchmarks/codesign/rewrite.py --out results/codesign/rewrite.json"}
    columns, ranks = record["columns"], record["rank_columns"]
    for dtype, tolerance in record["tolerance"].items():
        rows = [
            dict(zip(columns, row, strict=True))
            for case in record["cases"]
            if case["dtype"] == dtype
            for row in case["samples"]
        ]
        far = [
            dict(zip(ranks, row, strict=True))
            for case in record["ranks"]
            if case["dtype"] == dtype
            for row in case["samples"]
        ]
        worst = max(
            *(max(row["difference"], row["local difference"]) for row in rows),
            *(row["difference"] for row in far),
        )
        splits, parts = sum(row["splits"] for row in rows), sum(row["parts"] for row in rows)
        yield common | {
            "id": f"codesign/1-exact-{dtype}",
            "claim": f"largest difference of logits over max(1, largest logit), {dtype}: {len(rows)} random "
            f"plans of 12-block models ({splits} layers in {parts} parts, uneven groups, 2 to 4 chips), and "
            f"{len(far)} with a process a chip",
            "value": worst,
            "unit": "relative",
            "target": f"<= {tolerance:g}",
            "met": worst <= tolerance,
        }
    rows = [dict(zip(columns, row, strict=True)) for case in record["cases"] for row in case["samples"]]
    far = [dict(zip(ranks, row, strict=True)) for case in record["ranks"] for row in case["samples"]]
    for slug, what, good, of in (
        ("undo", "plans undone: weights and logits bit-identical", [r["undone"] for r in rows], rows),
        (
            "bytes", "plans whose executors moved exactly the bytes that were planned, slot to slot",
            [r["bytes"] for r in (*rows, *far)], (*rows, *far),
        ),
    ):  # fmt: skip
        yield common | {
            "id": f"codesign/1-{slug}",
            "claim": f"{what}; of {len(of)}",
            "value": sum(good),
            "unit": "plans",
            "target": f">= {len(of)}",
            "met": all(good),
        }


def planner(record: Fields) -> Iterator[Fields]:
    """The honest split (line 2)."""
    rows = [dict(zip(record["columns"], row, strict=True)) for row in record["instances"]]
    common = {"command": f"python benchmarks/codesign/planner.py --instances {len(rows)}"}
    worse = sum(row["objective"] > row["coarse objective"] for row in rows)
    split = sum(bool(row["split"]) for row in rows)
    tried = sum(row["tried"] for row in rows)
    yield common | {
        "id": "codesign/2-never-worse",
        "claim": f"random instances whose plan is worse than the coarse one; of {len(rows)}, {split} of "
        f"which split layers ({tried} splits were tried)",
        "value": worse,
        "unit": "instances",
        "target": "<= 0",
        "met": worse == 0,
        "baseline": "the coarse plan",
    }
    for slug, name, wants in (("slow", "slow link", False), ("fast", "fast link, giant perceptron", True)):
        found = dict(zip(record["columns"], record["plain"][name], strict=True))
        layers = int(found["split"])
        yield common | {
            "id": f"codesign/2-{slug}",
            "claim": f"layers split with a {name}: objective {found['coarse objective']:.4g} coarse, "
            f"{found['objective']:.4g} planned, {found['tried']} splits tried",
            "value": layers,
            "unit": "layers",
            "target": ">= 1" if wants else "<= 0",
            "met": (layers > 0) == wants,
            "baseline": "the coarse plan",
        }


def mapping(record: Fields) -> Iterator[Fields]:
    """Mapping (line 3)."""
    common = {"command": "python benchmarks/codesign/mapping.py --out results/codesign/mapping.json"}
    best, large, memory, coarse = (record[name] for name in ("optimum", "large", "memory", "coarse"))
    yield common | {
        "id": "codesign/3-optimum",
        "claim": f"mappings that are the exhaustive optimum, up to 12 segments on 4 slots, both modes; of "
        f"{best['of']}",
        "value": best["right"],
        "unit": "instances",
        "target": f">= {best['of']}",
        "met": best["right"] == best["of"],
        "baseline": "all mappings, one by one",
    }
    excess = 100.0 * large["worst_excess"]
    yield common | {
        "id": "codesign/3-large",
        "claim": f"how far the mapping of 24 segments on 8 slots is above CP-SAT's best in "
        f"{record['settings']['seconds']:g} s, at worst of {len(large['samples'])} instances",
        "value": round(excess, 2),
        "unit": "%",
        "target": "<= 5",
        "met": excess <= 5.0,
        "baseline": "OR-tools CP-SAT",
    }
    seconds = large["slowest_ms"] / 1e3
    yield common | {
        "id": "codesign/3-large-time",
        "claim": "what the slowest of these took",
        "value": round(seconds, 3),
        "unit": "s",
        "target": "<= 1",
        "met": seconds <= 1.0,
    }
    yield common | {
        "id": "codesign/3-memory",
        "claim": f"mappings that break a slot's memory, checked independently; of {len(memory['samples'])}",
        "value": memory["violations"],
        "unit": "violations",
        "target": "<= 0",
        "met": memory["violations"] == 0,
    }
    yield common | {
        "id": "codesign/3-coarse",
        "claim": "a mapping of 12 to 14 segments on 4 to 8 slots, the slowest of "
        f"{len(coarse['samples'])} problems (medians of {record['settings']['repeats']})",
        "value": round(coarse["slowest_median_ms"], 1),
        "unit": "ms",
        "target": "< 50",
        "met": coarse["slowest_median_ms"] < 50.0,
    }


def layout(record: Fields) -> Iterator[Fields]:
    """Quadratic assignment (line 4)."""
    command = f"python benchmarks/codesign/layout.py --qaplib … --device {record['settings']['device']}"
    common = {"command": command}
    for name in ("nug12", "nug20", "nug30", "tai20a", "kra30a"):
        found, best = record["instances"][name], record["instances"][name]["best_known"]
        costs = found["methods"]["tabu"]["costs"]
        yield common | {
            "id": f"codesign/4-{name}",
            "claim": f"cost of {name} by tabu search, best of {len(costs)} restarts",
            "value": min(costs),
            "unit": "",
            "target": f"<= {best}",
            "met": min(costs) <= best,
            "baseline": "the known optimum",
        }
    large = record["instances"]["sko49"]
    tabu = large["methods"]["tabu"]
    gap = 100.0 * (sum(tabu["costs"]) / len(tabu["costs"]) / large["best_known"] - 1.0)
    yield common | {
        "id": "codesign/4-sko49",
        "claim": f"mean gap of sko49 to the best known, tabu search, {len(tabu['costs'])} restarts",
        "value": round(gap, 3),
        "unit": "%",
        "target": "<= 0.2",
        "met": gap <= 0.2,
        "baseline": "the best known cost",
    }
    tabus = [each["methods"]["tabu"] for each in record["instances"].values()]
    slowest = max(max(each["seconds"]) for each in tabus)
    yield common | {
        "id": "codesign/4-seconds",
        "claim": f"a run on one core, the slowest of {len(record['instances'])} instances",
        "value": round(slowest, 3),
        "unit": "s",
        "target": "<= 5",
        "met": slowest <= 5.0,
    }
    speed = min(statistics.median(each["swaps_per_s"]) for each in tabus) / 1e6
    yield common | {
        "id": "codesign/4-core",
        "claim": "swap evaluations a second of one core, the slowest instance",
        "value": round(speed, 1),
        "unit": "million/s",
        "target": ">= 20",
        "met": speed >= 20.0,
    }
    batches = {name: each["batch"] for name, each in record["instances"].items() if "batch" in each}
    if batches:
        right = all(each["costs_right"] and each["same_permutations"] for each in batches.values())
        name, least = min(batches.items(), key=lambda each: each[1]["times"])
        yield common | {
            "id": "codesign/4-batch",
            "claim": f"swap evaluations a second of a batch of restarts on a GPU over one core's, in turns, "
            f"the instance where it gains least ({name}, {least['restarts']} restarts); permutations and "
            f"costs are {'those of the core, bit for bit' if right else 'NOT those of the core'}",
            "value": round(least["times"], 1),
            "unit": "x",
            "target": ">= 20",
            "met": right and least["times"] >= 20.0,
            "baseline": "one core, Numba",
        }


def proxy(record: Fields) -> Iterator[Fields]:
    """The hardware proxy on layers that it has not seen (line 5)."""
    told, settings = record["held_out"], record["settings"]
    common = {
        "command": f"python benchmarks/codesign/proxy.py --device {settings['device']} --points "
        f"{settings['points']}"
    }
    where = f"{told['configurations']} layers ({', '.join(record['precisions'])}), each predicted without it"
    error, alone = 100.0 * told["median_error"], 100.0 * told["roofline_median_error"]
    yield common | {
        "id": "codesign/5-error",
        "claim": f"median error of the proxy's latency, {where}",
        "value": round(error, 2),
        "unit": "%",
        "target": "<= 10",
        "met": error <= 10.0,
    }
    yield common | {
        "id": "codesign/5-roofline",
        "claim": f"the same over that of a roofline fitted to the same points ({alone:.1f} %)",
        "value": round(error / alone, 3),
        "unit": "x",
        "target": "< 1",
        "met": error < alone,
        "baseline": "a fitted roofline",
    }
    yield common | {
        "id": "codesign/5-rank",
        "claim": f"rank correlation (Spearman) of predicted and measured latency; roofline "
        f"{told['roofline_spearman']:.4f}",
        "value": round(told["spearman"], 4),
        "unit": "",
        "target": ">= 0.95",
        "met": told["spearman"] >= 0.95,
        "baseline": "a fitted roofline",
    }


def reality(record: Fields) -> Iterator[Fields]:
    """A plan against its run on several devices (line 6)."""
    told = record["settings"]
    slots, batch = told["slots"], told["batch"]
    command = (
        f"python benchmarks/codesign/reality.py --device {told['device']} --slots {slots} --dtype "
        f"{told['dtype']} --batch {batch}"
    )
    for case in record["cases"]:
        splits = f", {len(case['splits'])} layers split" if case["splits"] else ""
        # What a plan with splits is for is the latency of one batch.
        for what in ("latency",) if case["splits"] else ("latency", "period"):
            error = 100.0 * case["error"][what]
            yield {
                "id": f"codesign/6-{case['case']}-{what}-{slots}-b{batch}",
                "claim": f"predicted {what} of a pruned ViT-B on {slots} devices, batches of {batch}"
                f"{splits}: off by this ({case['predicted_ms'][what]:.3f} ms, measured "
                f"{case['measured_ms'][what]:.3f} ms; one device "
                f"{record['one_device_ms']['measured']:.3f} ms)",
                "value": round(error, 1),
                "unit": "%",
                "target": "<= 15",
                "met": error <= 15.0,
                "baseline": "measured",
                "command": command,
            }
        limit = logits_tolerance(told["dtype"], split=bool(case["splits"]))
        yield {
            "id": f"codesign/6-{case['case']}-logits-{slots}-b{batch}",
            "claim": f"largest difference of its logits from the unpartitioned model's, {told['dtype']}"
            f"{splits}; {case['moved_bytes']} bytes moved, {case['planned_bytes']} planned",
            "value": case["logits_error"],
            "unit": "relative",
            "target": f"<= {limit:g}",
            "met": case["logits_error"] <= limit and case["moved_bytes"] == case["planned_bytes"],
            "baseline": "the unpartitioned model",
            "command": command,
        }


def designs(record: Fields) -> Iterator[Fields]:
    """Joint training against its baselines (line 7)."""
    lines = {line["mode"]: line for line in record["modes"]}
    base = lines["two-stage"]
    for mode, line in lines.items():
        if mode == "two-stage":
            continue
        points = 100.0 * (line["accuracy"] - base["accuracy"])
        yield {
            "id": f"codesign/7-{mode}",
            "claim": f"energy-delay product of {mode} over two-stage's, geometric mean of {line['seeds']} "
            f"seeds ({line['low']:.3f} to {line['high']:.3f}), accuracy {line['accuracy']:.2%} against "
            f"{base['accuracy']:.2%} ({points:+.2f} points), {line['violations']} epochs frozen by the guard",
            "value": round(line["ratio"], 3),
            "unit": "x",
            "target": None,
            "met": True,
            "baseline": "two-stage",
            "command": record["command"],
        }


KINDS = {
    "rewrite": rewrite, "planner": planner, "mapping": mapping, "layout": layout, "proxy": proxy,
    "reality": reality, "designs": designs,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(record_command(__doc__, RESULTS, KINDS))

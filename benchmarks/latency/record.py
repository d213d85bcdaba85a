"""Put what the latency benchmarks measured into ``results/latency``: samples, and one claim a figure.

::

    PYTHONPATH=src python benchmarks/latency/record.py described results/latency/describe-cpu.json
    PYTHONPATH=src python benchmarks/latency/record.py named models/resnet18_b1_224.onnx --provider cpu
    PYTHONPATH=src python benchmarks/latency/record.py judged results/latency/judged-cpu.json
    PYTHONPATH=src python benchmarks/latency/record.py tests results/latency/tests.json

``described`` takes what ``describe.py`` wrote, ``judged`` what ``judge.py`` wrote. ``named`` analyses
ResNet-18 for a provider, or reads the ``graph.json`` of it. ``tests`` takes pytest's outcomes of the two
tests that are themselves what is claimed, as ``{"passed": {name: seconds}, "command": text, "git":
revision}``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparseflow.core.claims import update
from sparseflow.core.environment import get_git_revision
from sparseflow.core.files import write_atomic
from sparseflow.latency.graph import Graph, analyze

RESULTS = Path(__file__).parents[2] / "results"
MODELS_OF_THE_TARGET = 8
MODEL_ERROR = {"cpu": 8.0, "cuda": 5.0}
"""Kind of device -> largest mean error of whole networks held out, percent."""

RESNET18_CPU = {"Conv_Relu": 9, "Conv_Add_Relu": 8, "Conv": 3}

Fields = dict[str, Any]


def percent(share: float, *, at_most: float | None = None, at_least: float | None = None) -> Fields:
    """A share as a claim's value, with its target where there is one."""
    value = round(100.0 * share, 2)
    if at_most is not None:
        return {"value": value, "unit": "%", "target": f"<= {at_most:g}", "met": value <= at_most}
    if at_least is not None:
        return {"value": value, "unit": "%", "target": f">= {at_least:g}", "met": value >= at_least}
    return {"value": value, "unit": "%", "target": None, "met": True}


def described(path: Path, asked: argparse.Namespace) -> Iterator[Fields]:
    """Identities and extraction (line 1)."""
    record = json.loads(path.read_text(encoding="utf-8"))
    summary = record["summary"]
    kind = "cuda" if "cuda" in record["provider"].lower() else "cpu"
    common = {
        "device": record["environment"]["device"]["name"],
        "command": f"python benchmarks/latency/describe.py --provider {kind}",
        "git": record["environment"]["git"],
        "samples": inside(path),
        "baseline": None,
    }
    if record["rows"]:
        yield {
            "id": f"latency/1-{kind}-identities",
            "claim": f"kernels that share an id without being the same, of {summary['kernels']} kernels in "
            f"{summary['models']} models at {summary['shapes']} shapes ({len(record['rows'])} graphs)",
            "value": summary["collisions"],
            "unit": "collisions",
            "target": "== 0",
            "met": summary["collisions"] == 0,
            **common,
        }
    if record["checks"]:
        yield {
            "id": f"latency/1-{kind}-extraction",
            "claim": f"optimised nodes that run alone and match the tensor inside the graph to 1e-4: "
            f"{summary['matched_nodes']} of {summary['checked_nodes']} (largest error "
            f"{summary['largest_relative_error']:.1e})",
            **percent(summary["matched_nodes"] / summary["checked_nodes"], at_least=100.0),
            **common,
        }


def named(path: Path, asked: argparse.Namespace) -> Iterator[Fields]:
    """What ResNet-18 consists of (line 2)."""
    graph = Graph.load(path) if path.suffix == ".json" else analyze(path, asked.provider)
    kind = "cuda" if graph.provider.startswith("CUDA") else "cpu"
    counts = graph.counts()
    samples = RESULTS / "latency" / f"resnet18-{kind}.json"
    record = {"provider": graph.provider, "onnxruntime": graph.ort_version, "level": graph.level}
    write_atomic(samples, json.dumps(record | {"counts": counts}, indent=1) + "\n")
    met = kind == "cuda" or all(counts.get(name) == count for name, count in RESNET18_CPU.items())
    yield {
        "id": f"latency/2-resnet18-{kind}",
        "claim": f"kernels of ResNet-18 under {graph.provider}, everything optimised",
        "value": ", ".join(f"{count} {name}" for name, count in counts.items()),
        "unit": "",
        "target": None if kind == "cuda" else "9 Conv_Relu, 8 Conv_Add_Relu, 3 Conv among them",
        "met": met,
        "baseline": None,
        "device": asked.device or graph.provider,
        "command": f"sparseflow latency analyze resnet18.onnx --provider {kind}",
        "samples": inside(samples),
    }


def judged(path: Path, asked: argparse.Namespace) -> Iterator[Fields]:
    """Errors on what was held out, at rest (line 3) and beside loads (line 4)."""
    record = json.loads(path.read_text(encoding="utf-8"))
    kind, networks = record["fingerprint"]["kind"], record["networks"]
    common = {
        "device": record["fingerprint"]["name"],
        "command": f"python benchmarks/latency/judge.py COLLECTIONS --out results/{inside(path)}",
        "git": record["git"],
        "samples": inside(path),
        "baseline": None,
    }
    for key, slug, what in (
        ("at_rest", "rest", "without the network and the kernels that only it has"),
        ("at_rest_strict", "rest-strict", "without the network and all of its kernels"),
    ):
        scores = record[key]["scores"]
        said = (
            f"{scores['count']} models of {len(networks)} networks, each predicted by what was learned {what}"
        )
        yield {
            "id": f"latency/3-{kind}-{slug}",
            "claim": f"mean error at rest: {said}",
            **percent(scores["mape"], at_most=MODEL_ERROR[kind] if key == "at_rest" else None),
            **common,
        }
        yield {
            "id": f"latency/3-{kind}-{slug}-within-10",
            "claim": f"predictions within 10 % at rest: {said}",
            **percent(scores["within_10"], at_least=90.0 if key == "at_rest" else None),
            **common,
        }
    scores = record["kernels"][record["kind"]]["by_kernel"]
    leaky = record["kernels"][record["kind"]]["leaky"]
    yield {
        "id": f"latency/3-{kind}-kernels",
        "claim": f"mean error of the kernel regressor `{record['kind']}` over {scores['count']} kernels, "
        f"none of them learned from (split by rows instead, which leaks: {100 * leaky['mape']:.1f} %)",
        **percent(scores["mape"], at_most=15.0),
        **common,
    }
    if "levels" in record:
        yield from beside_loads(record, kind, common)


def beside_loads(record: Fields, kind: str, common: Fields) -> Iterator[Fields]:
    """The figures of line 4."""
    miss = max(row["largest_miss"] for row in record["achieved"])
    yield {
        "id": f"latency/4-{kind}-achieved",
        "claim": "largest distance of an achieved load from the one asked for, in points",
        "value": round(100.0 * miss, 2),
        "unit": "points",
        "target": "<= 5",
        "met": round(100.0 * miss, 2) <= 5.0,
        **common,
    }
    slow = [row["slowdown"] for row in record["slowdowns"]]
    yield {
        "id": f"latency/4-{kind}-monotone",
        "claim": "mean slowdown of whole models at rest and at each load, which must grow",
        "value": " → ".join(f"{value:.2f}" for value in (1.0, *slow)),
        "unit": "x",
        "target": "growing",
        "met": all(a < b for a, b in zip((1.0, *slow), slow, strict=False)),
        **common,
    }
    told, blind = record["beside_loads"]["scores"]["mape"], record["beside_loads_blind"]["mape"]
    yield {
        "id": f"latency/4-{kind}-blind",
        "claim": f"mean error beside loads when the predictor is not told of them ({100 * blind:.1f} %) over "
        f"that when it is ({100 * told:.1f} %), networks held out",
        "value": round(blind / told, 2),
        "unit": "x",
        "target": ">= 2",
        "met": round(blind / told, 2) >= 2.0,
        **common,
    }
    for row in record["levels"]:
        yield {
            "id": f"latency/4-{kind}-level-{round(100 * row['level'])}",
            "claim": f"mean error of a whole model's slowdown at load {row['level']:g}, by a predictor that "
            "saw no measurement at that level",
            **percent(row["error"], at_most=10.0),
            **common,
        }
    inside_share = 100.0 * record["intervals"]
    yield {
        "id": f"latency/4-{kind}-intervals",
        "claim": "measurements of whole models within their 90 % intervals, at rest and beside loads, the "
        "intervals made from other networks",
        "value": round(inside_share, 2),
        "unit": "%",
        "target": "85 to 95",
        "met": 85.0 <= inside_share <= 95.0,
        **common,
    }


def tests(path: Path, asked: argparse.Namespace) -> Iterator[Fields]:
    """Tests that are what is claimed (lines 5 and 6)."""
    record = json.loads(path.read_text(encoding="utf-8"))
    for line, slug, part, said in (
        (
            5,
            "prometheus",
            "follows_the_load",
            "a real Prometheus moves a prediction, and its loss is an error",
        ),
        (
            6,
            "kills",
            "killed_ten_times",
            "a collection killed ten times ends with the rows of an unbroken one",
        ),
    ):
        found = {name: seconds for name, seconds in record["passed"].items() if part in name}
        yield {
            "id": f"latency/{line}-{slug}",
            "claim": said,
            "value": bool(found),
            "unit": "passed",
            "target": "passed",
            "met": bool(found),
            "baseline": None,
            "device": asked.device or "CPU",
            "command": record["command"],
            "git": record["git"],
            "samples": inside(path),
        }


def inside(path: Path) -> str:
    """A file of results, relative to that folder."""
    return path.resolve().relative_to(RESULTS.resolve()).as_posix()


def main() -> int:
    parts = {"described": described, "named": named, "judged": judged, "tests": tests}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=parts)
    parser.add_argument("file", type=Path)
    parser.add_argument("--provider", default="cpu", help="of `named`")
    parser.add_argument("--device", help="what it ran on, where the file does not tell")
    asked = parser.parse_args()
    for fields in parts[asked.part](asked.file, asked):
        today = {"git": get_git_revision() or "unknown", "date": datetime.date.today()}
        found = update(RESULTS, today | fields)
        print(f"{'met ' if found.met else 'NOT MET'} {found.id}: {found.value} {found.unit} ({found.target})")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Put what the tuning benchmarks measured into ``results/tuning``: one claim a figure.

::

    PYTHONPATH=src python benchmarks/tuning/record.py lines results/tuning/lines.json
    PYTHONPATH=src python benchmarks/tuning/record.py equal results/tuning/equal.json
    PYTHONPATH=src python benchmarks/tuning/record.py against runs/against.jsonl
    PYTHONPATH=src python benchmarks/tuning/record.py guided runs/guided.jsonl
    PYTHONPATH=src python benchmarks/tuning/record.py ranking runs/eval
    PYTHONPATH=src python benchmarks/tuning/record.py embed results/tuning/embed-cpu.json
    PYTHONPATH=src python benchmarks/tuning/record.py score results/tuning/score-cpu.json
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from guided import summary

from sparseflow.core.claims import record_command
from sparseflow.core.files import write_atomic
from sparseflow.core.metrics import bootstrap_mean
from sparseflow.tuning.net.judge import TOP
from sparseflow.tuning.net.page import SCORES
from sparseflow.tuning.net.study import BOOSTED, FULL, PRETRAINED, read_study
from sparseflow.tuning.search import GUIDED

RESULTS = Path(__file__).resolve().parents[2] / "results"

Fields = dict[str, Any]


def lines(record: Fields) -> Iterator[Fields]:
    """Schedules read and written (line 1)."""
    files = record["files"]
    rows = sum(found["rows"] for found in files)
    named = sum(found["byte_for_byte"] + sum(found["refused"].values()) for found in files)
    problems = {name: count for found in files for name, count in found["problems"].items()}
    for name in problems:
        problems[name] = sum(found["problems"].get(name, 0) for found in files)
    told = ", ".join(f"{count} for {name}" for name, count in problems.items())
    yield {
        "id": "tuning/1-lines",
        "claim": f"rows of AutoSparse's labels that parse and are written byte for byte, or are refused for "
        f"a named reason, of {rows} ({sum(found['runnable'] for found in files)} can run; {told})",
        "value": named,
        "unit": "rows",
        "target": f">= {rows}",
        "met": named >= rows,
        "command": "python benchmarks/tuning/lines.py LABELS --out results/tuning/lines.json",
    }
    seconds = max(min(found["seconds"]) * 10_000 / found["parsed"] for found in files)
    yield {
        "id": "tuning/1-speed",
        "claim": "parsing 10,000 schedules, the slower of the files, the fastest of some runs",
        "value": round(seconds, 3),
        "unit": "s",
        "target": "< 1",
        "met": round(seconds, 3) < 1,
        "command": "python benchmarks/tuning/lines.py LABELS --out results/tuning/lines.json",
    }


def equal(record: Fields) -> Iterator[Fields]:
    """Random schedules against scipy (line 2)."""
    for name, found in record["summary"].items():
        right = found["outcomes"].get("equal", 0)
        largest = found["largest_error"]["float32"]
        yield {
            "id": f"tuning/2-{name}",
            "claim": f"random schedules of {name} ({found['distinct']} distinct) that ran and equal scipy, "
            f"of {found['drawn']}; largest error in float32 {largest:.1e} of the largest result",
            "value": round(100.0 * right / found["drawn"], 2),
            "unit": "%",
            "target": ">= 100",
            "met": right == found["drawn"],
            "command": "python benchmarks/tuning/equal.py --out results/tuning/equal.json",
        }


def against(record: Fields) -> Iterator[Fields]:
    """Tuned kernels against the baselines (line 3)."""
    targets = {"mkl": 1.2, "scipy": 2.5, "registers": 1.1}
    names = {"mkl": "Intel MKL", "scipy": "scipy", "registers": "CSR with sums in registers"}
    settings = record["settings"]
    command = "python benchmarks/tuning/against.py MATRICES --mkl libmkl_rt.so --out RUN"
    for kind in sorted({row["problem"].partition(":")[0] for row in record["rows"]}):
        rows = [row for row in record["rows"] if row["problem"].partition(":")[0] == kind]
        matrices = len({row["matrix"] for row in rows})
        for key, least in targets.items():
            ratios = [row["against"][key]["ratio"] for row in rows]
            value = round(statistics.geometric_mean(ratios), 2)
            yield {
                "id": f"tuning/3-{kind}-{key}",
                "claim": f"tuned {kind} over {names[key]}, geometric mean of {len(rows)} cases of {matrices} "
                f"real matrices, {settings['threads']} threads, {settings['budget']:g} s to tune each (least "
                f"{min(ratios):.2f}, most {max(ratios):.1f})",
                "value": value,
                "unit": "x",
                "target": f">= {least:g}",
                "met": value >= least,
                "baseline": names[key],
                "command": command,
            }
        worst = min(min(value["ratio"] for value in row["against"].values()) for row in rows)
        yield {
            "id": f"tuning/3-{kind}-floor",
            "claim": f"tuned {kind} over the best of the three, the worst of {len(rows)} cases",
            "value": round(worst, 3),
            "unit": "x",
            "target": ">= 0.97",
            "met": round(worst, 3) >= 0.97,
            "command": command,
        }


def guided(record: Fields) -> Iterator[Fields]:
    """Searches that a model guides against a long one (line 4)."""
    rows = record["rows"]
    long = {(row["matrix"], row["problem"]): row for row in rows if not row["seed"]}
    summaries = summary(rows)
    for told in summaries:
        key = (told["method"], told["operator"])
        if not told["method"].startswith(GUIDED):
            continue
        plain = (told["method"].removeprefix(GUIDED), told["operator"])
        control = [each for each in summaries if (each["method"], each["operator"]) == plain]
        without = [f"; without a model {each['median']:.3f}, {each['searches']} searches" for each in control]
        some = [row for row in rows if row["seed"] and (row["method"], row["problem"].split(":")[0]) == key]
        share = max(row["measurements"] / long[row["matrix"], row["problem"]]["measurements"] for row in some)
        value = round(told["median"], 3)
        seeds = len({row["seed"] for row in some})
        yield {
            "id": f"tuning/4-{told['operator']}-{told['method']}",
            "claim": f"{told['operator']}: time of what {told['method']} search finds over what a search of "
            f"{record['settings']['long']} schedules does, with {share:.1%} of its measurements at most; "
            f"median over {told['problems']} matrices of medians over {seeds} seeds ({told['within']} of "
            f"{told['problems']} matrices within 5 %, worst {told['worst']:.2f}{''.join(without)})",
            "value": value,
            "unit": "x",
            "target": "<= 1.05",
            "met": value <= 1.05 and share <= 0.1,
            "baseline": f"{record['settings']['long_method']} search, {record['settings']['long']} schedules",
            "command": "python benchmarks/tuning/guided.py MATRICES --out RUN",
        }


_SHORT = {FULL: "full", PRETRAINED: "pretrained"}


def ranking(record: Fields) -> Iterator[Fields]:
    """Networks against boosted trees and a random pick; one for all operators against one each (line 5)."""
    seeds, operators = record["seeds"], list(record["pools"])
    common = {"command": f"{record['command']} --device cuda; record.py ranking RUN", "unit": "top-k score"}
    for operator in operators:
        for model in _SHORT:
            for rival, told in (("random", "a random pick"), (f"{BOOSTED}_{operator}", "boosted trees")):
                gains = {k: gain(record, operator, k, model, rival) for k in TOP}
                parts = [f"top-{k} {mean:+.3f} ({low:+.3f} to {high:+.3f})"
                         for k, (mean, low, high) in gains.items()]  # fmt: skip
                least = round(min(mean for mean, _, _ in gains.values()), 3)
                yield common | {
                    "id": f"tuning/5-{operator}-{_SHORT[model]}-{'random' if rival == 'random' else 'trees'}",
                    "claim": f"{operator}: top-k score of {model} less that of {told}, on the "
                    f"pools of matrices whose families were not learnt from, {seeds} trainings each: "
                    f"{', '.join(parts)}; the least",
                    "value": least,
                    "target": "> 0",
                    "met": least > 0,
                    "baseline": told,
                }
    for model in _SHORT:
        alone = "AutoSparseNet" if model == FULL else model
        gains = {name: gain(record, name, 1, model, f"{alone}_{name}") for name in operators}
        parts = [
            f"{name} {mean:+.3f} ({low:+.3f} to {high:+.3f})" for name, (mean, low, high) in gains.items()
        ]
        least = round(min(mean for mean, _, _ in gains.values()), 3)
        yield common | {
            "id": f"tuning/5-joint-{_SHORT[model]}",
            "claim": f"top-1 score of {model}, which learns all operators, less that of networks of one "
            f"operator each: {', '.join(parts)}; the least",
            "value": least,
            "target": ">= -0.01",
            "met": least >= -0.01,
            "baseline": "networks of one operator",
        }


def gain(record: Fields, operator: str, k: int, model: str, rival: str) -> tuple[float, float, float]:
    """How much higher a model's top-k score is than a rival's: the mean over matrices, and its interval.

    Scores of a matrix are means over trainings; `"random"` is the expected score of a random pick.
    """
    at = TOP.index(k)
    mine = record["rankings"][model][operator]
    if rival == "random":
        others = {name: [pool["random"]] for name, pool in record["pools"][operator].items()}
    else:
        others = record["rankings"][rival][operator]
    gains = [
        statistics.mean(row[at] for row in mine[name]) - statistics.mean(row[at] for row in others[name])
        for name in mine
    ]
    return statistics.mean(gains), *bootstrap_mean(gains)


def studied(folder: Path) -> tuple[Fields, Path]:
    """What `sparseflow tuning eval` left in a folder, with the scores of every ranking, put into results/.

    `"pools"` tells of an operator and matrix what does not depend on the model; `"rankings"` has, for a
    model, an operator and a matrix, a row for each seed: top-k scores, and the share of pairs in order.
    """
    pools: Fields = {}
    rankings: Fields = {}
    rows = sorted(read_study(folder), key=lambda row: row.seed)
    for row in rows:
        for one in row.judged:
            pools.setdefault(one.operator, {})[one.matrix] = {
                "known": one.known, "schedules": one.pool,
                "random": [round(one.random_top_k[k], 4) for k in TOP],
            }  # fmt: skip
            of_model = rankings.setdefault(row.entry, {}).setdefault(one.operator, {})
            of_model.setdefault(one.matrix, []).append(
                [round(value, 4) for value in (*(one.top_k[k] for k in TOP), one.pair_accuracy)]
            )
    told = json.loads((folder / SCORES).read_text(encoding="utf-8"))
    seeds = len({row.seed for row in rows})
    record = told | {"seeds": seeds, "top": TOP, "pools": pools, "rankings": rankings}
    del record["scores_known"]
    kept = RESULTS / "tuning" / "ranking.json"
    write_atomic(kept, json.dumps(record) + "\n")
    return record, kept


def embed(record: Fields) -> Iterator[Fields]:
    """Embedding a large pattern (line 6)."""
    cuda = record["environment"]["device"]["kind"] == "cuda"
    seconds = round(max(record["seconds"]), 3)
    where = "cuda" if cuda else "cpu"
    command = f"python benchmarks/tuning/embed.py --device {where} --out results/tuning/embed-{where}.json"
    on = "a GPU" if cuda else f"{record['threads']} CPU threads"
    yield {
        "id": f"tuning/6-embed-{where}",
        "claim": f"coarsening and embedding a pattern of {record['nnz']:,} elements on {on}, the slowest of "
        f"{len(record['seconds'])} times, the first among them",
        "value": seconds,
        "unit": "s",
        "target": "< 1" if cuda else "< 30",
        "met": seconds < (1 if cuda else 30),
        "command": command,
    }
    used = record["cuda_peak_bytes"] if cuda else record["peak_bytes_beyond_input"]
    yield {
        "id": f"tuning/6-memory-{where}",
        "claim": f"memory that this takes {'on the GPU' if cuda else 'beyond the coordinates themselves'}",
        "value": round(used / 1e9, 2),
        "unit": "GB",
        "target": "< 2",
        "met": used < 2e9,
        "command": command,
    }


def score(record: Fields) -> Iterator[Fields]:
    """Scoring candidates (line 6)."""
    cuda = record["environment"]["device"]["kind"] == "cuda"
    seconds = round(statistics.median(record["seconds"]), 4)
    encoded = f"{record['encode_seconds']:.2f} s"
    limit = 0.05 if cuda else 2.0
    where = "cuda" if cuda else "cpu"
    file = f"results/tuning/score-{where}.json"
    value = seconds if cuda else round(seconds + record["encode_seconds"], 3)
    yield {
        "id": f"tuning/6-score-{where}",
        "claim": f"scoring {record['schedules']:,} {record['operator']} schedules with a network of "
        f"{record['parameters']:,} weights, median of {len(record['seconds'])} times, "
        + (f"encoded before in {encoded}" if cuda else f"{encoded} of encoding included"),
        "value": value,
        "unit": "s",
        "target": f"< {limit:g}",
        "met": value < limit,
        "command": f"python benchmarks/tuning/score.py --device {where} --out {file}",
    }


KINDS = {
    "lines": lines, "equal": equal, "against": against, "guided": guided, "ranking": ranking, "embed": embed,
    "score": score,
}  # fmt: skip


def read(path: Path) -> tuple[Fields, Path]:
    """A record and its file; JSON lines, whose first holds the circumstances, are copied to results/."""
    if path.is_dir():
        return studied(path)
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return json.loads(text), path.resolve()
    head, *rows = (json.loads(line) for line in text.splitlines())
    record = head | {"rows": rows}
    kept = RESULTS / "tuning" / f"{path.stem}.json"
    write_atomic(kept, json.dumps(record) + "\n")
    return record, kept


if __name__ == "__main__":
    sys.exit(record_command(__doc__, RESULTS, KINDS, read=read))

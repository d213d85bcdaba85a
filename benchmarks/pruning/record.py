"""Put what the pruning benchmarks measured into ``results/pruning``: one claim a figure.

::

    PYTHONPATH=src python benchmarks/pruning/record.py throughput results/pruning/throughput-cuda.json
    PYTHONPATH=src python benchmarks/pruning/record.py comparison results/pruning/comparison.json
    PYTHONPATH=src python benchmarks/pruning/record.py checks results/pruning/checks.json
    PYTHONPATH=src python benchmarks/pruning/record.py decode results/pruning/decode-cpu.json
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparseflow.core.claims import record_command
from sparseflow.pruning.data.moving_digits import MovingDigits

RESULTS = Path(__file__).resolve().parents[2] / "results"

Fields = dict[str, Any]


def throughput(record: Fields) -> Iterator[Fields]:
    """Compact against dense (line 1)."""
    cuda = record["environment"]["device"]["kind"] == "cuda"
    where, told = "cuda" if cuda else "cpu", record["settings"]
    flags = [f"--{name} {told[name]}" for name in ("device", "dtype", "batch", "rounds", "keep", "stage")]
    flags += ["--compile"] if told["compile"] else []
    flags += [f"--threads {told['threads']}"] if told["threads"] else []
    command = (
        f"python benchmarks/pruning/throughput.py {' '.join(flags)} --rivals {' '.join(told['rivals'])} "
        f"--out results/pruning/throughput-{where}.json"
    )
    size = f"{told['depth']} blocks of width {told['dim']}, {told['frames']}x{told['size']}x{told['size']}"
    how = f"batch {told['batch']}, {told['dtype']}" + (", both compiled" if record["compiled"] else "")
    target = 1.8 if cuda else 1.6
    gflops = record["gflops"]

    def ratio(name: str) -> str:
        found = record["speedup"][name]
        return f"{found['median']:.2f}x ({found['low']:.2f} to {found['high']:.2f})"

    value = round(record["speedup"]["compact"]["median"], 3)
    rivals = [name for name in record["speedup"] if name.startswith("compact, ")]
    beside = ", ".join(f"{name.removeprefix('compact, ')} {ratio(name)}" for name in rivals)
    yield {
        "id": f"pruning/1-compact-{where}",
        "claim": f"throughput of a compact video transformer over the dense one ({size}; "
        f"{told['keep']:.0%} of tokens from block {told['stage']} on; {how}): {ratio('compact')}, "
        f"{gflops['dense'] / gflops['compact']:.2f}x fewer operations ({gflops['compact']:.0f} GFLOP a clip)"
        + (f"; rivals at as many tokens: {beside}" if beside else ""),
        "value": value,
        "unit": "x",
        "target": f">= {target:g}",
        "met": value >= target,
        "baseline": "the dense model",
        "command": command,
    }
    soft = round(record["speedup"]["soft masks"]["median"], 3)
    yield {
        "id": f"pruning/1-masks-{where}",
        "claim": f"the same with masks, which remove nothing: soft {ratio('soft masks')}, hard "
        f"{ratio('hard masks')}",
        "value": soft,
        "unit": "x",
        "target": None,
        "met": True,
        "baseline": "the dense model",
        "command": command,
    }
    share, how = record["score"]["share"], "what the score takes, as a share of the dense forward"
    if cuda:
        # On its own it is mostly launches, which come one after the other from an idle device.
        extra = [
            (mine - other) / dense
            for mine, other, dense in zip(
                *(record["times_ms"][name] for name in ("compact", "compact, uniform", "dense")), strict=True
            )
        ]
        how = (
            "what the score adds to a compact model, beyond one that keeps tokens evenly, as a share of the "
            f"dense forward (on its own, from an idle device, it takes {share:.1%} of it)"
        )
        share = statistics.median(extra)
    value = round(100.0 * share, 2)
    yield {
        "id": f"pruning/1-score-{where}",
        "claim": how,
        "value": value,
        "unit": "%",
        "target": "< 3",
        "met": value < 3.0,
        "baseline": "the dense model",
        "command": command,
    }


def comparison(record: Fields) -> Iterator[Fields]:
    """AST against its rivals, and against itself without its parts (line 2)."""
    models = {line["model"]: line for line in record["models"]}
    common = {"command": record["command"], "unit": "points"}

    def points(line: Fields, name: str) -> tuple[float, str]:
        mean, low, high = (100.0 * line[f"{name}{end}"] for end in ("", "_low", "_high"))
        return round(mean, 2), f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"

    dense, ast = models["dense"], models["ast"]
    lost, told = points(ast, "over_dense")
    yield common | {
        "id": "pruning/2-ast-dense",
        "claim": f"accuracy of AST on moving digits less that of the dense model ({dense['accuracy']:.2%}), "
        f"{ast['seeds']} seeds: {told} points",
        "value": lost,
        "target": ">= -0.5",
        "met": lost >= -0.5,
        "baseline": "the dense model",
    }
    for name, line in models.items():
        slug = "-".join(name.replace(",", "").split())
        if name == "one frame":
            chance = 100.0 / len(MovingDigits.classes)
            inside = 100.0 * line["accuracy_low"] <= chance <= 100.0 * line["accuracy_high"]
            yield common | {
                "id": f"pruning/2-{slug}",
                "claim": f"accuracy on clips that show their first frame over and over ("
                f"{100.0 * line['accuracy_low']:.2f} to {100.0 * line['accuracy_high']:.2f}); chance is "
                f"{chance:g}",
                "value": round(100.0 * line["accuracy"], 2),
                "target": "chance",
                "met": inside,
                "baseline": None,
            }
        elif name not in ("dense", "ast"):
            over, told = points(line, "over_ast")
            yield common | {
                "id": f"pruning/2-{slug}",
                "claim": f"accuracy with {name} less that with AST, at as many tokens, {line['seeds']} "
                f"seeds: {told} points ({line['accuracy']:.2%} against {ast['accuracy']:.2%})",
                "value": over,
                "target": None,
                "met": True,
                "baseline": "AST2.0-lite v2",
            }


def decode(record: Fields) -> Iterator[Fields]:
    """Decoding (line 3)."""
    rates = [record["frames"] / sample["seconds"] for sample in record["samples"][1:]]
    value = round(statistics.median(rates))
    yield {
        "id": "pruning/3-decode",
        "claim": f"frames of 320x240 decoded in a second, {len(record['files'])} generated .avi "
        f"files, {record['processes']} processes, {record['threads']} thread each; median of {len(rates)}, "
        f"the slowest {min(rates):.0f}",
        "value": value,
        "unit": "frames/s",
        "target": ">= 1500",
        "met": value >= 1500,
        "baseline": None,
        "command": "python benchmarks/pruning/decode.py --generate 20 --processes 2 --out "
        "results/pruning/decode-cpu.json",
    }


def checks(record: Fields) -> Iterator[Fields]:
    """The loader, going on after a kill, and gates (lines 3 to 5)."""
    claims = {
        "loader": (
            "3-loader",
            "tests of the loader on a generated tree of real .avi files in UCF-101's layout that pass: clips "
            "and frames by hand-computed cases, groups apart in all three splits, damaged and missing files",
        ),
        "resume": (
            "4-resume",
            "trainings killed by SIGKILL in mid-epoch that end with the weights and the history of an "
            "unbroken one, bit for bit on a CPU",
        ),
        "gates": (
            "5-gates",
            "tests of gates that pass: gradients against finite differences, and hard sparsity that never "
            "falls as the drive grows (0, 0.1, 1, 10, 100; for 0.3, 0.5 and 0.75 to keep)",
        ),
    }
    for name, (slug, claim) in claims.items():
        cases = record["lines"][name]
        passed = sum(case["outcome"] == "passed" for case in cases)
        yield {
            "id": f"pruning/{slug}",
            "claim": f"{claim}; of {len(cases)}",
            "value": passed,
            "unit": "trainings" if name == "resume" else "tests",
            "target": f">= {len(cases)}",
            "met": passed == len(cases) > 0,
            "baseline": None,
            "command": "python benchmarks/pruning/checks.py --out results/pruning/checks.json",
        }


KINDS = {"checks": checks, "throughput": throughput, "comparison": comparison, "decode": decode}


if __name__ == "__main__":
    sys.exit(record_command(__doc__, RESULTS, KINDS))

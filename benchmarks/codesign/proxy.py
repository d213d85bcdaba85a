r"""Prediction error of the hardware proxy on held-out layers.

::

    export PYTHONPATH=src:.
    python benchmarks/codesign/proxy.py --device cuda --points 720 --out results/codesign/proxy-cuda.json \
        --keep results/codesign/proxy-cuda.jsonl
    python benchmarks/codesign/proxy.py --device cpu --points 150 --threads 1 --tdp-w 65 \
        --out results/codesign/proxy-cpu.json --keep results/codesign/proxy-cpu.jsonl

Layers of all types are sampled from a grid and measured once per configuration; on a GPU as CUDA graphs, in
float32 (without TF32), bfloat16 and float16. Every configuration is predicted by a proxy that was fitted
without it, and by a roofline that was fitted to the same points. The record contains all points. Some
configurations are measured again at the end: the difference between two measurements limits every model.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from frame import finish_record, make_parser, start_record

from benchmarks.claims import Claim
from sparseflow.codesign.hardware.chips import read_library
from sparseflow.codesign.hardware.proxy import (
    DeviceSpec,
    LayerGrid,
    LayerPoint,
    cross_validate,
    fit_proxy,
    measure_device,
    read_points,
)
from sparseflow.codesign.hardware.proxy.profiling import ProfileConfig, profile_grid
from sparseflow.core.metrics import median_error
from sparseflow.core.timing import measure

TARGETS = {"median_error": 0.10, "spearman": 0.95}
LAYERS, DEVICES = 30, 8


def collected(args: argparse.Namespace, file: Path) -> tuple[list[LayerPoint], dict[str, Any]]:
    """Measure the points; return them and the conditions of the measurement."""
    cuda = args.device.startswith("cuda")
    precisions = tuple(args.precisions or (["float32", "bfloat16", "float16"] if cuda else ["float32"]))
    grid = LayerGrid(precisions=precisions) if cuda else LayerGrid.small(precisions)
    config = ProfileConfig(
        mode=args.mode or ("graph" if cuda else "eager"), repeats=args.repeats,
        power_every=args.power_every if cuda else 0,
    )  # fmt: skip
    since = time.monotonic()
    # An existing file determines the specification of the device, because measured ceilings vary.
    points = read_points(file, missing_ok=True).points
    spec = points[0].device if points else measure_device(args.device, tdp_w=args.tdp_w, idle_w=args.idle_w)
    ceilings_s = time.monotonic() - since
    shared = {"device": args.device, "grid": grid, "config": config, "seed": args.seed}

    def progress(message: str, fraction: float) -> None:
        print(f"{fraction:.0%}: {message}", file=sys.stderr)

    result = profile_grid(
        file, spec, num_points=args.points, budget_s=args.budget_s, progress=progress, **shared
    )
    elapsed_ms = {
        "ceilings_s": round(ceilings_s, 2),
        "points_s": round(time.monotonic() - since - ceilings_s, 2),
    }
    record = {
        "mode": config.mode,
        "precisions": precisions,
        "took": elapsed_ms,
        "device_spec": asdict(spec) | {"rates": dict(spec.rates)},
    }
    if args.retest:
        with tempfile.TemporaryDirectory() as scratch:
            repeated = profile_grid(Path(scratch) / "again.jsonl", spec, num_points=args.retest, **shared)
        record["retest_ms"] = [[a.lat_ms, b.lat_ms] for a, b in zip(result, repeated, strict=False)]
        record["retest_error"] = median_error(*zip(*record["retest_ms"], strict=True))
    return result, record


def table_ms(args: argparse.Namespace, proxy: Any, spec: DeviceSpec) -> float:
    """Measure the median time of a table of costs."""
    layers = [item.to_node(index) for index, item in enumerate(LayerGrid().sample(LAYERS, args.seed + 1))]
    chips = read_library().chips
    devices = [spec, *(chips[index % len(chips)] for index in range(DEVICES - 1))]
    return measure(lambda: proxy.predict_table(layers, devices), repeats=50).median_ms


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: hardware proxy on held-out layers."""
    scores, settings = record["held_out"], record["settings"]
    command = (
        f"python benchmarks/codesign/proxy.py --device {settings['device']} --points {settings['points']}"
    )
    details = {"layers": scores["configurations"], "precisions": ", ".join(record["precisions"])}
    error, roofline_error = 100.0 * scores["median_error"], 100.0 * scores["roofline_median_error"]
    yield Claim(
        id="codesign/5-error",
        claim=f"Median error of the proxy's latency on {scores['configurations']} held-out layers.",
        value=round(error, 2),
        unit="%",
        target="<= 10",
        command=command,
        details=details,
    )
    yield Claim(
        id="codesign/5-roofline",
        claim="Median error of the proxy over that of a roofline that is fitted to the same points.",
        value=round(error / roofline_error, 3),
        unit="x",
        target="< 1",
        baseline="a fitted roofline",
        command=command,
        details=details | {"roofline_error_percent": round(roofline_error, 2)},
    )
    yield Claim(
        id="codesign/5-rank",
        claim="Spearman rank correlation of predicted and measured latency on held-out layers.",
        value=round(scores["spearman"], 4),
        target=">= 0.95",
        baseline="a fitted roofline",
        command=command,
        details=details | {"roofline": round(scores["roofline_spearman"], 4)},
    )


def main() -> int:
    parser = make_parser(__doc__, required=True)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--points", type=int, default=150, help="layer configurations")
    parser.add_argument("--precisions", nargs="*", help="by default all three on a GPU, float32 on a CPU")
    parser.add_argument("--mode", choices=("eager", "graph"), help="by default graph on a GPU")
    parser.add_argument("--repeats", type=int, default=9, help="samples per configuration")
    parser.add_argument(
        "--power-every", type=int, default=16, help="on a GPU, measure power of one in this many layers"
    )
    parser.add_argument("--tdp-w", type=float, help="power at full load, W; by default the limit of a GPU")
    parser.add_argument("--idle-w", type=float, help="idle power, W; by default measured on a GPU")
    parser.add_argument(
        "--budget-s", type=float, default=math.inf, help="start no measurement after this time, s"
    )
    parser.add_argument("--retest", type=int, default=24, help="configurations to measure again")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--keep", type=Path, help="file of points; extended if it exists")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        points, values = collected(args, args.keep or Path(scratch) / "points.jsonl")
    since = time.monotonic()
    evaluation = cross_validate(points, num_folds=args.folds, seed=args.seed)
    proxy = fit_proxy(points, num_folds=0, seed=args.seed)
    values["took"]["fits_s"] = round(time.monotonic() - since, 2)
    summary = evaluation.summarize()
    met = summary["median_error"] <= TARGETS["median_error"] and summary["spearman"] >= TARGETS["spearman"]
    met = met and summary["median_error"] < summary["roofline_median_error"]
    record = {
        **start_record(args, device=args.device),
        **values,
        "held_out": summary,
        "met": met,
        "table_ms": table_ms(args, proxy, points[0].device),
        "table": [LAYERS, DEVICES],
        "points": [
            {
                "name": point.layer.name,
                "lat_ms": point.lat_ms,
                "predicted_ms": round(predicted, 6),
                "roofline_ms": round(roofline, 6),
                "mem_mb": round(point.mem_mb, 4),
                "power_w": point.power_w,
            }
            for point, predicted, roofline in zip(
                evaluation.points,
                evaluation.predicted_ms.tolist(),
                evaluation.roofline_ms.tolist(),
                strict=True,
            )
        ],
    }
    print(
        f"{summary['points']} points: median error {summary['median_error']:.1%} (roofline alone "
        f"{summary['roofline_median_error']:.1%}), Spearman {summary['spearman']:.4f} "
        f"({summary['roofline_spearman']:.4f}); memory {summary['mem_error']}, power {summary['power_error']}"
    )
    for groups in summary["by"].values():
        for name, result in groups.items():
            print(
                f"  {name:10s} {result['points']:4d}  {result['median_error']:6.1%} "
                f"({result['roofline_median_error']:.1%})  {result['spearman']:.4f}"
            )
    print(f"measured once more: median difference {values.get('retest_error', math.nan):.1%}")
    print(f"table of {LAYERS} x {DEVICES}: {record['table_ms']:.2f} ms; {values['took']}")
    return finish_record(args, record, [], make_claims)


if __name__ == "__main__":
    sys.exit(main())

"""Study of a device: export a zoo, extract its kernels and measure both, idle and under load.

::

    export PYTHONPATH=src
    python benchmarks/latency/study.py prepare --work runs/study --zoo benchmarks/latency/zoo-cpu.yaml
    python benchmarks/latency/study.py models  --work runs/study
    python benchmarks/latency/study.py kernels --work runs/study
    python benchmarks/latency/study.py load    --work runs/study --stressor cpu-fma

``--provider cuda`` studies a GPU (``zoo-cuda.yaml``; its models do not all fit in memory, see ``--keep``).
``models`` and ``kernels`` measure all of them without load, except for views, which have no work on a GPU and
are sampled. ``load`` measures a sample of the kernels and the models that match ``--loaded`` at each of
``--levels``. Collections are written to ``WORK/collections``; every step can be resumed. `evaluate.py` trains
on them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from sparseflow.core.parallel import map_unordered
from sparseflow.errors import SparseFlowError
from sparseflow.latency.graph import zoo
from sparseflow.latency.graph.extraction import extract, read_kernel
from sparseflow.latency.measure.collection import collect
from sparseflow.latency.measure.config import CollectionConfig
from sparseflow.latency.measure.fanout import fan_out
from sparseflow.latency.model.composition import VIEW_OPS

MAX_PER_NAME = 12
MAX_VIEWS = 12


def prepare_one(task: tuple[str, str, str, bool]) -> dict[str, Any]:
    """Export one case and extract its kernels; return the outcome."""
    work, case, provider, check = task
    folder = Path(work)
    outcome_path = folder / "prepared" / f"{case}.json"
    if outcome_path.is_file():
        return json.loads(outcome_path.read_text(encoding="utf-8"))
    start_s = time.monotonic()
    zoo_config = zoo.load_zoo_config(folder / "zoo.yaml")
    spec = next(c for c in zoo_config.list_cases() if c.name == case)
    only = {"batches": [spec.batch_size], "sizes": [spec.image_size]}
    case_config = zoo_config.model_copy(update={"models": [spec.spec.model_copy(update=only)], **only})
    exported = zoo.export_zoo(case_config, folder / "models", provider=provider)[0]
    row: dict[str, Any] = {"case": case, "problem": exported.problem}
    if exported.path is not None and exported.optimized_path is not None:
        try:
            results = extract(
                exported.path, folder / "graphs" / case, provider=provider, check=check, threads=1
            )
            row |= {
                "nodes": sum(r.nodes for r in results),
                "matched": sum(r.matched for r in results),
                "largest_relative_error": max((r.relative_error or 0.0 for r in results), default=None),
                "problems": [f"{r.kernel_id}: {r.problem}" for r in results if not r.ok][:5],
            }
        except SparseFlowError as error:
            row["problem"] = str(error)
        # No longer required, and as large as the model.
        exported.optimized_path.unlink(missing_ok=True)
        (folder / "graphs" / case / "optimized.onnx").unlink(missing_ok=True)
    row["seconds"] = round(time.monotonic() - start_s, 1)
    outcome_path.parent.mkdir(parents=True, exist_ok=True)
    outcome_path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return row


def prepare(args: argparse.Namespace) -> None:
    args.work.mkdir(parents=True, exist_ok=True)
    zoo_path = args.work / "zoo.yaml"
    zoo_path.write_text(args.zoo.read_text(encoding="utf-8"), encoding="utf-8")
    cases = [case.name for case in zoo.load_zoo_config(zoo_path).list_cases()]
    tasks = [(str(args.work), case, args.provider, args.check) for case in cases]
    for number, (_, row) in enumerate(map_unordered(prepare_one, tasks, workers=args.jobs), start=1):
        print(f"{number}/{len(cases)} {row}", flush=True)


def make_config(args: argparse.Namespace, **settings: Any) -> CollectionConfig:
    return CollectionConfig(provider=args.provider, threads=1, **settings)


def collect_into(args: argparse.Namespace, name: str, config: CollectionConfig) -> None:
    last_s = [0.0]

    def report(message: str, fraction: float) -> None:
        if time.monotonic() - last_s[0] > 15.0:
            last_s[0] = time.monotonic()
            print(f"{100 * fraction:5.1f} %  {message}", flush=True)

    print(collect(config, args.work / "collections" / name, progress=report).to_dict(), flush=True)


IDLE: dict[str, Any] = {
    "levels": [0.0], "min_time_s": 0.1, "max_time_s": 2.0, "max_samples": 200, "warmup": 3, "loops": 5,
}  # fmt: skip


def measure_models(args: argparse.Namespace) -> None:
    paths = sorted((args.work / "models").glob("*.onnx"))
    rounds = args.rounds or 6
    keep = len(paths) if args.keep is None else args.keep
    collect_into(args, "models", make_config(args, models=paths, rounds=rounds, keep=keep, **IDLE))


def measure_kernels(args: argparse.Namespace) -> None:
    paths = {p.name: p for p in sorted((args.work / "graphs").glob("*/kernels/*.onnx"))}
    views: list[Path] = []
    if args.provider == "cuda":
        views = [path for path in paths.values() if read_kernel(path).node_op in VIEW_OPS]
    excluded = set(views) - set(random.Random(0).sample(views, min(MAX_VIEWS, len(views))))
    selected = [path for path in paths.values() if path not in excluded]
    settings = make_config(args, kernels=selected, rounds=args.rounds or 2, **IDLE)
    if args.gpus is None:
        collect_into(args, "kernels", settings)
        return
    for part in fan_out(settings, args.work / "collections", gpus=args.gpus):
        print(part.to_dict(), flush=True)


def measure_load(args: argparse.Namespace) -> None:
    selected = sample_kernels(args.work / "graphs", args.loaded, args.kernels)
    selected_models = sorted(
        {path for pattern in args.loaded for path in (args.work / "models").glob(pattern)}
    )
    collect_into(
        args,
        args.stressor or "load",
        make_config(
            args, kernels=selected, models=selected_models, levels=args.levels,
            rounds=args.rounds or 3, warmup=3, loops=10, min_time_s=args.seconds, max_time_s=2.5,
            keep=args.kernels + len(selected_models), copies=0,
            **({} if args.stressor is None else {"stressor": args.stressor}),
        ),
    )  # fmt: skip


def sample_kernels(graphs: Path, patterns: list[str], count: int) -> list[Path]:
    """Sample kernels of the measured models, at most a few of each name; deterministic."""
    globs = [f"{Path(pattern).stem}/kernels/*.onnx" for pattern in patterns]
    paths = {p.name: p for glob in globs for p in sorted(graphs.glob(glob))}
    by_name: dict[str, list[Path]] = {}
    for path in paths.values():
        by_name.setdefault(read_kernel(path).op, []).append(path)
    generator = random.Random(0)
    pool = [p for paths in by_name.values() for p in generator.sample(paths, min(MAX_PER_NAME, len(paths)))]
    return sorted(generator.sample(pool, min(count, len(pool))))


PARTS = {"prepare": prepare, "models": measure_models, "kernels": measure_kernels, "load": measure_load}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--work", type=Path, required=True, help="directory of the study")
    parser.add_argument("--zoo", type=Path, help="YAML file of the networks (prepare)")
    parser.add_argument("--provider", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--jobs", type=int, default=1, help="export processes (prepare)")
    parser.add_argument("--check", action="store_true", help="compare each node with the graph (prepare)")
    parser.add_argument(
        "--rounds",
        type=int,
        help="measurements of each target at each level; default: 6 of models, 2 of kernels, 3 under load",
    )
    parser.add_argument("--keep", type=int, help="models that stay loaded between rounds; default: all")
    parser.add_argument("--stressor", help="kind of load; by default cpu-fma or gpu-matmul")
    parser.add_argument("--gpus", type=int, nargs="+", help="GPUs that measure the kernels, one part each")
    parser.add_argument("--levels", type=float, nargs="+", default=[0.0, 0.3, 0.6, 0.9])
    parser.add_argument("--loaded", nargs="+", default=["*_b1_224.onnx"], help="models to measure under load")
    parser.add_argument("--kernels", type=int, default=80, help="kernels to measure under load")
    parser.add_argument("--seconds", type=float, default=0.5, help="minimum time of a measurement under load")
    args = parser.parse_args()
    PARTS[args.part](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A device's study: a zoo exported, every kernel extracted, all of it measured at rest and beside loads.

::

    export PYTHONPATH=src
    python benchmarks/latency/study.py prepare --work runs/study --zoo benchmarks/latency/zoo-cpu.yaml
    python benchmarks/latency/study.py models  --work runs/study
    python benchmarks/latency/study.py kernels --work runs/study
    python benchmarks/latency/study.py load    --work runs/study --stressor cpu-fma

``--provider cuda`` studies a GPU (``zoo-cuda.yaml``, whose models do not all stay in its memory: see
``--keep``). ``models`` and ``kernels`` measure all of them without a load, but for views, of which a GPU
does nothing, only a few; ``load`` a sample of the kernels and the models that ``--loaded`` matches at each
of ``--levels``. Collections land in ``WORK/collections``; whatever is stopped goes on where it was.
`judge.py` beside this learns from them.
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
from sparseflow.latency import zoo
from sparseflow.latency.campaign import Config
from sparseflow.latency.collect import collect
from sparseflow.latency.compose import VIEWS
from sparseflow.latency.extract import extract, read_kernel
from sparseflow.latency.fanout import fan_out

FEW_A_NAME = 12
FEW_VIEWS = 12


def prepare_one(task: tuple[str, str, str, bool]) -> dict[str, Any]:
    """Export one case and extract its kernels; gives what came of it."""
    work, case, provider, check = task
    folder = Path(work)
    done = folder / "prepared" / f"{case}.json"
    if done.is_file():
        return json.loads(done.read_text(encoding="utf-8"))
    begun = time.monotonic()
    whole = zoo.load_config(folder / "zoo.yaml")
    spec = next(c for c in whole.cases() if c.name == case)
    only = {"batches": [spec.batch], "sizes": [spec.size]}
    one = whole.model_copy(update={"models": [spec.spec.model_copy(update=only)], **only})
    exported = zoo.export(one, folder / "models", provider=provider)[0]
    row: dict[str, Any] = {"case": case, "problem": exported.problem}
    if exported.path is not None and exported.optimised_path is not None:
        try:
            found = extract(
                exported.path, folder / "graphs" / case, provider=provider, check=check, threads=1
            )
            row |= {
                "nodes": sum(r.nodes for r in found),
                "matched": sum(r.matched for r in found),
                "largest_relative_error": max((r.relative_error or 0.0 for r in found), default=None),
                "problems": [f"{r.kernel_id}: {r.problem}" for r in found if not r.ok][:5],
            }
        except SparseFlowError as error:
            row["problem"] = str(error)
        # Not needed any more, and as large as the model.
        exported.optimised_path.unlink(missing_ok=True)
        (folder / "graphs" / case / "optimised.onnx").unlink(missing_ok=True)
    row["seconds"] = round(time.monotonic() - begun, 1)
    done.parent.mkdir(parents=True, exist_ok=True)
    done.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return row


def prepare(asked: argparse.Namespace) -> None:
    asked.work.mkdir(parents=True, exist_ok=True)
    kept = asked.work / "zoo.yaml"
    kept.write_text(asked.zoo.read_text(encoding="utf-8"), encoding="utf-8")
    cases = [case.name for case in zoo.load_config(kept).cases()]
    tasks = [(str(asked.work), case, asked.provider, asked.check) for case in cases]
    for number, (_, row) in enumerate(map_unordered(prepare_one, tasks, workers=asked.jobs), start=1):
        print(f"{number}/{len(cases)} {row}", flush=True)


def config(asked: argparse.Namespace, **settings: Any) -> Config:
    return Config(provider=asked.provider, threads=1, **settings)


def gather(asked: argparse.Namespace, name: str, settings: Config) -> None:
    last = [0.0]

    def tell(what: str, fraction: float) -> None:
        if time.monotonic() - last[0] > 15.0:
            last[0] = time.monotonic()
            print(f"{100 * fraction:5.1f} %  {what}", flush=True)

    print(collect(settings, asked.work / "collections" / name, progress=tell).to_dict(), flush=True)


AT_REST: dict[str, Any] = {
    "levels": [0.0], "min_time_s": 0.1, "max_time_s": 2.0, "max_samples": 200, "warmup": 3, "loops": 5,
}  # fmt: skip


def models(asked: argparse.Namespace) -> None:
    found = sorted((asked.work / "models").glob("*.onnx"))
    rounds = asked.rounds or 6
    keep = len(found) if asked.keep is None else asked.keep
    gather(asked, "models", config(asked, models=found, rounds=rounds, keep=keep, **AT_REST))


def kernels(asked: argparse.Namespace) -> None:
    found = {p.name: p for p in sorted((asked.work / "graphs").glob("*/kernels/*.onnx"))}
    views: list[Path] = []
    if asked.provider == "cuda":
        views = [path for path in found.values() if read_kernel(path).node_op in VIEWS]
    spared = set(views) - set(random.Random(0).sample(views, min(FEW_VIEWS, len(views))))
    chosen = [path for path in found.values() if path not in spared]
    settings = config(asked, kernels=chosen, rounds=asked.rounds or 2, **AT_REST)
    if asked.gpus is None:
        gather(asked, "kernels", settings)
        return
    for part in fan_out(settings, asked.work / "collections", gpus=asked.gpus):
        print(part.to_dict(), flush=True)


def load(asked: argparse.Namespace) -> None:
    chosen = sample(asked.work / "graphs", asked.loaded, asked.kernels)
    chosen_models = sorted(
        {path for pattern in asked.loaded for path in (asked.work / "models").glob(pattern)}
    )
    gather(
        asked,
        asked.stressor or "load",
        config(
            asked, kernels=chosen, models=chosen_models, levels=asked.levels,
            rounds=asked.rounds or 3, warmup=3, loops=10, min_time_s=asked.seconds, max_time_s=2.5,
            keep=asked.kernels + len(chosen_models), copies=0,
            **({} if asked.stressor is None else {"stressor": asked.stressor}),
        ),
    )  # fmt: skip


def sample(graphs: Path, patterns: list[str], count: int) -> list[Path]:
    """Kernels of the models that are measured, a few of each name at most, drawn the same way every time."""
    globs = [f"{Path(pattern).stem}/kernels/*.onnx" for pattern in patterns]
    found = {p.name: p for glob in globs for p in sorted(graphs.glob(glob))}
    by_name: dict[str, list[Path]] = {}
    for path in found.values():
        by_name.setdefault(read_kernel(path).op, []).append(path)
    generator = random.Random(0)
    pool = [p for paths in by_name.values() for p in generator.sample(paths, min(FEW_A_NAME, len(paths)))]
    return sorted(generator.sample(pool, min(count, len(pool))))


PARTS = {"prepare": prepare, "models": models, "kernels": kernels, "load": load}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--work", type=Path, required=True, help="folder of the study")
    parser.add_argument("--zoo", type=Path, help="YAML file of the networks (prepare)")
    parser.add_argument("--provider", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--jobs", type=int, default=1, help="processes that export (prepare)")
    parser.add_argument("--check", action="store_true", help="compare every node with the graph (prepare)")
    parser.add_argument(
        "--rounds", type=int, help="visits to each item and level: 6 to models, 2 to kernels and 3 at loads"
    )
    parser.add_argument("--keep", type=int, help="models that stay loaded from round to round; all of them")
    parser.add_argument("--stressor", help="kind of load; by default cpu-fma or gpu-matmul")
    parser.add_argument("--gpus", type=int, nargs="+", help="GPUs that share the kernels, a part each")
    parser.add_argument("--levels", type=float, nargs="+", default=[0.0, 0.3, 0.6, 0.9])
    parser.add_argument(
        "--loaded", nargs="+", default=["*_b1_224.onnx"], help="models to measure beside loads"
    )
    parser.add_argument("--kernels", type=int, default=80, help="kernels to measure beside loads")
    parser.add_argument("--seconds", type=float, default=0.5, help="least time of a measurement beside loads")
    asked = parser.parse_args()
    PARTS[asked.part](asked)
    return 0


if __name__ == "__main__":
    sys.exit(main())

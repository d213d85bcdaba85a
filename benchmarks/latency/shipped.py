"""Train the predictor of this machine that the package ships.

::

    export PYTHONPATH=src:.
    python benchmarks/latency/shipped.py --work runs/shipped
    python benchmarks/latency/shipped.py --work runs/shipped-cuda --provider cuda --synthetic-kernels 1000

Exports a small zoo, writes the training blocks, extracts the kernels of both, measures them and synthetic
kernels of all operators in about half an hour, and writes `src/sparseflow/latency/data/NAME.json`.
Every step resumes. ``--collections`` limits a run to some of the measurements, without training, so that two
GPUs of one machine share the work.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparseflow.latency.graph.extraction import extract
from sparseflow.latency.graph.synthetic_kernels import SyntheticKernelsConfig
from sparseflow.latency.graph.zoo import ZooConfig, export_zoo
from sparseflow.latency.measure.blocks import list_blocks, list_training_blocks
from sparseflow.latency.measure.collection import collect
from sparseflow.latency.measure.config import CollectionConfig
from sparseflow.latency.measure.peaks import measure_peaks
from sparseflow.latency.model.kernel_regressor import RATIO
from sparseflow.latency.model.predictor import SHIPPED
from sparseflow.latency.model.training import train

DATA = Path(__file__).resolve().parents[2] / "src" / "sparseflow" / "latency" / "data"

NETWORKS = (
    "resnet18",
    "mobilenet_v2",
    "efficientnet_b0",
    "vit_tiny",
    "convnext_tiny",
    "swin_tiny",
    "regnet_y_4gf",
)
SYNTHETIC_KERNELS = 2500
"""More than `quickstart` measures: errors still decrease with this number."""

SYNTHETIC = "synthetic"
COLLECTIONS = ("models", "kernels", SYNTHETIC)

SIZES = {"vit_tiny": [160, 224], "resnet18": [160, 224], "mobilenet_v2": [160, 224]}


def prepare(work: Path, provider: str) -> tuple[list[Path], list[Path]]:
    """Write the models and their kernels; return the files and the directories of kernels."""
    zoo = ZooConfig.model_validate(
        {"models": [{"name": name, "sizes": SIZES.get(name, [224])} for name in NETWORKS]}
    )
    exports = export_zoo(zoo, work / "models", provider=provider)
    models = [result.path for result in exports if result.path is not None]
    models += [block.write(work / "blocks") for block in (*list_blocks(), *list_training_blocks())]
    folders = []
    for model in models:
        folder = work / "graphs" / model.stem
        if not (folder / "kernels").is_dir():
            extract(model, folder, provider=provider, check=False, threads=1)
        folders.append(folder)
    return models, folders


def measure(work: Path, provider: str, names: Sequence[str], synthetic_kernels: int) -> list[Path]:
    """Make the named collections, without load; return their directories."""
    common: dict[str, Any] = {
        "provider": provider, "levels": [0.0], "min_time_s": 0.1, "max_time_s": 1.0, "max_samples": 200,
        "warmup": 3, "loops": 5,
    }  # fmt: skip
    configs = {}
    if SYNTHETIC in names:
        synthetic = SyntheticKernelsConfig(kernels=synthetic_kernels)
        configs[SYNTHETIC] = CollectionConfig(synthetic=synthetic, rounds=1, **common)
    if set(names) - {SYNTHETIC}:
        models, folders = prepare(work, provider)
        # Composition and intervals come from the few networks, so they are measured more often.
        configs["models"] = CollectionConfig(models=models, rounds=5, **common)
        rounds = 2 if provider == "cpu" else 1  # a GPU runs many copies of a kernel in each round
        configs["kernels"] = CollectionConfig(kernels=folders, rounds=rounds, **common)
    last_s = time.monotonic()

    def report(message: str, fraction: float) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > 15.0:
            last_s = time.monotonic()
            print(f"{100 * fraction:5.1f} %  {message}", flush=True)

    for name in names:
        print(collect(configs[name], work / "collections" / name, progress=report).to_dict(), flush=True)
    return [work / "collections" / name for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="directory of models and measurements")
    parser.add_argument("--provider", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--synthetic-kernels", type=int, default=SYNTHETIC_KERNELS, metavar="N")
    parser.add_argument("--collections", nargs="+", choices=COLLECTIONS, metavar="NAME")
    args = parser.parse_args()
    paths = measure(args.work, args.provider, args.collections or COLLECTIONS, args.synthetic_kernels)
    if args.collections:
        return 0
    predictor = train(paths, kind=RATIO)
    fingerprint = predictor.fingerprint
    predictor = predictor.model_copy(update={"origin": SHIPPED, "peaks": measure_peaks(fingerprint.provider)})
    name = "-".join(re.findall("[a-z0-9]+", f"{fingerprint.kind} {fingerprint.name}".lower()))
    path = predictor.save(DATA / f"{name}.json")
    print(json.dumps(predictor.quality), flush=True)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

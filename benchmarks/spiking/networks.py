"""Whole networks on a GPU against their strongest dense form, with the numerics beside the times.

::

    PYTHONPATH=src python benchmarks/spiking/networks.py --out networks.json --case spiking_resnet18:4:32 \\
        --trained runs/train/spk_w64 --test cifar10-test.tar.gz

A case is ``model:T:batch`` or ``model:T:batch:image``, a model being a name of
``sparseflow.spiking.catalog``; ``--trained`` adds a network that ``train_cifar10.py`` wrote, on real images.
Every case runs in fp16 groups, or with ``--exact`` in float32 ones. Results are written after each case; one
that fails is recorded.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sparseflow.core.files import write_atomic
from sparseflow.spiking import catalog
from sparseflow.spiking.baselines import OUR_DENSE, from_rest
from sparseflow.spiking.bench import OPTIMISED, bench
from sparseflow.spiking.optimize import accelerated, layer_times, optimize


def trained(run: Path, test: Path, images: int) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A trained network, test images in random order, and their labels."""
    from cifar10 import load_archive
    from safetensors.torch import load_file
    from train_cifar10 import MEAN, STD

    from sparseflow.spiking.networks import spiking_resnet

    network = json.loads((run / "metrics.json").read_text())["network"]
    net = spiking_resnet(
        network["depth"], width=network["width"], T=network["T"], residual=network["residual"]
    )
    net.load_state_dict(load_file(run / "weights.safetensors"))
    found = load_archive(test)
    # The archive is sorted by class.
    chosen = torch.randperm(len(found.labels), generator=torch.Generator().manual_seed(0))[:images].numpy()
    pixels = torch.from_numpy(found.images[chosen]).float() / 255
    mean, std = torch.tensor(MEAN).view(1, 3, 1, 1), torch.tensor(STD).view(1, 3, 1, 1)
    return net.eval(), (pixels - mean) / std, torch.from_numpy(found.labels[chosen]).long()


def numerics(model: torch.nn.Module, x: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """Error of the optimised network's logits, and of eager's in the same dtype, against float64."""
    scale = reference.norm()
    return {"error_optimised": ((from_rest(model)(x).double() - reference).norm() / scale).item()}


def peaks(model: torch.nn.Module, x: torch.Tensor, dtype: torch.dtype | None) -> tuple[int, int]:
    """Peak bytes of a run with everything that the network holds: as it is, and optimised."""
    gc.collect()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated(x.device)
    twin = copy.deepcopy(model)

    def peak() -> int:
        from_rest(twin)(x)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(x.device)
        from_rest(twin)(x)
        return torch.cuda.max_memory_allocated(x.device) - base

    dense = peak()
    optimize(twin, x, dtype=dtype, cache=False)
    return dense, peak()


def accuracy(model: torch.nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Fraction right over all batches, each from rest."""
    forward = from_rest(model)
    hits = [(forward(x).argmax(-1) == labels).float().mean().item() for x, labels in batches]
    return sum(hits) / len(hits)


def measure(
    name: str, model: torch.nn.Module, x: torch.Tensor, labels: torch.Tensor | None,
    dtype: torch.dtype | None, args: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """One case: times, agreement, memory and where the time goes."""
    device = torch.device("cuda", args.gpu)
    model, x = model.to(device), x.to(device)
    batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    if labels is not None:
        labels = labels.to(device)
        batches = list(zip(x.split(args.batch), labels.split(args.batch), strict=True))
        x, labels = batches[0]
    before = accuracy(model, batches) if batches else None
    double = from_rest(copy.deepcopy(model).double())(x.double())
    eager = from_rest(model)(x).double()
    dense_peak, optimised_peak = peaks(model, x, dtype)
    begun = time.monotonic()
    result = bench(
        model, x, labels=labels, dtype=dtype, rounds=args.rounds, compiled=args.compiled, cache=False
    )
    row = result.to_dict()
    row |= {
        "case": name,
        "dtype": str(dtype),
        "seconds": time.monotonic() - begun,
        "samples": {k: list(v) for k, v in result.comparison.times_ms.items()},
        "images_for_accuracy": sum(len(b) for b, _ in batches),
        "accuracy_before": before,
        "accuracy_after": accuracy(model, batches) if batches else None,
        "error_eager": ((eager - double).norm() / double.norm()).item(),
        **numerics(model, x, double),
        "memory_eager_bytes": dense_peak,
        "memory_optimised_bytes": optimised_peak,
        "whole": accelerated(model).whole.model_dump(),  # type: ignore[union-attr]
        "decisions": {k: v.model_dump() for k, v in accelerated(model).decisions.items()},
        "layer_ms": layer_times(model, x),
    }
    return row


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    if "error" in row:
        return f"{row['case']:34} FAILED {row['error'][:150]}"
    ms, base = row["latency_ms"], row["baseline"]
    speed, eager = row["speedup"], row["speedup_eager"]
    ways = [d["way"] for d in row["decisions"].values()]
    return (
        f"{row['case']:34} {row['dtype'][6:]:8} {ms['eager']:8.3f} {ms[base]:8.3f} {ms[OPTIMISED]:8.3f} ms "
        f"{speed['median']:5.2f}x ({speed['low']:.2f}-{speed['high']:.2f}) eager {eager['median']:6.2f}x "
        f"top1 {row['top1_agreement']:.3f} sparse {ways.count('sparse')}/{len(ways)} {row['whole']['way']} "
        f"[{base}] ours dense {ms.get(OUR_DENSE, float('nan')):.3f} "
        f"acc {row['accuracy_before']} {row['accuracy_after']} "
        f"mem {row['memory_eager_bytes'] / 2**20:.0f}->{row['memory_optimised_bytes'] / 2**20:.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--case", action="append", default=[], help="model:T:batch[:image]")
    parser.add_argument("--trained", type=Path, action="append", default=[])
    parser.add_argument("--test", type=Path)
    parser.add_argument("--batch", type=int, default=32, help="of trained networks")
    parser.add_argument("--images", type=int, default=2048, help="test images for a trained one's accuracy")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--compiled", action="store_true", help="let the dense side use torch.compile too")
    parser.add_argument("--exact", action="store_true", help="keep float32 accuracy instead of fp16")
    parser.add_argument("--time-limit-s", type=float, default=500.0, help="start no case after this long")
    args = parser.parse_args()
    torch.cuda.set_device(args.gpu)
    torch.backends.cudnn.benchmark = True
    begun = time.monotonic()
    jobs: list[tuple[str, Any]] = []
    for run in args.trained:
        jobs.append((run.name, lambda run=run: trained(run, args.test, args.images)))
    for text in args.case:
        model, steps, batch, *image = text.split(":")
        settings = catalog.Settings(steps=int(steps), image=int(image[0]) if image else 32)
        case = catalog.Case(model=model, settings=settings, batch=int(batch))
        jobs.append((text, case.build))
    rows: list[dict[str, Any]] = []
    for name, build in jobs:
        for dtype in (None,) if args.exact else (torch.float16,):
            if time.monotonic() - begun > args.time_limit_s:
                rows.append({"case": name, "error": "not started: the time limit was reached"})
                continue
            try:
                model, x, labels = build()
                rows.append(measure(name, model, x, labels, dtype, args))
            except Exception as error:
                # The other cases go on; what failed stands in the results.
                traceback.print_exc(limit=-6)
                rows.append({"case": name, "error": f"{type(error).__name__}: {error}"})
            print(line(rows[-1]), flush=True)
            facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "argv": sys.argv[1:]}
            write_atomic(args.out, json.dumps({**facts, "rows": rows}, default=asdict))


if __name__ == "__main__":
    main()

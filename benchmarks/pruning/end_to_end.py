r"""Clips per second from video files to class scores, of a dense and of pruned models.

::

    export PYTHONPATH=src:.
    python benchmarks/pruning/end_to_end.py clips/*.mp4 --dense runs/all/dense/seed-0/model.safetensors \
        --pruned runs/all/ast-0.3/seed-0/model.safetensors --out results/pruning/end-to-end-cpu.json

Each call reads clips at random positions of the files, crops and normalizes them as in a test, and computes
the class scores with a compact model. Threads decode the next batches meanwhile. All models get the same
clips; calls are interleaved. Decoding without a model is timed, too. `sparseflow pruning compare` writes the
models and their accuracy.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.claims import Claim, record_claims, slugify
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic
from sparseflow.core.timing import compare
from sparseflow.errors import InputError
from sparseflow.pruning import VideoViT, compact
from sparseflow.pruning.compaction.flops import count_flops
from sparseflow.pruning.compaction.saved_model import load_model
from sparseflow.pruning.data.sampling import center_crop, normalize_clip
from sparseflow.pruning.data.video import open_video

DENSE, DECODING = "dense", "decoding"
PREFETCH = 2
"""Batches that are decoded ahead."""

Position = tuple[Path, int, int]
"""File, its number of frames, and the first frame of a clip."""


def sample_positions(files: Sequence[Path], count: int, num_frames: int, seed: int) -> list[Position]:
    """Sample clips of consecutive frames."""
    generator = np.random.default_rng(seed)
    frames = {path: open_video(path).frames for path in files}
    long = [path for path in files if frames[path] >= num_frames]
    if not long:
        raise InputError(f"no file has the {num_frames} frames of a clip")
    paths = [long[generator.integers(len(long))] for _ in range(count)]
    return [(path, frames[path], int(generator.integers(frames[path] - num_frames + 1))) for path in paths]


def read_clip(position: Position, num_frames: int, size: int) -> Tensor:
    """Decode, crop and normalize a clip."""
    path, frames, first = position
    pixels = open_video(path, frames=frames).read(range(first, first + num_frames))
    return normalize_clip(center_crop(pixels, size))


def read_batches(
    pool: ThreadPoolExecutor,
    positions: Sequence[Position],
    batch_size: int,
    read: Callable[[Position], Tensor],
) -> Iterator[Tensor]:
    """Yield batches in order, while threads decode the next ones."""
    pending: deque[list[Future[Tensor]]] = deque()
    starts = iter(range(0, len(positions), batch_size))
    while True:
        while len(pending) <= PREFETCH and (start := next(starts, None)) is not None:
            pending.append([pool.submit(read, clip) for clip in positions[start : start + batch_size]])
        if not pending:
            return
        yield torch.stack([future.result() for future in pending.popleft()])


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: each pruned model over the dense one, from file to class scores."""
    settings, device = record["settings"], record["environment"]["device"]["kind"]
    for name, speedup in record["speedup"].items():
        if name in (DENSE, DECODING):
            continue
        yield Claim(
            id=f"pruning/5-end-to-end-{slugify(name)}-{device}",
            claim=f"Clips per second from video files to class scores of '{name}' over the dense model, "
            f"batch {settings['batch']}.",
            value=round(speedup["median"], 3),
            unit="x",
            target=">= 2",
            baseline="the dense model",
            command=record["command"],
            details={
                "low": round(speedup["low"], 3),
                "high": round(speedup["high"], 3),
                "clips_per_s": round(record["clips_per_s"][name], 2),
                "decoding_clips_per_s": round(record["clips_per_s"][DECODING], 2),
                "flop_reduction": round(record["gflops"][DENSE] / record["gflops"][name], 3),
            },
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="videos")
    parser.add_argument("--dense", type=Path, required=True, help="dense model")
    parser.add_argument("--pruned", nargs="+", type=Path, required=True, help="models that prune")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--compile", action="store_true", help="compile every model")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--clips", type=int, default=8, help="clips of a call")
    parser.add_argument("--threads", type=int, default=2, help="threads that decode")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    models: dict[str, VideoViT] = {DENSE: load_model(args.dense)}
    # A comparison stores a model as NAME/seed-N/model.safetensors.
    models |= {path.parts[-3]: compact(load_model(path)) for path in args.pruned}
    config = models[DENSE].config
    positions = sample_positions(args.files, args.clips, config.num_frames, args.seed)
    read = partial(read_clip, num_frames=config.num_frames, size=config.img_size)
    with ThreadPoolExecutor(args.threads) as pool:

        def run(model: Any | None) -> None:
            for batch in read_batches(pool, positions, args.batch, read):
                if model is not None:
                    with torch.inference_mode():
                        model(batch.to(args.device, dtype)).cpu()

        runners: dict[str, Any] = {
            name: model.to(args.device, dtype).eval() for name, model in models.items()
        }
        if args.compile:
            runners = {name: torch.compile(model, fullgraph=True) for name, model in runners.items()}
        calls = {name: partial(run, model) for name, model in {**runners, DECODING: None}.items()}
        comparison = compare(calls, rounds=args.rounds, baseline=DENSE, device=args.device, seed=args.seed)
    settings = {
        name: getattr(args, name)
        for name in ("device", "dtype", "compile", "batch", "clips", "threads", "rounds", "seed")
    }
    record = {
        "environment": collect_environment(args.device, seed=args.seed),
        "command": "python benchmarks/pruning/end_to_end.py FILES --dense MODEL --pruned MODELS",
        "settings": settings | {"files": [path.name for path in args.files]},
        "gflops": {name: round(count_flops(model)["total"] / 1e9, 3) for name, model in models.items()},
        "clips_per_s": {name: args.clips * 1e3 / comparison.samples(name).median_ms for name in calls},
        "speedup": {name: vars(comparison.speedup(name)) for name in calls},
        "times_ms": dict(comparison.times_ms),
        "order": comparison.order,
    }
    for name in calls:
        speedup = comparison.speedup(name)
        print(
            f"{name:20s} {record['clips_per_s'][name]:9.2f} clips/s  {speedup.median:.2f}x "
            f"({speedup.low:.2f} to {speedup.high:.2f})"
        )
    if args.out:
        write_atomic(args.out, json.dumps(record) + "\n")
        record_claims(make_claims(record), record, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

r"""Throughput of a video transformer: dense, with soft and hard masks, and compact.

::

    export PYTHONPATH=src:.
    python benchmarks/pruning/throughput.py --device cuda --dtype bfloat16 --batch 32 --compile \
        --out results/pruning/throughput-cuda.json
    python benchmarks/pruning/throughput.py --batch 1 --rounds 7 --threads 2 \
        --out results/pruning/throughput-cpu.json

All candidates have the same random weights and clips and are timed interleaved. The baseline selectors are
compact models with the same number of tokens. The score is also timed separately, on the features of its
stage, interleaved with the dense model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.claims import Claim, record_claims
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic
from sparseflow.core.timing import compare
from sparseflow.pruning import VideoViT, compact
from sparseflow.pruning.compaction.flops import count_flops
from sparseflow.pruning.evaluation.profile import DENSE, VideoViTProfile, make_dense, profile_video_vit
from sparseflow.pruning.model.config import SELECTORS
from sparseflow.pruning.selectors.ast import ScoreConfig

TOLERANCE = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.01}
"""Largest relative difference between the compact and the masked model."""


def build_model(args: argparse.Namespace, selector: str) -> VideoViT:
    """Build a model with reproducible random weights, ViT-B by default."""
    torch.manual_seed(args.seed)
    return VideoViT(
        args.size, args.frames, 101, args.dim, args.depth, args.heads, 4, 16,
        use_ast_prune=True, ast_cfg={"selector": selector, "stages": {args.stage: args.keep}},
    ).eval()  # fmt: skip


def time_score(args: argparse.Namespace, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Time the score and the dense model, interleaved."""
    model = build_model(args, "ast").to(device, dtype)
    config = model.config
    assert model.score is not None
    clips = torch.randn(args.batch, config.num_frames, 3, args.size, args.size, device=device, dtype=dtype)
    t, h, w = config.grid
    features = torch.randn(args.batch, t, h * w, config.embed_dim, device=device, dtype=dtype)
    dense_model, score = make_dense(model), model.score
    if args.compile:
        dense_model.compile(fullgraph=True)
        score.compile(fullgraph=True)

    def run(module: torch.nn.Module, value: torch.Tensor) -> None:
        with torch.no_grad():
            module(value)

    comparison = compare(
        {DENSE: lambda: run(dense_model, clips), "score": lambda: run(score, features)},
        rounds=args.rounds, baseline=DENSE, device=device, warmup=3,
    )  # fmt: skip
    shares = sorted(1.0 / ratio for ratio in comparison.ratios("score"))
    return {"share": shares[len(shares) // 2], "times_ms": dict(comparison.times_ms)}


def record(comparison: VideoViTProfile) -> dict[str, Any]:
    names = list(comparison.comparison.times_ms)
    return {
        "error": comparison.error,
        "gflops": {name: round(comparison.flops[name] / 1e9, 3) for name in names},
        "clips_per_s": {name: comparison.clips_per_s(name) for name in names},
        "speedup": {name: vars(comparison.comparison.speedup(name)) for name in names},
        "times_ms": dict(comparison.comparison.times_ms),
        "order": comparison.comparison.order,
    }


def format_command(script: str, record: dict[str, Any], names: str) -> str:
    """Format the command of a record, also for `patch.py`; `names` is the option with a list of names."""
    settings = record["settings"]
    flags = [f"--{name} {settings[name]}" for name in ("device", "dtype", "batch", "rounds", "keep", "stage")]
    flags += ["--compile"] if settings["compile"] else []
    flags += [f"--threads {settings['threads']}"] if settings["threads"] else []
    flags += [f"--{names} {' '.join(settings[names])}"]
    out = f"results/pruning/{script}-{record['environment']['device']['kind']}.json"
    return f"python benchmarks/pruning/{script}.py {' '.join(flags)} --out {out}"


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: compacted against dense model."""
    settings = record["settings"]
    device = record["environment"]["device"]["kind"]
    command = format_command("throughput", record, "selectors")
    baseline = "the dense model"
    speedup, gflops = record["speedup"], record["gflops"]
    yield Claim(
        id=f"pruning/1-compact-{device}",
        claim=f"Throughput of a compacted video transformer with {settings['keep']:.0%} of the tokens over "
        f"the dense model, batch {settings['batch']}.",
        value=round(speedup["compact"]["median"], 3),
        unit="x",
        target=">= 1.8" if device == "cuda" else ">= 1.6",
        baseline=baseline,
        command=command,
        details={
            "low": round(speedup["compact"]["low"], 3),
            "high": round(speedup["compact"]["high"], 3),
            "dtype": settings["dtype"],
            "compiled": settings["compile"],
            "blocks": settings["depth"],
            "width": settings["dim"],
            "clip": f"{settings['frames']}x{settings['size']}x{settings['size']}",
            "first_pruned_block": settings["stage"],
            "gflops": round(gflops["compact"], 1),
            "flop_reduction": round(gflops["dense"] / gflops["compact"], 3),
            **{
                f"speedup_{name.removeprefix('compact, ')}": round(interval["median"], 3)
                for name, interval in speedup.items()
                if name.startswith("compact, ")
            },
        },
    )
    yield Claim(
        id=f"pruning/1-masks-{device}",
        claim="Throughput of the same model with soft token masks, which remove no tokens, over the dense "
        "model.",
        value=round(speedup["soft masks"]["median"], 3),
        unit="x",
        baseline=baseline,
        command=command,
        details={"hard_masks": round(speedup["hard masks"]["median"], 3)},
    )
    share = record["score"]["share"]
    # Records of version 0.1 do not name the measure; its default was entropy.
    measure = settings.get("measure", "entropy")
    details: dict[str, float] = {}
    claim = f"Time of the token score ({measure}) as a share of the dense forward pass."
    if device == "cuda":
        # Timed alone on an idle GPU, the score is dominated by kernel launches.
        names = ("compact", "compact, uniform", "dense")
        compact, uniform, dense = (record["times_ms"][name] for name in names)
        claim = (
            f"Time that the token score ({measure}) adds over uniform selection as a share of the dense "
            "forward pass."
        )
        details = {"share_alone": round(share, 4)}
        share = statistics.median((c - u) / d for c, u, d in zip(compact, uniform, dense, strict=True))
    yield Claim(
        id=f"pruning/1-score-{device}",
        claim=claim,
        value=round(100.0 * share, 2),
        unit="%",
        target="< 3",
        baseline=baseline,
        command=command,
        details=details,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=TOLERANCE)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="compile every candidate")
    parser.add_argument("--keep", type=float, default=0.5, help="share of kept tokens")
    parser.add_argument("--stage", type=int, default=1, help="block of the stage")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--selectors", nargs="*", default=SELECTORS[1:], help="baseline selectors to time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    model = build_model(args, "ast")
    compacted = {f"compact, {name}": compact(build_model(args, name)) for name in args.selectors}
    comparison = profile_video_vit(
        model,
        batch_size=args.batch,
        device=args.device,
        dtype=dtype,
        compiled=args.compile,
        rounds=args.rounds,
        extra_models=compacted,
        seed=args.seed,
        progress=lambda message, _: print(message, file=sys.stderr),
    )
    settings = {name: getattr(args, name) for name in vars(args) if name != "out"}
    settings["measure"] = ScoreConfig().measure
    result = {
        "environment": collect_environment(args.device, seed=args.seed),
        "settings": settings,
        **record(comparison),
    }
    result["parts"] = {"dense": count_flops(make_dense(model)), "compact": count_flops(compact(model))}
    for name in comparison.comparison.times_ms:
        speedup = comparison.comparison.speedup(name)
        print(
            f"{name:20s} {comparison.clips_per_s(name):8.2f} clips/s  {speedup.median:.3f}x "
            f"({speedup.low:.3f} to {speedup.high:.3f})  {comparison.flops[name] / 1e9:.1f} GFLOP per clip"
        )
    wrong = comparison.error > TOLERANCE[args.dtype]
    if wrong:
        print(f"the compact model differs by {comparison.error:.1e}, more than {TOLERANCE[args.dtype]:.1e}")
        result["failed"] = "the compact model differs from the masked one"
    result["score"] = time_score(args, args.device, dtype)
    share = result["score"]["share"]
    print(f"score: {share:.2%} of the dense forward; compact differs by {comparison.error:.1e}")
    if args.out:
        write_atomic(args.out, json.dumps(result) + "\n")
        record_claims(make_claims(result), result, args.out)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())

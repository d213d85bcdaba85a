r"""Throughput of a video transformer dense, with soft and hard masks, and compact (line 1).

::

    export PYTHONPATH=src:.
    python benchmarks/pruning/throughput.py --device cuda --dtype bfloat16 --batch 32 --compile \
        --out results/pruning/throughput-cuda.json
    python benchmarks/pruning/throughput.py --batch 1 --rounds 7 --threads 2 \
        --out results/pruning/throughput-cpu.json

All candidates have the same random weights and take the same clips, in turns. Beside AST2.0-lite v2 stand
its rivals, compact too, with as many tokens. What the score itself takes is timed apart, on features of the
stage, in turns with the dense model.
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
from sparseflow.pruning.compaction.flops import flops
from sparseflow.pruning.evaluation.profile import DENSE, Profile, dense, profile
from sparseflow.pruning.model.config import SELECTORS

TOLERANCE = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.01}
"""Largest difference of the compact model from the masked one, relative."""


def made(asked: argparse.Namespace, selector: str) -> VideoViT:
    """ViT-B by default, with the same weights each time."""
    torch.manual_seed(asked.seed)
    return VideoViT(
        asked.size, asked.frames, 101, asked.dim, asked.depth, asked.heads, 4, 16,
        use_ast_prune=True, ast_cfg={"selector": selector, "stages": {asked.stage: asked.keep}},
    ).eval()  # fmt: skip


def scored(asked: argparse.Namespace, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """What the score takes beside the whole dense model."""
    model = made(asked, "ast").to(device, dtype)
    config = model.config
    assert model.score is not None
    clips = torch.randn(asked.batch, config.num_frames, 3, asked.size, asked.size, device=device, dtype=dtype)
    t, h, w = config.grid
    features = torch.randn(asked.batch, t, h * w, config.embed_dim, device=device, dtype=dtype)
    whole, score = dense(model), model.score
    if asked.compile:
        whole.compile(fullgraph=True)
        score.compile(fullgraph=True)

    def run(module: torch.nn.Module, value: torch.Tensor) -> None:
        with torch.no_grad():
            module(value)

    found = compare(
        {DENSE: lambda: run(whole, clips), "score": lambda: run(score, features)},
        rounds=asked.rounds, baseline=DENSE, device=device, warmup=3,
    )  # fmt: skip
    shares = sorted(1.0 / ratio for ratio in found.ratios("score"))
    return {"share": shares[len(shares) // 2], "times_ms": dict(found.times_ms)}


def record(found: Profile) -> dict[str, Any]:
    names = list(found.comparison.times_ms)
    return {
        "batch": found.batch,
        "dtype": found.dtype,
        "compiled": found.compiled,
        "error": found.error,
        "gflops": {name: round(found.flops[name] / 1e9, 3) for name in names},
        "clips_per_s": {name: found.clips_per_s(name) for name in names},
        "speedup": {name: vars(found.comparison.speedup(name)) for name in names},
        "times_ms": dict(found.comparison.times_ms),
        "order": found.comparison.order,
    }


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: compacted against dense model."""
    settings = record["settings"]
    device = record["environment"]["device"]["kind"]
    flags = [f"--{name} {settings[name]}" for name in ("device", "dtype", "batch", "rounds", "keep", "stage")]
    flags += ["--compile"] if settings["compile"] else []
    flags += [f"--threads {settings['threads']}"] if settings["threads"] else []
    command = (
        f"python benchmarks/pruning/throughput.py {' '.join(flags)} --rivals {' '.join(settings['rivals'])} "
        f"--out results/pruning/throughput-{device}.json"
    )
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
            "compiled": bool(record["compiled"]),
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
    details: dict[str, float] = {}
    claim = "Time of the token score as a share of the dense forward pass."
    if device == "cuda":
        # Timed alone on an idle GPU, the score is dominated by kernel launches.
        names = ("compact", "compact, uniform", "dense")
        compact, uniform, dense = (record["times_ms"][name] for name in names)
        claim = "Time that the token score adds over uniform selection as a share of the dense forward pass."
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
    parser.add_argument("--mode", help="of torch.compile")
    parser.add_argument("--keep", type=float, default=0.5, help="share of tokens that is left")
    parser.add_argument("--stage", type=int, default=1, help="block before which the others go")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, help="of a CPU")
    parser.add_argument("--rivals", nargs="*", default=SELECTORS[1:], help="selectors to time, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file")
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    dtype = getattr(torch, asked.dtype)
    model = made(asked, "ast")
    others = {f"compact, {name}": compact(made(asked, name)) for name in asked.rivals}
    found = profile(
        model, batch=asked.batch, device=asked.device, dtype=dtype, compiled=asked.compile, mode=asked.mode,
        rounds=asked.rounds, others=others, seed=asked.seed,
        progress=lambda message, _: print(message, file=sys.stderr),
    )  # fmt: skip
    settings = {name: getattr(asked, name) for name in vars(asked) if name != "out"}
    told = {
        "environment": collect_environment(asked.device, seed=asked.seed),
        "settings": settings,
        **record(found),
    }
    told["parts"] = {"dense": flops(dense(model)), "compact": flops(compact(model))}
    for name in found.comparison.times_ms:
        speedup = found.comparison.speedup(name)
        print(
            f"{name:20s} {found.clips_per_s(name):8.2f} clips/s  {speedup.median:.3f}x "
            f"({speedup.low:.3f} to {speedup.high:.3f})  {found.flops[name] / 1e9:.1f} GFLOP a clip"
        )
    wrong = found.error > TOLERANCE[asked.dtype]
    if wrong:
        print(f"the compact model differs by {found.error:.1e}, more than {TOLERANCE[asked.dtype]:.1e}")
        told["failed"] = "the compact model differs from the masked one"
    told["score"] = scored(asked, asked.device, dtype)
    print(f"score: {told['score']['share']:.2%} of the dense forward; compact differs by {found.error:.1e}")
    if asked.out:
        write_atomic(asked.out, json.dumps(told) + "\n")
        record_claims(make_claims(told), told, asked.out)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())

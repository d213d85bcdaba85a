r"""Speed-up of `sparseflow.pruning.patch` on architectures of true size with random weights.

::

    export PYTHONPATH=src:.
    python benchmarks/pruning/patch.py --device cuda --dtype bfloat16 --batch 32 --compile \
        --out results/pruning/patch-cuda.json
    python benchmarks/pruning/patch.py --batch 1 --rounds 7 --threads 1 --models deit-s vit-b clip-b \
        --out results/pruning/patch-cpu.json

For each architecture the dense encoder and its patched copies are timed interleaved: half of the tokens from
block 1 on, selected by AST, evenly spaced, or merged by ToMe; and for images ToMe as published, which merges
8 tokens before each block from block 1 on. Before the timing, in float32, `keep=1` must be bit-identical, and
the outputs with AST must equal those of masked attention.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.claims import Claim, record_claims, slugify
from benchmarks.pruning.throughput import format_command
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic
from sparseflow.core.timing import compare
from sparseflow.pruning import get_kept_positions, patch
from sparseflow.pruning.patching.families import find_encoder
from sparseflow.pruning.patching.profile import DENSE, count_gflops, make_call, make_inputs
from sparseflow.pruning.patching.reference import mask_dropped_tokens

AST, UNIFORM, TOME, TOME_R8 = "ast", "uniform", "tome", "tome, r = 8"
TOLERANCE = 2e-3
"""Largest difference to masked attention in float32, divided by the largest output."""

SMALL = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
LARGE = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
}  # fmt: skip
_DINOV2 = {"image_size": 224, "patch_size": 14}
_BEIT = {"use_relative_position_bias": True}
_VJEPA2 = {"frames_per_clip": 16}

ARCHITECTURES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "deit-s": ("DeiTModel", "DeiTConfig", SMALL),
    "vit-b": ("ViTModel", "ViTConfig", {}),
    "vit-l": ("ViTModel", "ViTConfig", LARGE),
    "deit-b": ("DeiTModel", "DeiTConfig", {}),
    "dinov2-b": ("Dinov2Model", "Dinov2Config", _DINOV2),
    "dinov2-registers-l": (
        "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {**LARGE, **_DINOV2},
    ),
    "dinov3-b": (
        "DINOv3ViTModel", "DINOv3ViTConfig",
        {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "num_register_tokens": 4},
    ),
    "dinov3-l": ("DINOv3ViTModel", "DINOv3ViTConfig", {**LARGE, "num_register_tokens": 4}),
    "clip-b": ("CLIPVisionModel", "CLIPVisionConfig", {"patch_size": 16}),
    "clip-l": ("CLIPVisionModel", "CLIPVisionConfig", {**LARGE, "patch_size": 14}),
    "siglip-b": ("SiglipVisionModel", "SiglipVisionConfig", {}),
    "beit-b": ("BeitModel", "BeitConfig", _BEIT),
    "videomae-b": ("VideoMAEModel", "VideoMAEConfig", {}),
    "videomae-l": ("VideoMAEModel", "VideoMAEConfig", LARGE),
    "vivit-b": ("VivitModel", "VivitConfig", {}),
    "timesformer-b": ("TimesformerModel", "TimesformerConfig", {}),
    "vjepa2-l": ("VJEPA2Model", "VJEPA2Config", _VJEPA2),
}  # fmt: skip
"""Name -> class and configuration of transformers, and its arguments."""


def build_encoder(name: str, seed: int) -> Any:
    """Build an encoder with reproducible random weights."""
    import transformers

    model_class, config_class, arguments = ARCHITECTURES[name]
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**arguments)).eval()
    return find_encoder(model).encoder


def list_stages(depth: int, num_tokens: int, args: argparse.Namespace, *, is_image: bool) -> dict[str, Any]:
    """Candidate -> selector and stages."""
    stages = {args.stage: args.keep}
    candidates = {AST: ("ast", stages), UNIFORM: ("uniform", stages), TOME: ("tome", stages)}
    if is_image and num_tokens > 8 * depth:
        r8 = {block: 1.0 - 8 * block / num_tokens for block in range(1, depth)}
        candidates[TOME_R8] = ("tome", r8)
    return candidates


@torch.no_grad()
def check_outputs(encoder: nn.Module, inputs: Tensor, args: argparse.Namespace) -> dict[str, Any]:
    """Compare keep=1 with the encoder, and AST with masked attention."""

    def run(module: nn.Module) -> Tensor:
        return module(inputs).last_hidden_state

    dense = run(encoder)
    patched: Any = copy.deepcopy(encoder)
    patch(patched, keep=1.0)
    identical = torch.equal(run(patched), dense)
    patch(patched, stages={args.stage: args.keep})
    pruned = run(patched)
    pruner, family = patched.token_pruner, find_encoder(encoder).adapter
    num_tokens = pruner.grid[0] * pruner.grid[1] * pruner.grid[2]
    blocks = family.list_blocks(encoder)
    with mask_dropped_tokens(encoder, blocks, get_kept_positions(patched), pruner.num_prefix, num_tokens):
        reference = run(encoder)
    error = float((pruned - reference).abs().max() / reference.abs().max())
    return {"identical": identical, "error": error}


def measure_architecture(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Check and time one architecture."""
    encoder = build_encoder(name, args.seed).to(args.device)
    target = find_encoder(encoder)
    checks = check_outputs(encoder, make_inputs(target, 2, seed=args.seed), args)
    encoder = encoder.to(getattr(torch, args.dtype))
    inputs = make_inputs(target, args.batch, seed=args.seed)
    result = patch(copy.deepcopy(encoder), keep=1.0)
    encoders, stages = {DENSE: encoder}, {}
    candidates = list_stages(len(result.tokens), result.tokens[0], args, is_image=result.grid[0] == 1)
    for label, (selector, shares) in candidates.items():
        if selector == "tome" and result.family == "TimeSformer":
            continue
        encoders[label] = copy.deepcopy(encoder)
        stages[label] = list(patch(encoders[label], stages=shares, selector=selector).tokens)
    gflops = {label: count_gflops(value, inputs[:1]) for label, value in encoders.items()}
    if args.compile:
        torch._dynamo.reset()
        for value in encoders.values():
            value.compile(fullgraph=result.family != "TimeSformer")
    comparison = compare(
        {label: make_call(value, inputs) for label, value in encoders.items()},
        rounds=args.rounds, baseline=DENSE, device=args.device, seed=args.seed,
    )  # fmt: skip
    return {
        **checks,
        "family": result.family,
        "blocks": len(result.tokens),
        "tokens": stages,
        "gflops": {label: round(value, 3) for label, value in gflops.items()},
        "samples_per_s": {
            label: args.batch * 1e3 / comparison.samples(label).median_ms for label in encoders
        },
        "speedup": {label: vars(comparison.speedup(label)) for label in encoders},
        "times_ms": dict(comparison.times_ms),
        "order": comparison.order,
    }


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield one claim for each architecture: the encoder patched with AST over the dense one."""
    settings = record["settings"]
    device = record["environment"]["device"]["kind"]
    command = format_command("patch", record, "models")
    for name, row in record["models"].items():
        speedup = row["speedup"][AST]
        yield Claim(
            id=f"pruning/6-patch-{slugify(name)}-{device}",
            claim=f"Throughput of {name} patched to keep {settings['keep']:.0%} of the tokens from block "
            f"{settings['stage']} on, over the dense encoder, batch {settings['batch']}.",
            value=round(speedup["median"], 3),
            unit="x",
            target=">= 1.8" if device == "cuda" else None,
            baseline="the encoder without pruning",
            command=command,
            details={
                "low": round(speedup["low"], 3),
                "high": round(speedup["high"], 3),
                "dtype": settings["dtype"],
                "compiled": settings["compile"],
                "error": float(f"{row['error']:.1e}"),
                "flop_reduction": round(row["gflops"][DENSE] / row["gflops"][AST], 3),
                **{
                    f"speedup_{slugify(label).replace('-', '_')}": round(row["speedup"][label]["median"], 3)
                    for label in (UNIFORM, TOME, TOME_R8)
                    if label in row["speedup"]
                },
            },
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="compile every candidate")
    parser.add_argument("--models", nargs="*", default=list(ARCHITECTURES)[1:], choices=ARCHITECTURES)
    parser.add_argument("--keep", type=float, default=0.5, help="share of kept tokens")
    parser.add_argument("--stage", type=int, default=1, help="block of the stage")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    record: dict[str, Any] = {
        "environment": collect_environment(args.device, seed=args.seed),
        "settings": {name: getattr(args, name) for name in vars(args) if name != "out"},
        "models": {},
    }
    wrong = []
    for name in args.models:
        row = record["models"][name] = measure_architecture(name, args)
        speedups = ", ".join(
            f"{label} {interval['median']:.2f}x ({interval['low']:.2f} to {interval['high']:.2f})"
            for label, interval in row["speedup"].items()
            if label != DENSE
        )
        print(f"{name:20s} {speedups}; error {row['error']:.1e}", flush=True)
        if not row["identical"] or row["error"] > TOLERANCE:
            wrong.append(name)
        if args.out:
            write_atomic(args.out, json.dumps(record) + "\n")
    if wrong:
        record["failed"] = f"wrong outputs of {', '.join(wrong)}"
        print(record["failed"])
    if args.out:
        write_atomic(args.out, json.dumps(record) + "\n")
        record_claims(make_claims(record), record, args.out)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

"""Recall of token scores: the share of the tokens of a small moving object that a score selects.

::

    PYTHONPATH=src:. python benchmarks/pruning/recall.py --out results/pruning/recall.json

The clips are `MovingObjects`: an object of 12 x 12 pixels over textures or photographs, with a still, panning
or zooming camera, strong noise, or a distractor as large as the object. Nothing is trained: the scores read
linear features of patches, as a patch embedding with random weights computes them, and the same features
after a LayerNorm. A token belongs to the object if the object covers more than a fifth of its patch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.claims import Claim, record_claims, slugify
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic
from sparseflow.pruning.data.moving_objects import BACKGROUNDS, MovingObjects
from sparseflow.pruning.selectors.ast import EntropyScore, ScoreConfig

PATCH, CHANNELS = 8, 64
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)
CLAIMED_SHARE = 0.1

CASES: Mapping[str, Mapping[str, Any]] = {
    "still": {"camera": "still", "distractors": 0},
    "pan": {"camera": "pan", "distractors": 0},
    "fast pan": {"camera": "pan", "camera_speed": 4.0, "distractors": 0},
    "zoom": {"camera": "zoom", "distractors": 0},
    "noise": {"camera": "still", "distractors": 0, "noise": 0.1},
    "distractor": {"camera": "mixed", "distractors": 1},
}

SCORES: Mapping[str, ScoreConfig] = {
    "AST": ScoreConfig(),
    "AST, time only": ScoreConfig(space=0.0, region=0.0),
    "AST, space only": ScoreConfig(time=0.0, region=0.0),
    "AST, no regions": ScoreConfig(region=0.0),
    "AST, level 1": ScoreConfig(levels=(1,)),
    "AST, level 4": ScoreConfig(levels=(4,)),
    "entropy": ScoreConfig(measure="entropy"),
}


def cut_patches(clips: Tensor) -> Tensor:
    """Cut clips [n, T, 1, H, W] into patches, [n, T, patches, PATCH * PATCH]."""
    rows = clips[:, :, 0].unflatten(-1, (-1, PATCH)).unflatten(2, (-1, PATCH))
    return rows.transpose(3, 4).flatten(4).flatten(2, 3)


def score_tokens(patches: Tensor, weights: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Score name -> score of each token, [n, T * patches]."""
    num_frames, side = patches.shape[1], round(patches.shape[2] ** 0.5)
    change = (patches[:, 1:] - patches[:, :-1]).square().mean(-1)
    scores = {
        "random": torch.rand(patches.shape[:3], generator=generator),
        "frame difference": torch.cat([change[:, :1], change], 1),
    }
    embedded = patches @ weights / PATCH
    for name, config in SCORES.items():
        scores[name] = EntropyScore(num_frames, (side, side), config)(embedded)
    normalized = functional.layer_norm(embedded, (CHANNELS,))
    scores["AST, normalized"] = EntropyScore(num_frames, (side, side), SCORES["AST"])(normalized)
    return {name: score.flatten(1) for name, score in scores.items()}


def measure_recall(clips: MovingObjects, seed: int) -> dict[str, list[list[float]]]:
    """Score name -> recall of each clip at each of `SHARES`."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(PATCH * PATCH, CHANNELS, generator=generator)
    batch = clips.make_batch(range(len(clips)))
    is_object = clips.find_object_tokens(batch["corner"], PATCH).flatten(1)
    recalls = {}
    for name, score in score_tokens(cut_patches(batch["clip"]), weights, generator).items():
        order = score.argsort(dim=1, descending=True)
        selected = [is_object.gather(1, order[:, : int(share * order.shape[1])]).sum(1) for share in SHARES]
        recalls[name] = (torch.stack(selected, 1) / is_object.sum(1, keepdim=True)).tolist()
    return recalls


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: recall at `CLAIMED_SHARE`, both backgrounds together."""
    targets = {("AST", "still"): ">= 80", ("AST", "pan"): ">= 60"}
    column = record["shares"].index(CLAIMED_SHARE)
    for case in CASES:
        for name in ("AST", "entropy", "frame difference", "random"):
            recalls = {
                background: np.mean(record["recall"][f"{background}, {case}"][name], axis=0)
                for background in BACKGROUNDS
            }
            means = np.mean(list(recalls.values()), axis=0)
            yield Claim(
                id=f"pruning/1-recall-{slugify(name)}-{slugify(case)}",
                claim=f"Tokens of a small moving object among the 10% with the highest score ({name}), "
                f"without training, case: {case}.",
                value=round(100.0 * float(means[column]), 1),
                unit="%",
                target=targets.get((name, case)),
                command=record["command"],
                details={
                    background: round(100.0 * float(values[column]), 1)
                    for background, values in recalls.items()
                },
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clips", type=int, default=36, help="for each background and case")
    parser.add_argument("--size", type=int, default=64, help="side of a frame, pixels")
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    recall = {}
    for background in BACKGROUNDS:
        for case, settings in CASES.items():
            clips = MovingObjects(
                num_clips=args.clips, train=False, seed=args.seed, size=args.size, num_frames=args.frames,
                background=background, **settings,
            )  # fmt: skip
            recall[f"{background}, {case}"] = measure_recall(clips, args.seed)
    for case, recalls in recall.items():
        print(f"{case}: recall in % at {', '.join(f'{share:.0%}' for share in SHARES)} kept")
        for name, values in recalls.items():
            cells = "".join(f"{100.0 * value:7.1f}" for value in np.mean(values, axis=0))
            print(f"  {name:32s}{cells}")
    if args.out:
        record = {
            "environment": collect_environment("cpu", seed=args.seed),
            "command": f"python benchmarks/pruning/recall.py --clips {args.clips} --size {args.size} "
            f"--frames {args.frames} --seed {args.seed} --out results/pruning/recall.json",
            "shares": SHARES,
            "recall": {
                case: {name: np.round(values, 3).tolist() for name, values in recalls.items()}
                for case, recalls in recall.items()
            },
        }
        write_atomic(args.out, json.dumps(record) + "\n")
        record_claims(make_claims(record), record, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Recall of token scores: the share of the tokens of a small moving object that a score selects.

::

    PYTHONPATH=src:. python benchmarks/pruning/recall.py --out results/pruning/recall.json

A digit of 12 x 12 pixels moves over a background of 1/f noise. Nothing is trained: the scores read linear
features of patches, as a patch embedding with random weights computes them. The camera stands still or pans,
or pixels are noisy. A token belongs to the object if the object covers more than a fifth of its patch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.claims import Claim, record_claims
from sparseflow.core.environment import collect_environment
from sparseflow.core.extras import require
from sparseflow.core.files import write_atomic
from sparseflow.pruning.selectors.ast import EntropyScore, ScoreConfig

FRAMES, SIZE, OBJECT, PATCH, CHANNELS = 8, 64, 12, 8, 64
SIDE = SIZE // PATCH
SHARES = (0.1, 0.2, 0.3)
OBJECT_SPEED = 4.0
"""Pixels per frame."""
MIN_COVER = 0.2
"""Covered share of a patch from which its token belongs to the object."""

CAMERAS: dict[str, dict[str, float]] = {
    "still": {"pan": 0, "noise": 0.05},
    "pan": {"pan": 1, "noise": 0.05},
    "noise": {"pan": 0, "noise": 0.3},
}
"""Pixels per frame of the camera, and standard deviation of the noise of each pixel."""

FEATURE_SCALES = {"embedding": 1.0 / PATCH, "initial": 0.02, "normalized": None}
"""Standard deviation of the weights of the patch embedding; None applies a LayerNorm to the features."""

SCORES = {
    "divergence": ScoreConfig(measure="divergence"),
    "entropy": ScoreConfig(measure="entropy"),
    "divergence, time only": ScoreConfig(measure="divergence", space=0.0, region=0.0, levels=(4,)),
}


def make_clip(
    rng: np.random.Generator, digits: np.ndarray, *, pan: float, noise: float
) -> tuple[np.ndarray, np.ndarray]:
    """Make a clip and the mask of its object, each of shape (FRAMES, SIZE, SIZE)."""
    side = SIZE + int(FRAMES * pan) + 1
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(side), np.fft.fftfreq(side)))
    frequency[0, 0] = 1.0 / side
    background = np.fft.ifft2(np.fft.fft2(rng.normal(size=(side, side))) / frequency**0.9).real
    background = (background - background.mean()) / background.std()
    digit = 3.0 * np.kron(digits[rng.integers(len(digits))], np.ones((2, 2)))[:OBJECT, :OBJECT]
    angle = rng.uniform(0.0, 2.0 * np.pi)
    start = rng.uniform(8, SIZE - OBJECT - 8, 2)
    clip, mask = np.zeros((FRAMES, SIZE, SIZE)), np.zeros((FRAMES, SIZE, SIZE))
    for frame in range(FRAMES):
        offset = int(pan * frame)
        clip[frame] = background[offset : offset + SIZE, offset : offset + SIZE]
        moved = start + OBJECT_SPEED * frame * np.array([np.sin(angle), np.cos(angle)])
        row, column = np.clip(moved, 0, SIZE - OBJECT).astype(int)
        region = clip[frame, row : row + OBJECT, column : column + OBJECT]
        region[digit > 0.3] = digit[digit > 0.3]
        mask[frame, row : row + OBJECT, column : column + OBJECT] = 1.0
    return clip + noise * rng.normal(size=clip.shape), mask


def cut_patches(clip: np.ndarray) -> Tensor:
    """Cut frames into patches, [FRAMES, SIDE * SIDE, PATCH * PATCH]."""
    patches = clip.reshape(FRAMES, SIDE, PATCH, SIDE, PATCH).transpose(0, 1, 3, 2, 4)
    return torch.from_numpy(patches.reshape(FRAMES, SIDE * SIDE, PATCH * PATCH).astype(np.float32))


def score_tokens(patches: Tensor, weights: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Score name -> score of each token, [clips, FRAMES * SIDE * SIDE]; patches are [clips, FRAMES, ...]."""
    difference = torch.zeros(patches.shape[:3])
    difference[:, 1:] = (patches[:, 1:] - patches[:, :-1]).square().mean(-1)
    difference[:, 0] = difference[:, 1]
    scores = {
        "random": torch.rand(difference.shape, generator=generator).flatten(1),
        "frame difference": difference.flatten(1),
    }
    for feature, scale in FEATURE_SCALES.items():
        x = patches @ weights * (FEATURE_SCALES["embedding"] if scale is None else scale)
        x = torch.nn.functional.layer_norm(x, (CHANNELS,)) if scale is None else x
        for name, config in SCORES.items():
            score = EntropyScore(FRAMES, (SIDE, SIDE), config)
            scores[f"{name}, {feature} features"] = score(x).flatten(1)
    return scores


def measure_recall(camera: dict[str, float], num_clips: int, seed: int) -> dict[str, list[list[float]]]:
    """Score name -> recall of each clip at each of `SHARES`."""
    digits = require("sklearn.datasets", "pruning").load_digits().images / 16.0
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    weights = torch.randn(PATCH * PATCH, CHANNELS, generator=generator)
    clips, masks = zip(*(make_clip(rng, digits, **camera) for _ in range(num_clips)), strict=True)
    is_object = torch.stack([cut_patches(mask).mean(-1) > MIN_COVER for mask in masks]).flatten(1)
    scores = score_tokens(torch.stack([cut_patches(clip) for clip in clips]), weights, generator)
    recalls = {}
    for name, score in scores.items():
        order = score.argsort(dim=1, descending=True)
        selected = [is_object.gather(1, order[:, : int(share * order.shape[1])]).sum(1) for share in SHARES]
        recalls[name] = (torch.stack(selected, 1) / is_object.sum(1, keepdim=True)).tolist()
    return recalls


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: recall at the smallest share for each camera."""
    targets = {("divergence", "still"): ">= 80", ("divergence", "pan"): ">= 60"}
    for camera, recalls in record["recall"].items():
        for slug, name in (
            ("divergence", "divergence, embedding features"),
            ("entropy", "entropy, embedding features"),
            ("random", "random"),
        ):
            means = [round(100.0 * value, 1) for value in np.mean(recalls[name], axis=0).tolist()]
            yield Claim(
                id=f"pruning/1-recall-{slug}-{camera}",
                claim=f"Tokens of a small moving object among the 10% of highest {slug} score without "
                f"training, camera: {camera}.",
                value=means[0],
                unit="%",
                target=targets.get((slug, camera)),
                command=record["command"],
                details=dict(zip(("at_10_percent", "at_20_percent", "at_30_percent"), means, strict=True)),
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clips", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    recall = {name: measure_recall(camera, args.clips, args.seed) for name, camera in CAMERAS.items()}
    for camera, recalls in recall.items():
        print(f"{camera}: recall in % at {', '.join(f'{share:.0%}' for share in SHARES)} kept")
        for name, values in recalls.items():
            cells = "".join(f"{100.0 * value:7.1f}" for value in np.mean(values, axis=0))
            print(f"  {name:44s}{cells}")
    if args.out:
        record = {
            "environment": collect_environment("cpu", seed=args.seed),
            "command": f"python benchmarks/pruning/recall.py --clips {args.clips} --seed {args.seed} "
            "--out results/pruning/recall.json",
            "shares": SHARES,
            "recall": {
                camera: {name: np.round(values, 4).tolist() for name, values in recalls.items()}
                for camera, recalls in recall.items()
            },
        }
        write_atomic(args.out, json.dumps(record) + "\n")
        record_claims(make_claims(record), record, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

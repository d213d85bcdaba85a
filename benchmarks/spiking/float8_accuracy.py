r"""Accuracy of a spiking network before and after its weights are stored in float8, as one record.

::

    PYTHONPATH=src:. python benchmarks/spiking/float8_accuracy.py runs/train/weights.safetensors \
        --test cifar10-test.tar.gz --device cuda --out results/spiking/float8.json --card card.json

The network after is the shipped one. `--card` is its card with the new scores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from cifar10 import load_archive
from package_network import DATA, format_card
from safetensors.torch import load
from torch import Tensor
from train_cifar10 import parse, score_weights

from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic
from sparseflow.spiking.models.pretrained import DEFAULT_NETWORK


def score(weights: bytes, card: dict[str, Any], images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Return the scores of stored weights."""
    network = card["network"]
    words = ["--train", "", "--test", "", "--name", "", "--residual", network["residual"]]
    words += ["--depth", str(network["depth"]), "--width", str(network["width"])]
    return score_weights(parse(words), load(weights), images, labels)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="weights as trained")
    parser.add_argument("--test", type=Path, required=True, help="archive of test images")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--card", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    test = load_archive(args.test)
    images = torch.from_numpy(test.images).to(args.device)
    labels = torch.from_numpy(test.labels).to(args.device)
    card = json.loads((DATA / f"{DEFAULT_NETWORK}.json").read_text())
    record: dict[str, Any] = {
        "environment": collect_environment(torch.device(args.device)),
        "samples": len(labels),
    }
    for name, path in (("before", args.before), ("after", DATA / f"{DEFAULT_NETWORK}.safetensors")):
        weights = path.read_bytes()
        scores = score(weights, card, images, labels)
        digest = hashlib.sha256(weights).hexdigest()
        record[name] = {
            "sha256": digest,
            "bytes": len(weights),
            "compressed_bytes": len(zlib.compress(weights)),
            "correct": scores["correct"],
        }
        print(name, record[name])
    # The last scores are those of the shipped weights.
    card |= scores | {"weights_bytes": len(weights), "weights_sha256": digest}
    write_atomic(args.card, format_card(card) + "\n")
    write_atomic(args.out, json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

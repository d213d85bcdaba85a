"""Convert a run of `train_cifar10` to the package data of `sparseflow.spiking.models.pretrained`.

::

    PYTHONPATH=src python benchmarks/spiking/package_network.py runs/train/spiking_resnet18_w32 \\
        --test cifar10-test.tar.gz --name cifar10-sew-resnet18
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
from cifar10 import CLASSES, Images, load_archive
from train_cifar10 import parse

from sparseflow.errors import FileFormatError, InputError, SparseFlowError

MAX_WEIGHTS_BYTES = 8_000_000
MAX_IMAGES_BYTES = 1_000_000
IMAGES = 256
DATA = Path(__file__).parents[2] / "src" / "sparseflow" / "spiking" / "data"
# Paths of the machine that trained say nothing to a reader of the card.
_PRIVATE = ("out", "checkpoints", "train", "test", "resume", "name")


def choose_images(test: Images, *, count: int = IMAGES, seed: int = 0) -> Images:
    """``count`` test images, as even over the classes as possible, in random order; blind to any network."""
    generator = np.random.default_rng(seed)
    per_class = [count // len(CLASSES) + (k < count % len(CLASSES)) for k in range(len(CLASSES))]
    indices = np.concatenate(
        [
            generator.choice(np.flatnonzero(test.labels == k), size=per_class[k], replace=False)
            for k in range(len(CLASSES))
        ]
    )
    generator.shuffle(indices)
    return Images(images=test.images[indices], labels=test.labels[indices])


def package(run: Path, test: Path | None, name: str, data: Path) -> list[Path]:
    """Write ``<name>.safetensors``, ``<name>.json`` and, given ``test``, ``images.npz`` into ``data``.

    Raises:
        InputError: The name, the weights or the images are not fit to ship.
        FileFormatError: The run's files are missing or do not belong together.
    """
    if not re.fullmatch(r"[a-z0-9-]+", name):
        raise InputError(f"`name` (={name!r}) must be lower-case letters, digits and dashes")
    try:
        metrics = json.loads((run / "metrics.json").read_text())
        weights = (run / "weights.safetensors").read_bytes()
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{run}: not a finished run of train_cifar10.py ({error})") from error
    if hashlib.sha256(weights).hexdigest() != metrics.get("weights_sha256"):
        raise FileFormatError(f"{run}: metrics.json describes other weights than weights.safetensors")
    if len(weights) > MAX_WEIGHTS_BYTES:
        raise InputError(f"{run}: the weights are {len(weights)} bytes; at most {MAX_WEIGHTS_BYTES} may ship")
    data.mkdir(parents=True, exist_ok=True)
    written = [data / f"{name}.safetensors", data / f"{name}.json"]
    shutil.copyfile(run / "weights.safetensors", written[0])
    card = {key: value for key, value in metrics.items() if key not in ("name", "config", "command")}
    card["name"] = name
    card["training"] = {k: v for k, v in metrics["config"].items() if k not in _PRIVATE}
    card["command"] = training_command(metrics["config"])
    written[1].write_text(format_card(card) + "\n")
    if test is not None:
        sample = choose_images(load_archive(test))
        path = data / "images.npz"
        np.savez_compressed(path, images=sample.images, labels=sample.labels.astype(np.uint8))
        if path.stat().st_size > MAX_IMAGES_BYTES:
            raise InputError(f"{path}: {path.stat().st_size} bytes; at most {MAX_IMAGES_BYTES} may ship")
        written.append(path)
    return written


def training_command(config: dict[str, object]) -> str:
    """The command that trains such a network again, with the archives by their plain names."""
    words = ["python", "benchmarks/spiking/train_cifar10.py"]
    words += ["--train", "cifar10-train.tar.gz", "--test", "cifar10-test.tar.gz"]
    words += ["--name", str(config["name"])]
    defaults = asdict(parse(["--train", "", "--test", "", "--name", ""]))
    for key, value in config.items():
        if key not in (*_PRIVATE, "device") and value != defaults.get(key):
            words += [f"--{key.replace('_', '-')}", str(value)]
    return shlex.join(words)


def format_card(card: dict[str, object]) -> str:
    """Indented JSON with each list of numbers on one line."""
    text = json.dumps(card, indent=1)
    return re.sub(r"\[[\s\d.,eE+-]+\]", lambda m: re.sub(r"\s+", " ", m.group()), text)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("run", type=Path, help="folder with metrics.json and weights.safetensors")
    parser.add_argument("--test", type=Path, help="archive of test images; omit to keep the shipped ones")
    parser.add_argument("--name", default="cifar10-sew-resnet18")
    parser.add_argument("--data", type=Path, default=DATA, help="package data folder")
    args = parser.parse_args(argv)
    try:
        for path in package(args.run, args.test, args.name, args.data):
            print(f"{path} {path.stat().st_size} bytes")
    except SparseFlowError as error:
        print(f"package_network: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

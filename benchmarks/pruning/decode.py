"""Decode files of video to RGB, and say how many frames that gives a second.

::

    export PYTHONPATH=src:.
    python benchmarks/pruning/decode.py --generate 20 --processes 2 --out results/pruning/decode-cpu.json
    python benchmarks/pruning/decode.py --threads 2 clips/*.mp4

Every repeat decodes all files, every frame of them, through the decoder that the data set uses, and checks
how many frames came out. Generated files are like UCF-101's: AVI, MPEG-4, 320 × 240, 25 frames a second,
about 500 kbit a second; their content is a moving texture with noise.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.claims import Claim, record_claims
from sparseflow.core.environment import collect_environment
from sparseflow.core.extras import get_version, require
from sparseflow.core.files import write_atomic
from sparseflow.errors import RunError
from sparseflow.pruning.data.video import decode, open_video

WIDTH, HEIGHT = 320, 240
BITS_PER_SECOND = 500_000
FRAMES = 186
"""Of a generated file; UCF-101's mean."""

SEED = 0


def generate(path: Path, seed: int) -> Path:
    """A file like UCF-101's."""
    av = require("av", "pruning")
    generator = np.random.default_rng([SEED, seed])
    rows, cols = np.mgrid[:HEIGHT, :WIDTH]
    noise = generator.normal(0, 4, (8, HEIGHT, WIDTH))
    periods, speeds = generator.uniform(10, 40, 3), generator.uniform(-4, 4, 3)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=25, width=WIDTH, height=HEIGHT, pix_fmt="yuv420p")
        stream.bit_rate = BITS_PER_SECOND
        for number in range(FRAMES):
            waves = [
                np.sin((cols + speed * number) / period) + np.cos((rows - speed * number) / period)
                for period, speed in zip(periods, speeds, strict=True)
            ]
            pixels = 128 + 50 * np.stack(waves, -1) + noise[generator.integers(8), ..., None]
            frame = av.VideoFrame.from_ndarray(pixels.clip(0, 255).astype(np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def timed(path: Path, *, size: int | None, threads: int) -> tuple[tuple[int, ...], float]:
    """Decode one file; gives the shape of what came out, and seconds."""
    begin = time.perf_counter()
    frames = decode(path, size=size, threads=threads)
    return frames.shape, time.perf_counter() - begin


def measure(files: list[Path], asked: argparse.Namespace) -> dict[str, Any]:
    """Decode all files again and again, in processes of their own that stay."""
    counts = [open_video(path).frames for path in files]
    one = partial(timed, size=asked.size, threads=asked.threads)
    samples, shapes = [], []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.processes, mp_context=context) as pool:
        for _ in range(asked.repeats):
            begin = time.perf_counter()
            found = list(pool.map(one, files))
            seconds = time.perf_counter() - begin
            if [shape[0] for shape, _ in found] != counts:
                raise RunError(f"{[shape[0] for shape, _ in found]} frames came out of {counts}")
            samples.append({"seconds": seconds, "file_seconds": [spent for _, spent in found]})
            shapes = [shape for shape, _ in found]
    return {
        "files": [
            {"name": path.name, "bytes": path.stat().st_size, "shape": shape}
            for path, shape in zip(files, shapes, strict=True)
        ],
        "frames": sum(counts),
        "samples": samples,
    }


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: frames decoded per second."""
    rates = [record["frames"] / sample["seconds"] for sample in record["samples"][1:]]
    yield Claim(
        id="pruning/3-decode",
        claim=f"Frames of 320x240 decoded per second from {len(record['files'])} generated .avi files by "
        f"{record['processes']} processes.",
        value=round(statistics.median(rates)),
        unit="frames/s",
        target=">= 1500",
        command="python benchmarks/pruning/decode.py --generate 20 --processes 2 --out "
        "results/pruning/decode-cpu.json",
        details={"threads": record["threads"], "repeats": len(rates), "min": round(min(rates))},
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="videos")
    parser.add_argument("--generate", type=int, default=0, metavar="N", help="videos to make and decode, too")
    parser.add_argument("--size", type=int, help="shorter side, in pixels; as it is when left out")
    parser.add_argument("--threads", type=int, default=1, help="of each decoder")
    parser.add_argument("--processes", type=int, default=1, help="that decode a file each")
    parser.add_argument("--repeats", type=int, default=7, help="the first one warms up, and is kept, too")
    parser.add_argument("--out", type=Path, help="JSON file")
    asked = parser.parse_args()
    if not asked.files and not asked.generate:
        parser.error("name files, or --generate some")
    with tempfile.TemporaryDirectory() as folder:
        made = [generate(Path(folder) / f"{place}.avi", place) for place in range(asked.generate)]
        found = measure([*asked.files, *made], asked)
    record = {
        "environment": collect_environment("cpu", seed=SEED),
        "av": get_version("av"),
        **{name: getattr(asked, name) for name in ("size", "threads", "processes", "generate")},
        **found,
    }
    warm = record["samples"][1:] or record["samples"]
    rates = sorted(record["frames"] / sample["seconds"] for sample in warm)
    print(
        f"{len(record['files'])} files, {record['frames']:,} frames, {asked.processes} processes of "
        f"{asked.threads} threads: median {rates[len(rates) // 2]:,.0f} frames/s "
        f"({rates[0]:,.0f} to {rates[-1]:,.0f})"
    )
    for place, file in enumerate(record["files"]):
        best = min(sample["file_seconds"][place] for sample in record["samples"])
        frames, height, width, _ = file["shape"]
        print(f"  {file['name']}: {width} × {height}, {frames / best:,.0f} frames/s at best")
    if asked.out:
        write_atomic(asked.out, json.dumps(record, indent=1) + "\n")
        record_claims(make_claims(record), record, asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

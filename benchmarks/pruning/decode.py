"""Throughput of decoding video files to RGB, frames per second.

::

    export PYTHONPATH=src:.
    python benchmarks/pruning/decode.py --generate 20 --processes 2 --out results/pruning/decode-cpu.json
    python benchmarks/pruning/decode.py --threads 2 clips/*.mp4

Each repeat decodes all frames of all files with the decoder of the dataset and checks their number.
Generated files resemble UCF-101: AVI, MPEG-4, 320 x 240 pixels, 25 frames/s, about 500
kbit/s, with a noisy moving texture.
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
from sparseflow.pruning.data.video import iterate_frames, open_video

WIDTH, HEIGHT = 320, 240
BITS_PER_SECOND = 500_000
FRAMES = 186
"""Frames of a generated file, the mean of UCF-101."""

SEED = 0


def generate(path: Path, seed: int) -> Path:
    """Write a file that resembles UCF-101."""
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


def time_decoding(path: Path, *, size: int | None, threads: int) -> tuple[tuple[int, ...], float]:
    """Decode one file; return the shape of the frames and the seconds."""
    start_s = time.perf_counter()
    frames = np.stack(list(iterate_frames(path, size=size, threads=threads)))
    return frames.shape, time.perf_counter() - start_s


def measure(files: list[Path], args: argparse.Namespace) -> dict[str, Any]:
    """Decode all files repeatedly in a pool of processes."""
    counts = [open_video(path).frames for path in files]
    decode_file = partial(time_decoding, size=args.size, threads=args.threads)
    samples, shapes = [], []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=context) as pool:
        for _ in range(args.repeats):
            start_s = time.perf_counter()
            results = list(pool.map(decode_file, files))
            seconds = time.perf_counter() - start_s
            if [shape[0] for shape, _ in results] != counts:
                raise RunError(f"expected {counts} frames, got {[shape[0] for shape, _ in results]}")
            samples.append({"seconds": seconds, "file_seconds": [spent for _, spent in results]})
            shapes = [shape for shape, _ in results]
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
    parser.add_argument(
        "--generate", type=int, default=0, metavar="N", help="number of videos to generate and decode"
    )
    parser.add_argument("--size", type=int, help="shorter side, pixels; unchanged by default")
    parser.add_argument("--threads", type=int, default=1, help="threads of each decoder")
    parser.add_argument("--processes", type=int, default=1, help="parallel processes")
    parser.add_argument(
        "--repeats", type=int, default=7, help="repeats; the first is a warm-up and is recorded, too"
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    if not args.files and not args.generate:
        parser.error("pass files or --generate N")
    with tempfile.TemporaryDirectory() as folder:
        generated = [generate(Path(folder) / f"{index}.avi", index) for index in range(args.generate)]
        results = measure([*args.files, *generated], args)
    record = {
        "environment": collect_environment("cpu", seed=SEED),
        "av": get_version("av"),
        **{name: getattr(args, name) for name in ("size", "threads", "processes", "generate")},
        **results,
    }
    warm = record["samples"][1:] or record["samples"]
    rates = sorted(record["frames"] / sample["seconds"] for sample in warm)
    print(
        f"{len(record['files'])} files, {record['frames']:,} frames, {args.processes} processes of "
        f"{args.threads} threads: median {rates[len(rates) // 2]:,.0f} frames/s "
        f"({rates[0]:,.0f} to {rates[-1]:,.0f})"
    )
    for index, file in enumerate(record["files"]):
        best = min(sample["file_seconds"][index] for sample in record["samples"])
        frames, height, width, _ = file["shape"]
        print(f"  {file['name']}: {width} × {height}, {frames / best:,.0f} frames/s at best")
    if args.out:
        write_atomic(args.out, json.dumps(record, indent=1) + "\n")
        record_claims(make_claims(record), record, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

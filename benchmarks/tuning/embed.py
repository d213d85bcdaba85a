"""Time and memory of coarsening and embedding a synthetic pattern (line 6).

::

    export PYTHONPATH=src:.
    python benchmarks/tuning/embed.py --threads 2 --out results/tuning/embed-cpu.json
    python benchmarks/tuning/embed.py --device cuda --out results/tuning/embed-cuda.json

Row lengths follow a power law in random order, and columns are uniform. The pattern is created and embedded
in a separate process. Memory is the peak of this process, with torch and the network, minus the coordinates.
The network has random weights, which do not change the time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.claims import Claim, record_claims
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic

EACH = 10
"""Mean number of elements of a row."""

EXPONENT = 0.7
"""The row of rank n has a length proportional to n**-EXPONENT."""

ROWS_AT_ONCE = 2**16


def pattern(nnz: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """Create sorted int64 coordinates and the shape; works in place to save memory."""
    side = max(1, nnz // EACH)
    generator = np.random.default_rng(seed)
    share = np.arange(1, side + 1) ** -EXPONENT
    lengths = np.minimum(side, (share * (nnz / share.sum())).astype(np.int64))
    # The remainder of rounding goes to the shortest rows, the most frequent ones.
    lengths[max(0, side - (nnz - int(lengths.sum()))) :] += 1
    lengths = generator.permutation(np.minimum(side, lengths))
    ends = np.cumsum(lengths)
    rows, cols = np.empty(ends[-1], np.int64), np.empty(ends[-1], np.int64)
    for first in range(0, side, ROWS_AT_ONCE):
        subset = lengths[first : first + ROWS_AT_ONCE]
        start, end = ends[first] - subset[0], ends[first + len(subset) - 1]
        item = np.repeat(subset, subset)
        position = np.arange(start, end) - np.repeat(ends[first : first + len(subset)] - subset, subset)
        # One element in each of as many equal parts of the row as it has elements: sorted, and none twice.
        remaining, right = position * side // item, (position + 1) * side // item
        rows[start:end] = np.repeat(np.arange(first, first + len(subset)), subset)
        cols[start:end] = remaining + (generator.random(end - start) * (right - remaining)).astype(np.int64)
    return rows, cols, (side, side)


def peak_bytes() -> int:
    """Return the peak memory of this process."""
    # The peak of getrusage would be inherited from the parent process.
    result = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert result
    return 1024 * int(result[1])


def embed_task(nnz: int, device: str, threads: int, repeats: int) -> dict[str, Any]:
    """Create a pattern and embed it in this process."""
    rows, cols, shape = pattern(nnz)
    made_bytes = peak_bytes()

    import torch

    from sparseflow.tuning.model.net.coarsen import coarsen
    from sparseflow.tuning.model.net.pattern_net import PatternConfig, PatternNet

    torch.set_num_threads(threads)
    config = PatternConfig()
    network = PatternNet(config).to(device).eval()
    seconds, coarsen_seconds = [], []
    cells = 0
    for _ in range(repeats):
        start = time.perf_counter()
        with torch.no_grad():
            result = coarsen(rows, cols, shape, max_cells=config.max_cells, device=device)
            coarsen_seconds.append(time.perf_counter() - start)
            vector = network([result]).cpu()
        seconds.append(time.perf_counter() - start)
        assert bool(vector.isfinite().all())
        cells = len(result.coords)
    input_bytes = rows.nbytes + cols.nbytes
    return {
        "nnz": len(rows),
        "shape": shape,
        "cells": cells,
        "config": config.model_dump(),
        "threads": threads,
        "seconds": seconds,
        "coarsen_seconds": coarsen_seconds,
        "input_bytes": input_bytes,
        "peak_bytes_beyond_input": peak_bytes() - input_bytes,
        "peak_bytes_beyond_input_made": made_bytes - input_bytes,
        "cuda_peak_bytes": torch.cuda.max_memory_allocated(device) if device != "cpu" else None,
    }


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: time and memory of embedding a pattern."""
    device = record["environment"]["device"]["kind"]
    cuda = device == "cuda"
    command = f"python benchmarks/tuning/embed.py --device {device} --out results/tuning/embed-{device}.json"
    position = "a GPU" if cuda else f"{record['threads']} CPU threads"
    yield Claim(
        id=f"tuning/6-embed-{device}",
        claim=f"Time to coarsen and embed a pattern of {record['nnz']:,} elements on {position}, slowest of "
        f"{len(record['seconds'])} runs including the first.",
        value=round(max(record["seconds"]), 3),
        unit="s",
        target="< 1" if cuda else "< 30",
        command=command,
    )
    used_bytes = record["cuda_peak_bytes"] if cuda else record["peak_bytes_beyond_input"]
    yield Claim(
        id=f"tuning/6-memory-{device}",
        claim="Peak GPU memory of embedding the pattern."
        if cuda
        else "Peak memory of embedding the pattern in addition to its coordinates.",
        value=round(used_bytes / 1e9, 2),
        unit="GB",
        target="< 2",
        command=command,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nnz", type=int, default=10_000_000, help="approximate number of elements")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7, help="repeats; the first warms up")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        result = pool.submit(embed_task, args.nnz, args.device, args.threads, args.repeats).result()
    record = {"environment": collect_environment(args.device, seed=0), **result}
    print(
        f"{record['nnz']:,} elements, {record['cells']:,} cells: {min(record['seconds']):.2f} s (first "
        f"{record['seconds'][0]:.2f} s, coarsening {min(record['coarsen_seconds']):.2f} s), "
        f"{record['peak_bytes_beyond_input'] / 1e9:.2f} GB beyond the input"
    )
    if record["cuda_peak_bytes"] is not None:
        print(f"{record['cuda_peak_bytes'] / 1e9:.2f} GB on the GPU")
    if args.out:
        write_atomic(args.out, json.dumps(record, indent=1) + "\n")
        record_claims(make_claims(record), record, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Time of scoring random schedules of a problem with a network (line 6).

::

    export PYTHONPATH=src:.
    python benchmarks/tuning/score.py --threads 2 --out results/tuning/score-cpu.json
    python benchmarks/tuning/score.py --device cuda --out results/tuning/score-cuda.json

Schedules are sampled and encoded once, and the time of encoding is recorded. Scoring starts with encoded
schedules and ends with scores in CPU memory. The pattern is embedded before, as in a search. The network has
random weights without `--net`; weights do not change the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.claims import Claim, record_claims
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic
from sparseflow.tuning.measure.synthetic import sample_pattern
from sparseflow.tuning.model.net.network import AutoSparseNet
from sparseflow.tuning.model.net.pretrained import load_network
from sparseflow.tuning.model.net.scoring import embed_problem, score_token_ids
from sparseflow.tuning.model.net.tokenizer import ScheduleTokenizer
from sparseflow.tuning.schedule.matrices import CooMatrix
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import ScheduleSpace


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: time to score schedules."""
    device = record["environment"]["device"]["kind"]
    cuda = device == "cuda"
    seconds = round(statistics.median(record["seconds"]), 4)
    yield Claim(
        id=f"tuning/6-score-{device}",
        claim=f"Median time to score {record['schedules']:,} {record['operator']} schedules with a network "
        f"of {record['parameters']:,} weights, {'without' if cuda else 'including'} encoding.",
        value=seconds if cuda else round(seconds + record["encode_seconds"], 3),
        unit="s",
        target="< 0.05" if cuda else "< 2",
        command=f"python benchmarks/tuning/score.py --device {device} --out "
        f"results/tuning/score-{device}.json",
        details={"runs": len(record["seconds"]), "encode_s": round(record["encode_seconds"], 3)},
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--operator", default="spmm")
    parser.add_argument("--n-cols", type=int, default=256, help="for all operators but spmv")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20, help="repeats; the first warms up")
    parser.add_argument("--net", type=Path, help="network to score with")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    random = np.random.default_rng(0)
    kind = get_operator(args.operator)
    _, pattern = sample_pattern(random, kind="power_rows")
    matrix = CooMatrix(
        rows=pattern.rows, cols=pattern.cols, values=np.ones(pattern.nnz, np.float32), shape=pattern.shape
    )
    problem = SparseProblem(operator=kind, matrix=matrix, n_cols=args.n_cols if kind.dense_axes else None)
    space = ScheduleSpace(kind, problem.extents, threads=[1, args.threads])
    samples: dict[Schedule, None] = {}
    while len(samples) < args.schedules:
        samples[space.sample(random)] = None
    encoder = ScheduleTokenizer()
    start = time.perf_counter()
    ids = encoder.encode(list(samples), kind, problem.extents)
    table = encoder.table
    encode_seconds = time.perf_counter() - start

    net = (AutoSparseNet() if args.net is None else load_network(args.net)).to(args.device).eval()
    context = embed_problem(net, problem, args.threads)
    seconds = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        scores = score_token_ids(net, ids, table, context)
        seconds.append(time.perf_counter() - start)
        assert bool(np.isfinite(scores).all())
    record = {
        "environment": collect_environment(args.device, seed=0),
        "operator": kind.name,
        "schedules": len(ids),
        "tokens": int(ids.shape[1]),
        "distinct_tokens": len(table.fields),
        "config": net.config.model_dump(),
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "threads": args.threads,
        "encode_seconds": encode_seconds,
        "seconds": seconds,
    }
    warm = sorted(seconds[1:])
    middle, fastest = 1e3 * warm[len(warm) // 2], 1e3 * warm[0]
    print(
        f"{len(ids):,} schedules: scored in {middle:.1f} ms (fastest {fastest:.1f}, "
        f"first {1e3 * seconds[0]:.1f}); encoded in {1e3 * encode_seconds:.0f} ms"
    )
    if args.out:
        write_atomic(args.out, json.dumps(record, indent=1) + "\n")
        record_claims(make_claims(record), record, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Seconds until an optimized network returns its first output: cold, warm, and from a saved plan.

::

    python -m benchmarks.spiking.time_to_first_result --out runs/first.json --case vgg11:32 --case resnet18:32

Each row is measured in new processes: `optimize` without any cache, `optimize` with the caches of the first
process (compiled kernels and decisions), and `load_plan` of the plan that the first process saved. Importing
packages and building the network are not counted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import sparseflow
from benchmarks.claims import Claim, write_samples
from benchmarks.spiking.zoo_networks import CASES, NETWORKS, build
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import read_json, write_json
from sparseflow.spiking import load_plan, save_plan

MODULE = "benchmarks.spiking.time_to_first_result"
STEPS = ("cold", "warm", "plan")
CACHE_VARIABLES = ("SPARSEFLOW_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def measure_step(step: str, case: str, device: torch.device, plan: Path) -> float:
    """Return the seconds until the first output of one network in this process."""
    name, _, batch = case.partition(":")
    model, x, _ = build(NETWORKS[name], int(batch), device)
    (x.clone() @ x.new_ones(x.shape[-1], 1)).sum().item()  # creates the handles of the GPU's libraries
    start = time.perf_counter()
    if step == "plan":
        load_plan(model, plan, x)
    else:
        dtype = torch.float16 if x.is_cuda else None
        sparseflow.optimize(model, x, dtype=dtype, reset=True)
    with torch.no_grad():
        model(x).sum().item()
    seconds = time.perf_counter() - start
    if step == "cold":
        save_plan(model, plan)
    return seconds


def measure_case(case: str, device: str) -> dict[str, Any]:
    """Measure the steps of one network, each in a new process with the caches of the one before."""
    row: dict[str, Any] = {"case": case}
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder) / name.lower()) for name in CACHE_VARIABLES}
        for step in STEPS:
            out = Path(folder) / f"{step}.json"
            command = [sys.executable, "-m", MODULE, "--device", device]
            command += ["--case", case, "--out", str(out), "--step", step, "--plan", f"{folder}/plan.json"]
            subprocess.run(command, env=os.environ | caches, check=True)
            row[f"{step}_s"] = round(read_json(out)["seconds"], 2)
    return row


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield one claim for each step: the largest of the networks' times."""
    kind = "cpu" if record["arguments"]["device"] == "cpu" else "gpu"
    samples = write_samples(f"spiking/6-first-result-{kind}.json", record)
    sentences = {
        "cold": "`optimize` without caches",
        "warm": "`optimize` with the caches of an earlier process",
        "plan": "`load_plan` with the caches of an earlier process",
    }
    targets = {"cold": "<= 30", "warm": "<= 2", "plan": "<= 2"} if kind == "gpu" else {}
    for step, sentence in sentences.items():
        seconds = {row["case"]: row[f"{step}_s"] for row in record["rows"]}
        yield Claim(
            id=f"spiking/6-first-result-{kind}-{step}",
            claim=f"Longest time to the first output of {len(seconds)} networks: {sentence}.",
            value=max(seconds.values()),
            unit="s",
            target=targets.get(step),
            command=record["command"],
            samples=samples,
            details=seconds,
        )


def main(arguments: list[str] | None = None) -> int:
    """Measure all cases and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--case", action="append", choices=CASES, metavar="NAME:BATCH", required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.step:
        seconds = measure_step(options.step, options.case[0], torch.device(options.device), options.plan)
        write_json(options.out, {"seconds": seconds})
        return 0
    rows: list[dict[str, Any]] = []
    for case in options.case:
        rows.append(measure_case(case, options.device))
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
        write_json(options.out, {
            "command": f"python -m {MODULE} {' '.join(arguments or sys.argv[1:])}",
            "arguments": {"device": options.device},
            "environment": collect_environment(options.device),
            "rows": rows,
        }, indent=1)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())

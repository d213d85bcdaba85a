"""Compile what cases of ``networks.py`` need, in parallel processes, before anything is timed.

Triton and torch's compiler keep what they made on disk, where the measuring process finds it.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
import warnings

import torch
from network_cases import Job, distinct

from sparseflow.spiking.api import optimize
from sparseflow.spiking.graph.analysis import analyze
from sparseflow.spiking.profile.baselines import FUSED_DENSE, build_baselines


def warm(task: tuple[Job, argparse.Namespace]) -> str:
    """Compile what a case needs; what it learns beside that is dropped. Returns what went wrong, or ""."""
    job, args = task
    try:
        warnings.simplefilter("ignore")
        if args.device.type == "cuda":
            torch.cuda.set_device(args.device)
        model, x, _ = job.build(args.device)
        x = x[: job.batch]
        for name, form in build_baselines(model, analyze(model), x, compile=args.compiled).items():
            if name == FUSED_DENSE or "compiled" in name:
                form(x)
        optimize(model, x, dtype=args.dtype, cache=False)
        return ""
    except Exception as error:
        return f"{job.name}: {type(error).__name__}: {error}"[:300]
    finally:
        tidy(args)


def _few_threads() -> None:
    # Read by torch's compiler when it is first used; there are as many processes as cores already.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)


def prepare(jobs: list[Job], args: argparse.Namespace, limit_s: float) -> None:
    """Run `warm` for all cases in parallel processes, for no longer than `limit_s`."""
    pending = jobs if args.compiled else distinct(jobs)
    start_s = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(min(args.prepare, len(pending)), _few_threads) as pool:
        results = pool.imap_unordered(warm, [(job, args) for job in pending])
        try:
            for _ in pending:
                if failed := results.next(max(limit_s - (time.monotonic() - start_s), 0.1)):
                    print(f"could not be prepared: {failed}", file=sys.stderr)
        except multiprocessing.TimeoutError:
            print("the preparation was stopped; what is missing is compiled on the way", file=sys.stderr)
            pool.terminate()
        pool.close()
        pool.join()
    print(f"prepared {len(pending)} cases in {time.monotonic() - start_s:.1f} s", flush=True)


def tidy(args: argparse.Namespace) -> None:
    """Give memory back."""
    if args.compiled:
        torch.compiler.reset()
    gc.collect()
    if args.device.type == "cuda":
        torch.cuda.empty_cache()

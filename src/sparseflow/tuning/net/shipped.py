"""The network that comes with SparseFlow, which guided searches begin with."""

from __future__ import annotations

from functools import cache
from importlib import resources

from sparseflow.tuning.costmodel import Scorer
from sparseflow.tuning.net.model import AutoSparseNet
from sparseflow.tuning.net.saved import load
from sparseflow.tuning.net.scoring import scorer
from sparseflow.tuning.problem import Problem

FILE = "autosparse.safetensors"


@cache
def shipped() -> AutoSparseNet:
    """The network, on the CPU; read once."""
    with resources.as_file(resources.files("sparseflow.tuning") / "data" / FILE) as path:
        return load(path)


def prior(problem: Problem, threads: int) -> Scorer:
    """What it thinks of the schedules of a problem, for so many threads."""
    return scorer(shipped(), problem, threads)

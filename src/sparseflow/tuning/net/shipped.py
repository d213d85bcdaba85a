"""The network that comes with SparseFlow, which guided searches begin with."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path

from sparseflow.tuning.costmodel import Scorer
from sparseflow.tuning.net.model import AutoSparseNet
from sparseflow.tuning.net.saved import load
from sparseflow.tuning.net.scoring import scorer
from sparseflow.tuning.problem import Problem

FILE = "autosparse.safetensors"

SHIPPED = "shipped"
"""What names it where a network's file is asked for."""


@cache
def shipped() -> AutoSparseNet:
    """The network, on the CPU; read once."""
    with resources.as_file(resources.files("sparseflow.tuning") / "data" / FILE) as path:
        return load(path)


def network(name: Path | str) -> AutoSparseNet:
    """The network of a file, or the shipped one; on the CPU, not to be changed.

    Raises:
        InputError: There is no such file.
        FileFormatError: It is something else, or damaged.
    """
    return shipped() if name == SHIPPED else load(name)


def prior(problem: Problem, threads: int) -> Scorer:
    """What it thinks of the schedules of a problem, for so many threads."""
    return scorer(shipped(), problem, threads)

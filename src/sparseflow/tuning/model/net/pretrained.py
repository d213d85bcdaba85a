"""A network in one file: weights as safetensors, the configuration as JSON in their metadata."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from importlib import resources
from pathlib import Path

import torch

from sparseflow.core.artifact import load_tensors, save_tensors
from sparseflow.errors import FileFormatError
from sparseflow.tuning.model.cost_model import Scorer
from sparseflow.tuning.model.net.network import AutoSparseNet, NetConfig
from sparseflow.tuning.model.net.scoring import scorer
from sparseflow.tuning.schedule.problem import Problem

_MARK = {"sparseflow": "autosparse-net", "version": "1"}
"""Says that a file is one of these; the version counts what a change of tokens or statistics would break."""


def save(net: AutoSparseNet, path: Path | str, *, half: bool = True) -> None:
    """Write a network, in place of what is there.

    Args:
        net: The network.
        path: Ends in `.safetensors`, by custom. Its folder must exist.
        half: Store weights in float16, half as large and exact enough for ranking; else in float32.

    Raises:
        OSError: The file cannot be written.
    """
    kind = torch.float16 if half else torch.float32
    weights = {name: value.to(kind) for name, value in net.state_dict().items()}
    save_tensors(path, weights, _MARK | {"config": json.dumps(net.config.to_dict(), sort_keys=True)})


def load(path: Path | str, *, device: torch.device | str = "cpu") -> AutoSparseNet:
    """Read a network that `save` wrote, ready to score.

    Args:
        path: The file.
        device: Where to put it.

    Raises:
        InputError: There is no such file.
        FileFormatError: It is something else, or damaged.
    """
    metadata, given = load_tensors(path, _MARK, "AutoSparse Net")
    try:
        config = NetConfig.from_dict(json.loads(metadata["config"]))
        found = {name: value.shape for name, value in given.items()}
        if _least(config) > sum(shape.numel() for shape in found.values()):
            raise ValueError("what it holds does not fit its configuration")
        net = AutoSparseNet(config)
        expected = {name: value.shape for name, value in net.state_dict().items()}
        if found != expected:
            wrong = sorted(name for name in found.keys() | expected if found.get(name) != expected.get(name))
            raise ValueError(f"`{wrong[0]}` does not fit its configuration")
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{path} is not an AutoSparse Net that can be read: {error}") from error
    weights = {name: value.float() for name, value in given.items()}
    if not all(bool(value.isfinite().all()) for value in weights.values()):
        raise FileFormatError(f"{path} is damaged: it holds weights that are not finite")
    net.load_state_dict(weights)
    return net.to(device).eval()


def _least(config: NetConfig) -> int:
    """Weights that a network of this configuration has at least: none is made larger than its file."""
    pattern = config.pattern
    of_pattern = 0 if pattern is None else max(9 * pattern.channels**2, pattern.width**2)
    return of_pattern + (0 if config.joined == "perceptron" else config.layers * 4 * config.width**2)


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


def load_prior(path: Path | str) -> Callable[[Problem, int], Scorer]:
    """Load a network as the prior of guided searches; see `TuningSession`.

    Raises:
        InputError: There is no such file.
        FileFormatError: The file is not a network.
    """
    return partial(scorer, load(path))

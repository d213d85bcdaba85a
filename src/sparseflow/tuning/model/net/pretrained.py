"""Network files and the shipped network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from sparseflow.core.artifact import Artifact
from sparseflow.errors import FileFormatError
from sparseflow.tuning.model.cost_model import ScheduleScorer
from sparseflow.tuning.model.net.network import AutoSparseNet, NetConfig
from sparseflow.tuning.model.net.scoring import make_scorer
from sparseflow.tuning.schedule.problem import SparseProblem


class NetworkFile(Artifact):
    """Metadata of a network file. A change of tokens, features or names of weights is a new version."""

    FORMAT: ClassVar[str] = "sparseflow.tuning.autosparse-net"
    VERSION: ClassVar[int] = 3
    HINT: ClassVar[str] = "train a network with `sparseflow tuning train`"

    config: NetConfig


def save_network(net: AutoSparseNet, path: Path | str, *, half: bool = True) -> None:
    """Write a network, replacing an existing file.

    Args:
        net: Network.
        path: File, usually `.safetensors`.
        half: Store weights as float16, which is precise enough for ranking; else as float32.

    Raises:
        OSError: The file cannot be written.
    """
    dtype = torch.float16 if half else torch.float32
    weights = {name: value.to(dtype) for name, value in net.state_dict().items()}
    NetworkFile(config=net.config).save_tensors(path, weights)


def load_network(path: Path | str, *, device: torch.device | str = "cpu") -> AutoSparseNet:
    """Read a network in evaluation mode.

    Args:
        path: File.
        device: Device.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file has another format or version, or is damaged.
    """
    file, tensors = NetworkFile.load_tensors(path)
    weights = {name: value.float() for name, value in tensors.items()}
    may_fit = _count_min_weights(file.config) <= sum(value.numel() for value in weights.values())
    net = AutoSparseNet(file.config) if may_fit else None
    if net is None or _get_shapes(weights) != _get_shapes(net.state_dict()):
        raise FileFormatError(f"{path} is damaged: the weights do not fit the configuration; {file.HINT}")
    if not all(bool(value.isfinite().all()) for value in weights.values()):
        raise FileFormatError(f"{path} is damaged: weights are not finite; {file.HINT}")
    net.load_state_dict(weights)
    return net.to(device).eval()


def _get_shapes(weights: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in weights.items()}


def _count_min_weights(config: NetConfig) -> int:
    """Lower bound of the number of weights, so that no network larger than its file is allocated."""
    pattern = config.pattern
    of_pattern = 0 if pattern is None else max(9 * pattern.channels**2, pattern.width**2)
    return of_pattern + (0 if config.context_mode == "mlp" else config.layers * 4 * config.width**2)


SHIPPED_FILE = "autosparse.safetensors"

SHIPPED = "shipped"
"""Name of the shipped network in place of a file."""


@cache
def load_shipped_network() -> AutoSparseNet:
    """Load the shipped network on the CPU, once."""
    with resources.as_file(resources.files("sparseflow.tuning") / "data" / SHIPPED_FILE) as path:
        return load_network(path)


def resolve_network(name: Path | str) -> AutoSparseNet:
    """Load the network of a file or the shipped network on the CPU; it must not be modified.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file has another format or version, or is damaged.
    """
    return load_shipped_network() if name == SHIPPED else load_network(name)


def make_shipped_prior(problem: SparseProblem, threads: int) -> ScheduleScorer:
    """Create a scorer of a problem with the shipped network."""
    return make_scorer(load_shipped_network(), problem, threads)


def load_prior(path: Path | str) -> Callable[[SparseProblem, int], ScheduleScorer]:
    """Load a network as the prior of guided searches; see `TuningSession`.

    Raises:
        InputError: There is no such file.
        FileFormatError: The file is not a network.
    """
    return partial(make_scorer, load_network(path))

"""Network files and the shipped network."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparseflow.errors import FileFormatError
from sparseflow.tuning.measure.synthetic import PATTERN_KINDS, sample_pattern
from sparseflow.tuning.model.net import pretrained
from sparseflow.tuning.model.net.network import AutoSparseNet, NetConfig
from sparseflow.tuning.model.net.pretrained import (
    SHIPPED_FILE,
    NetworkFile,
    load_shipped_network,
    make_shipped_prior,
)
from sparseflow.tuning.model.net.statistics import NUM_FEATURES
from sparseflow.tuning.schedule.matrices import CooMatrix
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.presets import build_presets
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.space import ScheduleSpace
from tests.conformance import check_artifact_file
from tests.tuning.synthetic_labels import NO_PATTERN, SMALL


@pytest.mark.parametrize("config", [SMALL, NO_PATTERN], ids=["pattern", "bare"])
@pytest.mark.parametrize("half", [True, False])
def test_save_load_round_trip(config: NetConfig, half: bool, tmp_path: Path) -> None:
    net, path = AutoSparseNet(config), tmp_path / "net.safetensors"
    pretrained.save_network(net, path, half=half)
    loaded = pretrained.load_network(path)
    assert loaded.config == config and not loaded.training
    statistics = np.ones(NUM_FEATURES, np.float32)
    tolerance = 1e-2 if half else 0.0
    torch.testing.assert_close(
        loaded.embed_task(None, statistics), net.embed_task(None, statistics), rtol=tolerance, atol=tolerance
    )
    assert all(value.dtype == torch.float32 for value in loaded.state_dict().values())
    if not half:
        torch.testing.assert_close(dict(loaded.state_dict()), dict(net.state_dict()), rtol=0.0, atol=0.0)


def test_default_network_file_is_below_8_mb(tmp_path: Path) -> None:
    pretrained.save_network(AutoSparseNet(), tmp_path / "net.safetensors")
    assert (tmp_path / "net.safetensors").stat().st_size < 8e6


def write_changed(path: Path, **changes: Any) -> None:
    """Write a network with changed metadata or weights."""
    net = AutoSparseNet(SMALL)
    weights = {name: value.half() for name, value in net.state_dict().items()}
    config = changes.pop("config", net.config)
    NetworkFile(config=config).save_tensors(path, weights | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"config": NetConfig(width=1024)},
        {"head": torch.zeros(3)},
        {"more": torch.zeros(3)},
        {"head": torch.full((16,), torch.nan)},
    ],
)
def test_load_weights_that_do_not_fit_raises(changes: dict[str, Any], tmp_path: Path) -> None:
    write_changed(tmp_path / "net.safetensors", **changes)
    with pytest.raises(FileFormatError):
        pretrained.load_network(tmp_path / "net.safetensors")


def test_network_file_conforms(tmp_path: Path) -> None:
    write_changed(tmp_path / "net.safetensors")
    check_artifact_file(pretrained.load_network, tmp_path / "net.safetensors", hint="tuning train")


def test_shipped_network_is_small_and_cached() -> None:
    file = resources.files("sparseflow.tuning") / "data" / SHIPPED_FILE
    assert len(file.read_bytes()) <= 8_000_000
    assert load_shipped_network() is load_shipped_network() and not load_shipped_network().training


@pytest.mark.parametrize("name", OPERATORS)
def test_shipped_network_ranks_presets(name: str) -> None:
    """The presets are far faster than most random schedules for every kind of matrix."""
    rng = np.random.default_rng(0)
    above = []
    for kind in PATTERN_KINDS:
        _, pattern = sample_pattern(rng, kind=kind, rows=(500, 2000), nnz=(5000, 12_000))
        values = np.ones(len(pattern.rows), np.float32)
        matrix = CooMatrix(rows=pattern.rows, cols=pattern.cols, values=values, shape=pattern.shape)
        operator = OPERATORS[name]
        problem = SparseProblem(operator=operator, matrix=matrix, n_cols=64 if operator.dense_axes else None)
        space = ScheduleSpace(operator, problem.extents, threads=[1, 2])
        scores = make_shipped_prior(problem, 2)
        samples = scores([space.sample(rng) for _ in range(50)])
        best = scores(list(build_presets(operator, problem.extents, 2).values())).max()
        assert np.isfinite(samples).all()
        above.append((best > samples).mean())
    assert np.mean(above) > 0.9

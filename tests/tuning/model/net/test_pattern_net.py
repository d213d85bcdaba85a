"""The pattern branch: shapes, sensitivity and invalid inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from sparseflow.errors import InputError
from sparseflow.tuning.model.net import pattern_net as module
from sparseflow.tuning.model.net.coarsen import Cells, coarsen
from sparseflow.tuning.model.net.pattern_net import PatternConfig, PatternNet
from sparseflow.tuning.model.net.sparse_conv import ActiveSites

KINDS = ["hdc", "strided"]
POOLINGS = ["concat", "last"]
SMALL = {"channels": 8, "width": 24}


def cells(shape: tuple[int, int], density: float = 0.3, seed: int = 0) -> Cells:
    rows, cols = np.nonzero(np.random.default_rng(seed).random(shape) < density)
    return coarsen(rows, cols, shape, max_cells=200)


def network(**fields: Any) -> PatternNet:
    torch.manual_seed(0)
    return PatternNet(PatternConfig(**{**SMALL, **fields})).eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_forward_any_shape_gives_vector(kind: str, pooling: str) -> None:
    net = network(kind=kind, pooling=pooling)
    patterns = [cells((50, 60)), cells((1, 30)), cells((30, 1)), cells((1, 1), 1.0), cells((5, 5), 0.0)]
    with torch.no_grad():
        result = net(patterns)
        single = torch.cat([net([pattern]) for pattern in patterns])
    assert result.shape == (5, 24)
    # Items of a batch do not influence each other.
    torch.testing.assert_close(result, single)
    assert len({tuple(row) for row in result.tolist()}) == 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_forward_every_weight_has_gradient(kind: str, pooling: str) -> None:
    net = network(kind=kind, pooling=pooling).train()
    net([cells((200, 300), 0.05), cells((40, 40))]).square().sum().backward()
    for name, value in net.named_parameters():
        assert value.grad is not None and value.grad.isfinite().all() and value.grad.any(), name


@pytest.mark.parametrize("pooling", POOLINGS)
def test_kinds_have_equal_weight_counts(pooling: str) -> None:
    sizes = {sum(value.numel() for value in network(kind=k, pooling=pooling).parameters()) for k in KINDS}
    assert len(sizes) == 1


def test_forward_is_deterministic() -> None:
    net, pattern = network(), cells((90, 70))
    with torch.no_grad():
        assert torch.equal(net([pattern]), net([pattern]))


def test_forward_depends_on_positions() -> None:
    net = network()
    result = []
    for cols in (np.arange(64), np.arange(64)[::-1]):
        with torch.no_grad():
            result.append(net([coarsen(np.arange(64), cols, (64, 64))]))
    assert not torch.allclose(*result, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "value"),
    [("kind", "dense"), ("pooling", None), ("channels", 0), ("width", 1.5), ("max_cells", 0), ("depth", 3)],
)
def test_config_invalid_value_raises(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        PatternConfig.model_validate({name: value})


def test_forward_invalid_cells_raise() -> None:
    net, pattern = network(), cells((5, 5))
    with pytest.raises(InputError):
        net([])
    with pytest.raises(InputError):
        net([replace(pattern, features=pattern.features[:, 1:])])


def test_forward_training_caches_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    net, patterns = network(), [cells((20, 30)), cells((30, 20)), cells((25, 25))]
    created = []
    parent = ActiveSites.from_coords
    monkeypatch.setattr(ActiveSites, "from_coords", lambda *args: created.append(args) or parent(*args))
    for training, times in ((False, 6), (True, 3)):
        net.train(training)
        created.clear()
        result = [net([item]) for item in patterns * 2]
        assert len(created) == times
        assert torch.equal(torch.cat(result[:3]), torch.cat(result[3:]))
    monkeypatch.setattr(module, "_MAX_CACHED_CELLS", 1)
    created.clear()
    other = network().train()
    for index in (0, 0, 1, 0):
        other([patterns[index]])
    assert len(created) == 3


@pytest.mark.gpu
def test_forward_gpu_matches_cpu() -> None:
    net = network()
    patterns = [cells((50, 60)), cells((300, 20)), cells((5, 5), 0.0)]
    with torch.no_grad():
        expected = net(patterns)
        result = net.cuda()(patterns)
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-3, atol=1e-4)

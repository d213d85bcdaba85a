"""Networks in files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save as serialize

from sparseflow.errors import FileFormatError, InputError
from sparseflow.tuning.model.net import pretrained
from sparseflow.tuning.model.net.network import AutoSparseNet, NetConfig
from sparseflow.tuning.model.net.statistics import NUM_FEATURES
from tests.tuning.synthetic_labels import NO_PATTERN, SMALL


@pytest.mark.parametrize("config", [SMALL, NO_PATTERN], ids=["pattern", "bare"])
@pytest.mark.parametrize("half", [True, False])
def test_save_load_round_trip(config: NetConfig, half: bool, tmp_path: Path) -> None:
    net, path = AutoSparseNet(config), tmp_path / "net.safetensors"
    pretrained.save_network(net, path, half=half)
    loaded = pretrained.load_network(path)
    assert loaded.config == config and not loaded.training
    messages = np.ones(NUM_FEATURES, np.float32)
    tolerance = 1e-2 if half else 0.0
    torch.testing.assert_close(
        loaded.embed_task(None, messages), net.embed_task(None, messages), rtol=tolerance, atol=tolerance
    )
    assert all(value.dtype == torch.float32 for value in loaded.state_dict().values())
    if not half:
        torch.testing.assert_close(dict(loaded.state_dict()), dict(net.state_dict()), rtol=0.0, atol=0.0)


def test_default_network_file_is_below_8_mb(tmp_path: Path) -> None:
    pretrained.save_network(AutoSparseNet(), tmp_path / "net.safetensors")
    assert (tmp_path / "net.safetensors").stat().st_size < 8e6


def _file(tmp_path: Path, net: AutoSparseNet, **changes: object) -> Path:
    """A file of a network, with some of its metadata or weights changed."""
    weights = {name: value.half() for name, value in net.state_dict().items()}
    metadata = pretrained._METADATA | {"config": json.dumps(net.config.to_dict())}
    for name, value in changes.items():
        if isinstance(value, torch.Tensor):
            weights[name.replace("__", ".")] = value
        else:
            metadata[name] = str(value)
    path = tmp_path / "changed.safetensors"
    path.write_bytes(serialize(weights, metadata=metadata))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparseflow": "other"}, "AutoSparse"),
        ({"version": 0}, ""),
        ({"config": "{"}, ""),
        ({"config": "[]"}, ""),
        ({"config": json.dumps(NetConfig(width=1024).to_dict())}, ""),
        ({"head": torch.zeros(3)}, "`head`"),
        ({"more": torch.zeros(3)}, "`more`"),
        ({"head": torch.full((16,), torch.nan)}, ""),
    ],
)
def test_load_foreign_file_raises(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    path = _file(tmp_path, AutoSparseNet(SMALL), **changes)
    with pytest.raises(FileFormatError, match=message or None):
        pretrained.load_network(path)


def test_load_damaged_or_missing_file_raises(tmp_path: Path) -> None:
    path = _file(tmp_path, AutoSparseNet(SMALL))
    pretrained.load_network(path)
    content = path.read_bytes()
    for torn in (content[:-10], content[:100], b""):
        path.write_bytes(torn)
        with pytest.raises(FileFormatError):
            pretrained.load_network(path)
    with pytest.raises(InputError):
        pretrained.load_network(tmp_path / "absent.safetensors")

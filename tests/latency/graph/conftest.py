"""Exported networks that the tests of graphs share."""

from __future__ import annotations

from pathlib import Path

import pytest

SMALL_VIT = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL_SWIN = {"embed_dim": 12, "depths": [2, 2], "num_heads": [2, 3], "window_size": 4}


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ResNet-18, MobileNet and two small vision transformers."""
    from sparseflow.latency.graph.zoo import ZooConfig, export_zoo

    folder = tmp_path_factory.mktemp("zoo")
    models = [
        "resnet18",
        "mobilenet_v2",
        {"name": "vit", "config": SMALL_VIT, "sizes": [32], "batches": [1, 2]},
        {"name": "swin", "config": SMALL_SWIN, "sizes": [32]},
    ]
    config = ZooConfig.model_validate({"models": models, "sizes": [64]})
    assert all(result.problem is None for result in export_zoo(config, folder))
    return folder

"""Configurations in the how-tos are valid."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparseflow.codesign import read_config, read_library
from sparseflow.latency.graph.zoo import ZooConfig
from sparseflow.latency.inference_config import load_inference_config
from sparseflow.latency.measure.config import load_collection_config
from sparseflow.pruning.config import parse_config
from sparseflow.pruning.config import read_config as read_pruning_config

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"


def read_zoo(path: Path) -> Any:
    from sparseflow.core.config import load_config

    return load_config(ZooConfig, path, extra="latency")


def read_task(path: Path) -> Any:
    return parse_config(read_config(path).task, "`task`")


def read_changes(path: Path) -> Any:
    from sparseflow.core.config import read_config_file

    changes = read_config_file(path, package="sparseflow.pruning", extra="pruning")
    return read_pruning_config("moving_digits", changes)


@pytest.mark.parametrize(
    ("page", "readers"),
    [
        ("train-a-latency-predictor", [load_collection_config, read_zoo]),
        ("predict-under-load", [load_collection_config, load_inference_config]),
        ("prune-your-vit", [read_pruning_config, read_changes]),
        ("plan-a-partition", [read_library, read_library, read_task]),
    ],
)
def test_configs_of_page_are_valid(page: str, readers: list[Callable[[Path], Any]], tmp_path: Path) -> None:
    text = (HOW_TO / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^( *)```yaml\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == len(readers)
    for (_, block), read in zip(blocks, readers, strict=True):
        path = tmp_path / "config.yaml"
        path.write_text(textwrap.dedent(block), encoding="utf-8")
        assert read(path)

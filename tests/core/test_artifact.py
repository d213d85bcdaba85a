"""Weights in files: what is written is read, and what is something else is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparseflow.core.artifact import load_tensors, save_tensors
from sparseflow.errors import FileFormatError, InputError

MARK = {"sparseflow": "thing", "version": "1"}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    weights = {"a": torch.randn(3, 4).T, "b": torch.arange(3)}
    save_tensors(path, weights, MARK | {"made": "so"})
    metadata, found = load_tensors(path, MARK, "thing")
    assert metadata["made"] == "so"
    torch.testing.assert_close(found, weights, rtol=0.0, atol=0.0)


def test_what_is_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(InputError, match="there is no file"):
        load_tensors(path, MARK, "thing")
    save_tensors(path, {"a": torch.zeros(2)}, {"sparseflow": "other"})
    with pytest.raises(FileFormatError, match="holds no thing of this version"):
        load_tensors(path, MARK, "thing")
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(FileFormatError, match="is not a thing that can be read"):
        load_tensors(path, MARK, "thing")

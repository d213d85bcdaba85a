"""Tests of the shipped network and images, and of damaged package data."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sparseflow.errors import FileFormatError, InputError
from sparseflow.spiking.models import pretrained

pytest.importorskip("spikingjelly")


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with one tiny network called ``tiny``."""
    from sparseflow.spiking.models.spiking_resnet import spiking_resnet

    torch.manual_seed(0)
    network = {
        "depth": 18, "width": 2, "num_classes": 10, "T": 2, "stem": "cifar", "residual": "sew_add",
    }  # fmt: skip
    net = spiking_resnet(18, width=2, T=2, residual="sew_add")
    tensors = {k: v.half() if v.dim() > 1 else v for k, v in net.state_dict().items()}
    save_file(tensors, tmp_path / "tiny.safetensors")
    card = {
        "network": network, "normalization": {"mean": [0.5] * 3, "std": [0.25] * 3},
        "test_accuracy": 0.5, "correct": 1, "test_images": 2,
    }  # fmt: skip
    (tmp_path / "tiny.json").write_text(json.dumps(card))
    np.savez_compressed(
        tmp_path / "images.npz",
        images=np.zeros((4, 3, 32, 32), np.uint8),
        labels=np.arange(4, dtype=np.uint8),
    )
    monkeypatch.setattr(pretrained, "_get_data_dir", lambda: tmp_path)
    return tmp_path


def test_load_gives_the_stored_weights_in_float32(shelf: Path) -> None:
    assert pretrained.list_names() == ["tiny"]
    net = pretrained.load_network("tiny")
    assert not net.training and net.T == 2
    assert all(p.dtype == torch.float32 for p in net.parameters())
    assert torch.equal(net.conv1.weight, net.conv1.weight.half().float())  # pyright: ignore
    assert net(pretrained.normalize(pretrained.load_images()[0], "tiny")).shape == (4, 10)


def test_images_and_normalisation(shelf: Path) -> None:
    pixels, labels = pretrained.load_images()
    assert pixels.dtype == np.uint8 and labels.dtype == np.int64
    assert pretrained.normalize(pixels, "tiny").unique().tolist() == [-2.0]
    with pytest.raises(InputError, match="float32"):
        pretrained.normalize(pixels.astype(np.float32), "tiny")


def test_unknown_name_lists_the_known(shelf: Path) -> None:
    with pytest.raises(InputError, match=r"'other'.*tiny"):
        pretrained.load_network("other")


@pytest.mark.parametrize("content", [b"", b"{", b"{}"])
def test_damaged_card(shelf: Path, content: bytes) -> None:
    (shelf / "tiny.json").write_bytes(content)
    with pytest.raises(FileFormatError, match=r"tiny\.json"):
        pretrained.load_network("tiny")


def test_damaged_weights(shelf: Path) -> None:
    path = shelf / "tiny.safetensors"
    full = path.read_bytes()
    path.write_bytes(full[:-10])
    with pytest.raises(FileFormatError, match=r"tiny\.safetensors"):
        pretrained.load_network("tiny")
    path.unlink()
    with pytest.raises(InputError, match="tiny"):
        pretrained.load_network("tiny")


def test_weights_of_another_width(shelf: Path) -> None:
    card = json.loads((shelf / "tiny.json").read_text())
    card["network"]["width"] = 4
    (shelf / "tiny.json").write_text(json.dumps(card))
    with pytest.raises(FileFormatError, match="card"):
        pretrained.load_network("tiny")


def pickled() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, images=np.array([{"a": 1}], dtype=object), labels=np.zeros(1))
    return stream.getvalue()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", pickled()])
def test_damaged_images(shelf: Path, content: bytes) -> None:
    (shelf / "images.npz").write_bytes(content)
    with pytest.raises(FileFormatError, match=r"images\.npz"):
        pretrained.load_images()


def test_missing_images(shelf: Path) -> None:
    (shelf / "images.npz").unlink()
    with pytest.raises(FileFormatError, match=r"images\.npz"):
        pretrained.load_images()

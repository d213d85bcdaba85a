"""Inputs of networks from files of tensors, and random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sparseflow.errors import FileFormatError, InputError
from sparseflow.spiking.models.network_inputs import InputConfig, load_tensors, parse_shape

X = torch.arange(24.0).view(2, 3, 4)


def save(path: Path, content: Any) -> str:
    if path.suffix == ".npy":
        np.save(path, content, allow_pickle=True)
    elif path.suffix == ".npz":
        np.savez(path, **content)
    elif path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path)
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "key", "expected"),
    [
        ("x.pt", X, "", [X]),
        ("x.pth", (X, X + 1), "", [X, X + 1]),
        ("x.pt", [X, X + 1], ":1", [X + 1]),
        ("x.pt", {"frames": X, "mask": X > 3}, "", [X, X > 3]),
        ("x.pt", nn.Parameter(X), "", [X]),
        ("x.npy", X.numpy(), "", [X]),
        ("x.npz", {"frames": X.numpy(), "label": np.array(3)}, ":frames", [X]),
        ("x.safetensors", {"x": X}, "", [X]),
    ],
)
def test_load_tensors_reads_each_kind_of_file(
    name: str, content: Any, key: str, expected: list[torch.Tensor], tmp_path: Path
) -> None:
    tensors = load_tensors(save(tmp_path / name, content) + key)
    assert len(tensors) == len(expected)
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(tensors, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        ("model.pt", nn.Linear(2, 2), FileFormatError, "other objects"),
        ("text.pt", {"x": "text"}, FileFormatError, "'x'.*str"),
        ("none.pt", [], FileFormatError, "no tensors"),
        ("objects.npy", np.array([{}], dtype=object), FileFormatError, "objects"),
        ("letters.npy", np.array(["a"]), FileFormatError, "ndarray"),
        ("x.csv", X, InputError, r"\.safetensors"),
    ],
)
def test_load_tensors_refuses_other_content(
    name: str, content: Any, error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        load_tensors(save(tmp_path / name, content))


@pytest.mark.parametrize("suffix", [".pt", ".npy", ".npz", ".safetensors"])
def test_load_tensors_damaged_or_absent_file_is_named(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"x{suffix}"
    for content in (b"", b"damaged", b"PK\x03\x04"):
        file.write_bytes(content)
        with pytest.raises(FileFormatError, match="x\\" + suffix):
            load_tensors(str(file))
    with pytest.raises(InputError, match="absent"):
        load_tensors(str(tmp_path / f"absent{suffix}"))
    with pytest.raises(InputError, match="cannot read"):
        (tmp_path / f"d{suffix}").mkdir()
        load_tensors(str(tmp_path / f"d{suffix}"))


def test_load_tensors_unknown_key_lists_the_keys(tmp_path: Path) -> None:
    file = save(tmp_path / "x.npz", {"frames": X.numpy()})
    with pytest.raises(InputError, match=r"'frame'.*frames"):
        load_tensors(f"{file}:frame")


def test_inputs_are_cast_to_the_precision_of_the_network(tmp_path: Path) -> None:
    tensors = [X.double(), X.to(torch.uint8), X > 3, X.long()]
    file = save(tmp_path / "x.pt", tensors)
    model = nn.Linear(4, 1).to(torch.bfloat16)
    actual = [x.dtype for x in InputConfig(files=(file,)).load(model)]
    assert actual == [torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int64]


def test_random_inputs_are_reproducible_and_sparse_with_an_event_rate() -> None:
    config = InputConfig(shapes=((4, 2, 2, 16, 16), (3,)), event_rate=0.1)
    x, second = config.load(nn.Identity())
    assert x.shape == (4, 2, 2, 16, 16) and second.shape == (3,)
    assert set(x.unique().tolist()) == {0.0, 1.0} and 0.05 < x.mean() < 0.15
    assert torch.equal(x, config.load(nn.Identity())[0])


@pytest.mark.parametrize(
    "options",
    [{}, {"files": ("x.pt",), "shapes": ((2,),)}, {"shapes": ((2, 0),)}, {"shapes": ((2**20, 2**20),)},
     {"shapes": ((2,),), "event_rate": 1.0}],
)  # fmt: skip
def test_input_config_out_of_range_raises(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        InputConfig(**options).load(nn.Identity())


@pytest.mark.parametrize("text", ["", "4,", "a", "4x2", "4.0"])
def test_parse_shape_invalid_text_raises(text: str) -> None:
    with pytest.raises(InputError, match="4,2,48,48"):
        parse_shape(text)
    assert parse_shape("4, 2") == (4, 2)

"""Storage of weights in float8."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.float8 import convert


def test_convert_rounds_matrices_to_multiples_of_their_step(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = 0.05 * torch.randn(64, 64, generator=generator)
    tensors = {"experts.w": matrix, "w": matrix.clone(), "bias": matrix[0].clone()}
    save_file(tensors, tmp_path / "in.safetensors", metadata={"format": "pt"})
    convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", {"": 2**-6, "experts": 2**-5})
    rounded = load_file(tmp_path / "out.safetensors")
    assert torch.equal(rounded["bias"], matrix[0])
    for name, step in (("experts.w", 2**-5), ("w", 2**-6)):
        assert rounded[name].dtype == torch.float8_e4m3fn
        values = rounded[name].float()
        assert torch.equal(values, torch.round(matrix / step) * step)
        assert not torch.signbit(values[values == 0]).any()

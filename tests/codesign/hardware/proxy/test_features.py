"""Tests of `codesign.hardware.proxy.features`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sparseflow.codesign.hardware.chips import read_library
from sparseflow.codesign.hardware.proxy import FEATURES, build_layer_features
from sparseflow.errors import InputError
from tests.codesign.hardware.proxy.made_up import GPU, node


def read(layer, device=GPU) -> dict[str, float]:
    return dict(zip(FEATURES, build_layer_features(layer, device).tolist(), strict=True))


def test_features_of_layer_and_device() -> None:
    layer = node("attention", inner=12)
    result = read(layer)
    assert result["log10_flops"] == pytest.approx(math.log10(float(layer.flops)))
    assert result["log10_bytes"] == pytest.approx(math.log10(float(layer.bytes)))
    assert result["log10_peak_flops"] == pytest.approx(math.log10(4e14))
    assert result["log10_peak_bw"] == pytest.approx(math.log10(2e12))
    assert [result[f"is_{kind}"] for kind in ("embed", "attention", "mlp", "head")] == [0, 1, 0, 0]
    assert [result[f"is_{item}"] for item in ("float64", "float32", "bfloat16", "float16")] == [0, 0, 1, 0]
    assert result["embed_dim/1024"] == 0.75 and result["num_heads/16"] == 0.75
    assert result["seq_len/1024"] == pytest.approx(196 / 1024) and result["mlp_ratio/4"] == 0.0
    assert result["log2_batch/8"] == 3 / 8
    assert read(node("mlp"))["mlp_ratio/4"] == 1.0


@pytest.mark.parametrize(("kind", "inner"), [("embed", 16), ("attention", 5), ("mlp", 1000), ("head", 101)])
def test_features_infer_product_shapes(kind: str, inner: int) -> None:
    expected = {"embed": 3 * 16**2, "attention": 5 * 64}.get(kind, inner)
    result = read(node(kind, inner=inner))
    assert 10 ** result["log10_inner"] == pytest.approx(expected)
    # Heads that were cut do not change the width of those that are left.
    assert result["head_dim/128"] == pytest.approx(0.5 if kind == "attention" else 0.0)


def test_features_count_tiles_and_waves() -> None:
    # 8 * 196 = 1568 rows are 13 tiles, 3072 columns 24: 312 tiles on 100 multiprocessors, 4 waves for 3.12.
    result = read(node("mlp"))
    assert result["log2_waves_first/8"] == pytest.approx(math.log2(3.12) / 8)
    assert result["lost_waves_first"] == pytest.approx(math.log2(4 / 3.12))
    assert result["lost_rows"] == pytest.approx(math.log2(13 * 128 / 1568)) and result["lost_columns"] == 0.0
    assert result["unaligned_8"] == result["unaligned_64"] == 0.0
    assert read(node("mlp", inner=3000))["unaligned_64"] == 1.0
    assert read(node("mlp", inner=3001))["unaligned_8"] == 1.0
    # 13 * 6 tiles for the way back are less than one wave.
    seconds = (4 * 768 + 1 * 3072) * 2 * 128 * 128 * 100
    assert result["log10_tiled"] == pytest.approx(math.log10(seconds / float(node("mlp").flops)))
    # Where nobody knows the multiprocessors, nothing is said about them.
    silent = read(node("mlp"), replace(GPU, cores=None))
    assert silent["log2_waves_first/8"] == silent["lost_waves_first"] == silent["log10_tiled"] == 0.0


def test_features_pad_head_width() -> None:
    layer = node("attention", inner=12)
    odd = replace(layer, num_heads=16)  # as wide together: 48 each
    assert read(odd)["head_padding"] == pytest.approx(math.log2(64 / 48))
    assert read(layer)["head_padding"] == 0.0


@pytest.mark.parametrize(("kind", "inner"), [("embed", 16), ("attention", 12), ("mlp", 3072), ("head", 101)])
def test_features_gradients(kind: str, inner: int) -> None:
    layer = node(kind, inner=inner)
    index = torch.tensor([float(layer.flops) / 1e9, float(layer.bytes) / 1e6], dtype=torch.float64)

    def smooth(x: torch.Tensor) -> torch.Tensor:
        result = build_layer_features(replace(layer, flops=1e9 * x[0], bytes=1e6 * x[1]), GPU)
        return result[: FEATURES.index("head_dim/128")]  # what follows counts tiles, and is a constant

    assert torch.autograd.gradcheck(smooth, index.requires_grad_())
    features = build_layer_features(replace(layer, flops=1e9 * index[0], bytes=1e6 * index[1]), GPU)
    weights = torch.arange(1.0, len(FEATURES) + 1.0)
    (gradient,) = torch.autograd.grad((weights * features).sum(), index)
    assert bool(torch.isfinite(gradient).all()) and bool((gradient != 0.0).all())
    assert torch.allclose(features.detach(), build_layer_features(layer, GPU), rtol=0.0, atol=1e-12)


def test_features_of_closed_layer_are_finite() -> None:
    for kind, inner in (("embed", 16), ("attention", 12), ("mlp", 3072), ("head", 101)):
        removed = replace(node(kind, inner=inner), flops=torch.zeros((), requires_grad=True), bytes=0.0)
        features = build_layer_features(removed, GPU)
        assert bool(torch.isfinite(features).all())
        features.sum().backward()
        assert isinstance(removed.flops, torch.Tensor) and removed.flops.grad is not None
        assert bool(torch.isfinite(removed.flops.grad))


def test_features_of_all_library_chips_are_finite() -> None:
    for chip in read_library().chips:
        for kind, inner in (("embed", 16), ("attention", 12), ("mlp", 3072), ("head", 101)):
            assert bool(torch.isfinite(build_layer_features(node(kind, inner=inner), chip)).all())


@pytest.mark.parametrize(
    "wrong",
    [
        {"flops": -1.0}, {"bytes": float("nan")}, {"flops": torch.tensor(float("inf"))}, {"seq_len": 0},
        {"layer_type": "convolution"}, {"precision": "int8"},
    ],
)  # fmt: skip
def test_features_of_invalid_layer_are_refused(wrong: dict) -> None:
    with pytest.raises(InputError, match="mlp-bfloat16-b8-s196-c768-3072"):
        build_layer_features(replace(node(), **wrong), GPU)

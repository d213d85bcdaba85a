"""Tests of `codesign.hardware.proxy.synthetic_layers`."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sparseflow.codesign.hardware.proxy import LayerConfig, LayerGrid
from sparseflow.codesign.hardware.proxy.synthetic_layers import TensorPool
from sparseflow.errors import InputError
from sparseflow.pruning import VideoViT
from sparseflow.pruning.compaction.layered_model import LayeredVideoViT

KINDS = [("embed", 8, 0), ("attention", 3, 32), ("mlp", 200, 0), ("head", 10, 0)]


def config(kind: str, inner: int, head_dim: int, precision: str = "float32") -> LayerConfig:
    return LayerConfig(
        layer_type=kind,
        precision=precision,
        batch=2,
        seq_len=20,
        embed_dim=128,
        inner=inner,
        head_dim=head_dim,
    )


@pytest.mark.parametrize(("kind", "inner", "head_dim"), KINDS)
def test_layer_flops_and_bytes_match_module(kind: str, inner: int, head_dim: int) -> None:
    created = config(kind, inner, head_dim)
    layer = created.to_node(4)
    module, x = TensorPool("cpu").make_layer(created)
    counter = FlopCounterMode(display=False)
    # Only the products of the plain kernel are counted.
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        y = module(x)
    assert counter.get_total_flops() == layer.flops
    assert 4 * sum(parameter.numel() for parameter in module.parameters()) == layer.weight_bytes
    assert (4 * x.numel(), 4 * y.numel()) == (layer.traffic_in_bytes, layer.traffic_out_bytes)
    assert tuple(y.shape) == ((2, 10) if kind == "head" else (2, 20, 128))
    assert bool(torch.isfinite(y).all()) and float(y.std()) > 0.0
    assert layer.weight_bytes < layer.memory_bytes and layer.id == 4 and layer.name == created.name
    assert float(layer.bytes) >= layer.weight_bytes + layer.traffic_in_bytes + layer.traffic_out_bytes


def test_layer_costs_match_video_transformer() -> None:
    model = VideoViT(
        32, 2, 10, embed_dim=64, depth=1, num_heads=2, mlp_ratio=3, patch_size=8, position="joint"
    )
    layers = LayeredVideoViT(model.eval()).describe_layers(4)
    assert len(layers) == 4
    kinds = {"embed": (8, 0), "attention": (2, 32), "mlp": (192, 0), "head": (10, 0)}
    for layer in layers:
        inner, head_dim = kinds[layer.layer_type]
        own_part = LayerConfig(
            layer_type=layer.layer_type, precision="float32", batch=4, seq_len=32, embed_dim=64, inner=inner,
            head_dim=head_dim,
        ).to_node()  # fmt: skip
        for name in (
            "flops", "bytes", "weight_bytes", "memory_bytes", "seq_len", "embed_dim", "num_heads",
            "mlp_ratio", "precision", "batch_size", "traffic_in_bytes", "traffic_out_bytes",
        ):  # fmt: skip
            assert getattr(own_part, name) == getattr(layer, name), (layer.name, name)


def test_half_precision_halves_bytes() -> None:
    full, half = config("mlp", 64, 0).to_node(), config("mlp", 64, 0, "bfloat16").to_node()
    assert (half.flops, 2 * half.bytes, 2 * half.memory_bytes) == (
        full.flops,
        full.bytes,
        full.memory_bytes,
    )


def test_tensor_pool_grows_deterministically() -> None:
    pool, small = TensorPool("cpu", seed=1), config("mlp", 64, 0)
    large = LayerConfig(layer_type="embed", precision="float32", batch=8, seq_len=200, embed_dim=64, inner=32)
    _, first = pool.make_layer(small)
    saved = first.clone()
    module, x = pool.make_layer(large)
    assert module(x).shape == (8, 200, 64) and torch.equal(first, saved)
    assert torch.equal(TensorPool("cpu", seed=1).make_layer(small)[1], saved)
    assert not torch.equal(TensorPool("cpu", seed=2).make_layer(small)[1], saved)


def test_grid_sample_cycles_types() -> None:
    grid = LayerGrid.small(("float32", "bfloat16"))
    configs = grid.sample(40, seed=2)
    assert len(set(configs)) == 40 and configs[:16] == grid.sample(16, seed=2) != grid.sample(16, seed=3)
    kinds = {(item.layer_type, item.precision) for item in configs[:8]}
    assert len(kinds) == 8
    for item in configs:
        assert item.batch * item.seq_len <= grid.rows and float(item.to_node().flops) <= grid.flops
        assert item.layer_type != "attention" or item.inner * item.head_dim <= item.embed_dim


def test_invalid_grid_is_refused() -> None:
    with pytest.raises(InputError, match="`types`"):
        LayerGrid(types=("convolution",))
    with pytest.raises(InputError, match="`batch`"):
        LayerGrid(batch=(4, 2))
    with pytest.raises(InputError):
        LayerGrid(flops=1.0).sample(1)

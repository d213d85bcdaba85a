"""Made-up layers: that they cost what they say, and that grids are drawn as told."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sparseflow.codesign.hardware.proxy import Grid, LayerConfig
from sparseflow.codesign.hardware.proxy.synthetic_layers import Pool
from sparseflow.errors import InputError
from sparseflow.pruning import VideoViT
from sparseflow.pruning.steps import Steps

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
def test_a_layer_costs_what_it_says(kind: str, inner: int, head_dim: int) -> None:
    made = config(kind, inner, head_dim)
    layer = made.node(4)
    module, x = Pool("cpu").layer(made)
    counter = FlopCounterMode(display=False)
    # Only the products of the plain kernel are counted.
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        y = module(x)
    assert counter.get_total_flops() == layer.flops
    assert 4 * sum(each.numel() for each in module.parameters()) == layer.weight_bytes
    assert (4 * x.numel(), 4 * y.numel()) == (layer.traffic_in_bytes, layer.traffic_out_bytes)
    assert tuple(y.shape) == ((2, 10) if kind == "head" else (2, 20, 128))
    assert bool(torch.isfinite(y).all()) and float(y.std()) > 0.0
    assert layer.weight_bytes < layer.memory_bytes and layer.id == 4 and layer.name == made.name
    assert float(layer.bytes) >= layer.weight_bytes + layer.traffic_in_bytes + layer.traffic_out_bytes


def test_a_video_transformer_counts_the_same_way() -> None:
    model = VideoViT(
        32, 2, 10, embed_dim=64, depth=1, num_heads=2, mlp_ratio=3, patch_size=8, position="joint"
    )
    layers = Steps(model.eval()).describe_layers(4)
    assert len(layers) == 4
    kinds = {"embed": (8, 0), "attention": (2, 32), "mlp": (192, 0), "head": (10, 0)}
    for theirs in layers:
        inner, head_dim = kinds[theirs.layer_type]
        mine = LayerConfig(
            layer_type=theirs.layer_type, precision="float32", batch=4, seq_len=32, embed_dim=64, inner=inner,
            head_dim=head_dim,
        ).node()  # fmt: skip
        for name in (
            "flops", "bytes", "weight_bytes", "memory_bytes", "seq_len", "embed_dim", "num_heads",
            "mlp_ratio", "precision", "batch", "traffic_in_bytes", "traffic_out_bytes",
        ):  # fmt: skip
            assert getattr(mine, name) == getattr(theirs, name), (theirs.name, name)


def test_half_precision_takes_half_the_bytes() -> None:
    whole, half = config("mlp", 64, 0).node(), config("mlp", 64, 0, "bfloat16").node()
    assert (half.flops, 2 * half.bytes, 2 * half.memory_bytes) == (
        whole.flops,
        whole.bytes,
        whole.memory_bytes,
    )


def test_a_pool_grows_and_its_values_are_those_of_the_seed() -> None:
    pool, small = Pool("cpu", seed=1), config("mlp", 64, 0)
    large = LayerConfig(layer_type="embed", precision="float32", batch=8, seq_len=200, embed_dim=64, inner=32)
    _, first = pool.layer(small)
    kept = first.clone()
    module, x = pool.layer(large)
    assert module(x).shape == (8, 200, 64) and torch.equal(first, kept)
    assert torch.equal(Pool("cpu", seed=1).layer(small)[1], kept)
    assert not torch.equal(Pool("cpu", seed=2).layer(small)[1], kept)


def test_a_grid_is_drawn_in_turns() -> None:
    grid = Grid.small(("float32", "bfloat16"))
    drawn = grid.draw(40, seed=2)
    assert len(set(drawn)) == 40 and drawn[:16] == grid.draw(16, seed=2) != grid.draw(16, seed=3)
    kinds = {(each.layer_type, each.precision) for each in drawn[:8]}
    assert len(kinds) == 8
    for each in drawn:
        assert each.batch * each.seq_len <= grid.rows and float(each.node().flops) <= grid.flops
        assert each.layer_type != "attention" or each.inner * each.head_dim <= each.embed_dim


def test_a_grid_that_holds_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="`types`"):
        Grid(types=("convolution",))
    with pytest.raises(InputError, match="`batch`"):
        Grid(batch=(4, 2))
    with pytest.raises(InputError):
        Grid(flops=1.0).draw(1)

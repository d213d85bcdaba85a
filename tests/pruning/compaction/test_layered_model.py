"""A VideoViT layer by layer: the same scores, and figures that are those of what really goes on."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparseflow.core.layers import LAYER_TYPES, LayerNode, Splittable
from sparseflow.errors import InputError, ModelError
from sparseflow.pruning import VideoViT, compact
from sparseflow.pruning.compaction.flops import flops
from sparseflow.pruning.compaction.layered_model import Steps, differentiable_layers
from sparseflow.pruning.model.blocks import Attention, Block, Perceptron
from sparseflow.pruning.model.config import BY_HEADS, SELECTORS
from tests.pruning.models import awake, clips, far, tiny

STAGES = ({0: 0.8, 1: 0.5, 3: 0.3}, {1: 1.0, 2: 0.5}, {3: 0.25})
POOLS = ("mean", "cls")


def made(
    selector: str | None,
    *,
    merge: bool = False,
    pool: str = "mean",
    stages: dict[int, float] | None = None,
    grains: bool = True,
    **others: Any,
) -> VideoViT:
    """A compact model; a dense one without a selector."""
    if selector is None:
        return awake(pool=pool, **others)
    keep = {"channel": 0.5} if selector in BY_HEADS else {"head": 0.5, "channel": 0.5, "block": 0.5}
    ast = {
        "stages": STAGES[0] if stages is None else stages, "selector": selector, "merge": merge,
        "keep": keep if grains else {},
    }  # fmt: skip
    return compact(awake(ast, pool=pool, **others))


def states(steps: Steps, samples: Tensor) -> list[dict[str, Tensor]]:
    """The state before the first layer, and after each."""
    with torch.no_grad():
        found = [steps.initial_state(samples)]
        for layer in range(len(steps.describe_layers(len(samples)))):
            found.append(steps.run_layer(layer, found[-1]))
    return found


def size(tensors: Any) -> int:
    """Bytes of all tensors in it."""
    return sum(each.numel() * each.element_size() for each in tensors if isinstance(each, Tensor))


def plain(value: float | Tensor) -> float:
    return value.item() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("selector", [None, *SELECTORS])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize(("merge", "dtype"), [(False, torch.float32), (True, torch.float64)])
def test_they_do_what_the_model_does(
    selector: str | None, pool: str, stages: dict[int, float], merge: bool, dtype: torch.dtype
) -> None:
    model = made(selector, merge=merge, pool=pool, stages=stages, seed=int(merge)).to(dtype)
    steps, x = Steps(model), clips(model, 3)
    found = states(steps, x)
    with torch.no_grad():
        assert torch.equal(found[-1]["logits"], model(x))
    layers = steps.describe_layers(3)
    assert [size(state.values()) for state in found] == [
        layers[0].traffic_in_bytes, *(layer.traffic_out_bytes for layer in layers)
    ]  # fmt: skip
    assert [layer.traffic_in_bytes for layer in layers[1:]] == [
        layer.traffic_out_bytes for layer in layers[:-1]
    ]
    for layer, state in zip(layers[1:-1], found[2:], strict=False):
        assert state["x"].shape == (3, layer.seq_len, layer.embed_dim)
    assert sum(plain(layer.flops) for layer in layers) == 3 * flops(model)["total"]
    assert sum(layer.weight_bytes for layer in layers) == size(model.parameters())
    assert all(layer.memory_bytes > layer.weight_bytes for layer in layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("selector", SELECTORS)
def test_half_precision(selector: str, dtype: torch.dtype) -> None:
    model = made(selector, grains=False).to(dtype)
    found, layers = states(Steps(model), clips(model)), Steps(model).describe_layers(2)
    with torch.no_grad():
        assert torch.equal(found[-1]["logits"], model(clips(model)))
    assert [size(state.values()) for state in found[1:]] == [layer.traffic_out_bytes for layer in layers]
    assert layers[0].precision == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("pool", POOLS)
def test_nothing_goes_on_that_is_not_needed(selector: str, pool: str) -> None:
    model = made(selector, pool=pool, grains=False)
    steps, x = Steps(model), clips(model)
    found = states(steps, x)
    names = {name for state in found[1:-1] for name in state}
    assert names == {"x"} | ({"place"} if selector not in BY_HEADS else set()) | (
        {"bias", "size"} if selector == "tome" else set()
    )
    for at, state in enumerate(found[1:-1], 1):
        for name in set(state) - {"x"}:
            # Numbers, and not what would stand there if it did not come along.
            broken = {each: value for each, value in state.items() if each != name}
            broken[name] = state[name].flip(1)
            with torch.no_grad():
                for layer in range(at, len(found) - 1):
                    broken = steps.run_layer(layer, broken)
            assert not torch.equal(broken["logits"], found[-1]["logits"]), (at, name)


def test_layers_are_named_and_told() -> None:
    model = made("ast", stages={1: 0.5}, grains=False, merge=True)
    layers = Steps(model).describe_layers(2)
    assert [layer.name for layer in layers] == [
        "embed", *(f"blocks.{at}.{half}" for at in range(4) for half in ("attention", "perceptron")), "head"
    ]  # fmt: skip
    assert [layer.id for layer in layers] == list(range(10))
    assert [layer.layer_type for layer in layers] == ["embed", *["attention", "mlp"] * 4, "head"]
    assert {layer.layer_type for layer in layers} == set(LAYER_TYPES)
    assert [layer.seq_len for layer in layers] == [64, 64, 64, *[33] * 7]
    assert {layer.num_heads for layer in layers if layer.layer_type == "attention"} == {4}
    assert {layer.mlp_ratio for layer in layers if layer.layer_type == "mlp"} == {2.0}
    assert all(layer.batch == 2 and layer.precision == "float32" for layer in layers)


def test_the_figures_of_one_layer() -> None:
    model, b, n, c, m = made(None), 3, 64, 16, 32
    attention, perceptron = Steps(model).describe_layers(b)[1:3]
    weights = 3 * c * (c + 1) + c * (c + 1) + 2 * c
    assert attention.weight_bytes == 4 * weights
    assert attention.flops == b * (2 * n * c * 4 * c + 4 * n * n * c)
    # In, out, and written and read: a norm, queries, keys, values and what heads gather.
    assert attention.bytes == 4 * (weights + b * n * c * (1 + 1 + 2 * (1 + 3 + 1)))
    # Together: x, the norm, queries, keys, values, what heads gather, what is added to x.
    assert attention.memory_bytes == 4 * (weights + b * n * c * 7)
    weights = c * (m + 1) + m * (c + 1) + 2 * c
    assert perceptron.weight_bytes == 4 * weights and perceptron.flops == b * 4 * n * c * m
    assert perceptron.bytes == 4 * (weights + b * n * (2 * c + 2 * (c + m)))
    assert perceptron.memory_bytes == 4 * (weights + b * n * (2 * c + 2 * m))


def test_stages_of_removed_blocks_are_done_by_the_next_layer() -> None:
    model = awake({"stages": {0: 0.8, 1: 0.5, 3: 0.3}, "keep": {"block": 0.5}})
    assert model.gates is not None
    with torch.no_grad():
        model.gates.logits["block"].copy_(torch.tensor([-5.0, -5.0, 5.0, -5.0]))
    cut = compact(model)
    layers, found = Steps(cut).describe_layers(2), states(Steps(cut), clips(cut))
    assert [layer.name for layer in layers] == ["embed", "blocks.2.attention", "blocks.2.perceptron", "head"]
    assert [layer.seq_len for layer in layers] == [64, 32, 32, 19]
    with torch.no_grad():
        assert torch.equal(found[-1]["logits"], cut(clips(cut)))
        model.gates.logits["block"].fill_(-5.0)
    none = compact(model)
    assert [layer.name for layer in Steps(none).describe_layers(1)] == ["embed", "head"]
    with torch.no_grad():
        assert torch.equal(states(Steps(none), clips(none))[-1]["logits"], none(clips(none)))


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (tiny().train(), "training mode"),
        (tiny({"stages": {}, "keep": {"head": 0.5}}), "gates.*`compact` it"),
        (tiny({"stages": {1: 0.5}}), "only masks.*`compact` it"),
        (tiny({"stages": {1: 0.5}, "selector": "attention"}), "only masks"),
    ],
)  # fmt: skip
def test_models_that_are_not_finished(model: VideoViT, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        Steps(model)


def test_models_that_are() -> None:
    for ast in (None, {"stages": {}}, {"stages": {1: 0.5}, "selector": "tome"}):
        model = tiny(ast)
        with torch.no_grad():
            assert torch.equal(states(Steps(model), clips(model))[-1]["logits"], model(clips(model)))


def test_several_dtypes() -> None:
    model = tiny()
    model.head.double()
    with pytest.raises(ModelError, match="float32, float64"):
        Steps(model)


@pytest.mark.parametrize("batch", [0, -1, 1.0, True])
def test_batches(batch: Any) -> None:
    with pytest.raises(InputError, match="batch"):
        Steps(tiny()).describe_layers(batch)


@pytest.mark.parametrize("selector", [None, *SELECTORS])
def test_splits_move_what_they_say(selector: str | None) -> None:
    model = made(selector, pool="cls", merge=True)
    steps = Steps(model)
    for layer in steps.describe_layers(3):
        module, seen = steps.get_layer(layer.id), []
        looks = selector in BY_HEADS and layer.name in ("blocks.0.attention", "blocks.1.attention",
                                                        "blocks.3.attention")  # fmt: skip
        if not layer.splittable:
            assert looks or layer.num_heads == 1 or layer.mlp_ratio * layer.embed_dim == 1
            assert layer.units == layer.split_in_bytes == layer.split_out_bytes == 0
            continue
        assert not looks
        hook = module.register_forward_hook(lambda _, given, out, seen=seen: seen.append((given, out)))
        states(steps, clips(model, 3))
        hook.remove()
        given, out = seen[-1]
        assert layer.split_in_bytes == size(given) and layer.split_out_bytes == size([out])
        if isinstance(module, nn.Linear):
            assert layer.split_joins and layer.units == module.out_features
        else:
            assert not layer.split_joins and isinstance(module, Splittable)
            units = module.heads if isinstance(module, Attention) else module.up.out_features  # pyright: ignore
            assert layer.units == units


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("biased", [False, True])
def test_parts_add_up(dtype: torch.dtype, biased: bool) -> None:
    model = made(None).to(dtype)
    block: Any = model.blocks[1]
    g = torch.Generator().manual_seed(0)
    x, bias = torch.randn(2, 9, 16, generator=g).to(dtype), torch.randn(2, 9, generator=g).to(dtype)
    attention: Attention = block.attention
    perceptron: Perceptron = block.perceptron
    given = (x, bias) if biased else (x,)
    with torch.no_grad():
        parts = [
            attention.slice_units(torch.tensor(units), bias=not at)
            for at, units in enumerate([[2], [3, 0, 1]])
        ]
        assert [part.heads for part in parts] == [1, 3] and parts[1].proj.bias is None
        assert far(parts[0](*given) + parts[1](*given), attention(*given)) <= 100 * torch.finfo(dtype).eps
        order = torch.randperm(32, generator=g)
        others = [perceptron.slice_units(order[:5], bias=True), perceptron.slice_units(order[5:], bias=False)]
        assert others[1].down.bias is None and others[0].up.out_features == 5
        assert far(others[0](x) + others[1](x), perceptron(x)) <= 100 * torch.finfo(dtype).eps


def test_a_part_is_a_copy() -> None:
    block: Any = made(None).blocks[0]
    for module in (block.attention, block.perceptron):
        whole = [each.clone() for each in module.parameters()]
        part = module.slice_units(torch.tensor([1, 0]), bias=True)
        assert not part.training and all(each.dtype == torch.float32 for each in part.parameters())
        with torch.no_grad():
            for each in part.parameters():
                each.zero_()
        assert all(torch.equal(one, other) for one, other in zip(module.parameters(), whole, strict=True))


def test_importance() -> None:
    model = made(None).double()
    steps, block = Steps(model), model.blocks[2]
    assert isinstance(block, Block) and block.attention is not None and block.perceptron is not None
    heads, channels = steps.unit_importance(5), steps.unit_importance(6)
    values, out = block.attention.qkv.weight[32:].view(4, 4, 16), block.attention.proj.weight.view(16, 4, 4)
    for at in range(4):
        assert heads[at].item() == pytest.approx((out[:, at] @ values[at]).norm().item())
    assert channels[7] == block.perceptron.up.weight[7].norm() * block.perceptron.down.weight[:, 7].norm()
    assert [len(steps.unit_importance(layer)) for layer in (0, 5, 6, 9)] == [16, 4, 32, 5]
    assert not any(steps.unit_importance(layer).requires_grad for layer in range(10))


@pytest.mark.parametrize("selector", [None, *SELECTORS])
@pytest.mark.parametrize("pool", POOLS)
def test_each_layer_alone(selector: str | None, pool: str) -> None:
    model = made(selector, pool=pool, merge=True)
    steps, x = Steps(model), clips(model)
    found, layers = states(steps, x), steps.describe_layers(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for at, layer in enumerate(layers):
        alone = steps.select_layers([at], "cpu")
        assert size(alone.model.parameters()) == layer.weight_bytes
        with torch.no_grad():
            after = alone.run_layer(at, alone.initial_state(x) if at == 0 else found[at])
            for each in alone.model.parameters():
                each.zero_()
        assert set(after) == set(found[at + 1])
        assert all(torch.equal(after[name], value) for name, value in found[at + 1].items())
        assert alone.describe_layers(2) == layers
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    none = steps.select_layers([], "cpu").model
    assert not list(none.parameters()) and not list(none.buffers())


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: Tensor | None) -> Tensor:
        return self.inner(*given)


def test_another_module_in_its_place() -> None:
    steps = Steps(made(None))
    x = clips(steps.model)
    expected = states(steps, x)[-1]["logits"]
    for layer in range(10):
        module = steps.get_layer(layer)
        steps.replace_layer(layer, Around(module) if layer != 3 else module)
        assert (steps.get_layer(layer) is module) == (layer == 3)
    assert torch.equal(states(steps, x)[-1]["logits"], expected)
    assert steps.describe_layers(1)[2].units == 32


GATED: dict[str, Any] = {
    "stages": {1: 0.5, 3: 0.25}, "merge": True, "keep": {"head": 0.5, "channel": 0.5, "block": 0.5}
}  # fmt: skip


def gated(block: list[float], head: Tensor, channel: Tensor) -> VideoViT:
    """A model whose gates are open (1) or closed (0), but for rounding."""
    model = tiny(GATED)
    assert model.gates is not None
    values = {"block": torch.tensor(block), "head": head, "channel": channel}
    with torch.no_grad():
        for name, each in model.gates.logits.items():
            each.copy_(torch.where(values[name] > 0.5, 40.0, -40.0))
    return model


def test_soft_layers_of_open_gates() -> None:
    model = gated([1.0] * 4, torch.ones(4, 4), torch.ones(4, 32))
    hard, soft = Steps(compact(model)).describe_layers(3), differentiable_layers(model, 3)
    assert len(hard) == len(soft)
    for one, other in zip(hard, soft, strict=True):
        assert isinstance(other.flops, Tensor) and other.flops.shape == () == other.bytes.shape  # pyright: ignore
        assert plain(other.flops) == pytest.approx(plain(one.flops), rel=1e-6)
        assert plain(other.bytes) == pytest.approx(plain(one.bytes), rel=1e-6)
        same = ("weight_bytes", "memory_bytes", "traffic_out_bytes", "units", "seq_len", "name")
        assert [getattr(one, name) for name in same] == [getattr(other, name) for name in same]


def test_soft_layers_of_closed_gates() -> None:
    g = torch.Generator().manual_seed(0)
    head, channel = (torch.rand(4, count, generator=g).round() for count in (4, 32))
    head[:, 0] = channel[:, 0] = 1.0
    model = gated([1.0, 1.0, 0.0, 1.0], head, channel)
    hard = {layer.name: layer for layer in Steps(compact(model)).describe_layers(2)}
    soft = {layer.name: layer for layer in differentiable_layers(model, 2)}
    assert set(soft) - set(hard) == {"blocks.2.attention", "blocks.2.perceptron"}
    for name, layer in soft.items():
        one = hard.get(name)
        for figure in ("flops", "bytes"):
            expected = 0.0 if one is None else plain(getattr(one, figure))
            assert plain(getattr(layer, figure)) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def total(layers: tuple[LayerNode, ...]) -> Tensor:
    return torch.stack(
        [torch.as_tensor(each.flops) + 3 * torch.as_tensor(each.bytes) for each in layers]
    ).sum()


def test_gradients_go_to_the_gates() -> None:
    model = awake(GATED).double()
    assert model.gates is not None
    total(differentiable_layers(model, 2)).backward()
    for name, logits in model.gates.logits.items():
        assert logits.grad is not None and (logits.grad > 0.0).all(), name
        at = (1,) * logits.ndim
        with torch.no_grad():
            sides = []
            for step in (0.1, -0.1):
                logits[at] += step
                sides.append(total(differentiable_layers(model, 2)).item())
                logits[at] -= step
        assert logits.grad[at].item() == pytest.approx((sides[0] - sides[1]) / 0.2, rel=0.02), name


def test_soft_layers_without_gates() -> None:
    model = tiny({"stages": {1: 0.5}})
    soft, hard = differentiable_layers(model, 1), Steps(compact(model)).describe_layers(1)
    assert [plain(layer.flops) for layer in soft] == [plain(layer.flops) for layer in hard]


def test_every_way_to_embed() -> None:
    for position, tubelet in product(("factored", "joint"), (1, 2)):
        model = awake(position=position, tubelet_size=tubelet, pool="cls")
        layers = Steps(model).describe_layers(1)
        assert sum(layer.weight_bytes for layer in layers) == size(model.parameters())
        assert sum(plain(layer.flops) for layer in layers) == flops(model)["total"]

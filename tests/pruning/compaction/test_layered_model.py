"""Layer-by-layer execution: same scores, and costs that match the executed layers."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparseflow.core.layers import LAYER_TYPES, LayerNode, Splittable
from sparseflow.errors import InputError, ModelError
from sparseflow.pruning import VideoViT, compact
from sparseflow.pruning.compaction.flops import count_flops
from sparseflow.pruning.compaction.layered_model import LayeredVideoViT, make_differentiable_layers
from sparseflow.pruning.model.blocks import MLP, Attention, TransformerBlock
from sparseflow.pruning.model.config import ATTENTION_SELECTORS, SELECTORS
from tests.pruning.models import awake, clips, far, tiny

STAGES = ({0: 0.8, 1: 0.5, 3: 0.3}, {1: 1.0, 2: 0.5}, {3: 0.25})
POOLS = ("mean", "cls")


def make_model(
    selector: str | None,
    *,
    merge: bool = False,
    pool: str = "mean",
    stages: dict[int, float] | None = None,
    grains: bool = True,
    **arguments: Any,
) -> VideoViT:
    """A compact model; without a selector a dense one."""
    if selector is None:
        return awake(pool=pool, **arguments)
    keep = (
        {"channel": 0.5} if selector in ATTENTION_SELECTORS else {"head": 0.5, "channel": 0.5, "block": 0.5}
    )
    ast = {
        "stages": STAGES[0] if stages is None else stages, "selector": selector, "merge": merge,
        "keep": keep if grains else {},
    }  # fmt: skip
    return compact(awake(ast, pool=pool, **arguments))


def states(steps: LayeredVideoViT, samples: Tensor) -> list[dict[str, Tensor]]:
    """The initial state and the state after each layer."""
    with torch.no_grad():
        outputs = [steps.initial_state(samples)]
        for layer in range(len(steps.describe_layers(len(samples)))):
            outputs.append(steps.run_layer(layer, outputs[-1]))
    return outputs


def size(tensors: Any) -> int:
    """Bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))


def plain(value: float | Tensor) -> float:
    return value.item() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("selector", [None, *SELECTORS])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize(("merge", "dtype"), [(False, torch.float32), (True, torch.float64)])
def test_layers_match_the_model(
    selector: str | None, pool: str, stages: dict[int, float], merge: bool, dtype: torch.dtype
) -> None:
    model = make_model(selector, merge=merge, pool=pool, stages=stages, seed=int(merge)).to(dtype)
    steps, x = LayeredVideoViT(model), clips(model, 3)
    outputs = states(steps, x)
    with torch.no_grad():
        assert torch.equal(outputs[-1]["logits"], model(x))
    layers = steps.describe_layers(3)
    assert [size(state.values()) for state in outputs] == [
        layers[0].traffic_in_bytes, *(layer.traffic_out_bytes for layer in layers)
    ]  # fmt: skip
    assert [layer.traffic_in_bytes for layer in layers[1:]] == [
        layer.traffic_out_bytes for layer in layers[:-1]
    ]
    for layer, state in zip(layers[1:-1], outputs[2:], strict=False):
        assert state["x"].shape == (3, layer.seq_len, layer.embed_dim)
    assert sum(plain(layer.flops) for layer in layers) == 3 * count_flops(model)["total"]
    assert sum(layer.weight_bytes for layer in layers) == size(model.parameters())
    assert all(layer.memory_bytes > layer.weight_bytes for layer in layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("selector", SELECTORS)
def test_half_precision(selector: str, dtype: torch.dtype) -> None:
    model = make_model(selector, grains=False).to(dtype)
    outputs, layers = states(LayeredVideoViT(model), clips(model)), LayeredVideoViT(model).describe_layers(2)
    with torch.no_grad():
        assert torch.equal(outputs[-1]["logits"], model(clips(model)))
    assert [size(state.values()) for state in outputs[1:]] == [layer.traffic_out_bytes for layer in layers]
    assert layers[0].precision == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("pool", POOLS)
def test_state_has_only_needed_entries(selector: str, pool: str) -> None:
    model = make_model(selector, pool=pool, grains=False)
    steps, x = LayeredVideoViT(model), clips(model)
    outputs = states(steps, x)
    names = {name for state in outputs[1:-1] for name in state}
    needs_positions = selector not in (*ATTENTION_SELECTORS, "dynamic_vit")
    assert names == {"x"} | ({"positions"} if needs_positions else set()) | (
        {"attn_bias", "size"} if selector == "tome" else set()
    )
    for index, state in enumerate(outputs[1:-1], 1):
        for name in set(state) - {"x"}:
            # Numbers, and not what would stand there if it did not come along.
            broken = {tensor: value for tensor, value in state.items() if tensor != name}
            broken[name] = state[name].flip(1)
            with torch.no_grad():
                for layer in range(index, len(outputs) - 1):
                    broken = steps.run_layer(layer, broken)
            assert not torch.equal(broken["logits"], outputs[-1]["logits"]), (index, name)


def test_layers_have_names_and_types() -> None:
    model = make_model("ast", stages={1: 0.5}, grains=False, merge=True)
    layers = LayeredVideoViT(model).describe_layers(2)
    assert [layer.name for layer in layers] == [
        "embed", *(f"blocks.{index}.{half}" for index in range(4) for half in ("attention", "mlp")), "head"
    ]  # fmt: skip
    assert [layer.id for layer in layers] == list(range(10))
    assert [layer.layer_type for layer in layers] == ["embed", *["attention", "mlp"] * 4, "head"]
    assert {layer.layer_type for layer in layers} == set(LAYER_TYPES)
    assert [layer.seq_len for layer in layers] == [64, 64, 64, *[33] * 7]
    assert {layer.num_heads for layer in layers if layer.layer_type == "attention"} == {4}
    assert {layer.mlp_ratio for layer in layers if layer.layer_type == "mlp"} == {2.0}
    assert all(layer.batch_size == 2 and layer.precision == "float32" for layer in layers)


def test_costs_of_one_block() -> None:
    model, b, n, c, m = make_model(None), 3, 64, 16, 32
    attention, mlp = LayeredVideoViT(model).describe_layers(b)[1:3]
    weights = 3 * c * (c + 1) + c * (c + 1) + 2 * c
    assert attention.weight_bytes == 4 * weights
    assert attention.flops == b * (2 * n * c * 4 * c + 4 * n * n * c)
    # In, out, and written and read: a norm, queries, keys, values and what heads gather.
    assert attention.bytes == 4 * (weights + b * n * c * (1 + 1 + 2 * (1 + 3 + 1)))
    # Together: x, the norm, queries, keys, values, what heads gather, what is added to x.
    assert attention.memory_bytes == 4 * (weights + b * n * c * 7)
    weights = c * (m + 1) + m * (c + 1) + 2 * c
    assert mlp.weight_bytes == 4 * weights and mlp.flops == b * 4 * n * c * m
    assert mlp.bytes == 4 * (weights + b * n * (2 * c + 2 * (c + m)))
    assert mlp.memory_bytes == 4 * (weights + b * n * (2 * c + 2 * m))


def test_stages_of_removed_blocks_move_to_next_layer() -> None:
    model = awake({"stages": {0: 0.8, 1: 0.5, 3: 0.3}, "keep": {"block": 0.5}})
    assert model.gates is not None
    with torch.no_grad():
        model.gates.logits["block"].copy_(torch.tensor([-5.0, -5.0, 5.0, -5.0]))
    cut = compact(model)
    layers, outputs = LayeredVideoViT(cut).describe_layers(2), states(LayeredVideoViT(cut), clips(cut))
    assert [layer.name for layer in layers] == ["embed", "blocks.2.attention", "blocks.2.mlp", "head"]
    assert [layer.seq_len for layer in layers] == [64, 32, 32, 19]
    with torch.no_grad():
        assert torch.equal(outputs[-1]["logits"], cut(clips(cut)))
        model.gates.logits["block"].fill_(-5.0)
    none = compact(model)
    assert [layer.name for layer in LayeredVideoViT(none).describe_layers(1)] == ["embed", "head"]
    with torch.no_grad():
        assert torch.equal(states(LayeredVideoViT(none), clips(none))[-1]["logits"], none(clips(none)))


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (tiny().train(), "training mode"),
        (tiny({"stages": {}, "keep": {"head": 0.5}}), "gates.*`compact`"),
        (tiny({"stages": {1: 0.5}}), "masks.*`compact`"),
        (tiny({"stages": {1: 0.5}, "selector": "attention"}), "masks"),
    ],
)  # fmt: skip
def test_unfinished_models_raise(model: VideoViT, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        LayeredVideoViT(model)


def test_finished_models_are_accepted() -> None:
    for ast in (None, {"stages": {}}, {"stages": {1: 0.5}, "selector": "tome"}):
        model = tiny(ast)
        with torch.no_grad():
            assert torch.equal(
                states(LayeredVideoViT(model), clips(model))[-1]["logits"], model(clips(model))
            )


def test_mixed_dtypes_raise() -> None:
    model = tiny()
    model.head.double()
    with pytest.raises(ModelError, match="float32, float64"):
        LayeredVideoViT(model)


@pytest.mark.parametrize("batch_size", [0, -1, 1.0, True])
def test_invalid_batch_raises(batch_size: Any) -> None:
    with pytest.raises(InputError, match="batch_size"):
        LayeredVideoViT(tiny()).describe_layers(batch_size)


@pytest.mark.parametrize("selector", [None, *SELECTORS])
def test_split_bytes_match_tensors(selector: str | None) -> None:
    model = make_model(selector, pool="cls", merge=True)
    steps = LayeredVideoViT(model)
    for layer in steps.describe_layers(3):
        module, sizes = steps.get_layer(layer.id), []
        stage_layers = [f"blocks.{block}.attention" for block in (0, 1, 3)]
        reads_heads = selector in ATTENTION_SELECTORS and layer.name in stage_layers
        if not layer.splittable:
            assert reads_heads or layer.num_heads == 1 or layer.mlp_ratio * layer.embed_dim == 1
            assert layer.units == layer.split_in_bytes == layer.split_out_bytes == 0
            continue
        assert not reads_heads
        hook = module.register_forward_hook(lambda _, inputs, out, sizes=sizes: sizes.append((inputs, out)))
        states(steps, clips(model, 3))
        hook.remove()
        inputs, out = sizes[-1]
        assert layer.split_in_bytes == size(inputs) and layer.split_out_bytes == size([out])
        if isinstance(module, nn.Linear):
            assert layer.split_joins and layer.units == module.out_features
        else:
            assert not layer.split_joins and isinstance(module, Splittable)
            units = module.num_heads if isinstance(module, Attention) else module.up.out_features  # pyright: ignore
            assert layer.units == units


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("biased", [False, True])
def test_sliced_parts_add_up(dtype: torch.dtype, biased: bool) -> None:
    model = make_model(None).to(dtype)
    block: Any = model.blocks[1]
    g = torch.Generator().manual_seed(0)
    x, bias = torch.randn(2, 9, 16, generator=g).to(dtype), torch.randn(2, 9, generator=g).to(dtype)
    attention: Attention = block.attention
    mlp: MLP = block.mlp
    inputs = (x, bias) if biased else (x,)
    with torch.no_grad():
        parts = [
            attention.slice_units(torch.tensor(units), bias=not index)
            for index, units in enumerate([[2], [3, 0, 1]])
        ]
        assert [part.num_heads for part in parts] == [1, 3] and parts[1].proj.bias is None
        assert far(parts[0](*inputs) + parts[1](*inputs), attention(*inputs)) <= 100 * torch.finfo(dtype).eps
        order = torch.randperm(32, generator=g)
        arguments = [mlp.slice_units(order[:5], bias=True), mlp.slice_units(order[5:], bias=False)]
        assert arguments[1].down.bias is None and arguments[0].up.out_features == 5
        assert far(arguments[0](x) + arguments[1](x), mlp(x)) <= 100 * torch.finfo(dtype).eps


def test_slice_units_copies_weights() -> None:
    block: Any = make_model(None).blocks[0]
    for module in (block.attention, block.mlp):
        original = [tensor.clone() for tensor in module.parameters()]
        part = module.slice_units(torch.tensor([1, 0]), bias=True)
        assert not part.training and all(tensor.dtype == torch.float32 for tensor in part.parameters())
        with torch.no_grad():
            for tensor in part.parameters():
                tensor.zero_()
        assert all(
            torch.equal(node, other) for node, other in zip(module.parameters(), original, strict=True)
        )


def test_unit_importance_ranks_units() -> None:
    model = make_model(None).double()
    steps, block = LayeredVideoViT(model), model.blocks[2]
    assert isinstance(block, TransformerBlock) and block.attention is not None and block.mlp is not None
    heads, channels = steps.unit_importance(5), steps.unit_importance(6)
    values, out = block.attention.qkv.weight[32:].view(4, 4, 16), block.attention.proj.weight.view(16, 4, 4)
    for index in range(4):
        assert heads[index].item() == pytest.approx((out[:, index] @ values[index]).norm().item())
    assert channels[7] == block.mlp.up.weight[7].norm() * block.mlp.down.weight[:, 7].norm()
    assert [len(steps.unit_importance(layer)) for layer in (0, 5, 6, 9)] == [16, 4, 32, 5]
    assert not any(steps.unit_importance(layer).requires_grad for layer in range(10))


@pytest.mark.parametrize("selector", [None, *SELECTORS])
@pytest.mark.parametrize("pool", POOLS)
def test_selected_layers_run_alone(selector: str | None, pool: str) -> None:
    model = make_model(selector, pool=pool, merge=True)
    steps, x = LayeredVideoViT(model), clips(model)
    outputs, layers = states(steps, x), steps.describe_layers(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for index, layer in enumerate(layers):
        single = steps.select_layers([index], "cpu")
        assert size(single.model.parameters()) == layer.weight_bytes
        with torch.no_grad():
            after = single.run_layer(index, single.initial_state(x) if index == 0 else outputs[index])
            for tensor in single.model.parameters():
                tensor.zero_()
        assert set(after) == set(outputs[index + 1])
        assert all(torch.equal(after[name], value) for name, value in outputs[index + 1].items())
        assert single.describe_layers(2) == layers
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    none = steps.select_layers([], "cpu").model
    assert not list(none.parameters()) and not list(none.buffers())


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor | None) -> Tensor:
        return self.inner(*inputs)


def test_replace_layer_is_used() -> None:
    steps = LayeredVideoViT(make_model(None))
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
    """A model with gates that are open (1) or closed (0) up to rounding."""
    model = tiny(GATED)
    assert model.gates is not None
    values = {"block": torch.tensor(block), "head": head, "channel": channel}
    with torch.no_grad():
        for name, tensor in model.gates.logits.items():
            tensor.copy_(torch.where(values[name] > 0.5, 40.0, -40.0))
    return model


def test_differentiable_layers_of_open_gates_equal_hard_layers() -> None:
    model = gated([1.0] * 4, torch.ones(4, 4), torch.ones(4, 32))
    hard, soft = LayeredVideoViT(compact(model)).describe_layers(3), make_differentiable_layers(model, 3)
    assert len(hard) == len(soft)
    for node, other in zip(hard, soft, strict=True):
        assert isinstance(other.flops, Tensor) and other.flops.shape == () == other.bytes.shape  # pyright: ignore
        assert plain(other.flops) == pytest.approx(plain(node.flops), rel=1e-6)
        assert plain(other.bytes) == pytest.approx(plain(node.bytes), rel=1e-6)
        same = ("weight_bytes", "memory_bytes", "traffic_out_bytes", "units", "seq_len", "name")
        assert [getattr(node, name) for name in same] == [getattr(other, name) for name in same]


def test_differentiable_layers_of_closed_gates_cost_nothing() -> None:
    g = torch.Generator().manual_seed(0)
    head, channel = (torch.rand(4, count, generator=g).round() for count in (4, 32))
    head[:, 0] = channel[:, 0] = 1.0
    model = gated([1.0, 1.0, 0.0, 1.0], head, channel)
    hard = {layer.name: layer for layer in LayeredVideoViT(compact(model)).describe_layers(2)}
    soft = {layer.name: layer for layer in make_differentiable_layers(model, 2)}
    assert set(soft) - set(hard) == {"blocks.2.attention", "blocks.2.mlp"}
    for name, layer in soft.items():
        node = hard.get(name)
        for figure in ("flops", "bytes"):
            expected = 0.0 if node is None else plain(getattr(node, figure))
            assert plain(getattr(layer, figure)) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def total(layers: tuple[LayerNode, ...]) -> Tensor:
    return torch.stack(
        [torch.as_tensor(tensor.flops) + 3 * torch.as_tensor(tensor.bytes) for tensor in layers]
    ).sum()


def test_differentiable_layers_pass_gradients_to_gates() -> None:
    model = awake(GATED).double()
    assert model.gates is not None
    total(make_differentiable_layers(model, 2)).backward()
    for name, logits in model.gates.logits.items():
        assert logits.grad is not None and (logits.grad > 0.0).all(), name
        index = (1,) * logits.ndim
        with torch.no_grad():
            sides = []
            for step in (0.1, -0.1):
                logits[index] += step
                sides.append(total(make_differentiable_layers(model, 2)).item())
                logits[index] -= step
        assert logits.grad[index].item() == pytest.approx((sides[0] - sides[1]) / 0.2, rel=0.02), name


def test_differentiable_layers_without_gates() -> None:
    model = tiny({"stages": {1: 0.5}})
    soft, hard = make_differentiable_layers(model, 1), LayeredVideoViT(compact(model)).describe_layers(1)
    assert [plain(layer.flops) for layer in soft] == [plain(layer.flops) for layer in hard]


def test_embedding_costs() -> None:
    for position, tubelet in product(("factored", "joint"), (1, 2)):
        model = awake(position=position, tubelet_size=tubelet, pool="cls")
        layers = LayeredVideoViT(model).describe_layers(1)
        assert sum(layer.weight_bytes for layer in layers) == size(model.parameters())
        assert sum(plain(layer.flops) for layer in layers) == count_flops(model)["total"]

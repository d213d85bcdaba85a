"""Blocks: attention against an explicit implementation, biases, gates and removed blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparseflow.pruning.model.blocks import MLP, Attention, BlockGates, TransformerBlock


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def attention() -> Attention:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Attention(6, 2, 4).double()


def compute_heads(attention: Attention, x: Tensor, bias: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """Attention maps [B, S, S] and outputs [B, S, head_dim] of each head."""
    q, k, v = attention.qkv(x).chunk(3, -1)
    maps, outputs = [], []
    for index in range(attention.num_heads):
        columns = slice(index * attention.head_dim, (index + 1) * attention.head_dim)
        scores = q[..., columns] @ k[..., columns].transpose(1, 2) / attention.head_dim**0.5
        if bias is not None:
            scores = scores + bias[:, None, :]
        maps.append(scores.softmax(-1))
        outputs.append(maps[-1] @ v[..., columns])
    return maps, outputs


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_attention_matches_explicit_heads(attention: Attention, biased: bool, gated: bool) -> None:
    x, bias = random_tensor(2, 5, 6), random_tensor(2, 5, seed=1) if biased else None
    gate_values = torch.tensor([0.25, 0.0], dtype=torch.float64) if gated else None
    _, heads = compute_heads(attention, x, bias)
    if gate_values is not None:
        heads = [head * weight for head, weight in zip(heads, gate_values, strict=True)]
    torch.testing.assert_close(attention(x, bias, gate_values), attention.proj(torch.cat(heads, -1)))


def test_infinite_negative_bias_removes_a_token(attention: Attention) -> None:
    x, remaining = random_tensor(2, 5, 6), [0, 2, 3]
    bias = torch.full((2, 5), -torch.inf, dtype=torch.float64)
    bias[:, remaining] = 0.0
    torch.testing.assert_close(attention(x, bias)[:, remaining], attention(x[:, remaining]))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_received_attention_matches_attention_maps(attention: Attention, first: bool, biased: bool) -> None:
    x, bias = random_tensor(2, 5, 6), random_tensor(2, 5, seed=1) if biased else None
    mean = torch.stack(compute_heads(attention, x, bias)[0]).mean(0)
    expected = mean[:, 0] if first else mean.mean(1)
    outputs = attention.compute_received_attention(x, None, bias, first=first)
    torch.testing.assert_close(outputs.double(), expected, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(outputs.sum(1), torch.ones(2))
    weight = torch.tensor([[0.0, 0.5, 0.5, 0.0, 0.0]], dtype=torch.float64).expand(2, -1)
    outputs = attention.compute_received_attention(x, weight, bias, first=first)
    expected = mean[:, 0] if first else mean[:, 1:3].mean(1)
    torch.testing.assert_close(outputs.double(), expected, rtol=0.0, atol=1e-6)


def test_mean_keys_average_heads(attention: Attention) -> None:
    x = random_tensor(2, 5, 6)
    k = attention.qkv(x).chunk(3, -1)[1]
    torch.testing.assert_close(attention.compute_mean_keys(x), (k[..., :4] + k[..., 4:]) / 2)


def test_mlp_gates_scale_channels() -> None:
    mlp, x = MLP(6, 3).double(), random_tensor(2, 5, 6)
    gate_values = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    expected = mlp.down(torch.nn.functional.gelu(mlp.up(x)) * gate_values)
    torch.testing.assert_close(mlp(x, gate_values), expected)
    torch.testing.assert_close(mlp(x, torch.ones(3, dtype=torch.float64)), mlp(x))


def test_block_gate_scales_both_branches(attention: Attention) -> None:
    block, x, bias = (
        TransformerBlock(attention, MLP(6, 3).double(), 6).double(),
        random_tensor(2, 5, 6),
        random_tensor(2, 5),
    )
    assert block.norm1 is not None and block.norm2 is not None and block.mlp is not None
    gates = BlockGates(block=torch.tensor(0.5, dtype=torch.float64))
    between = x + 0.5 * attention(block.norm1(x), bias)
    torch.testing.assert_close(block(x, bias, gates), between + 0.5 * block.mlp(block.norm2(between)))
    closed = BlockGates(block=torch.tensor(0.0, dtype=torch.float64))
    assert torch.equal(block(x, bias, closed), x)


def test_removed_block_is_identity() -> None:
    x = random_tensor(2, 5, 6)
    block = TransformerBlock(None, None, 6)
    assert not list(block.parameters()) and torch.equal(block(x, random_tensor(2, 5)), x)


def test_stochastic_depth_drops_samples_in_training_only(attention: Attention) -> None:
    block = TransformerBlock(attention, MLP(6, 3).double(), 6, drop_path=0.5).double()
    x = random_tensor(1, 5, 6).expand(64, -1, -1)
    block.eval()
    torch.testing.assert_close(block(x), block(x[:1]).expand(64, -1, -1))
    block.train()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        outputs = block(x)
    # Both branches, one of them, or none, for whole samples.
    assert len({tuple(head.flatten().tolist()) for head in outputs}) == 4
    assert sum(torch.equal(head, x[0]) for head in outputs) == pytest.approx(16, abs=10)

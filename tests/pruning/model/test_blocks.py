"""Blocks: attention against one written out, biases, gates, and what is left where a block was removed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparseflow.pruning.model.blocks import Attention, Block, BlockGates, Perceptron


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def attention() -> Attention:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Attention(6, 2, 4).double()


def by_head(attention: Attention, x: Tensor, bias: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """Attention [B, S, S] and what it gathers [B, S, head_dim], head by head."""
    q, k, v = attention.qkv(x).chunk(3, -1)
    maps, found = [], []
    for at in range(attention.heads):
        mine = slice(at * attention.head_dim, (at + 1) * attention.head_dim)
        scores = q[..., mine] @ k[..., mine].transpose(1, 2) / attention.head_dim**0.5
        if bias is not None:
            scores = scores + bias[:, None, :]
        maps.append(scores.softmax(-1))
        found.append(maps[-1] @ v[..., mine])
    return maps, found


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_attention(attention: Attention, biased: bool, gated: bool) -> None:
    x, bias = drawn(2, 5, 6), drawn(2, 5, seed=1) if biased else None
    gate = torch.tensor([0.25, 0.0], dtype=torch.float64) if gated else None
    _, heads = by_head(attention, x, bias)
    if gate is not None:
        heads = [each * weight for each, weight in zip(heads, gate, strict=True)]
    torch.testing.assert_close(attention(x, bias, gate), attention.proj(torch.cat(heads, -1)))


def test_a_bias_of_minus_infinity_is_as_if_a_token_were_not_there(attention: Attention) -> None:
    x, left = drawn(2, 5, 6), [0, 2, 3]
    bias = torch.full((2, 5), -torch.inf, dtype=torch.float64)
    bias[:, left] = 0.0
    torch.testing.assert_close(attention(x, bias)[:, left], attention(x[:, left]))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_attention_received(attention: Attention, first: bool, biased: bool) -> None:
    x, bias = drawn(2, 5, 6), drawn(2, 5, seed=1) if biased else None
    mean = torch.stack(by_head(attention, x, bias)[0]).mean(0)
    expected = mean[:, 0] if first else mean.mean(1)
    found = attention.received(x, None, bias, first=first)
    torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(found.sum(1), torch.ones(2))
    weight = torch.tensor([[0.0, 0.5, 0.5, 0.0, 0.0]], dtype=torch.float64).expand(2, -1)
    found = attention.received(x, weight, bias, first=first)
    expected = mean[:, 0] if first else mean[:, 1:3].mean(1)
    torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=1e-6)


def test_keys_are_the_mean_over_heads(attention: Attention) -> None:
    x = drawn(2, 5, 6)
    k = attention.qkv(x).chunk(3, -1)[1]
    torch.testing.assert_close(attention.keys(x), (k[..., :4] + k[..., 4:]) / 2)


def test_a_perceptron_and_its_gates() -> None:
    perceptron, x = Perceptron(6, 3).double(), drawn(2, 5, 6)
    gate = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    expected = perceptron.down(torch.nn.functional.gelu(perceptron.up(x)) * gate)
    torch.testing.assert_close(perceptron(x, gate), expected)
    torch.testing.assert_close(perceptron(x, torch.ones(3, dtype=torch.float64)), perceptron(x))


def test_a_block(attention: Attention) -> None:
    block, x, bias = Block(attention, Perceptron(6, 3).double(), 6).double(), drawn(2, 5, 6), drawn(2, 5)
    assert block.norm1 is not None and block.norm2 is not None and block.perceptron is not None
    gates = BlockGates(block=torch.tensor(0.5, dtype=torch.float64))
    between = x + 0.5 * attention(block.norm1(x), bias)
    torch.testing.assert_close(block(x, bias, gates), between + 0.5 * block.perceptron(block.norm2(between)))
    closed = BlockGates(block=torch.tensor(0.0, dtype=torch.float64))
    assert torch.equal(block(x, bias, closed), x)


def test_a_removed_block_does_nothing() -> None:
    x = drawn(2, 5, 6)
    block = Block(None, None, 6)
    assert not list(block.parameters()) and torch.equal(block(x, drawn(2, 5)), x)


def test_stochastic_depth_leaves_samples_out_in_training_only(attention: Attention) -> None:
    block = Block(attention, Perceptron(6, 3).double(), 6, drop_path=0.5).double()
    x = drawn(1, 5, 6).expand(64, -1, -1)
    block.eval()
    torch.testing.assert_close(block(x), block(x[:1]).expand(64, -1, -1))
    block.train()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = block(x)
    # Either branch or none, whole samples at a time.
    assert len({tuple(each.flatten().tolist()) for each in found}) == 4
    assert sum(torch.equal(each, x[0]) for each in found) == pytest.approx(16, abs=10)

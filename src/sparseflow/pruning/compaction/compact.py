"""Real sparsity: a model without what its gates close and its stages drop, which computes the same.

Tokens that a stage drops are gathered away, to a fixed number. Heads and channels whose gates are closed are
cut out of the weights, and what is left is multiplied by its gate there. Closed blocks are removed.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from sparseflow.pruning.model.blocks import Attention, Block, Perceptron
from sparseflow.pruning.model.video_vit import VideoViT


def compact(model: VideoViT) -> VideoViT:
    """A smaller copy of a model, in evaluation mode.

    Args:
        model: Left as it is. One that is compact already, or prunes nothing, gives a plain copy.

    Returns:
        Equal to `model.eval()` but for rounding. It can be trained further; its gates are gone.
    """
    found = copy.deepcopy(model).eval()
    found.compacted = True
    if model.gates is None:
        return found
    with torch.no_grad():
        gates = model.gates.values(hard=True)
        for at, block in enumerate(found.blocks):
            assert isinstance(block, Block)
            _cut(block, {grain: gate[at] for grain, gate in gates.items()})
    found.gates = None
    return found


def _cut(block: Block, gates: dict[str, Tensor]) -> None:
    """Cut one block to what is open; nothing of it is left if its own gate is closed."""
    whole = gates.get("block")
    if whole is not None and whole == 0.0:
        block.attention = block.perceptron = block.norm1 = block.norm2 = None
        return
    assert block.attention is not None and block.perceptron is not None
    if "head" in gates:
        block.attention = _cut_heads(block.attention, gates["head"])
    if "channel" in gates:
        block.perceptron = _cut_channels(block.perceptron, gates["channel"])
    if whole is not None:
        for last in (block.attention.proj, block.perceptron.down):
            last.weight.mul_(whole)
            last.bias.mul_(whole)


def _cut_heads(whole: Attention, gate: Tensor) -> Attention:
    kept = gate.nonzero()[:, 0]
    found = whole.slice_units(kept, bias=True)
    found.proj.weight.unflatten(1, (-1, whole.head_dim)).mul_(gate[kept][:, None])
    return found


def _cut_channels(whole: Perceptron, gate: Tensor) -> Perceptron:
    kept = gate.nonzero()[:, 0]
    found = whole.slice_units(kept, bias=True)
    found.down.weight.mul_(gate[kept])
    return found


def units(model: VideoViT) -> list[tuple[int, int]]:
    """Heads and channels that each block has, (0, 0) where it was removed."""
    found = []
    for block in model.blocks:
        assert isinstance(block, Block)
        if block.attention is None or block.perceptron is None:
            found.append((0, 0))
        else:
            found.append((block.attention.heads, block.perceptron.up.out_features))
    return found


def shaped(model: VideoViT, wanted: list[tuple[int, int]]) -> VideoViT:
    """A model as `compact` leaves it, with these heads and channels, weights still to be filled in."""
    for block, (heads, channels) in zip(model.blocks, wanted, strict=True):
        assert isinstance(block, Block)
        attention, perceptron = block.attention, block.perceptron
        assert attention is not None and perceptron is not None
        if not heads:
            block.attention = block.perceptron = block.norm1 = block.norm2 = None
            continue
        dim, dropout = attention.proj.out_features, attention.out_dropout.p
        block.attention = Attention(
            dim, heads, attention.head_dim, dropout=attention.dropout, out_dropout=dropout
        )
        block.perceptron = Perceptron(dim, channels, dropout=dropout)
    model.gates, model.compacted = None, True
    return model.eval()

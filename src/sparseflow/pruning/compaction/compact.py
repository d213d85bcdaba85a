"""Compaction: remove what a model prunes and keep its outputs.

Tokens that a stage drops are removed by gathering a fixed number of tokens. Heads and channels with closed
gates are removed from the weights, and the remaining gates are multiplied into the weights. Closed blocks are
removed.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from sparseflow.pruning.model.blocks import MLP, Attention, TransformerBlock
from sparseflow.pruning.model.video_vit import VideoViT


def compact(model: VideoViT) -> VideoViT:
    """Return a smaller copy of a model, in evaluation mode.

    Args:
        model: Not modified. A model that is compact already, or does not prune, is only copied.

    Returns:
        A model with the outputs of `model.eval()` up to rounding. It has no gates and can be trained further.
    """
    compacted = copy.deepcopy(model).eval()
    compacted.compacted = True
    if model.gates is None:
        return compacted
    with torch.no_grad():
        gates = model.gates.compute_gates(hard=True)
        for index, block in enumerate(compacted.blocks):
            assert isinstance(block, TransformerBlock)
            _compact_block(block, {grain: gate_values[index] for grain, gate_values in gates.items()})
    assert compacted.pruner is not None
    compacted.pruner.gates = None
    return compacted


def _compact_block(block: TransformerBlock, gates: dict[str, Tensor]) -> None:
    block_gate = gates.get("block")
    if block_gate is not None and block_gate == 0.0:
        block.attention = block.mlp = block.norm1 = block.norm2 = None
        return
    assert block.attention is not None and block.mlp is not None
    if "head" in gates:
        heads = gates["head"].nonzero()[:, 0]
        block.attention = block.attention.slice_units(heads, bias=True)
        head_weights = block.attention.proj.weight.unflatten(1, (-1, block.attention.head_dim))
        head_weights.mul_(gates["head"][heads][:, None])
    if "channel" in gates:
        channels = gates["channel"].nonzero()[:, 0]
        block.mlp = block.mlp.slice_units(channels, bias=True)
        block.mlp.down.weight.mul_(gates["channel"][channels])
    if block_gate is not None:
        for layer in (block.attention.proj, block.mlp.down):
            layer.weight.mul_(block_gate)
            layer.bias.mul_(block_gate)


def list_units(model: VideoViT) -> list[tuple[int, int]]:
    """Heads and channels of each block; (0, 0) for a removed block."""
    units = []
    for block in model.blocks:
        assert isinstance(block, TransformerBlock)
        if block.attention is None or block.mlp is None:
            units.append((0, 0))
        else:
            units.append((block.attention.num_heads, block.mlp.up.out_features))
    return units


def resize_blocks(model: VideoViT, units: list[tuple[int, int]]) -> VideoViT:
    """Give a model the heads and channels of a compact one, in place, with uninitialized weights."""
    for block, (num_heads, channels) in zip(model.blocks, units, strict=True):
        assert isinstance(block, TransformerBlock)
        attention, mlp = block.attention, block.mlp
        assert attention is not None and mlp is not None
        if not num_heads:
            block.attention = block.mlp = block.norm1 = block.norm2 = None
            continue
        dim, dropout = attention.proj.out_features, attention.out_dropout.p
        block.attention = Attention(
            dim, num_heads, attention.head_dim, dropout=attention.dropout, out_dropout=dropout
        )
        block.mlp = MLP(dim, channels, dropout=dropout)
    if model.pruner is not None:
        model.pruner.gates = None
    model.compacted = True
    return model.eval()

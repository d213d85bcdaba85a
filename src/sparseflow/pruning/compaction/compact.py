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
    compacted.gates = None
    return compacted


def _compact_block(block: TransformerBlock, gates: dict[str, Tensor]) -> None:
    block_gate = gates.get("block")
    if block_gate is not None and block_gate == 0.0:
        block.attention = block.mlp = block.norm1 = block.norm2 = None
        return
    assert block.attention is not None and block.mlp is not None
    if "head" in gates:
        block.attention = _compact_attention(block.attention, gates["head"])
    if "channel" in gates:
        block.mlp = _compact_mlp(block.mlp, gates["channel"])
    if block_gate is not None:
        for layer in (block.attention.proj, block.mlp.down):
            layer.weight.mul_(block_gate)
            layer.bias.mul_(block_gate)


def _compact_attention(attention: Attention, gate_values: Tensor) -> Attention:
    retained = gate_values.nonzero()[:, 0]
    sliced = attention.slice_units(retained, bias=True)
    sliced.proj.weight.unflatten(1, (-1, attention.head_dim)).mul_(gate_values[retained][:, None])
    return sliced


def _compact_mlp(mlp: MLP, gate_values: Tensor) -> MLP:
    retained = gate_values.nonzero()[:, 0]
    sliced = mlp.slice_units(retained, bias=True)
    sliced.down.weight.mul_(gate_values[retained])
    return sliced


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
    model.gates, model.compacted = None, True
    return model.eval()

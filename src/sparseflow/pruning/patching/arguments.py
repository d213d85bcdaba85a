"""Arguments of a block that depend on the positions of its tokens: masks, rotary embeddings, positions.

Notation: a block has P prefix tokens and S grid tokens, which are S of the N tokens of the full grid;
`positions` is their position in the full grid, int64, [B, S].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparseflow.errors import SampleError


def gather_mask(mask: Tensor, positions: Tensor, num_prefix: int) -> Tensor:
    """Restrict an attention mask or bias to the present tokens.

    Args:
        mask: [1 or B, 1 or H, 1 or P + N, P + N], or [B, P + N].
        positions: [B, S].
        num_prefix: P.

    Returns:
        [B, 1 or H, 1 or P + S, P + S], or [B, P + S].
    """
    prefix = torch.arange(num_prefix, device=positions.device).expand(len(positions), -1)
    index = torch.cat([prefix, positions + num_prefix], 1)
    if mask.ndim == 2:
        return mask.gather(1, index)
    if mask.ndim != 4:
        raise SampleError(f"the attention mask has the shape {list(mask.shape)}; expected 2 or 4 dimensions")
    if mask.shape[2] > 1:
        mask = mask.take_along_dim(index[:, None, :, None], 2)
    return mask.take_along_dim(index[:, None, None], 3)


def gather_rotary(embedding: Tensor, positions: Tensor, num_prefix: int) -> Tensor:
    """Select the rotary embeddings of the present tokens, [B, 1 or H, S, D].

    Args:
        embedding: [N, D], or [H, N, D] with embeddings of each head.
        positions: [B, S].
        num_prefix: Not used: prefix tokens have no rotary embedding.
    """
    if embedding.ndim == 2:
        return embedding[positions][:, None]
    return embedding[None].take_along_dim(positions[:, None, :, None], 2)


def gather_rotary_pair(
    embeddings: tuple[Tensor, Tensor], positions: Tensor, num_prefix: int
) -> tuple[Tensor, Tensor]:
    """Apply `gather_rotary` to cosines and sines."""
    cos, sin = embeddings
    return gather_rotary(cos, positions, num_prefix), gather_rotary(sin, positions, num_prefix)


GATHERS: Mapping[str, Callable[[Any, Tensor, int], Any]] = {
    "attention_mask": gather_mask,
    "attn_mask": gather_mask,
    "position_embeddings": gather_rotary_pair,
    "rope": gather_rotary,
}
"""Name of a block's argument -> function that restricts its value to the present tokens."""

MASKS = ("attention_mask", "attn_mask")
"""Names of masks or biases of the attention."""

ROTARY_ARGUMENTS = ("position_embeddings", "rope", "position_mask")
"""Names of arguments by which queries and keys are rotated."""


def list_arguments(block: nn.Module) -> list[str]:
    """Names of the arguments of a block."""
    return list(inspect.signature(block.forward).parameters)


def gather_arguments(arguments: Mapping[str, Any], positions: Tensor, num_prefix: int) -> dict[str, Any]:
    """Restrict the arguments of a block to the present tokens.

    Args:
        arguments: Name -> value. Values of None stay; `position_mask` becomes `positions`.
        positions: [B, S].
        num_prefix: P.
    """
    gathered = dict(arguments)
    for name, gather in GATHERS.items():
        if gathered.get(name) is not None:
            gathered[name] = gather(gathered[name], positions, num_prefix)
    if "position_mask" in gathered:
        gathered["position_mask"] = positions
    return gathered

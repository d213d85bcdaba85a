"""Queries and keys of a block of another library, for the selectors that read attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparseflow.errors import InputError

_NORMS = ("layernorm_before", "norm1", "layer_norm1")
_QUERIES_AND_KEYS = (("q_proj", "k_proj"), ("query", "key"))
_HEADS = ("num_attention_heads", "num_heads")


class AttentionReader:
    """Computes queries and keys of a block.

    The norm before the attention is recognized by its name; the attention is the module with the projections
    `q_proj` and `k_proj`, `query` and `key`, or `qkv`.

    Args:
        block: Block of a transformer; not stored.

    Raises:
        InputError: The block has no such modules.
    """

    def __init__(self, block: nn.Module) -> None:
        norms = [name for name in _NORMS if hasattr(block, name)]
        paths = [path for path, module in block.named_modules() if _find_projections(module)]
        if not norms or not paths:
            raise InputError(
                f"queries and keys of {type(block).__name__} are unknown; use another selector, such as 'ast'"
            )
        self.norm, self.attention = norms[0], paths[0]

    def compute_mean_keys(self, block: nn.Module, x: Tensor) -> Tensor:
        """Keys, mean over heads, [B, S, head_dim]; the features that ToMe compares.

        Args:
            block: The block.
            x: Tokens before the block, [B, S, C].
        """
        return self._project(block, x, 1).mean(1)

    def compute_received_attention(
        self, block: nn.Module, x: Tensor, mask: Tensor | None, *, first: bool
    ) -> Tensor:
        """Attention that each token receives, mean over heads and queries, [B, S].

        Args:
            block: The block.
            x: Tokens before the block, [B, S, C].
            mask: Mask or bias of the attention, [1 or B, 1 or H, 1 or S, S].
            first: Use the first token (the class token) as the only query.
        """
        return self._compute_attention(block, x, mask, first=first).mean((1, 2))

    def compute_attention_entropy(self, block: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
        """Entropy of what each token attends to, mean over heads, [B, S]; arguments as above."""
        attention = self._compute_attention(block, x, mask, first=False)
        return torch.special.entr(attention).sum(-1).mean(1)

    def _compute_attention(self, block: nn.Module, x: Tensor, mask: Tensor | None, *, first: bool) -> Tensor:
        """Attention weights, at least float32, [B, H, queries, S]."""
        keys = self._project(block, x, 1)
        queries = self._project(block, x[:, :1] if first else x, 0)
        logits = (queries @ keys.mT) * keys.shape[-1] ** -0.5
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if mask is not None:
            mask = mask[:, :, : queries.shape[2]]
            logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
        return logits.softmax(-1)

    def _project(self, block: nn.Module, x: Tensor, index: int) -> Tensor:
        """Queries (index 0) or keys (index 1), [B, H, S, head_dim]."""
        attention: Any = block.get_submodule(self.attention)
        normed = getattr(block, self.norm)(x)
        names = _find_projections(attention)
        if len(names) == 1:  # one projection of queries, keys and values
            projection = getattr(attention, names[0])
            weight, bias = projection.weight.chunk(3)[index], projection.bias
            bias = None if bias is None else bias.chunk(3)[index]
            projected = functional.linear(normed, weight, bias)
        else:
            projected = getattr(attention, names[index])(normed)
        num_heads = next(getattr(attention, name) for name in _HEADS if hasattr(attention, name))
        heads = projected.unflatten(2, (num_heads, -1)).transpose(1, 2)
        norm = getattr(attention, ("q_norm", "k_norm")[index], None)
        return heads if norm is None else norm(heads)


def _find_projections(attention: nn.Module) -> tuple[str, ...]:
    """Names of the projections of an attention; empty for other modules."""
    for names in (*_QUERIES_AND_KEYS, ("qkv",)):
        if all(isinstance(getattr(attention, name, None), nn.Linear) for name in names):
            return names
    return ()

"""Token merging (ToMe, arXiv 2210.09461)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparseflow.pruning.selectors.tokens import TokenState


def merge_similar_tokens(tokens: TokenState, keys: Tensor, num_kept: int) -> TokenState:
    """Merge the most similar tokens until `num_kept` are left.

    Bipartite matching: tokens at even positions are matched to their most similar token at an odd position,
    and the most similar pairs are replaced by their mean, weighted by the number of merged tokens. A round
    merges at most half of the tokens; rounds repeat until enough are merged. Attention is biased by the
    logarithm of the size.

    Args:
        tokens: Tokens before the stage.
        keys: Features to compare, [B, S, D].
        num_kept: Tokens to keep.
    """
    # Half precision would overflow in sums of many tokens.
    dtype = torch.promote_types(tokens.x.dtype, torch.float32)
    x, keys, positions = tokens.grid.to(dtype), keys.to(dtype), tokens.positions
    size = torch.ones_like(x[..., :1]) if tokens.size is None else tokens.size[..., None].to(dtype)
    while x.shape[1] > num_kept:
        num_merged = min(x.shape[1] - num_kept, x.shape[1] // 2)
        with torch.no_grad():
            metric = torch.nn.functional.normalize(keys, dim=-1)
            similarity, best_match = (metric[:, ::2] @ metric[:, 1::2].transpose(1, 2)).max(-1)
            order = similarity.argsort(dim=1, descending=True)
            source, unmerged = order[:, :num_merged], order[:, num_merged:].sort(dim=1).values
            target = best_match.gather(1, source)
        weighted_x = _sum_pairs(x * size, source, target, unmerged)
        weighted_keys = _sum_pairs(keys * size, source, target, unmerged)
        size = _sum_pairs(size, source, target, unmerged)
        x, keys = weighted_x / size, weighted_keys / size
        positions = torch.cat([positions[:, ::2].gather(1, unmerged), positions[:, 1::2]], 1)
    return replace(
        tokens,
        x=torch.cat([tokens.x[:, : tokens.num_prefix], x.to(tokens.x.dtype)], 1),
        positions=positions,
        attn_bias=torch.nn.functional.pad(size[..., 0].log(), (tokens.num_prefix, 0)),
        size=size[..., 0],
    )


def _sum_pairs(values: Tensor, source: Tensor, target: Tensor, unmerged: Tensor) -> Tensor:
    """Add even tokens `source` to odd tokens `target`; return unmerged even tokens, then odd tokens."""
    even, odd = values[:, ::2], values[:, 1::2]
    width = values.shape[-1]
    merged = even.gather(1, source[..., None].expand(-1, -1, width))
    summed = odd.scatter_add(1, target[..., None].expand(-1, -1, width), merged)
    return torch.cat([even.gather(1, unmerged[..., None].expand(-1, -1, width)), summed], 1)

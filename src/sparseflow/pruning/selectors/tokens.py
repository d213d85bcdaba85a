"""Tokens between blocks: where each stands, which go on, and what becomes of the others.

A stage leaves a fixed number of tokens, whatever is in the video: shapes stay static, so that a model can be
compiled and captured. It does so in one of two ways that compute the same:

- `drop` gathers what is left, and nothing else is computed from there on;
- `mask` keeps all tokens, and gives those that are dropped a weight of 0 (or, in training, a soft weight):
  no token attends to them, and they are not pooled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """What goes from block to block: [B, P + S, C], P tokens that always stay in front of S of the grid.

    Attributes:
        x: Features.
        front: P: the class token if there is one, and what stages merged.
        place: Where on the grid of T * N tokens each of S stands, int64, [B, S].
        weight: Soft or hard weight of each of S, [B, S]; None where all are 1.
        left: Whether each of S is left where masks are hard, bool, [B, S]; None where all are.
        bias: What is added to attention towards each of P + S, [B, P + S]; None where that is 0.
        size: How many tokens each of S was merged from, [B, S]; None where none was.
    """

    x: Tensor
    front: int
    place: Tensor
    weight: Tensor | None = None
    left: Tensor | None = None
    bias: Tensor | None = None
    size: Tensor | None = None

    @property
    def grid(self) -> Tensor:
        """Features of those on the grid, [B, S, C]."""
        return self.x[:, self.front :]


def count(share: float, tokens: int) -> int:
    """How many tokens a share is; 1 at least."""
    return max(1, round(share * tokens))


def best(score: Tensor, kept: int) -> Tensor:
    """Places of the highest scores, ascending, int64, [B, kept]."""
    return score.topk(kept, dim=1).indices.sort(dim=1).values


def drop(tokens: Tokens, score: Tensor, kept: int, *, merge: bool) -> Tokens:
    """Gather the best.

    Args:
        tokens: Those before the stage, with weights of 1.
        score: [B, S].
        kept: How many go on, at most S.
        merge: Whether the mean of the others goes on as one more token in front.
    """
    chosen = best(score, kept)
    x = tokens.grid.gather(1, chosen[..., None].expand(-1, -1, tokens.x.shape[-1]))
    parts = [tokens.x[:, : tokens.front], x]
    if merge:
        others = torch.ones_like(score).scatter(1, chosen, 0.0)
        parts.insert(1, weighted_mean(tokens.grid, others)[:, None])
    bias = tokens.bias
    if bias is not None:
        front = bias.new_zeros(len(bias), tokens.front + int(merge))
        bias = torch.cat([front, bias[:, tokens.front :].gather(1, chosen)], 1)
    return replace(
        tokens,
        x=torch.cat(parts, 1),
        front=tokens.front + int(merge),
        place=tokens.place.gather(1, chosen),
        bias=bias,
        size=None if tokens.size is None else tokens.size.gather(1, chosen),
    )


def weighted_mean(x: Tensor, weight: Tensor) -> Tensor:
    """The mean of features, [B, C], by weights that need not add up to 1; 0 where all weights are 0.

    Args:
        x: [B, S, C].
        weight: [B, S], not negative.
    """
    wide = weight if weight.dtype == torch.float64 else weight.float()
    # Divided first: half precision would overflow in the sum.
    share = wide / wide.sum(1, keepdim=True).clamp_min(torch.finfo(wide.dtype).tiny)
    return torch.einsum("bs,bsc->bc", share.to(x.dtype), x)


def mask(tokens: Tokens, weight: Tensor, bias: Tensor, left: Tensor, *, merge: bool) -> Tokens:
    """Weigh the tokens instead of dropping them.

    Args:
        tokens: Those before the stage.
        weight: What each weighs from now on, [B, S], from 0 to 1; no more than before.
        bias: Its logarithm, [B, S]; -inf where it is 0.
        left: Which are left where masks are hard, bool, [B, S].
        merge: Whether the mean of what was lost goes on as one more token in front.
    """
    x = tokens.x
    before = torch.ones_like(weight) if tokens.weight is None else tokens.weight
    front = bias.new_zeros(len(bias), tokens.front + int(merge))
    if merge:
        mean = weighted_mean(tokens.grid, before - weight)
        x = torch.cat([x[:, : tokens.front], mean[:, None], tokens.grid], 1)
    return replace(
        tokens,
        x=x,
        front=tokens.front + int(merge),
        weight=weight,
        left=left,
        bias=torch.cat([front, bias], 1),
    )


def merge_alike(tokens: Tokens, keys: Tensor, kept: int) -> Tokens:
    """Merge the most alike until so many are left (ToMe, arXiv 2210.09461).

    Tokens are parted into two by turns; each of the first finds its likest in the second; the pairs that are
    most alike are merged to their mean, weighted by what they were merged from. Half of the tokens can go so
    at once; where more have to go, it is done again. Attention is towards log size, as there.

    Args:
        tokens: Those before the stage.
        keys: What is compared, [B, S, D].
        kept: How many go on.
    """
    # Sums of many would overflow half precision.
    wide = torch.promote_types(tokens.x.dtype, torch.float32)
    x, keys, place = tokens.grid.to(wide), keys.to(wide), tokens.place
    size = torch.ones_like(x[..., :1]) if tokens.size is None else tokens.size[..., None].to(wide)
    while x.shape[1] > kept:
        gone = min(x.shape[1] - kept, x.shape[1] // 2)
        with torch.no_grad():
            metric = torch.nn.functional.normalize(keys, dim=-1)
            alike, likest = (metric[:, ::2] @ metric[:, 1::2].transpose(1, 2)).max(-1)
            order = alike.argsort(dim=1, descending=True)
            away, stay = order[:, :gone], order[:, gone:].sort(dim=1).values
            into = likest.gather(1, away)

        def merged(
            values: Tensor, away: Tensor = away, stay: Tensor = stay, into: Tensor = into
        ) -> tuple[Tensor, Tensor]:
            first, second = values[:, ::2], values[:, 1::2]
            width = values.shape[-1]
            source = first.gather(1, away[..., None].expand(-1, -1, width))
            summed = second.scatter_add(1, into[..., None].expand(-1, -1, width), source)
            return first.gather(1, stay[..., None].expand(-1, -1, width)), summed

        weighted = torch.cat(merged(x * size), 1)
        weights = torch.cat(merged(keys * size), 1)
        size = torch.cat(merged(size), 1)
        x, keys = weighted / size, weights / size
        place = torch.cat([place[:, ::2].gather(1, stay), place[:, 1::2]], 1)
    log = size[..., 0].log()
    return replace(
        tokens,
        x=torch.cat([tokens.x[:, : tokens.front], x.to(tokens.x.dtype)], 1),
        place=place,
        bias=torch.nn.functional.pad(log, (tokens.front, 0)),
        size=size[..., 0],
    )


def lattice(tokens: int) -> Tensor:
    """Ranks of tokens, of which any number of the highest is spread evenly, int64, [tokens].

    By multiples of the golden ratio, of which the fractional parts are as far apart as can be.
    """
    golden = (5.0**0.5 - 1.0) / 2.0
    return ranks(1.0 - (golden * torch.arange(tokens, dtype=torch.float64)) % 1.0)


def ranks(score: Tensor) -> Tensor:
    """The place of each score, 0 for the lowest, int64: what `Module.to` does not round. [n] -> [n]."""
    return score.argsort().argsort()

"""Naming cells: a head that teaches the vision tower, in training only.

Each level of crops is a map of tokens of the whole canvas. Averaged over each cell, by the area that each
token has in it, it must tell what lies there. A step may look at some crops only; then cells of which too
little is seen are not asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor, nn

from sparseflow.adaptive.adapters.crops import LEVELS
from sparseflow.adaptive.grid_vqa.grounding import shown

_SEEN = 0.4
"""Share of a cell that has to be seen."""


class Naming(nn.Module):
    """A linear head for each level.

    Args:
        width: Of the vision tower.
        labels: What a cell can show.
        grid: Cells along a side.
        crop_side: Vision tokens along a side of a crop.
    """

    areas: Tensor

    def __init__(self, width: int, labels: int, grid: int, crop_side: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, labels)) for _ in LEVELS
        )
        areas = shown(grid, crop_side).unflatten(0, (-1, crop_side**2))
        self.register_buffer("areas", areas, persistent=False)

    def forward(self, seen: Tensor, crops: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Name cells at each level that there are crops of.

        Args:
            seen: Vision tokens, [B, crops, tokens, width].
            crops: Which crops those are, ascending; by default the first ones.

        Returns:
            Logits, [levels, B, cells, labels], and whether a level shows a cell, [levels, cells] bool.
        """
        every = list(range(seen.shape[1]) if crops is None else crops)
        logits, there, ends = [], [], list(accumulate((level**2 for level in LEVELS), initial=0))
        for (first, end), head in zip(pairwise(ends), self.heads, strict=True):
            mine = [at for at, crop in enumerate(every) if first <= crop < end]
            if not mine:
                continue
            area, whole = torch.cat([self.areas[every[at]] for at in mine]), self.areas[first:end].sum((0, 1))
            covered = area.sum(0)
            means = area / covered.clamp(min=1e-6)
            tokens = seen[:, mine[0] : mine[-1] + 1].flatten(1, 2)
            logits.append(head(torch.einsum("tc,btw->bcw", means.to(tokens.dtype), tokens)))
            there.append(covered >= _SEEN * whole)
        return torch.stack(logits), torch.stack(there)


def draw_crops(counts: Sequence[int], random: np.random.Generator) -> list[int]:
    """Some crops of each level, by chance.

    Args:
        counts: Of each level.
        random: What they are drawn from.
    """
    found, first = [], 0
    for level, count in zip(LEVELS, counts, strict=True):
        found += sorted((first + random.permutation(level**2)[:count]).tolist())
        first += level**2
    return found


def naming_loss(
    logits: Tensor,
    there: Tensor,
    cells: Tensor,
    blends: Tensor | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """Cross entropy of naming cells.

    Args:
        logits: [levels, B, cells, labels].
        there: Which cells a level shows, [levels, cells] bool.
        cells: Labels, [B, cells] int64.
        blends: Labels of what is blended in, if something is.
        shares: Of `cells` in the blend, [B, cells].
    """
    logs = logits.float().log_softmax(-1)
    loss = -_of(logs, cells)
    if blends is not None and shares is not None:
        loss = loss * shares - _of(logs, blends) * (1.0 - shares)
    asked = there[:, None].float()
    # Each level counts as much as another, however few of its cells are seen.
    levels = (loss * asked).sum((1, 2)) / (asked.sum((1, 2)) * len(cells)).clamp(min=1.0)
    return levels.sum() / there.any(1).sum()


def right(logits: Tensor, there: Tensor, cells: Tensor, nothing: int) -> Tensor:
    """Share of cells with something in them that each level names right, of those that it shows: [levels]."""
    asked = (cells != nothing) & there[:, None]
    hits = (logits.argmax(-1) == cells) & asked
    return hits.sum((1, 2)) / asked.sum((1, 2)).clamp(min=1)


def _of(logs: Tensor, labels: Tensor) -> Tensor:
    return logs.gather(-1, labels.expand(logs.shape[:-1])[..., None])[..., 0]

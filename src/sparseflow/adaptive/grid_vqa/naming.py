"""Naming cells: a head that teaches the vision tower, in training only.

Each level of crops is a map of tokens of the whole canvas. Averaged over each cell, it must tell what lies
there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparseflow.adaptive.adapters.crops import LEVELS


class Naming(nn.Module):
    """A linear head for each level.

    Args:
        width: Of the vision tower.
        labels: What a cell can show.
        grid: Cells along a side.
    """

    def __init__(self, width: int, labels: int, grid: int) -> None:
        super().__init__()
        self.grid = grid
        self.heads = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, labels)) for _ in LEVELS
        )

    def forward(self, seen: Tensor) -> Tensor:
        """Logits of cells at each level there is: [B, crops, tokens, width] -> [levels, B, cells, labels]."""
        side, first, found = round(seen.shape[2] ** 0.5), 0, []
        for level, head in zip(LEVELS, self.heads, strict=True):
            if first == seen.shape[1]:
                break
            tiles = seen[:, first : first + level**2].unflatten(1, (level, level)).unflatten(3, (side, side))
            first += level**2
            # [B, rows of crops, columns of crops, rows, columns, width] -> [B, width, all rows, all columns]
            whole = tiles.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
            cells = functional.adaptive_avg_pool2d(whole, self.grid).flatten(2).transpose(1, 2)
            found.append(head(cells))
        return torch.stack(found)


def naming_loss(
    logits: Tensor, cells: Tensor, blends: Tensor | None = None, shares: Tensor | None = None
) -> Tensor:
    """Cross entropy of naming cells.

    Args:
        logits: [levels, B, cells, labels].
        cells: Labels, [B, cells] int64.
        blends: Labels of what is blended in, if something is.
        shares: Of `cells` in the blend, [B, cells].
    """
    logs = logits.float().log_softmax(-1)
    loss = -_of(logs, cells)
    if blends is not None and shares is not None:
        loss = loss * shares - _of(logs, blends) * (1.0 - shares)
    return loss.mean()


def right(logits: Tensor, cells: Tensor, nothing: int) -> Tensor:
    """Share of cells with something in them that each level names right: [levels]."""
    there = cells != nothing
    hits = (logits.argmax(-1) == cells) & there
    return hits.sum((1, 2)) / there.sum().clamp(min=1)


def _of(logs: Tensor, labels: Tensor) -> Tensor:
    return logs.gather(-1, labels.expand(logs.shape[:-1])[..., None])[..., 0]

"""What lies where, told to the decoder's first blocks: heads that teach them, in training only.

Answering takes what the answers alone teach slowly, if at all: to know which place a vision token shows, and
to find the tokens that show what a word of the question names. Each is asked for here, from hidden states
a few blocks into the decoder, so that the blocks after them have only to put it together. A question has a
name or two, which is little to learn finding from; so every name, and the words for what is small, follow the
text (`quizzed`), where causal attention hides them from the answer, as far as these blocks.

Shapes: B samples, n vision tokens, T text tokens, S cells, d the decoder's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sparseflow.adaptive.adapters.crops import LEVELS


class GroundingHead(nn.Module):
    """Heads on hidden states of the decoder.

    Args:
        width: Of the decoder.
        words: Token of each name, in the order of labels.
        asked: Labels of the names that questions are about.
        small: Tokens that say of an item that it is small.
        grid: Cells along a side.
        crop_side: Vision tokens along a side of a crop.
    """

    words: Tensor
    quizzes: Tensor
    shown: Tensor

    def __init__(
        self, width: int, words: Sequence[int], asked: Sequence[int], small: Sequence[int], *, grid: int,
        crop_side: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self._names, self.quiz = len(words), len(asked) + len(small)
        cells, labels = grid**2, 2 * len(words) + 1
        sizes = (cells, labels, cells + 1)
        self.place, self.content, self.lies = (nn.Linear(width, size) for size in sizes)
        self.register_buffer("words", torch.tensor([*words, *small]), persistent=False)
        quiz = [*(words[label] for label in asked), *small]
        self.register_buffer("quizzes", torch.tensor(quiz), persistent=False)
        self.register_buffer("shown", shown(grid, crop_side), persistent=False)

    def quizzed(self, text: Tensor) -> Tensor:
        """Text with all such words after it, in an order by torch's generator: [B, T] -> [B, T + quiz]."""
        words = self.quizzes[torch.randperm(self.quiz).to(self.quizzes.device)]
        return torch.cat([text, words.expand(len(text), -1)], dim=1)

    def forward(self, hidden: Tensor, text: Tensor, prompts: Tensor, cells: Tensor) -> Tensor:
        """The losses.

        Args:
            hidden: Of `<bos>`, vision tokens and text: [B, 1 + n + T, d].
            text: As `quizzed` gave it: [B, T] int64.
            prompts: As in `Batch`: [B] int64.
            cells: What lies in each cell, as in `Batch`: [B, S] int64.

        Returns:
            Mean cross entropies, [3]: of vision tokens, which cells they show and what lies there; and of
            words that name or describe something, in the question and behind the text, in which cells it
            lies, or that it lies in none.
        """
        count = hidden.shape[1] - 1 - text.shape[1]
        plain = functional.rms_norm(hidden, hidden.shape[-1:])
        image, asked = plain[:, 1 : 1 + count], plain[:, 1 + count :]
        shown = self.shown[:count]
        place = -(self.place(image).float().log_softmax(-1) * shown).sum(-1).mean()
        contents = self.content(image).float().log_softmax(-1)
        of_cells = contents.gather(-1, cells[:, None].expand(-1, count, -1))
        content = -(of_cells * shown).sum(-1).mean()

        words = text[:, :, None] == self.words  # [B, T, names and words for small]
        at = torch.arange(text.shape[1], device=text.device)
        told = (at < prompts[:, None]) | (at >= text.shape[1] - self.quiz)
        there = functional.one_hot(cells % self._names, self._names) * (cells < 2 * self._names)[:, :, None]
        small = ((cells >= self._names) & (cells < 2 * self._names))[:, :, None]
        there = torch.cat([there, small.expand(-1, -1, len(self.words) - self._names)], dim=-1)
        found = words.float() @ there.transpose(1, 2).float()  # [B, T, S]
        wanted = torch.cat([found, (found.sum(-1, keepdim=True) == 0).float()], dim=-1)
        wanted = wanted / wanted.sum(-1, keepdim=True)
        lies = -(self.lies(asked).float().log_softmax(-1) * wanted).sum(-1)
        mine = (words.any(-1) & told).float()
        return torch.stack([place, content, (lies * mine).sum() / mine.sum()])


def shown(grid: int, crop_side: int) -> Tensor:
    """Which share of each vision token's area lies in each cell: [14 crops * tokens, S] float32."""
    every = []
    for level in LEVELS:
        side = level * crop_side
        edges = torch.arange(side + 1, dtype=torch.float64) / side
        cells = torch.arange(grid + 1, dtype=torch.float64) / grid
        low = torch.maximum(edges[:-1, None], cells[:-1])
        high = torch.minimum(edges[1:, None], cells[1:])
        along = (high - low).clamp(min=0.0) * side
        tokens = torch.einsum("yi,xj->yxij", along, along).flatten(2)
        tiles = tokens.unflatten(1, (level, crop_side)).unflatten(0, (level, crop_side))
        every.append(tiles.transpose(1, 2).flatten(0, 3))
    return torch.cat(every).float()


_SEEN = 0.4
"""Share of a cell that has to be seen."""


class NamingHead(nn.Module):
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

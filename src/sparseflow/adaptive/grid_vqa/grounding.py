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

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparseflow.adaptive.adapters.crops import LEVELS


class Grounding(nn.Module):
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

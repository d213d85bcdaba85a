"""Auxiliary heads that supervise the vision tower and the first decoder blocks, in training only.

`NamingHead` names the content of each cell from vision tokens. `GroundingHead` teaches two things that
answers alone teach slowly: which cell a vision token shows, and which cells contain what a word of the
question names. It reads hidden states after a few decoder blocks. A question has one or two names, which is
little supervision, so all names and the words for small items are appended to the text (`append_quiz`);
causal attention hides them from the answer.

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
        width: Width of the decoder.
        name_tokens: Token of each name, in the order of labels.
        question_labels: Labels of the names in questions.
        small_tokens: Tokens that describe an item as small.
        grid: Cells per side.
        crop_side: Vision tokens per side of a crop.
    """

    name_tokens: Tensor
    quiz_tokens: Tensor
    coverage: Tensor

    def __init__(
        self,
        width: int,
        name_tokens: Sequence[int],
        question_labels: Sequence[int],
        small_tokens: Sequence[int],
        *,
        grid: int,
        crop_side: int,
    ) -> None:
        super().__init__()
        self._names, self.num_quiz_tokens = len(name_tokens), len(question_labels) + len(small_tokens)
        cells, labels = grid**2, 2 * len(name_tokens) + 1
        sizes = (cells, labels, cells + 1)
        self.cell_head, self.content_head, self.location_head = (nn.Linear(width, size) for size in sizes)
        self.register_buffer("name_tokens", torch.tensor([*name_tokens, *small_tokens]), persistent=False)
        quiz = [*(name_tokens[label] for label in question_labels), *small_tokens]
        self.register_buffer("quiz_tokens", torch.tensor(quiz), persistent=False)
        self.register_buffer("coverage", compute_cell_coverage(grid, crop_side), persistent=False)

    def append_quiz(self, text: Tensor) -> Tensor:
        """Append all quiz tokens in random order (torch's generator): [B, T] -> [B, T + quiz]."""
        words = self.quiz_tokens[torch.randperm(self.num_quiz_tokens).to(self.quiz_tokens.device)]
        return torch.cat([text, words.expand(len(text), -1)], dim=1)

    def forward(self, hidden: Tensor, text: Tensor, prompts: Tensor, cells: Tensor) -> Tensor:
        """Compute the losses.

        Args:
            hidden: Hidden states of `<bos>`, vision tokens and text, [B, 1 + n + T, d].
            text: Result of `append_quiz`, [B, T] int64.
            prompts: Prompt lengths, as in `VqaBatch`, [B] int64.
            cells: Content of each cell, as in `VqaBatch`, [B, S] int64.

        Returns:
            Mean cross entropies, [3]: which cells a vision token shows, what they contain, and which cells
            contain what a name or size word describes, or that none does.
        """
        count = hidden.shape[1] - 1 - text.shape[1]
        normed = functional.rms_norm(hidden, hidden.shape[-1:])
        image, text_states = normed[:, 1 : 1 + count], normed[:, 1 + count :]
        coverage = self.coverage[:count]
        cell_loss = -(self.cell_head(image).float().log_softmax(-1) * coverage).sum(-1).mean()
        log_probs = self.content_head(image).float().log_softmax(-1)
        cell_log_probs = log_probs.gather(-1, cells[:, None].expand(-1, count, -1))
        content_loss = -(cell_log_probs * coverage).sum(-1).mean()

        words = text[:, :, None] == self.name_tokens  # [B, T, names and size words]
        index = torch.arange(text.shape[1], device=text.device)
        is_question = (index < prompts[:, None]) | (index >= text.shape[1] - self.num_quiz_tokens)
        cell_names = (
            functional.one_hot(cells % self._names, self._names) * (cells < 2 * self._names)[:, :, None]
        )
        small = ((cells >= self._names) & (cells < 2 * self._names))[:, :, None]
        cell_names = torch.cat(
            [cell_names, small.expand(-1, -1, len(self.name_tokens) - self._names)], dim=-1
        )
        matches = words.float() @ cell_names.transpose(1, 2).float()  # [B, T, S]
        targets = torch.cat([matches, (matches.sum(-1, keepdim=True) == 0).float()], dim=-1)
        targets = targets / targets.sum(-1, keepdim=True)
        location_losses = -(self.location_head(text_states).float().log_softmax(-1) * targets).sum(-1)
        weights = (words.any(-1) & is_question).float()
        return torch.stack([cell_loss, content_loss, (location_losses * weights).sum() / weights.sum()])


def compute_cell_coverage(grid: int, crop_side: int) -> Tensor:
    """Fraction of each vision token's area in each cell: [14 crops * tokens, S] float32."""
    levels = []
    for level in LEVELS:
        side = level * crop_side
        edges = torch.arange(side + 1, dtype=torch.float64) / side
        cells = torch.arange(grid + 1, dtype=torch.float64) / grid
        low = torch.maximum(edges[:-1, None], cells[:-1])
        high = torch.minimum(edges[1:, None], cells[1:])
        overlap = (high - low).clamp(min=0.0) * side
        tokens = torch.einsum("yi,xj->yxij", overlap, overlap).flatten(2)
        tiles = tokens.unflatten(1, (level, crop_side)).unflatten(0, (level, crop_side))
        levels.append(tiles.transpose(1, 2).flatten(0, 3))
    return torch.cat(levels).float()


_MIN_VISIBLE = 0.4
"""Minimum visible fraction of a cell."""


class NamingHead(nn.Module):
    """One linear classifier of cells per crop level.

    Args:
        width: Width of the vision tower.
        labels: Number of labels of a cell.
        grid: Cells per side.
        crop_side: Vision tokens per side of a crop.
    """

    areas: Tensor

    def __init__(self, width: int, labels: int, grid: int, crop_side: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, labels)) for _ in LEVELS
        )
        areas = compute_cell_coverage(grid, crop_side).unflatten(0, (-1, crop_side**2))
        self.register_buffer("areas", areas, persistent=False)

    def forward(self, features: Tensor, crops: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Classify cells at each level that has crops.

        Args:
            features: Vision tokens, [B, crops, tokens, width].
            crops: Indices of the crops, ascending; by default the first ones.

        Returns:
            Logits, [levels, B, cells, labels], and whether a level shows a cell, [levels, cells] bool.
        """
        crop_indices = list(range(features.shape[1]) if crops is None else crops)
        logits, visible, ends = [], [], list(accumulate((level**2 for level in LEVELS), initial=0))
        for (first, end), head in zip(pairwise(ends), self.heads, strict=True):
            level_indices = [index for index, crop in enumerate(crop_indices) if first <= crop < end]
            if not level_indices:
                continue
            area, full_area = (
                torch.cat([self.areas[crop_indices[index]] for index in level_indices]),
                self.areas[first:end].sum((0, 1)),
            )
            covered = area.sum(0)
            means = area / covered.clamp(min=1e-6)
            tokens = features[:, level_indices[0] : level_indices[-1] + 1].flatten(1, 2)
            logits.append(head(torch.einsum("tc,btw->bcw", means.to(tokens.dtype), tokens)))
            visible.append(covered >= _MIN_VISIBLE * full_area)
        return torch.stack(logits), torch.stack(visible)


def sample_crops(counts: Sequence[int], generator: np.random.Generator) -> list[int]:
    """Sample crops of each level.

    Args:
        counts: Number of crops of each level.
        generator: Random generator.
    """
    crops, first = [], 0
    for level, count in zip(LEVELS, counts, strict=True):
        crops += sorted((first + generator.permutation(level**2)[:count]).tolist())
        first += level**2
    return crops


def naming_loss(
    logits: Tensor,
    visible: Tensor,
    cells: Tensor,
    blended_cells: Tensor | None = None,
    fractions: Tensor | None = None,
) -> Tensor:
    """Cross entropy of classifying cells, with equal weight of each level.

    Args:
        logits: [levels, B, cells, labels].
        visible: Which cells a level shows, [levels, cells] bool.
        cells: Labels, [B, cells] int64.
        blended_cells: Labels of the blended images, if images are blended.
        fractions: Weight of `cells` in the blend, [B, cells].
    """
    log_probs = logits.float().log_softmax(-1)
    loss = -_gather_labels(log_probs, cells)
    if blended_cells is not None and fractions is not None:
        loss = loss * fractions - _gather_labels(log_probs, blended_cells) * (1.0 - fractions)
    mask = visible[:, None].float()
    # Equal weight of each level, independent of the number of visible cells.
    levels = (loss * mask).sum((1, 2)) / (mask.sum((1, 2)) * len(cells)).clamp(min=1.0)
    return levels.sum() / visible.any(1).sum()


def naming_accuracy(logits: Tensor, visible: Tensor, cells: Tensor, empty_label: int) -> Tensor:
    """Accuracy of each level on visible cells that are not empty: [levels]."""
    mask = (cells != empty_label) & visible[:, None]
    hits = (logits.argmax(-1) == cells) & mask
    return hits.sum((1, 2)) / mask.sum((1, 2)).clamp(min=1)


def _gather_labels(log_probs: Tensor, labels: Tensor) -> Tensor:
    return log_probs.gather(-1, labels.expand(log_probs.shape[:-1])[..., None])[..., 0]

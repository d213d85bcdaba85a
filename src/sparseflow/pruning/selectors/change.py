"""Score by the change of a patch since the previous frame: frame difference and EVS."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparseflow.core.checks import check_one_of

ChangeMeasure = Literal["frame_difference", "evs"]
CHANGE_MEASURES: tuple[str, ...] = get_args(ChangeMeasure)

_TIE = 1e-13
"""Relative decrease of equal changes from one token to the next."""

_LARGEST_DISTANCE = 2.0
"""Cosine distance of opposite features."""


class ChangeScore(nn.Module):
    """Change of the features of a patch since the previous frame.

    - `"frame_difference"`: mean squared difference. The first frame has the change to the second one.
    - `"evs"`: cosine distance. The first frame is kept, as in Efficient Video Sampling (arXiv 2510.14624), so
      that fewer tokens than those of one frame cannot be selected by change.

    Args:
        num_frames: T.
        grid: Rows and columns of patches; their product is N.
        measure: One of `CHANGE_MEASURES`.

    Raises:
        InputError: The measure is unknown.
    """

    def __init__(self, num_frames: int, grid: tuple[int, int], measure: str) -> None:
        super().__init__()
        check_one_of(CHANGE_MEASURES, measure=measure)
        self.num_frames, self.num_patches = num_frames, grid[0] * grid[1]
        self.measure = measure

    def forward(self, x: Tensor, retained: Tensor | None = None) -> Tensor:
        """Score every token; higher is more important.

        Args:
            x: Features of a floating dtype, [B, T, N, C].
            retained: Tokens that are still present, bool, [B, T, N]; all by default. A token whose
                counterpart is absent has the largest change of its sample.

        Returns:
            float64, [B, T, N]. Equal changes decrease by rounding errors with the position, so that earlier
            tokens are selected. One frame has no change.
        """
        x = x if x.dtype == torch.float64 else x.float()
        if x.shape[1] == 1:
            return self._break_ties(torch.zeros_like(x[..., 0]))
        previous, current = x[:, :-1], x[:, 1:]
        if self.measure == "evs":
            change = 1.0 - functional.cosine_similarity(previous, current, dim=-1)
            first = torch.full_like(change[:, :1], _LARGEST_DISTANCE)
        else:
            change = (current - previous).square().mean(-1)
            first = change[:, :1]
        score = torch.cat([first, change], 1)
        if retained is not None:
            pairs = retained[:, :-1] & retained[:, 1:]
            first_pair = pairs[:, :1] if self.measure == "frame_difference" else retained[:, :1]
            compared = torch.cat([first_pair, pairs], 1)
            largest = score.masked_fill(~compared, 0.0).amax((1, 2), keepdim=True)
            score = torch.where(compared, score, largest)
        return self._break_ties(score)

    def _break_ties(self, score: Tensor) -> Tensor:
        rank = torch.arange(score[0].numel(), device=score.device, dtype=torch.float64).view(score.shape[1:])
        return score.double() * (1.0 - _TIE * rank) - _TIE**2 * rank

"""How the next token is drawn.

A token is drawn with one uniform number of the request's own generator: the first token, by falling
probability, at which the summed probability exceeds it. So what a request gets depends on its seed and its
logits, and not on which other requests share its batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflow.errors import InputError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn.

    Attributes:
        temperature: What logits are divided by; 0 takes the most probable token.
        top_p: The least probable tokens that hold the rest of this are never drawn; above 0, at most 1.
        seed: What a request's numbers are drawn from.

    Raises:
        InputError: A value is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise InputError(f"`temperature` (={self.temperature}) must be a finite number, 0 or more")
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(f"`top_p` (={self.top_p}) must be above 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"`seed` (={self.seed}) must be a whole number of 0 to 2^63 - 1")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature == 0.0


class UniformStream:
    """The uniform numbers of one request.

    Args:
        sampling: How its tokens are drawn.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self.sampling = sampling
        self._generator = None if sampling.greedy else torch.Generator().manual_seed(sampling.seed)

    def next(self) -> float:
        """The next number in [0, 1); 0 where none is needed."""
        if self._generator is None:
            return 0.0
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


def most_probable(logits: Tensor) -> Tensor:
    """The most probable token of each row, the first of equal ones; -1 where logits are NaN.

    Args:
        logits: [rows, vocabulary] floating.

    Returns:
        [rows] int64. It never synchronises.
    """
    best = logits.argmax(-1, keepdim=True)
    # NaN counts as the largest, so one anywhere in a row is found here.
    return best.masked_fill(logits.gather(-1, best).isnan(), -1)[:, 0]


def pick(
    logits: Tensor,
    samplings: Sequence[SamplingParams],
    uniform: Sequence[float],
    *,
    best: Tensor | None = None,
) -> Tensor:
    """The next token of each row.

    Args:
        logits: [rows, vocabulary] floating.
        samplings: How each row is drawn.
        uniform: A number in [0, 1) for each row; not looked at where the row is greedy.
        best: What `most_probable` gave for these logits, where somebody asked already.

    Returns:
        [rows] int64, where the logits are; -1 where they are NaN.

    Raises:
        InputError: There is not one of each for every row.
    """
    if not len(logits) == len(samplings) == len(uniform):
        raise InputError(
            f"{len(logits)} rows of logits need as many ways of sampling (={len(samplings)}) and numbers "
            f"(={len(uniform)})"
        )
    best = most_probable(logits) if best is None else best
    drawn = [row for row, sampling in enumerate(samplings) if not sampling.greedy]
    if not drawn:
        return best
    told = torch.tensor(
        [[samplings[row].temperature, samplings[row].top_p, uniform[row]] for row in drawn],
        dtype=torch.float64,
    ).to(logits.device)
    temperature, top_p, number = told.split(1, dim=1)
    rows = torch.tensor(drawn, device=logits.device)
    found = _draw(logits[rows].double(), temperature, top_p, number)
    return best.index_copy(0, rows, found.where(best[rows] >= 0, -1))


def _draw(logits: Tensor, temperature: Tensor, top_p: Tensor, number: Tensor) -> Tensor:
    scaled = (logits - logits.max(1, keepdim=True).values) / temperature
    chances, tokens = scaled.softmax(1).sort(dim=1, descending=True, stable=True)
    before = chances.cumsum(1) - chances
    # The first token is always kept: nothing is before it.
    kept = chances.masked_fill(before >= top_p, 0.0)
    summed = kept.cumsum(1)
    at = (summed <= number * summed[:, -1:]).sum(1, keepdim=True)
    # Rounding may put the number at the very end; what has no chance is not drawn.
    at = at.minimum((kept > 0).sum(1, keepdim=True) - 1).clamp_min(0)
    return tokens.gather(1, at)[:, 0]

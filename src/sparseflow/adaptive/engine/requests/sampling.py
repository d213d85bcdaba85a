"""Sampling of tokens.

A token is sampled with one uniform number of the request's own generator: the first token, by decreasing
probability, at which the cumulative probability exceeds the number. The result depends on the request's seed
and logits, not on other requests in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflow.core.checks import check_non_negative
from sparseflow.errors import InputError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters.

    Attributes:
        temperature: Divisor of the logits; 0 selects the most probable token.
        top_p: Nucleus size: tokens are sampled from the smallest set with this total probability; above 0, at
            most 1.
        seed: Random seed of the request.

    Raises:
        InputError: A value is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_non_negative(temperature=self.temperature)
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(f"`top_p` (={self.top_p}) must be above 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"`seed` (={self.seed}) must be from 0 to 2^63 - 1")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is selected."""
        return self.temperature == 0.0


class UniformStream:
    """Uniform random numbers of one request.

    Args:
        sampling: Sampling parameters.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self.sampling = sampling
        self._generator = None if sampling.greedy else torch.Generator().manual_seed(sampling.seed)

    def next(self) -> float:
        """Next number in [0, 1); 0 if greedy."""
        if self._generator is None:
            return 0.0
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


def argmax_tokens(logits: Tensor) -> Tensor:
    """Most probable token of each row, the first of ties; -1 where logits are NaN.

    Args:
        logits: [rows, vocabulary], floating.

    Returns:
        [rows] int64; computed without synchronization.
    """
    best = logits.argmax(-1, keepdim=True)
    # argmax returns a NaN if the row has one.
    return best.masked_fill(logits.gather(-1, best).isnan(), -1)[:, 0]


def sample_tokens(
    logits: Tensor,
    samplings: Sequence[SamplingParams],
    uniform: Sequence[float],
    *,
    best: Tensor | None = None,
) -> Tensor:
    """Sample the next token of each row.

    Args:
        logits: [rows, vocabulary], floating.
        samplings: Sampling parameters of each row.
        uniform: Number in [0, 1) for each row; ignored for greedy rows.
        best: Result of `argmax_tokens` for these logits, if known.

    Returns:
        [rows] int64 on the logits' device; -1 where they are NaN.

    Raises:
        InputError: The numbers of rows differ.
    """
    if not len(logits) == len(samplings) == len(uniform):
        raise InputError(
            f"{len(logits)} rows of logits, {len(samplings)} sampling parameters and "
            f"{len(uniform)} random numbers must be equally many"
        )
    best = argmax_tokens(logits) if best is None else best
    sampled_rows = [row for row, sampling in enumerate(samplings) if not sampling.greedy]
    if not sampled_rows:
        return best
    params = torch.tensor(
        [[samplings[row].temperature, samplings[row].top_p, uniform[row]] for row in sampled_rows],
        dtype=torch.float64,
    ).to(logits.device)
    temperature, top_p, number = params.split(1, dim=1)
    rows = torch.tensor(sampled_rows, device=logits.device)
    sampled = _draw(logits[rows].double(), temperature, top_p, number)
    return best.index_copy(0, rows, sampled.where(best[rows] >= 0, -1))


def _draw(logits: Tensor, temperature: Tensor, top_p: Tensor, number: Tensor) -> Tensor:
    scaled = (logits - logits.max(1, keepdim=True).values) / temperature
    probs, tokens = scaled.softmax(1).sort(dim=1, descending=True, stable=True)
    before = probs.cumsum(1) - probs
    # Always keeps the first token.
    nucleus = probs.masked_fill(before >= top_p, 0.0)
    summed = nucleus.cumsum(1)
    rank = (summed <= number * summed[:, -1:]).sum(1, keepdim=True)
    # Rounding may select the end; tokens of probability 0 are never sampled.
    rank = rank.minimum((nucleus > 0).sum(1, keepdim=True) - 1).clamp_min(0)
    return tokens.gather(1, rank)[:, 0]

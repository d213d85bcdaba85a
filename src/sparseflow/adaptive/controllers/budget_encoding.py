"""A latency budget as a vector: sines and cosines of its logarithm, so that 170 and 180 ms differ.

Notation: x = pi · ln(budget in ms) / ln(10^6), an angle from 0 (1 ms) to pi (10^6 ms); n = dim / 2
    frequencies.

    encode(budget) = c · [ sqrt(a_j) · sin(j · x), sqrt(a_j) · cos(j · x) ],   j = 1 … n,   a_j = (n + 1 − j)
    / j

The dot product of two budgets depends on their ratio alone, through d = |x − y|: k(d) = c² · sum a_j · cos(j
· d). Its slope is minus Fejér's sum, sum (n + 1 − j) · sin(j · d) = ((n + 1) · sin d − sin((n + 1) · d)) / (4
· sin²(d / 2)), which is positive for all 0 < d < pi. So similarity falls strictly with distance over the
whole range, and, as a logarithm does, at every scale: at dim 256 the cosine of 170 ms with 171 ms is 0.999,
with 180 ms 0.95, with 380 ms 0.38. A single pair of frequencies could be steep for near budgets or
unambiguous for far ones, not both.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from sparseflow.errors import InputError

LEAST_MS, MOST_MS = 1.0, 1e6
"""Budgets that are told apart; those beyond count as the nearer end, and infinity is no limit."""

DIM = 256


def encode(budget_ms: Tensor, dim: int = DIM) -> Tensor:
    """Budgets as vectors of the length sqrt(dim).

    Args:
        budget_ms: [batch], milliseconds, above 0.
        dim: Even, and at least 2.

    Returns:
        [batch, dim] float32, on the same device.

    Raises:
        InputError: A budget is NaN, 0 or less, or `dim` is odd.
    """
    if dim < 2 or dim % 2:
        raise InputError(f"`dim` (={dim}) must be even: a sine and a cosine for each frequency")
    checked(budget_ms)
    # In float64: the highest frequency goes round 64 times over the range.
    angle = budget_ms.to(torch.float64).clamp(LEAST_MS, MOST_MS).log() * (math.pi / math.log(MOST_MS))
    frequency, amplitude = spectrum(dim, budget_ms.device)
    phase = angle[:, None] * frequency
    return torch.cat([amplitude * phase.sin(), amplitude * phase.cos()], dim=1).float()


@cache
def spectrum(dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Frequencies j and amplitudes c · sqrt(a_j), [dim / 2] float64 each."""
    count = dim // 2
    frequency = torch.arange(1, count + 1, dtype=torch.float64, device=device)
    weight = (count + 1 - frequency) / frequency
    return frequency, (weight * (dim / weight.sum())).sqrt()


def checked(budget_ms: Tensor) -> Tensor:
    """Budgets, if all of them can be kept by something.

    Raises:
        InputError: They are no vector, or one is NaN, 0 or less.
    """
    if budget_ms.ndim != 1:
        raise InputError(f"budgets must be a vector, [batch]; they have the shape {list(budget_ms.shape)}")
    wrong = ~(budget_ms > 0)
    if bool(wrong.any()):
        value = float(budget_ms[wrong][0])
        raise InputError(f"a latency budget must be above 0 ms, not {value}; leave it out for no budget")
    return budget_ms

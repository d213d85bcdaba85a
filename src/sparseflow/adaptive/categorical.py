"""Choosing among a few, some of which there are not: log-probabilities, entropy, and draws.

What is masked gets minus infinity before the softmax, so the rest sums to one and its likelihood is right; a
masked logit gets the gradient 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflow.errors import InputError, RunError


def masked(logits: Tensor, allowed: Tensor) -> Tensor:
    """Logits of which only those that are allowed can be chosen.

    Args:
        logits: [..., choices]; those of masked ones may be minus infinity already, or anything.
        allowed: [..., choices] bool.

    Returns:
        [..., choices]; minus infinity where masked.

    Raises:
        InputError: A row allows nothing.
        RunError: A logit that is allowed is not finite.
    """
    if not bool(allowed.any(-1).all()):
        raise InputError("a mask allows no choice at all; allow at least one, such as the cheapest")
    if not bool(logits.masked_fill(~allowed, 0.0).isfinite().all()):
        raise RunError(
            "logits are not finite: the controllers' weights, or the features that they see, are not"
        )
    return logits.masked_fill(~allowed, float("-inf"))


def log_probs(logits: Tensor, allowed: Tensor) -> Tensor:
    """Log-probabilities of choices; shapes and errors are those of `masked`."""
    return masked(logits, allowed).log_softmax(-1)


def entropy(log_prob: Tensor) -> Tensor:
    """Entropy in nats over the last dimension; what is masked adds nothing, and its gradient is 0."""
    # 0 · (−inf) is NaN; 0 · 0 is what is meant.
    return -(log_prob.exp() * log_prob.masked_fill(log_prob == float("-inf"), 0.0)).sum(-1)


def draw(log_prob: Tensor, uniform: Tensor) -> Tensor:
    """One choice a row.

    Args:
        log_prob: [rows, choices].
        uniform: [rows], from 0 to below 1, what is drawn from; the same numbers give the same choices.

    Returns:
        [rows] int64; never a masked one.
    """
    below = log_prob.detach().double().exp().cumsum(-1)
    total = below[:, -1]
    # Rounded up to the total itself, it would lie beyond the last choice.
    at = torch.minimum(uniform.to(below) * total, torch.nextafter(total, torch.zeros_like(total)))
    return (below <= at[:, None]).sum(-1)


def taken(values: Tensor, choice: Tensor) -> Tensor:
    """The values of what was chosen: [rows, choices] and [rows] -> [rows]."""
    return values.gather(-1, choice[:, None])[:, 0]

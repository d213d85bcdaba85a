"""`compute_difference`: how far two outputs of a network are apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference between two sets of tensors.

    Attributes:
        largest: Largest absolute difference.
        mean_error: Mean absolute difference over the mean absolute value.
    """

    largest: float
    mean_error: float


def compute_difference(expected: Any, actual: Any) -> Difference | None:
    """Compute the difference of two trees of tensors; None if their structure, types or shapes differ.

    NaN equals NaN, and infinity equals infinity of the same sign.
    """
    leaves, structure = tree_flatten(expected)
    actual_leaves, actual_structure = tree_flatten(actual)
    if structure != actual_structure:
        return None
    largest = error = size = 0.0
    for first, second in zip(leaves, actual_leaves, strict=True):
        if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
            if type(first) is not type(second) or first != second:
                return None
            continue
        if first.shape != second.shape or first.dtype != second.dtype:
            return None
        a, b = first.double(), second.double()
        gaps = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs().nan_to_num(nan=torch.inf))
        if gaps.numel():
            largest = max(largest, float(gaps.max()))
        error += float(gaps.sum())
        size += float(a.abs().nan_to_num(0.0, 0.0, 0.0).sum())
    return Difference(largest=largest, mean_error=error / max(size, 1e-30))

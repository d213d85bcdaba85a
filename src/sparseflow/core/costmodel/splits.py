"""Cross-validation splits.

Samples of one group never appear in both training and validation: rows of one kernel, or kernels of one
model, would leak the answer. `split_k_fold` ignores groups; it shows how optimistic such a split is.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence

from sparseflow.errors import InputError

Fold = tuple[list[int], list[int]]
"""Training indices and validation indices."""


def split_k_fold(count: int, folds: int, seed: int = 0) -> Iterator[Fold]:
    """Split `count` samples into `folds` random folds, ignoring groups.

    Raises:
        InputError: There are fewer samples than folds, or fewer than two folds.
    """
    yield from split_group_k_fold(range(count), folds, seed)


def split_group_k_fold(groups: Sequence[Hashable], folds: int, seed: int = 0) -> Iterator[Fold]:
    """Split samples into folds with about equally many groups each.

    Args:
        groups: Group of each sample.
        folds: Number of folds.
        seed: Seed of the order of the groups.

    Raises:
        InputError: There are fewer groups than folds, or fewer than two folds.
    """
    names = list(dict.fromkeys(groups))
    if not 2 <= folds <= len(names):
        raise InputError(
            f"`folds` (={folds}) must be at least 2 and at most the number of groups ({len(names)})"
        )
    random.Random(seed).shuffle(names)
    fold_of = {name: index % folds for index, name in enumerate(names)}
    for fold in range(folds):
        indices = range(len(groups))
        yield (
            [index for index in indices if fold_of[groups[index]] != fold],
            [index for index in indices if fold_of[groups[index]] == fold],
        )

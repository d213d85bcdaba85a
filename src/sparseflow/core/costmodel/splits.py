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
        yield _split_by_mask([fold_of[group] == fold for group in groups])


def split_leave_one_group_out(groups: Sequence[Hashable]) -> Iterator[tuple[Hashable, Fold]]:
    """Use each group once for validation; yields (group, fold).

    Raises:
        InputError: There are fewer than two groups.
    """
    names = list(dict.fromkeys(groups))
    if len(names) < 2:
        raise InputError(f"leave-one-group-out needs at least 2 groups, got {len(names)}")
    for name in names:
        yield name, _split_by_mask([group == name for group in groups])


def _split_by_mask(is_validation: list[bool]) -> Fold:
    return (
        [index for index, validation in enumerate(is_validation) if not validation],
        [index for index, validation in enumerate(is_validation) if validation],
    )

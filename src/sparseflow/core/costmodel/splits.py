"""Dividing samples into those to learn from and those to be judged by.

Samples of one group never stand on both sides: rows of one kernel, or kernels of one model, know each other's
answer. `split_k_fold` ignores groups and is there to show what that would pretend.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence

from sparseflow.errors import InputError

Fold = tuple[list[int], list[int]]
"""Indices to learn from, indices to be judged by."""


def split_k_fold(count: int, folds: int, seed: int = 0) -> Iterator[Fold]:
    """`folds` parts of `count` samples, whatever group they are of.

    Raises:
        InputError: There are fewer samples than folds, or fewer than two folds.
    """
    yield from split_group_k_fold(range(count), folds, seed)


def split_group_k_fold(groups: Sequence[Hashable], folds: int, seed: int = 0) -> Iterator[Fold]:
    """Parts of about equally many groups.

    Args:
        groups: Group of each sample.
        folds: How many parts.
        seed: What the order of groups is drawn from.

    Raises:
        InputError: There are fewer groups than folds, or fewer than two folds.
    """
    names = list(dict.fromkeys(groups))
    if not 2 <= folds <= len(names):
        raise InputError(f"`folds` (={folds}) must be at least 2 and at most the {len(names)} groups")
    random.Random(seed).shuffle(names)
    part = {name: place % folds for place, name in enumerate(names)}
    for number in range(folds):
        yield _fold([part[group] == number for group in groups])


def split_leave_one_group_out(groups: Sequence[Hashable]) -> Iterator[tuple[Hashable, Fold]]:
    """Each group once as what is judged.

    Raises:
        InputError: There are fewer than two groups.
    """
    names = list(dict.fromkeys(groups))
    if len(names) < 2:
        raise InputError(f"leaving one group out needs at least two, and there is {len(names)}")
    for name in names:
        yield name, _fold([group == name for group in groups])


def _fold(judged: list[bool]) -> Fold:
    return (
        [index for index, held in enumerate(judged) if not held],
        [index for index, held in enumerate(judged) if held],
    )

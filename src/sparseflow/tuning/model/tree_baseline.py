"""Baseline of the network: gradient boosting on one feature vector for each schedule.

The vector has columns for everything that tokens express: numbers, mode and positions of each primitive and
part of an axis. Labels are the network's; the matrix is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparseflow.core.costmodel.trees import TreeEnsemble
from sparseflow.errors import InputError
from sparseflow.tuning.model.dataset import TaskGroup
from sparseflow.tuning.model.net.tokenizer import FIELD_SIZES, TokenTable

_VALUES_PER_SLOT = 5
"""Two numbers, mode, position from outside and from inside."""

_ABSENT = -1.0


@dataclass(frozen=True, kw_only=True)
class TreeBaseline:
    """Boosted trees that predict labels from schedules; `TreeBaseline.fit` creates one.

    Attributes:
        slots: Codes of (primitive, role, part) that have columns, ascending, shape [slots].
        trees: Trees.
    """

    slots: np.ndarray
    trees: TreeEnsemble

    @classmethod
    def fit(
        cls,
        groups: Sequence[TaskGroup],
        table: TokenTable,
        *,
        seed: int = 0,
    ) -> TreeBaseline:
        """Fit the trees to all schedules of some groups.

        Args:
            groups: At least one group.
            table: Token table of their tokenizer.
            seed: Random seed.

        Raises:
            InputError: There is no group.
            MissingExtraError: XGBoost is missing.
        """
        if not groups:
            raise InputError("`groups` is empty")
        used = np.unique(np.concatenate([np.unique(group.ids) for group in groups]))
        slots = np.unique(_compute_slots(table)[used[used > 0]])
        x = np.concatenate([_build_vectors(group.ids, table, slots) for group in groups])
        y = np.concatenate([group.labels for group in groups])
        return cls(slots=slots, trees=TreeEnsemble.fit(x, y, seed=seed, threads=1))

    def score(self, group: TaskGroup, table: TokenTable) -> np.ndarray:
        """Predict the labels of a group's schedules, float32, shape [n]."""
        return self.trees.predict(_build_vectors(group.ids, table, self.slots))


def _compute_slots(table: TokenTable) -> np.ndarray:
    """Encode primitive, role and part of each token as one number, shape [tokens]."""
    primitive, role, part = table.fields[:, :3].astype(np.int64).T
    return (primitive * FIELD_SIZES[1] + role) * FIELD_SIZES[2] + part


def _build_vectors(ids: np.ndarray, table: TokenTable, slots: np.ndarray) -> np.ndarray:
    """Build feature vectors, float32, shape [n, slots * 5]; -1 for absent tokens."""
    values = np.concatenate([table.numbers, table.fields[:, 3:].astype(np.float32)], 1)
    token_slots = _compute_slots(table)
    position = np.searchsorted(slots, token_slots)
    known = slots[np.minimum(position, len(slots) - 1)] == token_slots
    position = np.where(known, position, len(slots))  # a last column, dropped, for unknown slots and padding
    vectors = np.full((len(ids), len(slots) + 1, _VALUES_PER_SLOT), _ABSENT, np.float32)
    rows = np.arange(len(ids))
    for column in ids.T:
        vectors[rows, position[column]] = values[column]
    return vectors[:, :-1].reshape(len(ids), -1)

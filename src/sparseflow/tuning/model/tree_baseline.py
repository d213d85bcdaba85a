"""Baseline of the network: gradient boosting on one feature vector for each schedule.

The vector has columns for everything that tokens express: numbers, mode and positions of each primitive and
part of an axis. Labels are the network's; the matrix is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparseflow.core.costmodel.splits import split_leave_one_group_out
from sparseflow.core.costmodel.trees import TreeEnsemble
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError
from sparseflow.tuning.model.dataset import RankingDataset, TaskGroup
from sparseflow.tuning.model.net.tokenizer import FIELD_SIZES, TokenTable
from sparseflow.tuning.model.ranking import RankingScore, evaluate_ranking

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
        max_schedules: int | None = None,
        seed: int = 0,
        threads: int = 1,
    ) -> TreeBaseline:
        """Fit the trees to the schedules of some groups.

        Args:
            groups: At least one group.
            table: Token table of their tokenizer.
            max_schedules: Maximum number of randomly selected schedules of each group; by default all.
            seed: Random seed.
            threads: Number of threads.

        Raises:
            InputError: There is no group, or `max_schedules` is below 1.
            MissingExtraError: XGBoost is missing.
        """
        if not groups or (max_schedules is not None and max_schedules < 1):
            raise InputError(
                f"`groups` ({len(groups)}) and `max_schedules` (={max_schedules}) must be at least 1"
            )
        rng = np.random.default_rng(seed)
        parts = [group.select_rows(rng.permutation(len(group))[:max_schedules]) for group in groups]
        used = np.unique(np.concatenate([np.unique(part.ids) for part in parts]))
        slots = np.unique(_compute_slots(table)[used[used > 0]])
        x = np.concatenate([_build_vectors(part.ids, table, slots) for part in parts])
        y = np.concatenate([part.labels for part in parts])
        return cls(slots=slots, trees=TreeEnsemble.fit(x, y, seed=seed, threads=threads))

    def score(self, group: TaskGroup, table: TokenTable) -> np.ndarray:
        """Predict the labels of a group's schedules, float32, shape [n]."""
        return self.trees.predict(_build_vectors(group.ids, table, self.slots))


def evaluate_tree_baseline(
    data: RankingDataset,
    *,
    max_schedules: int | None = None,
    seed: int = 0,
    threads: int = 1,
    progress: Progress | None = None,
) -> tuple[RankingScore, ...]:
    """Rank every task with trees that were not trained on its family, one operator at a time.

    Args:
        data: At least two families of matrices for each operator.
        max_schedules: Maximum number of schedules of each task for training; by default all. All are ranked.
        seed: Random seed; see `TreeBaseline.fit`.
        threads: Number of threads.
        progress: Progress callback.

    Raises:
        InputError: An operator has one family only.
        MissingExtraError: XGBoost is missing.
    """
    table, scores = data.encoder.table, []
    for operator in dict.fromkeys(group.task.operator for group in data.groups):
        groups = [group for group in data.groups if group.task.operator == operator]
        families = [group.task.family for group in groups]
        for family, (train_rows, test_rows) in split_leave_one_group_out(families):
            if progress is not None:
                progress(f"{operator} without {family}", len(scores) / len(data.groups))
            trees = TreeBaseline.fit(
                [groups[index] for index in train_rows],
                table,
                max_schedules=max_schedules,
                seed=seed,
                threads=threads,
            )
            scores += evaluate_ranking(
                (groups[index] for index in test_rows), lambda group, trees=trees: trees.score(group, table)
            )
    return tuple(scores)


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

"""What the network has to beat: gradient boosting on schedules alone, one vector a schedule.

A vector has a place for everything that tokens can say: for each primitive and part of an axis its numbers,
mode and places. Labels are the network's; nothing is known of the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparseflow.core.costmodel.splits import split_leave_one_group_out
from sparseflow.core.costmodel.trees import TreeEnsemble
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError
from sparseflow.tuning.model.dataset import Dataset, Group
from sparseflow.tuning.model.net.tokenizer import FIELDS, TokenTable
from sparseflow.tuning.model.ranking import Judged, judge

_VALUES = 5
"""Of a token: two numbers, mode, place from outside and from inside."""

_ABSENT = -1.0


@dataclass(frozen=True, kw_only=True)
class Boosted:
    """Boosted trees that predict labels from schedules. Make one with `Boosted.fit`.

    Attributes:
        slots: Symbols of primitive, role and part that have columns, as one number each, ascending, (slots,).
        trees: What predicts.
    """

    slots: np.ndarray
    trees: TreeEnsemble

    @classmethod
    def fit(
        cls,
        groups: Sequence[Group],
        table: TokenTable,
        *,
        most: int | None = None,
        seed: int = 0,
        threads: int = 1,
    ) -> Boosted:
        """Fit on all schedules of some groups.

        Args:
            groups: At least one.
            table: Of the encoder that encoded them.
            most: Schedules of each group at most, drawn at random; all by default.
            seed: What schedules, and the trees' rows and columns, are drawn from.
            threads: Threads to fit with.

        Raises:
            InputError: There is no group, or `most` is below 1.
            MissingExtraError: XGBoost is missing.
        """
        if not groups or (most is not None and most < 1):
            raise InputError(f"{len(groups)} groups and `most` (={most}): one or more of both are needed")
        random = np.random.default_rng(seed)
        parts = [group.part(random.permutation(len(group))[:most]) for group in groups]
        used = np.unique(np.concatenate([np.unique(part.ids) for part in parts]))
        slots = np.unique(_slots(table)[used[used > 0]])
        x = np.concatenate([_vectors(part.ids, table, slots) for part in parts])
        y = np.concatenate([part.labels for part in parts])
        return cls(slots=slots, trees=TreeEnsemble.fit(x, y, seed=seed, threads=threads))

    def score(self, group: Group, table: TokenTable) -> np.ndarray:
        """Expected labels of a group's schedules, float32, (n,)."""
        return self.trees.predict(_vectors(group.ids, table, self.slots))


def judge_baseline(
    data: Dataset,
    *,
    most: int | None = None,
    seed: int = 0,
    threads: int = 1,
    progress: Progress | None = None,
) -> tuple[Judged, ...]:
    """Rank every task by trees that saw nothing of its family of matrices; one operator after the other.

    Args:
        data: At least two families of matrices for each operator.
        most: Schedules of each task that trees learn from at most; all by default. All are ranked.
        seed: As for `Boosted.fit`.
        threads: Threads to fit with.
        progress: Called with (what is fitted, fraction done).

    Raises:
        InputError: An operator has one family only.
        MissingExtraError: XGBoost is missing.
    """
    table, found = data.encoder.table, []
    for operator in dict.fromkeys(group.task.operator for group in data.groups):
        groups = [group for group in data.groups if group.task.operator == operator]
        families = [group.task.family for group in groups]
        for family, (learnt, held) in split_leave_one_group_out(families):
            if progress is not None:
                progress(f"{operator} without {family}", len(found) / len(data.groups))
            trees = Boosted.fit([groups[at] for at in learnt], table, most=most, seed=seed, threads=threads)
            found += judge((groups[at] for at in held), lambda group, trees=trees: trees.score(group, table))
    return tuple(found)


def _slots(table: TokenTable) -> np.ndarray:
    """Primitive, role and part of each token as one number, (tokens,)."""
    primitive, role, part = table.fields[:, :3].astype(np.int64).T
    return (primitive * FIELDS[1] + role) * FIELDS[2] + part


def _vectors(ids: np.ndarray, table: TokenTable, slots: np.ndarray) -> np.ndarray:
    """Schedules as vectors, float32, (n, slots * 5); -1 where a schedule says nothing."""
    values = np.concatenate([table.numbers, table.fields[:, 3:].astype(np.float32)], 1)
    mine = _slots(table)
    place = np.searchsorted(slots, mine)
    known = slots[np.minimum(place, len(slots) - 1)] == mine
    place = np.where(known, place, len(slots))  # a last one, cut off, for what was not seen, and padding
    found = np.full((len(ids), len(slots) + 1, _VALUES), _ABSENT, np.float32)
    rows = np.arange(len(ids))
    for column in ids.T:
        found[rows, place[column]] = values[column]
    return found[:, :-1].reshape(len(ids), -1)

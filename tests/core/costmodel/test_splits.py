"""Cross-validation splits."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseflow.core.costmodel.splits import Fold, split_group_k_fold, split_k_fold
from sparseflow.errors import InputError

GROUPS = st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=40).filter(lambda g: len(set(g)) >= 2)


def assert_partition(groups: list[str], folds: list[Fold]) -> None:
    all_indices = list(range(len(groups)))
    assert sorted(index for _, validation in folds for index in validation) == all_indices
    for training, validation in folds:
        assert training and validation and sorted([*training, *validation]) == all_indices
        assert not {groups[i] for i in training} & {groups[i] for i in validation}


@given(GROUPS, st.data())
def test_split_group_k_fold_validates_each_sample_once_without_leaks(
    groups: list[str], data: st.DataObject
) -> None:
    count = data.draw(st.integers(2, len(set(groups))))
    folds = list(split_group_k_fold(groups, count, data.draw(st.integers(0, 5))))
    assert len(folds) == count
    assert_partition(groups, folds)
    sizes = [len({groups[i] for i in validation}) for _, validation in folds]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(2, 40), st.data())
def test_split_k_fold_validates_each_sample_once_in_equal_folds(count: int, data: st.DataObject) -> None:
    folds = list(split_k_fold(count, data.draw(st.integers(2, count))))
    assert_partition([str(index) for index in range(count)], folds)
    sizes = Counter(len(validation) for _, validation in folds)
    assert max(sizes) - min(sizes) <= 1


def test_splits_depend_on_the_seed_only() -> None:
    groups = [f"g{index % 12}" for index in range(40)]
    random.seed(1)
    first = list(split_group_k_fold(groups, 3, seed=1))
    random.seed(2)
    assert list(split_group_k_fold(groups, 3, seed=1)) == first != list(split_group_k_fold(groups, 3, seed=2))
    assert list(split_k_fold(20, 4, seed=1)) == list(split_k_fold(20, 4, seed=1))
    assert list(split_k_fold(20, 4, seed=1)) != list(split_k_fold(20, 4, seed=2))


def test_split_k_fold_shuffles_samples() -> None:
    folds = list(split_k_fold(40, 4))
    assert all(validation != list(range(validation[0], validation[0] + 10)) for _, validation in folds)


@pytest.mark.parametrize(("groups", "folds"), [("abc", 1), ("abc", 0), ("abc", 4), ("aaaa", 2), ("", 2)])
def test_split_group_k_fold_with_folds_out_of_range_raises(groups: str, folds: int) -> None:
    with pytest.raises(InputError, match=rf"\(={folds}\).*\({len(set(groups))}\)"):
        list(split_group_k_fold(groups, folds))


@pytest.mark.parametrize(("count", "folds"), [(3, 4), (3, 1), (0, 2)])
def test_split_k_fold_with_folds_out_of_range_raises(count: int, folds: int) -> None:
    with pytest.raises(InputError, match=rf"`folds` \(={folds}\)"):
        list(split_k_fold(count, folds))

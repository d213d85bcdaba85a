"""Folds: every sample is judged once, by what has not seen its group."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.core.costmodel.splits import Fold, split_group_k_fold, split_k_fold, split_leave_one_group_out
from sparseflow.errors import InputError

GROUPS = st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=40).filter(lambda g: len(set(g)) >= 2)


def check(groups: list[str], folds: list[Fold]) -> None:
    everything = list(range(len(groups)))
    assert sorted(index for _, judged in folds for index in judged) == everything
    for learned, judged in folds:
        assert learned and judged and sorted([*learned, *judged]) == everything
        assert not {groups[i] for i in learned} & {groups[i] for i in judged}


@settings(deadline=None)
@given(GROUPS, st.data())
def test_groups_are_never_on_both_sides_and_every_sample_is_judged_once(
    groups: list[str], data: st.DataObject
) -> None:
    count = data.draw(st.integers(2, len(set(groups))))
    folds = list(split_group_k_fold(groups, count, data.draw(st.integers(0, 5))))
    assert len(folds) == count
    check(groups, folds)
    sizes = [len({groups[i] for i in judged}) for _, judged in folds]
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(GROUPS)
def test_leaving_one_out_judges_each_group_once_under_its_name(groups: list[str]) -> None:
    found = list(split_leave_one_group_out(groups))
    check(groups, [fold for _, fold in found])
    assert [name for name, _ in found] == list(dict.fromkeys(groups))
    assert all({groups[i] for i in judged} == {name} for name, (_, judged) in found)


@settings(deadline=None)
@given(st.integers(2, 40), st.data())
def test_random_folds_judge_every_sample_once_in_parts_of_equal_size(count: int, data: st.DataObject) -> None:
    folds = list(split_k_fold(count, data.draw(st.integers(2, count))))
    check([str(index) for index in range(count)], folds)
    sizes = Counter(len(judged) for _, judged in folds)
    assert max(sizes) - min(sizes) <= 1


def test_the_same_seed_gives_the_same_folds_and_another_seed_others() -> None:
    groups = [f"g{index % 12}" for index in range(40)]
    random.seed(1)
    first = list(split_group_k_fold(groups, 3, seed=1))
    random.seed(2)
    assert list(split_group_k_fold(groups, 3, seed=1)) == first != list(split_group_k_fold(groups, 3, seed=2))
    assert list(split_k_fold(20, 4, seed=1)) == list(split_k_fold(20, 4, seed=1))
    assert list(split_k_fold(20, 4, seed=1)) != list(split_k_fold(20, 4, seed=2))


def test_folds_follow_the_samples_and_not_their_order() -> None:
    folds = list(split_k_fold(40, 4))
    assert all(judged != list(range(judged[0], judged[0] + 10)) for _, judged in folds)


@pytest.mark.parametrize(("groups", "folds"), [("abc", 1), ("abc", 0), ("abc", 4), ("aaaa", 2), ("", 2)])
def test_folds_are_at_least_2_and_at_most_the_groups(groups: str, folds: int) -> None:
    told = rf"`folds` \(={folds}\) must be at least 2 and at most the {len(set(groups))} groups"
    with pytest.raises(InputError, match=told):
        list(split_group_k_fold(groups, folds))


@pytest.mark.parametrize(("count", "folds"), [(3, 4), (3, 1), (0, 2)])
def test_random_folds_are_at_least_2_and_at_most_the_samples(count: int, folds: int) -> None:
    with pytest.raises(InputError, match=rf"`folds` \(={folds}\)"):
        list(split_k_fold(count, folds))


@pytest.mark.parametrize("groups", ["", "a", "aaa"])
def test_leaving_one_out_needs_two_groups(groups: str) -> None:
    with pytest.raises(InputError, match=f"at least two, and there is {len(set(groups))}"):
        list(split_leave_one_group_out(groups))

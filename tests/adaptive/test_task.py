"""Tasks: which samples of which split a study needs."""

from __future__ import annotations

import pytest

from sparseflow.adaptive.task import Counts, Parts, Stretch
from sparseflow.errors import InputError


def test_how_many_samples_of_each_split_are_needed() -> None:
    test = Stretch(split="test", count=5)
    behind = Parts(
        train=Stretch(split="val", count=4), validation=Stretch(split="val", first=4, count=3), test=test
    )
    assert behind.counts() == {"val": 7, "test": 5}
    apart = Parts(train=Stretch(split="train", count=4), validation=Stretch(split="val", count=3), test=test)
    assert apart.counts() == {"train": 4, "val": 3, "test": 5}


def test_counts_of_none() -> None:
    with pytest.raises(InputError, match=r"`validation` \(=0\) must be a whole number of samples"):
        Counts(validation=0)

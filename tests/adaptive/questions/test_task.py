"""Tasks: which samples of which split a study needs."""

from __future__ import annotations

import pytest

from sparseflow.adaptive.questions.task import SampleCounts, SampleRange, SplitRanges
from sparseflow.errors import InputError


def test_split_ranges_count_samples_of_splits() -> None:
    test = SampleRange(split="test", count=5)
    behind = SplitRanges(
        train=SampleRange(split="val", count=4),
        validation=SampleRange(split="val", first=4, count=3),
        test=test,
    )
    assert behind.counts() == {"val": 7, "test": 5}
    difference = SplitRanges(
        train=SampleRange(split="train", count=4), validation=SampleRange(split="val", count=3), test=test
    )
    assert difference.counts() == {"train": 4, "val": 3, "test": 5}


def test_sample_counts_below_1_raise() -> None:
    with pytest.raises(InputError, match=r"`validation` \(=0\) "):
        SampleCounts(validation=0)

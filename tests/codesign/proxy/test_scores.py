"""Errors and rank correlations."""

from __future__ import annotations

import numpy as np
import pytest

from sparseflow.codesign.proxy.scores import median_error, spearman
from sparseflow.errors import InputError


def test_the_median_error_is_relative() -> None:
    assert median_error([1.1, 2.0, 6.0], [1.0, 2.0, 4.0]) == pytest.approx(0.1)


def test_ranks_are_correlated() -> None:
    assert spearman([1.0, 2.0, 30.0], [5.0, 6.0, 7.0]) == pytest.approx(1.0)
    assert spearman([3.0, 2.0, 1.0], [5.0, 6.0, 7.0]) == pytest.approx(-1.0)
    # Ranks 1.5, 1.5, 3 against 1, 2, 3: the correlation is sqrt(3) / 2.
    assert spearman([1.0, 1.0, 2.0], [1.0, 2.0, 3.0]) == pytest.approx(np.sqrt(3.0) / 2.0)
    assert spearman([1.0, 1.0], [1.0, 2.0]) == 0.0


def test_it_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(0)
    a, b = random.integers(1, 20, 60).astype(float), random.integers(1, 20, 60).astype(float)
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)


@pytest.mark.parametrize(
    ("predicted", "measured"), [([], []), ([1.0], [1.0, 2.0]), ([1.0], [0.0]), ([float("nan")], [1.0])]
)
def test_what_cannot_be_compared_is_refused(predicted: list[float], measured: list[float]) -> None:
    for score in (median_error, spearman):
        with pytest.raises(InputError, match="are needed"):
            score(predicted, measured)

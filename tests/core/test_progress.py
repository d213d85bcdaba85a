"""Progress callbacks."""

from __future__ import annotations

import pytest

from sparseflow.core.progress import subrange


def test_subrange_maps_fractions_and_prefixes_messages() -> None:
    calls: list[tuple[str, float]] = []
    nested = subrange(lambda message, fraction: calls.append((message, fraction)), 0.2, 0.6, "plans: ")
    assert nested is not None
    nested("start", 0.0)
    nested("end", 1.0)
    assert calls == [("plans: start", pytest.approx(0.2)), ("plans: end", pytest.approx(0.6))]


def test_subrange_of_none_is_none() -> None:
    assert subrange(None, 0.0, 1.0) is None

"""Fixtures of the adapter tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    """Run every test without gradients."""
    with torch.no_grad():
        yield

"""Fixtures of the engine tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from sparseflow.adaptive.adapters import Adapter
    from sparseflow.adaptive.plan.runtime import PlanRuntime


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    """Run every test without gradients."""
    with torch.no_grad():
        yield


@pytest.fixture
def olmoe() -> Iterator[tuple[Adapter, PlanRuntime]]:
    """Adapter and plan runtime of a tiny OLMoE."""
    from tests.adaptive.engine.serving import attached  # needs the extra `adaptive`

    with attached() as both:
        yield both

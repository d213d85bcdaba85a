"""What tests share: which of them run where, one thread, and memory that is poisoned until it is written."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from sparseflow.core import journal
from tests import interpreted

# Tensors here are small: a second thread only waits, and sums in another order differ. Processes that tests
# start are told too, so that what one of them computes can be compared bit for bit.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# Kernels that tests compile have two threads of their own, and at every barrier one of them would keep a core
# from the tests beside it. (Processes that measure kernels set this themselves.)
os.environ["OMP_WAIT_POLICY"] = "passive"

# How long an example takes is the machine's affair. A run tries what the last one did, so that one that fails
# tells of a change; `--hypothesis-profile search` draws examples anew.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile("tests")

if not torch.cuda.is_available():
    # Triton decides when it is first imported, so this must stand before any test does that.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="torch sees no CUDA device here")
    too_slow = pytest.mark.skip(reason="slow; runs with --slow")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(too_slow)


def pytest_collection_finish() -> None:
    """Who collects garbage need not look through a million objects of modules and tests, which all stay."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> Iterator[None]:
    with interpreted.once():
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What a test does to the number of threads ends with it."""
    yield
    torch.set_num_threads(1)


@pytest.fixture
def refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who finds a folder locked does not wait; for tests that hold the lock themselves all the time."""
    monkeypatch.setattr(journal, "_LOCK_TIMEOUT_S", 0.0)


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `torch.empty` and `numpy.empty` (and their kin) return, so that an unwritten output shows.

    Floats become NaN, integers a pattern that no test expects, booleans True. Memory that compiled code
    allocates for itself is out of reach.
    """

    def poison(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if value.dtype.kind in "fc":
                value.fill(np.nan)
            elif value.dtype.kind in "iub":
                value.view(np.uint8).fill(0xA5 if value.dtype.kind != "b" else 1)
        elif value.is_floating_point() or value.is_complex():
            value.fill_(float("nan"))
        elif value.dtype == torch.bool:
            value.fill_(True)
        elif not value.is_meta:
            # 0xA5 in every byte, whatever the width and sign.
            width = value.element_size()
            pattern = int.from_bytes(b"\xa5" * width, "little", signed=value.dtype.is_signed)
            value.fill_(pattern)
        return value

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: poison(original(*args, **kwargs))

    for owner, names in (
        (torch, ("empty", "empty_like", "empty_strided")),
        (torch.Tensor, ("new_empty", "new_empty_strided")),
        (np, ("empty", "empty_like")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, wrapped(getattr(owner, name)))

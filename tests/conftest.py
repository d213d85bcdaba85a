"""Shared fixtures: test selection by device and speed, one thread, and poisoned uninitialized memory."""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from sparseflow.core import journal
from sparseflow.errors import MissingExtraError
from tests import interpreted, run_record

# Tensors in tests are small, so threads gain nothing, and they change the order of sums. Subprocesses inherit
# the setting, so their results can be compared bit for bit.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# Compiled kernels use two threads; with active waiting they would occupy the cores of parallel tests.
# Processes that measure kernels set this themselves.
os.environ["OMP_WAIT_POLICY"] = "passive"
# Compiling a network takes seconds; the tests of compiled networks ask for it.
os.environ["SPARSEFLOW_COMPILE"] = "0"

# Examples have no deadline and are the same in every run, so a failure points to a change of the code;
# `--hypothesis-profile search` draws new and more examples.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.register_profile("search", deadline=None, max_examples=500)
hypothesis.settings.load_profile("tests")

if not torch.cuda.is_available():
    # Triton reads the variable when it is imported, so this must precede every import of Triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")


_NUM_FROZEN_MODULES = pytest.StashKey[int]()
CollectHook = Generator[None, pytest.CollectReport, pytest.CollectReport]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--all-extras", action="store_true", help="fail without an optional package")
    parser.addoption("--record-dir", type=Path, help="write device, versions and outcome to a JSON file here")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="torch sees no CUDA device here")
    too_slow = pytest.mark.skip(reason="slow; runs with --slow")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(too_slow)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> CollectHook:
    """Skip a module, or a folder by its conftest, that imports an optional package which is not installed."""
    report = yield
    if report.failed and not collector.config.getoption("--all-extras"):
        package = _find_missing_package(report.call.excinfo.value)
        if package is not None:
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, f"Skipped: `{package}` is not installed")
    return report


def _find_missing_package(error: BaseException | None) -> str | None:
    """Return the package whose absence caused an error; None if another reason did."""
    while error is not None:
        if isinstance(error, MissingExtraError):
            return error.package
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            package = error.name.partition(".")[0]
            return None if package in ("sparseflow", "tests", "benchmarks") else package
        error = error.__cause__
    return None


def pytest_collection_finish(session: pytest.Session) -> None:
    _freeze_objects(session.config)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    if len(sys.modules) > item.config.stash[_NUM_FROZEN_MODULES] + 100:
        _freeze_objects(item.config)


def _freeze_objects(config: pytest.Config) -> None:
    """Exclude objects of modules and collected tests, which live until the end, from garbage collection.

    Memory measurements request full collections, which would take most of the time of their tests.
    """
    config.stash[_NUM_FROZEN_MODULES] = len(sys.modules)
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    directory = config.getoption("--record-dir")
    if directory is not None:
        path = run_record.write_record(directory, terminalreporter)
        terminalreporter.write_line(f"record: {path}")


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> Iterator[None]:
    with interpreted.patch_interpreter():
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Reset the number of threads after each test."""
    yield
    torch.set_num_threads(1)


@pytest.fixture
def refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for locked journals; for tests that hold the lock themselves."""
    monkeypatch.setattr(journal, "_LOCK_TIMEOUT_S", 0.0)


@pytest.fixture
def undrawn_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert figures to empty pictures, because drawing those of a page takes longer than most runs.

    For tests of commands and runs. The tests of the pages draw them.
    """
    savefig = Figure.savefig

    def save(figure: Figure, target: Any, **options: Any) -> None:
        if isinstance(target, io.StringIO):
            target.write('<svg viewBox="0 0 1 1"></svg>')
        else:
            savefig(figure, target, **options)

    monkeypatch.setattr(Figure, "savefig", save)


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the results of `torch.empty`, `numpy.empty` and their variants, so that unwritten outputs fail.

    Floats become NaN, integers a pattern that no test expects, booleans True. Memory that compiled code
    allocates itself is not filled.
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
            # 0xA5 in every byte, for any width and sign.
            width = value.element_size()
            pattern = int.from_bytes(b"\xa5" * width, "little", signed=value.dtype.is_signed)
            value.fill_(pattern)
        return value

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: poison(original(*args, **kwargs))

    for owner, names in (
        (torch, ("empty", "empty_like", "empty_strided")),
        (torch.Tensor, ("new_empty", "new_empty_strided")),
        (np, ("empty", "empty_like")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))

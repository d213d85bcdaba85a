"""Shared fixtures of the adaptive wing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "adaptive"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Import a benchmark script by name; no script stays imported, since other wings use the same names."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script_names = {path.stem for path in SCRIPTS.glob("*.py")}

    def forget_scripts() -> None:
        for name in script_names:
            sys.modules.pop(name, None)

    forget_scripts()
    yield import_module
    forget_scripts()

"""What tests of the adaptive wing share: its benchmarks, imported by name."""

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
    """Imports a benchmark by name. Those of other wings have the same names, so none stays imported."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    mine = {file.stem for file in SCRIPTS.glob("*.py")}

    def forget() -> None:
        for name in mine:
            sys.modules.pop(name, None)

    forget()
    yield import_module
    forget()

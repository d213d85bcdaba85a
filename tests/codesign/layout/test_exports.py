"""Names and imports of `codesign.layout`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sparseflow.codesign import layout


def test_all_names_are_exported() -> None:
    for name in layout.__all__:
        assert getattr(layout, name).__name__ == name
    assert set(layout.__all__) <= set(dir(layout))
    with pytest.raises(AttributeError, match="'nowhere'"):
        layout.nowhere  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018


def test_import_loads_no_heavy_package() -> None:
    script = (
        "import sys, sparseflow.codesign.layout; "
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"numba", "scipy", "torch", "triton", "matplotlib"} & set(process.stdout.split())


def test_search_imports_numba_and_scipy_on_use() -> None:
    script = (
        "import sys; from sparseflow.codesign.layout import assign, build_site_grid, compute_pareto_front; "
        "from sparseflow.codesign.layout import solve_temperatures; "
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"numba", "scipy", "torch", "triton", "matplotlib"} & set(process.stdout.split())

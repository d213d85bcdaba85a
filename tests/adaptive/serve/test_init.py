"""Tests of lazy exports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sparseflow.adaptive import serve


def test_exports_all_resolve() -> None:
    assert set(serve.__all__) <= set(dir(serve))
    for name in serve.__all__:
        assert getattr(serve, name) is not None
    with pytest.raises(AttributeError, match="unknown"):
        _ = serve.unknown  # pyright: ignore[reportAttributeAccessIssue]


def test_import_loads_no_optional_dependency() -> None:
    program = (
        "import sys, sparseflow.adaptive.serve as serve\n"
        "heavy = {'fastapi', 'uvicorn', 'ray', 'PIL', 'prometheus_client', 'transformers'}\n"
        "assert not {'torch', *heavy} & set(sys.modules)\n"
        "serve.EngineBackend, serve.Service, serve.Server\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120.0)
    assert result.returncode == 0, result.stderr

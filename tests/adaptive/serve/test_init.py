"""The names of the package, loaded when they are first used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sparseflow.adaptive import serve


def test_every_name_is_there() -> None:
    assert set(serve.__all__) <= set(dir(serve))
    for name in serve.__all__:
        assert getattr(serve, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = serve.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_nothing_is_loaded_before() -> None:
    program = (
        "import sys, sparseflow.adaptive.serve as serve\n"
        "heavy = {'fastapi', 'uvicorn', 'ray', 'PIL', 'prometheus_client', 'transformers'}\n"
        "assert not {'torch', *heavy} & set(sys.modules)\n"
        "serve.EngineBackend, serve.Service, serve.Server\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120.0)
    assert found.returncode == 0, found.stderr

"""Structure of the package: import directions and the cost of importing it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HEAVY = {"torch", "triton", "numba", "spikingjelly", "onnx", "onnxruntime", "matplotlib", "pyarrow", "numpy"}
OPTIONAL = {"triton", "numba", "spikingjelly", "pynvml", "onnx", "onnxruntime", "transformers", "ray"}


def test_import_contracts_hold() -> None:
    script = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports(no_cache=True))"
    completed = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr


def test_imports_are_lazy_and_public_names_exist() -> None:
    # One process for all imports, from the lightest to all wings.
    script = f"""
import sys

def list_packages():
    return {{name.partition(".")[0] for name in sys.modules}}

import sparseflow
assert not (heavy := {HEAVY} & list_packages()), heavy
assert set(sparseflow.__all__) <= set(dir(sparseflow))

import torch, torch.fx  # torch itself imports triton where triton is installed
before = list_packages()
import sparseflow.spiking
assert not (optional := {OPTIONAL} & (list_packages() - before)), optional

names = set(sparseflow.__all__) - {{"__version__"}}
assert all(callable(getattr(sparseflow, name)) for name in names)
for wing in ("adaptive", "codesign", "latency", "pruning", "spiking", "tuning"):
    assert wing in dir(sparseflow), wing
    module = getattr(sparseflow, wing)
    assert set(module.__all__) <= set(dir(module)), wing
    for name in module.__all__:
        getattr(module, name)
"""
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr


def test_unknown_name_raises_attribute_error() -> None:
    import sparseflow

    with pytest.raises(AttributeError, match="has no attribute 'optimise_everything'"):
        sparseflow.optimise_everything  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018


@pytest.fixture(scope="module")
def sources() -> dict[Path, str]:
    """Text of each module."""
    paths = sorted((ROOT / "src" / "sparseflow").rglob("*.py"))
    return {path: path.read_text(encoding="utf-8") for path in paths}


def test_modules_all_have_a_docstring(sources: dict[Path, str]) -> None:
    assert not [path for path, text in sources.items() if not text.startswith(('"""', 'r"""'))]


def test_modules_never_synchronize_without_a_device(sources: dict[Path, str]) -> None:
    # `torch.cuda.synchronize()` without an argument waits for the current device, which may be another one.
    assert not [path for path, text in sources.items() if "cuda.synchronize()" in text]

"""Structure of the package: import directions and the cost of importing it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "sparseflow").rglob("*.py"))

HEAVY = {"torch", "triton", "numba", "spikingjelly", "onnx", "onnxruntime", "matplotlib", "pyarrow", "numpy"}
OPTIONAL = {"triton", "numba", "spikingjelly", "pynvml", "onnx", "onnxruntime", "transformers", "ray"}


def test_import_contracts_hold() -> None:
    script = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports(no_cache=True))"
    completed = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr


def test_import_sparseflow_loads_no_heavy_package() -> None:
    script = "import sys, sparseflow; print(*sorted(name.partition('.')[0] for name in sys.modules))"
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not HEAVY & set(completed.stdout.split())


def test_import_spiking_loads_no_optional_package() -> None:
    # torch is imported first: it imports triton itself where triton is installed.
    script = (
        "import sys, torch, torch.fx; before = set(sys.modules); import sparseflow.spiking; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not OPTIONAL & set(completed.stdout.split())


def test_public_names_are_lazy_and_callable() -> None:
    script = (
        "import sys, sparseflow; assert 'torch' not in sys.modules; "
        "assert set(sparseflow.__all__) <= set(dir(sparseflow)); "
        "names = set(sparseflow.__all__) - {'__version__'}; "
        "assert all(callable(getattr(sparseflow, name)) for name in names)"
    )
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr


def test_unknown_name_raises_attribute_error() -> None:
    import sparseflow

    with pytest.raises(AttributeError, match="has no attribute 'optimise_everything'"):
        sparseflow.optimise_everything  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018


def test_wings_are_attributes_and_list_their_public_names() -> None:
    script = (
        "import importlib, sys, sparseflow\n"
        "for wing in ('adaptive', 'codesign', 'latency', 'pruning', 'spiking', 'tuning'):\n"
        "    assert wing in dir(sparseflow), wing\n"
        "    module = getattr(sparseflow, wing)\n"
        "    assert set(module.__all__) <= set(dir(module)), wing\n"
        "    for name in module.__all__:\n"
        "        getattr(module, name)\n"
    )
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr


def test_modules_all_have_a_docstring() -> None:
    missing = [path for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
    assert not missing


def test_modules_never_synchronize_without_a_device() -> None:
    # `torch.cuda.synchronize()` without an argument waits for the current device, which may be another one.
    calls = [
        f"{path}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "torch.cuda.synchronize"
        and not node.args
        and not node.keywords
    ]
    assert not calls

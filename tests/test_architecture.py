"""The shape of the project: which way imports point, and what importing costs."""

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


def test_imports_point_one_way() -> None:
    script = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_sparseflow_imports_nothing_heavy() -> None:
    script = "import sys, sparseflow; print(*sorted(name.partition('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())


def test_importing_the_spiking_wing_imports_no_optional_package() -> None:
    # From torch on: what torch itself imports (triton, where it is there) is not ours to choose.
    script = (
        "import sys, torch, torch.fx; before = set(sys.modules); import sparseflow.spiking; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not OPTIONAL & set(done.stdout.split())


def test_the_public_names_are_there_and_lazy() -> None:
    script = (
        "import sys, sparseflow; assert 'torch' not in sys.modules; "
        "assert set(sparseflow.__all__) <= set(dir(sparseflow)); "
        "names = set(sparseflow.__all__) - {'__version__'}; "
        "import sparseflow.spiking.optimize, sparseflow.spiking.explain; "
        # Two of them are also the names of their files; what users get must be the function all the same.
        "assert all(callable(getattr(sparseflow, name)) for name in names)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    import sparseflow

    with pytest.raises(AttributeError, match="has no attribute 'optimise_everything'"):
        sparseflow.optimise_everything  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src" / "sparseflow")))
def test_every_module_says_what_it_is_for(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{path} needs a docstring"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src" / "sparseflow")))
def test_nothing_synchronises_without_naming_its_device(path: Path) -> None:
    bare = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "torch.cuda.synchronize"
        and not node.args
        and not node.keywords
    ]
    assert not bare, f"{path}, lines {bare}: torch.cuda.synchronize() waits for whichever device is current"

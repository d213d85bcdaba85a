"""Python blocks of the how-tos compile and import names that exist."""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs" / "how-to").glob("*.md"))


def read_blocks(page: Path) -> Iterator[ast.Module]:
    for block in re.findall(
        r"^ *```python\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    ):
        yield ast.parse(textwrap.dedent(block), page.name)


def list_names(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of everything that is read from sparseflow."""
    aliases: dict[str, str] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sparseflow"):
            yield from ((node.module or "", alias.name) for alias in node.names)
            if node.module == "sparseflow":
                aliases |= {alias.asname or alias.name: f"sparseflow.{alias.name}" for alias in node.names}
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield aliases[node.value.id], node.attr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_use_existing_names(page: Path) -> None:
    for block in read_blocks(page):
        for module, name in list_names(block):
            assert hasattr(importlib.import_module(module), name), f"{page.name}: {module} has no {name}"

#!/usr/bin/env python3
"""Check that no file defines a banned identifier: check_identifiers.py PATH...

`banned_identifiers.txt`, in this folder, has one identifier a line, then what to write instead. Leading
underscores are ignored. Classes, functions, arguments, variables and attributes that are assigned count.
Prints each place and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

BANNED_FILE = Path(__file__).with_name("banned_identifiers.txt")


def read_banned(path: Path) -> dict[str, str]:
    """Read the banned identifiers, each with its replacement."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pairs = (line.partition(" ") for line in lines if line and not line.startswith("#"))
    return {identifier: replacement for identifier, _, replacement in pairs}


def iter_definitions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every identifier that a module defines, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno


def main(roots: list[str]) -> int:
    banned = read_banned(BANNED_FILE)
    count = 0
    for root in map(Path, roots):
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            for name, line in iter_definitions(ast.parse(path.read_text(encoding="utf-8"))):
                replacement = banned.get(name.lstrip("_"))
                if replacement is not None:
                    count += 1
                    print(f"{path}:{line}: `{name}` is banned; write {replacement}")
    print(f"{count} banned identifiers")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

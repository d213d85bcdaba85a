"""Generated trees of videos."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.pruning.data.tree import Tree


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """A shared tree that tests must not modify; see `own_tree`."""
    from tests.pruning.data.tree import make_tree  # needs the extra `pruning`

    return make_tree(tmp_path_factory.mktemp("ucf101"))


@pytest.fixture
def own_tree(tree: Tree, tmp_path: Path) -> Tree:
    """A copy that a test may modify."""
    root = shutil.copytree(tree.videos.parent, tmp_path / "tree")
    return replace(tree, videos=root / "videos", lists=root / "lists")

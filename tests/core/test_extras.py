"""The table of extras and asking for an optional package."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from sparseflow.core import extras
from sparseflow.errors import MissingExtraError

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_the_table_is_that_of_pyproject() -> None:
    declared = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    names = {extra: [re.split(r"[\[<>=]", wish)[0] for wish in wishes] for extra, wishes in declared.items()}
    assert names == {extra: [package for package, _ in packages] for extra, packages in extras.EXTRAS.items()}


def test_an_installed_package_is_imported() -> None:
    assert extras.require("json.decoder", "spiking") is sys.modules["json.decoder"]


def test_a_missing_package_names_its_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"`not_there`.*pip install 'sparseflow\[spiking\]'"):
        extras.require("not_there.at.all", "spiking")


def test_an_error_inside_an_installed_package_is_not_called_missing(tmp_path, monkeypatch) -> None:
    (tmp_path / "broken_inside.py").write_text("import surely_absent_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_absent_package"):
        extras.require("broken_inside", "spiking")


def test_versions_of_what_is_here_and_what_is_not() -> None:
    assert extras.get_version("numpy") is not None
    assert extras.get_version("surely-absent-package") is None

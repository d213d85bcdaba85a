"""The table of extras, and imports of optional packages."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from sparseflow.core import extras
from sparseflow.errors import MissingExtraError

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_extras_equal_pyproject() -> None:
    declared = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    names = {
        extra: [re.split(r"[\[<>=]", requirement)[0] for requirement in requirements]
        for extra, requirements in declared.items()
    }
    assert names == {
        extra: [package for package in packages if package not in extras.SEPARATE_PACKAGES]
        for extra, packages in extras.EXTRAS.items()
    }


def test_no_extra_requires_a_package_that_replaces_torch() -> None:
    """Releases of these packages require one release of torch, and pip installs it over another."""
    declared = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    requirements = {name for packages in declared.values() for name in packages}
    assert not any(name.startswith(("spikingjelly", "torchvision", "torchaudio")) for name in requirements)


def test_require_imports_an_installed_package() -> None:
    assert extras.require("json.decoder", "spiking") is sys.modules["json.decoder"]


def test_require_missing_package_names_the_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"`not_there`.*pip install 'sparseflow\[spiking\]'"):
        extras.require("not_there.at.all", "spiking")


def test_require_spikingjelly_is_installed_without_its_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.util, "find_spec", lambda name: None)
    command = r"pip install 'sparseflow\[spiking\]' && pip install --no-deps 'spikingjelly>=2.0'"
    with pytest.raises(MissingExtraError, match=command):
        extras.require("spikingjelly.activation_based", "spiking")


def test_require_package_without_one_of_its_own_extra_names_it(tmp_path, monkeypatch) -> None:
    (tmp_path / "incomplete_inside.py").write_text("import loguru\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "loguru", None)
    with pytest.raises(MissingExtraError, match=r"`loguru`.*sparseflow\[spiking\]'$"):
        extras.require("incomplete_inside", "spiking")


def test_require_broken_package_raises_its_own_error(tmp_path, monkeypatch) -> None:
    (tmp_path / "broken_inside.py").write_text("import surely_absent_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_absent_package"):
        extras.require("broken_inside", "spiking")


def test_get_version_of_a_missing_distribution_is_none() -> None:
    assert extras.get_version("numpy") is not None
    assert extras.get_version("surely-absent-package") is None

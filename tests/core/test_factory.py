"""User models named as `package.module:factory`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from sparseflow.core import factory
from sparseflow.errors import InputError, ModelError


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    lines = [
        "from torch import nn",
        "WIDTH = 3",
        "def make(width=2): return nn.Linear(width, 1)",
        "def wrong(): return 7",
        "def failing(): return {}['weights']",
    ]
    (tmp_path / "networks_for_a_test.py").write_text("\n".join(lines))
    (tmp_path / "broken_networks_for_a_test.py").write_text("def make(:")
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("networks_for_a_test", None)


def test_build_model_imports_from_the_current_directory() -> None:
    model = factory.build_model("networks_for_a_test:make", {"width": 5})
    assert isinstance(model, nn.Linear) and model.in_features == 5
    default = factory.build_model("networks_for_a_test:make")
    assert isinstance(default, nn.Linear) and default.in_features == 2


@pytest.mark.parametrize(
    ("name", "arguments", "error", "text"),
    [
        ("no_such_module_here:make", {}, InputError, "no_such_module_here:make"),
        ("networks_for_a_test:absent", {}, InputError, "networks_for_a_test:absent"),
        (":", {}, InputError, ":"),
        ("networks_for_a_test:WIDTH", {}, InputError, "int"),
        ("networks_for_a_test:make", {"depth": 3}, InputError, "depth"),
        ("networks_for_a_test:wrong", {}, ModelError, "int"),
        ("networks_for_a_test:failing", {}, ModelError, "KeyError: 'weights'"),
        ("broken_networks_for_a_test:make", {}, InputError, "SyntaxError"),
        (".networks_for_a_test:make", {}, InputError, "networks_for_a_test"),
        ("builtins:print", {}, ModelError, "NoneType"),
        ("builtins:dict.fromkeys", {}, InputError, "dict.fromkeys"),
        ("builtins:iter", {}, InputError, "iter"),
    ],
)
def test_build_model_invalid_name_or_arguments_are_refused(
    name: str, arguments: dict[str, int], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        factory.build_model(name, arguments)

"""A network named `package.module:factory` is imported and made, or the error says why not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from sparseflow.core import factory
from sparseflow.errors import InputError, ModelError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    lines = [
        "from torch import nn",
        "WIDTH = 3",
        "def make(width=2): return nn.Linear(width, 1)",
        "def wrong(): return 7",
    ]
    (tmp_path / "networks_for_a_test.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("networks_for_a_test", None)


def test_a_factory_in_the_current_folder() -> None:
    made = factory.build_model("networks_for_a_test:make", {"width": 5})
    assert isinstance(made, nn.Linear) and made.in_features == 5
    default = factory.build_model("networks_for_a_test:make")
    assert isinstance(default, nn.Linear) and default.in_features == 2


@pytest.mark.parametrize(
    ("name", "arguments", "error", "text"),
    [
        ("no_such_module_here:make", {}, InputError, "cannot be imported"),
        ("networks_for_a_test:absent", {}, InputError, "cannot be imported"),
        (":", {}, InputError, "cannot be imported"),
        ("networks_for_a_test:WIDTH", {}, InputError, "is a int, not a function"),
        ("networks_for_a_test:make", {"depth": 3}, InputError, "cannot be called with"),
        ("networks_for_a_test:wrong", {}, ModelError, "returned a int"),
    ],
)
def test_what_is_no_factory(name: str, arguments: dict[str, int], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        factory.build_model(name, arguments)

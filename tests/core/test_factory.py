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


def test_build_model_imports_a_file_with_its_neighbors(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "width_for_a_test.py").write_text("WIDTH = 4")
    (folder / "file_for_a_test.py").write_text(
        "from torch import nn\nfrom width_for_a_test import WIDTH\n"
        "class Model(nn.Linear):\n    def __init__(self): super().__init__(WIDTH, 1)\n"
    )
    name = f"{folder}/file_for_a_test.py:Model"
    try:
        model = factory.build_model(name)
        assert isinstance(model, nn.Linear) and model.in_features == 4
        assert type(factory.build_model(name)) is type(model)
        (tmp_path / "file_for_a_test.py").write_text("")
        with pytest.raises(InputError, match="imported already"):
            factory.build_model("file_for_a_test.py:Model")
    finally:
        sys.path.remove(str(folder))
        for module in ("file_for_a_test", "width_for_a_test"):
            sys.modules.pop(module, None)


def test_import_of_a_broken_or_absent_file_names_it(tmp_path: Path) -> None:
    for name, text in (
        ("absent_file.py:make", "absent_file"),
        ("broken_networks_for_a_test.py:make", "SyntaxError"),
    ):
        with pytest.raises(InputError, match=text):
            factory.import_factory(name)
    assert "broken_networks_for_a_test" not in sys.modules


def test_parse_arguments_reads_literals_objects_and_strings() -> None:
    arguments = factory.parse_arguments(["a=3", "b=(1, 2)", "c=ADD", "d=None", "e=torch.nn:ReLU", "f=x=1"])
    assert arguments == {"a": 3, "b": (1, 2), "c": "ADD", "d": None, "e": nn.ReLU, "f": "x=1"}


@pytest.mark.parametrize("text", ["a", "=3", "a b=3", "a=no_such_module_here:x"])
def test_parse_arguments_invalid_assignment_raises(text: str) -> None:
    with pytest.raises(InputError):
        factory.parse_arguments([text])

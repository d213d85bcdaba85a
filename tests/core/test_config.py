"""Settings in YAML: what ships, what a file may hold, and what is changed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

pytest.importorskip("yaml")

from sparseflow.core import extras
from sparseflow.core.config import apply_overrides, describe_validation_error, list_configs, read_config_file
from sparseflow.errors import FileFormatError, InputError, MissingExtraError

PACKAGE = "sparseflow.codesign"

NOT_VALUES = [
    "2024-13-45",  # looks like a date
    "2024-01-01 00:00:00 +99:99",
    "0x_",  # looks like a number
    "0b_",
    "9" * 5000,  # more digits than Python reads
    "!!int many",
    "!!float many",
    "!!bool maybe",
    "!!timestamp today",
    "!!binary é",
    "!!python/object/apply:os.getcwd []",
    "!unknown 3",
    "*nowhere",
    "=",
]
"""Text of YAML's grammar that has no value."""


def read(source: Path | str) -> dict[str, Any]:
    return read_config_file(source, package=PACKAGE, extra="codesign")


@pytest.mark.parametrize("package", ["sparseflow.codesign", "sparseflow.pruning"])
def test_what_ships_is_listed_and_can_be_read(package: str) -> None:
    names = list_configs(package)
    assert names and names == sorted(names)
    for name in names:
        assert not name.endswith(".yaml")
        assert read_config_file(name, package=package, extra="codesign")


def test_a_file_is_read_by_path_or_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: naïve\nparts: {1: [0.5, null, yes], rate: 3.0e-3}\n", encoding="utf-8")
    expected = {"name": "naïve", "parts": {1: [0.5, None, True], "rate": 0.003}}
    assert read(file) == read(str(file)) == expected


def test_what_ships_is_not_shared_between_readers() -> None:
    read("chips")["chips"].clear()
    assert read("chips")["chips"]


def test_a_missing_file_is_named_beside_what_ships(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no file .*gone\.yaml.*chips, version_c") as told:
        read(tmp_path / "gone.yaml")
    assert not isinstance(told.value, FileFormatError)
    with pytest.raises(InputError, match="no file"):
        read(tmp_path)
    for empty in ("", "\0"):
        with pytest.raises(InputError, match="no file"):
            read(empty)


def test_a_name_that_no_file_system_takes_is_a_missing_file() -> None:
    with pytest.raises(InputError, match="no file"):
        read("x" * 5000)


@pytest.mark.parametrize("text", ["", "# only a comment", "null", "3", "chips", "- 1\n- 2", "!!set {a, b}"])
def test_a_file_without_names_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "list.yaml"
    file.write_text(text)
    with pytest.raises(FileFormatError, match=r"list\.yaml must hold settings by name"):
        read(file)


@pytest.mark.parametrize(
    "text", ["a: [1", "a: 1\n\tb: 2", "a: b: c", "a: 'x", "a: 1\n---\nb: 2", "{[1]: 2}", "<<: 1", "a: \0"]
)
def test_a_file_that_is_not_yaml_is_refused_in_a_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_bytes(text.encode())
    with pytest.raises(FileFormatError, match=r"broken\.yaml is not YAML") as told:
        read(file)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("value", NOT_VALUES)
def test_a_value_that_is_none_is_refused(value: str, tmp_path: Path) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(f"a: {value}\n", encoding="utf-8")
    with pytest.raises(FileFormatError, match=r"odd\.yaml"):
        read(file)


def test_a_file_too_deep_to_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "deep.yaml"
    file.write_text("a: " + "[" * 5000 + "]" * 5000)
    with pytest.raises(FileFormatError, match=r"deep\.yaml"):
        read(file)


def test_yaml_is_asked_for_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"`yaml`.*sparseflow\[codesign\]"):
        read("chips")


FRAGMENTS = st.sampled_from(
    [
        "a", "b", ": ", "\n", "  ", "- ", "[", "]", "{", "}", ", ", "&x ", "*x", "!!map ", "!!str ", "'", '"',
        "|", ">", "# ", "---", "...", "? ", "<<: ", "1.0e3", ".nan", "~", "\t", "%YAML 1.1", "\x85", "\0",
    ]
)  # fmt: skip


@given(st.one_of(st.lists(FRAGMENTS, max_size=25).map(lambda each: "".join(each).encode()), st.binary()))
@budget(max_examples=300, deadline=None)
def test_any_bytes_are_settings_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(content)
    try:
        found = read(file)
    except FileFormatError as error:
        assert "any.yaml" in str(error)
    else:
        assert isinstance(found, dict)


def test_changes_go_before_what_was_there() -> None:
    content = {"train": {"epochs": 3, "rate": 0.1}, "mode": "dense", "off": None}
    before = copy.deepcopy(content)
    found = apply_overrides(content, {"train.epochs": 5, "mode": {"a": 1}, "new.deep.er": [1], "off": 0})
    assert found == {
        "train": {"epochs": 5, "rate": 0.1}, "mode": {"a": 1}, "off": 0, "new": {"deep": {"er": [1]}},
    }  # fmt: skip
    assert content == before
    found["train"]["rate"] = 9.0
    assert content == before
    assert apply_overrides(content, {}) == content


def test_later_changes_go_into_earlier_ones() -> None:
    changes: dict[str, Any] = {"part": {"a": 1}, "part.b": 2}
    assert apply_overrides({}, changes) == {"part": {"a": 1, "b": 2}}


def test_changes_themselves_are_left_as_they_are() -> None:
    changes: dict[str, Any] = {"part": {"a": 1}, "part.b": 2}
    apply_overrides({}, changes)
    assert changes == {"part": {"a": 1}, "part.b": 2}


@pytest.mark.parametrize(
    ("name", "part"),
    [("mode.a", "mode"), ("train.epochs.a", "epochs"), ("list.0", "list"), ("train.epochs.a.b", "epochs")],
)
def test_a_change_of_what_has_no_parts_is_refused(name: str, part: str) -> None:
    content = {"train": {"epochs": 3}, "mode": "dense", "list": [1, 2]}
    with pytest.raises(InputError, match=rf"`{name}` is no setting: `{part}` has no parts"):
        apply_overrides(content, {name: 1})
    assert content == {"train": {"epochs": 3}, "mode": "dense", "list": [1, 2]}


def test_a_change_of_one_of_two_that_yaml_wrote_once_leaves_the_other(tmp_path: Path) -> None:
    file = tmp_path / "alias.yaml"
    file.write_text("first: &same {rate: 1}\nsecond: *same\n")
    assert apply_overrides(read(file), {"first.rate": 2}) == {"first": {"rate": 2}, "second": {"rate": 1}}


NAMES = st.sampled_from(["a", "b", "c"])
CONTENT = st.dictionaries(
    NAMES, st.recursive(st.integers(), lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=6)
)


@given(CONTENT, st.lists(NAMES, min_size=1, max_size=4))
@budget(deadline=None)
def test_a_change_changes_what_it_names_and_nothing_else(content: dict[str, Any], path: list[str]) -> None:
    def without(tree: Any, at: list[str]) -> Any:
        """The tree as (path, value) pairs, but for what is at or below a path."""
        if not isinstance(tree, dict):
            return {(): tree}
        return {
            (name, *rest): value
            for name, inner in tree.items()
            if at[:1] != [name] or len(at) > 1
            for rest, value in without(inner, at[1:] if at[:1] == [name] else []).items()
        }

    before = copy.deepcopy(content)
    try:
        found = apply_overrides(content, {".".join(path): "new"})
    except InputError:
        at: Any = content
        for name in path[:-1]:
            at = at[name]
            if not isinstance(at, dict):
                break
        assert not isinstance(at, dict)
        return
    finally:
        assert content == before
    at = found
    for name in path:
        at = at[name]
    assert at == "new"
    assert without(found, path) == without(before, path)


class Inner(BaseModel):
    count: int


class Outer(BaseModel):
    inner: list[Inner]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"inner": [{"count": 1}, {}]}', "inner.1.count: Field required"),
        ("{}", "inner: Field required"),
        ("[", "the whole: Invalid JSON"),
    ],
)
def test_it_says_where_and_what(content: str, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate_json(content)
    assert describe_validation_error(caught.value).startswith(said)

"""Config files: YAML 1.2 scalars, limits, shipped configs, overrides, validation errors."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from pydantic import Field, ValidationError

pytest.importorskip("yaml")

from sparseflow.core import config, extras
from sparseflow.core.config import (
    StrictModel,
    apply_overrides,
    describe_validation_error,
    list_configs,
    load_config,
    parse_overrides,
    parse_yaml,
    read_config_file,
    validate_config,
)
from sparseflow.errors import FileFormatError, InputError, MissingExtraError

PACKAGE = "sparseflow.codesign"


class Train(StrictModel):
    epochs: int = Field(default=1, ge=1)
    rate: float = 0.1
    shuffle: bool = False
    lens: tuple[int, ...] = ()


class Settings(StrictModel):
    amp: Literal["off", "bf16"] = "off"
    train: Train = Train()


def read(source: Path | str) -> dict[str, Any]:
    return read_config_file(source, package=PACKAGE, extra="codesign")


def parse(text: str) -> Any:
    return parse_yaml(text, extra="codesign")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"), ("yes", "yes"), ("n", "n"), ("1:0.5", "1:0.5"), ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"), ("1_000", "1_000"), ("=", "="), ("0b1", "0b1"), ("true", True),
        ("False", False), ("null", None), ("~", None), ("''", ""), ("10", 10), ("010", 10), ("-7", -7),
        ("0o10", 8), ("0x1F", 31), ("1e-3", 0.001), ("3.0e-3", 0.003), ("1.", 1.0), (".5", 0.5), ("+1", 1),
        ("-.inf", -math.inf), ("'3'", "3"), ('"true"', "true"), ("!!str 3", "3"), ("!!float 3", 3.0),
        ("!!int '3'", 3), ("e5", "e5"), (".", "."), ("[1, {a: }]", [1, {"a": None}]), ("|\n  1\n", "1\n"),
    ],
)  # fmt: skip
def test_parse_yaml_scalar_follows_yaml_1_2(text: str, value: Any) -> None:
    parsed = parse(text)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "a: [1", "a: 1\n\tb: 2", "a: b: c", "a: 'x", "a: 1\n---\nb: 2", "{[1]: 2}", "a: \0", "a: *nowhere",
        "a: 1\na: 2", "{a: 1, 'a': 2}", "1: a\n1.0: b", "&a [*a]",
        "9223372036854775808", "a: 0x8000000000000000", "a: &a {b: *a}", "9" * 5000, "!!int many",
        "!!float many", "!!bool maybe", "!!timestamp today", "!!binary é", "!!set {a, b}", "!unknown 3",
        "!!python/object/apply:os.getcwd []", "[" * 5000, "[" * 100 + "]" * 100, "!!map [1]", "!!seq {a: 1}",
    ],
)  # fmt: skip
def test_parse_yaml_invalid_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse(text)
    assert str(caught.value) and "\n" not in str(caught.value)


def test_huge_integers_are_refused_with_their_size(tmp_path: Path) -> None:
    assert parse("9223372036854775807") == 2**63 - 1
    with pytest.raises(
        ValueError, match=r"^the integer 999999999999… has 5000 digits; expected at most 64 bits$"
    ):
        parse("epochs: " + "9" * 5000)
    with pytest.raises(InputError, match=r"`--set a=.*an integer of 64 bits exceeds"):
        parse_overrides([f"a={2**63}"], extra="codesign")
    file = tmp_path / "huge.json"
    file.write_text(f'{{"a": [{{"b": {10**30}}}]}}')
    with pytest.raises(FileFormatError, match=r"huge\.json is not a valid config: an integer of 100 bits"):
        read(file)


@pytest.mark.parametrize("text", ["- a\n" * 250_000, "[" + "{a: 1}," * 100_000 + "]", "[" * 100_000])
def test_parse_yaml_stops_at_the_limits(text: str) -> None:
    with pytest.raises(ValueError, match=rf"more than {config.MAX_NODES} nodes|nesting is deeper"):
        parse(text)


def test_parse_yaml_limits_alias_expansion() -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for before, name in zip("abcdefg", "bcdefgh", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]")
    with pytest.raises(ValueError, match=str(config.MAX_NODES)):
        parse("\n".join(lines))
    assert len(parse("\n".join(lines[:3]))["c"]) == 10


def test_parse_yaml_aliases_give_separate_values() -> None:
    content = parse("first: &same {rate: 1}\nsecond: *same\n")
    content["first"]["rate"] = 2
    assert content == {"first": {"rate": 2}, "second": {"rate": 1}}


@pytest.mark.parametrize("package", ["sparseflow.codesign", "sparseflow.pruning"])
def test_shipped_configs_are_listed_and_readable(package: str) -> None:
    names = list_configs(package)
    assert names and names == sorted(names)
    for name in names:
        assert not name.endswith(".yaml")
        assert read_config_file(name, package=package, extra="codesign")


def test_read_config_file_takes_a_path_or_a_string(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: naïve\nparts: {1: [0.5, null, true], rate: 3.0e-3}\n", encoding="utf-8")
    expected = {"name": "naïve", "parts": {1: [0.5, None, True], "rate": 0.003}}
    assert read(file) == read(str(file)) == read_config_file(file, extra="codesign") == expected


def test_read_config_file_reads_json(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"a": [1, "off"]}, indent="\t"))
    assert read(file) == {"a": [1, "off"]}
    file.write_text('{"a": 1, "a": 2}')
    with pytest.raises(FileFormatError, match="'a'"):
        read(file)


def test_shipped_config_is_not_shared_between_readers() -> None:
    read("chips")["chips"].clear()
    assert read("chips")["chips"]


@pytest.mark.parametrize("source", ["gone.yaml", "", "\0", ".", "x" * 5000])
def test_missing_file_is_named_with_the_shipped_configs(source: str) -> None:
    with pytest.raises(InputError, match=r"chips, version_c") as caught:
        read(source)
    assert not isinstance(caught.value, FileFormatError)


@pytest.mark.parametrize(
    "text", ["", "# only a comment", "null", "3", "chips", "- 1\n- 2", "a: [1", "a: \0", "a: !!binary x"]
)
def test_malformed_file_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_bytes(text.encode())
    with pytest.raises(FileFormatError, match=r"broken\.yaml") as caught:
        read(file)
    assert "\n" not in str(caught.value)


def test_large_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "large.yaml"
    file.write_bytes(b"#" * (config.MAX_CONFIG_BYTES + 1))
    with pytest.raises(FileFormatError, match=str(config.MAX_CONFIG_BYTES)):
        read(file)


def test_missing_yaml_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"`yaml`.*sparseflow\[codesign\]"):
        read("chips")


def test_load_config_applies_overrides_before_it_validates(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("amp: off\ntrain: {epochs: 0, rate: 1e-3, shuffle: yes, lens: [8, 16]}\n")
    with pytest.raises(FileFormatError, match=r"a\.yaml: train\.epochs"):
        load_config(Settings, file, extra="codesign")
    settings = load_config(Settings, file, extra="codesign", overrides={"train.epochs": 3})
    assert settings == Settings(train=Train(epochs=3, rate=0.001, shuffle=True, lens=(8, 16)))


@pytest.mark.parametrize(
    ("content", "expected_text"),
    [
        ({"unknown": 1}, "unknown"),
        ({"amp": "on"}, "amp"),
        ({"train": {"rate": math.inf}}, "train.rate"),
        ({"train": {"lens": [1, "x"]}}, "train.lens.1"),
        (3, "the settings"),
    ],
)
def test_validate_config_shows_the_field(content: Any, expected_text: str) -> None:
    with pytest.raises(InputError, match=expected_text) as caught:
        validate_config(Settings, content, "the settings")
    assert "\n" not in str(caught.value)


def test_strict_model_is_immutable() -> None:
    with pytest.raises(ValidationError):
        Settings().amp = "bf16"


@pytest.mark.parametrize(
    ("content", "expected_text"),
    [
        ('{"train": {"lens": [1, null]}}', "train.lens.1: "),
        ('{"amp": 1}', "amp: "),
        ("[", "Invalid JSON"),
    ],
)
def test_describe_validation_error_starts_with_the_field(content: str, expected_text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate_json(content)
    assert describe_validation_error(caught.value).startswith(expected_text)


def test_parse_overrides_reads_yaml_values() -> None:
    assignments = ["train.epochs=3", "amp=off", "share=1:0.5", "list=[1, a=b]", "empty=", "text='a=b'"]
    assert parse_overrides(assignments, extra="codesign") == {
        "train.epochs": 3, "amp": "off", "share": "1:0.5", "list": [1, "a=b"], "empty": None, "text": "a=b",
    }  # fmt: skip


@pytest.mark.parametrize("assignment", ["", "epochs", "=3", "a=[1", "a=!x 1"])
def test_parse_overrides_shows_a_malformed_assignment(assignment: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_overrides([assignment], extra="codesign")
    assert f"`--set {assignment}`" in str(caught.value)


def test_parse_overrides_shortens_a_long_assignment() -> None:
    with pytest.raises(InputError, match=r"^`--set a=9{78}`: .{20,120}$"):
        parse_overrides(["a=" + "9" * 5000], extra="codesign")


FRAGMENTS = st.sampled_from(
    [
        "a", "b", ": ", "\n", "  ", "- ", "[", "]", "{", "}", ", ", "&x ", "*x", "!!map ", "!!str ", "'", '"',
        "|", ">", "# ", "---", "...", "? ", "<<: ", "1.0e3", ".nan", "~", "\t", "%YAML 1.1", "\x85", "\0",
    ]
)  # fmt: skip


@given(st.one_of(st.lists(FRAGMENTS, max_size=25).map(lambda parts: "".join(parts).encode()), st.binary()))
@budget(max_examples=300, deadline=None)
def test_read_config_file_of_any_bytes_gives_a_mapping_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(content)
    try:
        content_read = read(file)
    except FileFormatError as error:
        assert "any.yaml" in str(error)
    else:
        assert isinstance(content_read, dict)


def test_apply_overrides_replaces_fields_of_a_copy() -> None:
    content = {"train": {"epochs": 3, "rate": 0.1}, "mode": "dense", "off": None}
    before = copy.deepcopy(content)
    result = apply_overrides(content, {"train.epochs": 5, "mode": {"a": 1}, "new.deep.er": [1], "off": 0})
    assert result == {
        "train": {"epochs": 5, "rate": 0.1}, "mode": {"a": 1}, "off": 0, "new": {"deep": {"er": [1]}},
    }  # fmt: skip
    result["train"]["rate"] = 9.0
    assert content == before
    assert apply_overrides(content, {}) == content


def test_apply_overrides_later_ones_extend_earlier_ones() -> None:
    overrides: dict[str, Any] = {"part": {"a": 1}, "part.b": 2}
    assert apply_overrides({}, overrides) == {"part": {"a": 1, "b": 2}}
    assert overrides == {"part": {"a": 1}, "part.b": 2}


@pytest.mark.parametrize(
    ("name", "parent"),
    [("mode.a", "mode"), ("train.epochs.a", "epochs"), ("list.0", "list"), ("train.epochs.a.b", "epochs")],
)
def test_apply_overrides_through_a_scalar_is_refused(name: str, parent: str) -> None:
    content = {"train": {"epochs": 3}, "mode": "dense", "list": [1, 2]}
    with pytest.raises(InputError, match=rf"`{name}`.*`{parent}`"):
        apply_overrides(content, {name: 1})
    assert content == {"train": {"epochs": 3}, "mode": "dense", "list": [1, 2]}


NAMES = st.sampled_from(["a", "b", "c"])
CONTENT = st.dictionaries(
    NAMES, st.recursive(st.integers(), lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=6)
)


def flatten(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return the leaves of nested mappings by path; an empty mapping is a leaf."""
    if not isinstance(tree, dict) or not tree:
        return {path: tree}
    return {key: leaf for name, child in tree.items() for key, leaf in flatten(child, (*path, name)).items()}


@given(CONTENT, st.lists(NAMES, min_size=1, max_size=4))
@budget(deadline=None)
def test_apply_overrides_changes_only_what_it_names(content: dict[str, Any], path: list[str]) -> None:
    before = copy.deepcopy(content)
    prefixes = [tuple(path[:length]) for length in range(1, len(path) + 1)]
    if any(isinstance(leaf, int) and key in prefixes[:-1] for key, leaf in flatten(content).items()):
        with pytest.raises(InputError):
            apply_overrides(content, {".".join(path): "new"})
    else:
        result = flatten(apply_overrides(content, {".".join(path): "new"}))
        assert result.pop(tuple(path)) == "new"
        expected = {
            key: leaf
            for key, leaf in flatten(before).items()
            if key[: len(path)] != tuple(path) and not (leaf == {} and key in [(), *prefixes])
        }
        assert result == expected
    assert content == before


def test_copy_with_unknown_field_is_refused() -> None:
    settings = Settings().model_copy(update={"train": Train(epochs=3)})
    assert settings.train.epochs == 3
    with pytest.raises(TypeError, match="Settings has no field epochs, rates"):
        settings.model_copy(update={"epochs": 3, "rates": 1})

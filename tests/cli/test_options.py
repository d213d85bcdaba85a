"""Shared options: parsing of `--set` and `--device`, and checks of `--out`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

pytest.importorskip("yaml")

from sparseflow.cli.options import check_writable, open_device, split_list
from sparseflow.core import extras
from sparseflow.core.config import parse_overrides
from sparseflow.errors import DeviceError, InputError, MissingExtraError

INVALID_YAML_VALUES = ["9" * 5000, "!!float many", "!!bool maybe", "!!timestamp today", "!a 3"]  # fmt: skip


def test_parse_overrides_without_values_is_empty() -> None:
    assert parse_overrides([], extra="codesign") == {}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.epochs=3", {"train.epochs": 3}),
        ("rate=3.0e-3", {"rate": 0.003}),
        ("mode=dense", {"mode": "dense"}),
        ("text='3'", {"text": "3"}),
        ("enabled=true", {"enabled": True}),
        ("empty=null", {"empty": None}),
        ("empty=", {"empty": None}),
        ("list=[1, 2]", {"list": [1, 2]}),
        ("parts={a: 1}", {"parts": {"a": 1}}),
        ("text=a=b", {"text": "a=b"}),
        ("day=2026-01-02", {"day": "2026-01-02"}),
    ],
)
def test_parse_overrides_reads_values_as_yaml(override: str, expected: dict[str, Any]) -> None:
    assert parse_overrides([override], extra="codesign") == expected


def test_parse_overrides_repeated_key_keeps_order_and_last_value() -> None:
    values = parse_overrides(["a=1", "b=2", "a=3"], extra="codesign")
    assert values == {"a": 3, "b": 2} and list(values) == ["a", "b"]


@pytest.mark.parametrize("override", ["", "epochs", "=", "=3", "train.epochs:3"])
def test_parse_overrides_without_key_or_value_raises(override: str) -> None:
    with pytest.raises(InputError, match=f"`--set {override}`"):
        parse_overrides(["a=1", override], extra="codesign")


@pytest.mark.parametrize(
    "value", ["[1", "{a: 1", "'open", "a: b: c", "\0", "{[1]: 2}", "[" * 5000, *INVALID_YAML_VALUES]
)
def test_parse_overrides_invalid_yaml_raises(value: str) -> None:
    with pytest.raises(InputError, match="`--set a="):
        parse_overrides([f"a={value}"], extra="codesign")


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=12), max_size=3))
@example(["a=:"])
@hypothesis_settings(max_examples=300, deadline=None)
def test_parse_overrides_any_text_parses_or_raises_input_error(overrides: list[str]) -> None:
    try:
        values = parse_overrides(overrides, extra="codesign")
    except InputError as error:
        assert "--set" in str(error)
    else:
        assert set(values) == {override.partition("=")[0] for override in overrides}


def test_parse_overrides_without_yaml_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"sparseflow\[pruning\]"):
        parse_overrides(["a=1"], extra="pruning")


def test_split_list_strips_items_and_keeps_none() -> None:
    assert split_list("a, b,c") == ["a", "b", "c"] and split_list(None) is None


def test_open_device_cpu_returns_cpu() -> None:
    assert open_device("cpu") == torch.device("cpu")
    assert open_device("cpu:0").type == "cpu"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "gpus",
        "CPU",
        "cudafoo",
        " cpu",
        "mps",
        "meta",
        "0",
        "cpu:",
        "cpu:one",
        "cpu:-1",
        "cpu:0:0",
        "cuda:x",
    ],
)
def test_open_device_unknown_name_raises_input_error(name: str) -> None:
    with pytest.raises(InputError, match=f"`--device {name}`"):
        open_device(name)


@pytest.mark.parametrize(("name", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:7", 1), ("cuda:7", 2)])
def test_open_device_absent_gpu_raises_device_error(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(DeviceError, match=f"`--device {name}`: torch sees {count} CUDA"):
        open_device(name)


def test_open_device_present_gpu_returns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert open_device("cuda") == torch.device("cuda")
    assert open_device("cuda:1") == torch.device("cuda", 1)


@pytest.mark.parametrize(("free_bytes", "expected"), [([], "cpu"), ([1, 5, 2], "cuda:1")])
def test_open_device_auto_selects_gpu_with_most_free_memory(
    free_bytes: list[int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free_bytes))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free_bytes[index], 10))
    assert open_device("auto") == torch.device(expected)


def test_check_writable_creates_nothing(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_check_writable_under_a_file_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_writable(tmp_path / "file")
    with pytest.raises(InputError, match="file/run"):
        check_writable(tmp_path / "file" / "run")


def test_check_writable_read_only_filesystem_raises() -> None:
    if not Path("/proc").is_dir():
        pytest.skip("needs /proc")
    with pytest.raises(InputError, match="/proc/run"):
        check_writable(Path("/proc/run"))

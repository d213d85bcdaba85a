"""`--set` and `--device`: what they mean, and what they refuse."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as budget
from hypothesis import strategies as st

pytest.importorskip("yaml")

from sparseflow.cli.options import changes_of, device_of
from sparseflow.core import extras
from sparseflow.errors import DeviceError, InputError, MissingExtraError

NOT_VALUES = ["2024-13-45", "0x_", "9" * 5000, "!!float many", "!!bool maybe", "!!timestamp today", "!a 3"]
"""Text of YAML's grammar that has no value."""


def test_nothing_is_set_unless_asked() -> None:
    assert changes_of(None, extra="codesign") == changes_of([], extra="codesign") == {}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("train.epochs=3", {"train.epochs": 3}),
        ("rate=3.0e-3", {"rate": 0.003}),
        ("mode=dense", {"mode": "dense"}),
        ("text='3'", {"text": "3"}),
        ("on=true", {"on": True}),
        ("off=null", {"off": None}),
        ("off=", {"off": None}),
        ("list=[1, 2]", {"list": [1, 2]}),
        ("parts={a: 1}", {"parts": {"a": 1}}),
        ("text=a=b", {"text": "a=b"}),
        ("day=2026-01-02", {"day": datetime.date(2026, 1, 2)}),
    ],
)
def test_values_are_read_as_yaml(change: str, expected: dict[str, Any]) -> None:
    assert changes_of([change], extra="codesign") == expected


def test_names_keep_their_order_and_the_last_value_counts() -> None:
    found = changes_of(["a=1", "b=2", "a=3"], extra="codesign")
    assert found == {"a": 3, "b": 2} and list(found) == ["a", "b"]


@pytest.mark.parametrize("change", ["", "epochs", "=", "=3", "train.epochs:3"])
def test_what_is_no_name_and_value_is_refused(change: str) -> None:
    with pytest.raises(InputError, match=r"`--set .*` must be a name and a value, such as train\.epochs=3"):
        changes_of(["a=1", change], extra="codesign")


@pytest.mark.parametrize("value", ["[1", "{a: 1", "'open", "a: b: c", "\0", "{[1]: 2}", *NOT_VALUES])
def test_a_value_that_yaml_cannot_read_is_refused(value: str) -> None:
    with pytest.raises(InputError, match="`--set a="):
        changes_of([f"a={value}"], extra="codesign")


def test_a_value_too_deep_to_read_is_refused() -> None:
    with pytest.raises(InputError, match="`--set a="):
        changes_of(["a=" + "[" * 5000], extra="codesign")


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=12), max_size=3))
@example(["a=:"])
@budget(max_examples=300, deadline=None)
def test_any_text_sets_names_or_is_refused(changes: list[str]) -> None:
    try:
        found = changes_of(changes, extra="codesign")
    except InputError as error:
        assert "--set" in str(error)
    else:
        assert set(found) == {change.partition("=")[0] for change in changes}


def test_yaml_is_asked_for_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"sparseflow\[pruning\]"):
        changes_of(["a=1"], extra="pruning")


def test_a_cpu_is_always_there() -> None:
    assert device_of("cpu") == torch.device("cpu")
    assert device_of("cpu:0").type == "cpu"


@pytest.mark.parametrize("name", ["", "gpus", "CPU", "cudafoo", " cpu", "mps", "meta", "0"])
def test_another_kind_of_device_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"`--device {name}` must be cpu or cuda"):
        device_of(name)


@pytest.mark.parametrize("name", ["cpu:", "cpu:one", "cpu:-1", "cpu:0:0"])
def test_what_is_no_number_of_a_cpu_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"`--device {name}`"):
        device_of(name)


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_cuda_is_refused_where_there_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=f"`--device {name}`.*use cpu"):
        device_of(name)


@pytest.mark.parametrize(
    ("count", "said"), [(0, "no CUDA device"), (1, "1 CUDA device"), (2, "2 CUDA devices")]
)
def test_how_many_there_are_is_said(count: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(DeviceError, match=f"`--device cuda:7`: torch sees {said} here; name another"):
        device_of("cuda:7")


def test_cuda_is_named_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of("cuda") == torch.device("cuda")
    assert device_of("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(InputError, match="`--device cuda:one`"):
        device_of("cuda:one")

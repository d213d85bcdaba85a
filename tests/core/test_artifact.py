"""Versioned artifact files: round trips, foreign and damaged files, array and dict fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, TypeAdapter, ValidationError

from sparseflow.core.artifact import ArrayField, Artifact, DictField
from sparseflow.errors import FileFormatError, InputError
from tests.conformance import check_artifact_file


@dataclass(frozen=True, kw_only=True)
class Span:
    low: float
    high: float

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise InputError(f"`low` (={self.low}) must not be above `high` (={self.high})")


class Space:
    def __init__(self, plans: int) -> None:
        self.plans = plans

    def to_dict(self) -> dict[str, Any]:
        return {"plans": self.plans}

    @classmethod
    def from_dict(cls, record: Any) -> Space:
        return cls(record["plans"])


class Profile(Artifact):
    FORMAT: ClassVar[str] = "sparseflow.test.profile"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "make one with `sparseflow test profile`"

    name: str
    counts: tuple[int, ...] = ()
    times_ms: Annotated[np.ndarray, ArrayField(np.float64, ndim=2, ge=0.0)]
    span: Span
    space: Annotated[Space, DictField()]
    level: float = Field(default=0.9, gt=0.0, lt=1.0)


@pytest.fixture
def profile() -> Profile:
    return Profile(
        name="é", counts=(1, 2), times_ms=np.array([[0.1, 2.0]]), span=Span(low=0.0, high=1.0), space=Space(3)
    )


def check_same(first: Profile, second: Profile) -> None:
    assert first.to_dict() == second.to_dict()
    assert second.times_ms.dtype == np.float64 and second.times_ms.shape == first.times_ms.shape
    assert isinstance(second.span, Span) and isinstance(second.space, Space)


def test_save_and_load_round_trip(profile: Profile, tmp_path: Path) -> None:
    path = profile.save(tmp_path / "new" / "profile.json")
    check_same(profile, Profile.load(path))
    assert list(json.loads(path.read_text()))[:2] == ["format", "version"]


def test_save_tensors_round_trip(profile: Profile, tmp_path: Path) -> None:
    path = profile.save_tensors(tmp_path / "a.safetensors", {"w": torch.arange(6.0).view(2, 3).T})
    loaded, tensors = Profile.load_tensors(path)
    check_same(profile, loaded)
    assert torch.equal(tensors["w"], torch.arange(6.0).view(2, 3).T)


def test_save_table_round_trip(profile: Profile, tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2], "b": ["x", None]})
    loaded, rows = Profile.load_table(profile.save_table(tmp_path / "a.parquet", table))
    check_same(profile, loaded)
    assert rows.to_pylist() == table.to_pylist()


def test_files_pass_the_conformance_checks(profile: Profile, tmp_path: Path) -> None:
    check_artifact_file(Profile.load, profile.save(tmp_path / "a.json"), Profile.HINT)
    check_artifact_file(
        lambda path: Profile.load_tensors(path),
        profile.save_tensors(tmp_path / "a.safetensors", {"w": torch.zeros(3)}),
        Profile.HINT,
    )
    table = pa.table({"a": [1, 2]})
    check_artifact_file(
        lambda path: Profile.load_table(path), profile.save_table(tmp_path / "a.parquet", table), Profile.HINT
    )


@pytest.mark.parametrize(
    ("changes", "expected_text"),
    [
        ({"format": "sparseflow.other"}, "sparseflow.other"),
        ({"format": None}, "None"),
        ({"version": 1}, "older"),
        ({"version": 3}, "newer"),
        ({"version": "2"}, "'2'"),
        ({"version": True}, "True"),
        ({"extra": 1}, "extra"),
        ({"name": None}, "name"),
        ({"times_ms": [[-1.0]]}, "-1.0"),
        ({"times_ms": [1.0]}, r"\[1\]"),
        ({"times_ms": [[1.0], [1.0, 2.0]]}, "times_ms"),
        ({"times_ms": [["1"]]}, "times_ms"),
        ({"times_ms": None}, "times_ms"),
        ({"span": {"low": 2.0, "high": 1.0}}, "2.0"),
        ({"span": {"low": 2.0}}, "span.high"),
        ({"space": {}}, "plans"),
        ({"space": 3}, "space"),
        ({"level": 1.0}, "level"),
    ],
)
def test_load_wrong_content_shows_it(
    profile: Profile, changes: dict[str, Any], expected_text: str, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile.to_dict() | changes))
    with pytest.raises(FileFormatError, match=expected_text) as caught:
        Profile.load(path)
    assert str(path) in str(caught.value) and "sparseflow test profile" in str(caught.value)


@pytest.mark.parametrize("record", [None, [], "x", 3, {}])
def test_load_foreign_json_is_refused(record: object, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(record))
    with pytest.raises(FileFormatError):
        Profile.load(path)


def test_load_table_of_another_writer_is_refused(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    with pytest.raises(FileFormatError, match=r"sparseflow\.test\.profile"):
        Profile.load_table(tmp_path / "a.parquet")


def test_load_tensors_of_another_writer_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(FileFormatError, match=r"sparseflow\.test\.profile"):
        Profile.load_tensors(tmp_path / "a.safetensors")


@pytest.mark.parametrize("kind", ["json", "safetensors", "parquet"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_load_file_with_changed_bytes_gives_an_input_error_or_an_artifact(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / f"a.{kind}"
    artifact = Profile(name="a", times_ms=np.ones((1, 2)), span=Span(low=0.0, high=1.0), space=Space(3))
    if kind == "json":
        artifact.save(path)
        load: Callable[[Path], object] = Profile.load
    elif kind == "safetensors":
        artifact.save_tensors(path, {"w": torch.ones(4)})
        load = Profile.load_tensors
    else:
        artifact.save_table(path, pa.table({"a": [1, 2, 3]}))
        load = Profile.load_table
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        load(path)
    except InputError as error:
        assert str(path) in str(error)


def test_save_content_with_nan_is_refused(tmp_path: Path) -> None:
    class Loose(Profile):
        quality: dict[str, Any]

    artifact = Loose(
        name="a",
        times_ms=np.ones((1, 1)),
        span=Span(low=0.0, high=1.0),
        space=Space(1),
        quality={"x": np.nan},
    )
    with pytest.raises(ValueError, match="JSON"):
        artifact.save(tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


INTEGERS = TypeAdapter(Annotated[np.ndarray, ArrayField(np.int32, ndim=1)])
FLOATS = TypeAdapter(Annotated[np.ndarray, ArrayField(np.float32, gt=0.0)])


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_array_field_keeps_integers(values: list[int]) -> None:
    array = INTEGERS.validate_python(values)
    assert array.dtype == np.int32 and array.tolist() == values == INTEGERS.dump_python(array, mode="json")


@pytest.mark.parametrize("values", [[2**31], [0.5], ["1"], [[1]], 3, "12", None, [2**70], [None]])
def test_array_field_refuses_what_does_not_fit(values: object) -> None:
    with pytest.raises(ValidationError):
        INTEGERS.validate_python(values)


@pytest.mark.parametrize("values", [[0.0], [1e300], [np.nan], [np.inf], [1.0, -1.0]])
def test_array_field_refuses_out_of_range_values(values: list[float]) -> None:
    with pytest.raises(ValidationError):
        FLOATS.validate_python(values)

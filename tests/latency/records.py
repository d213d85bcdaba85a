"""Conversion of dataclasses to and from JSON types, as in the fields of an artifact."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeVar

from pydantic import create_model

from sparseflow.core.artifact import Artifact

T = TypeVar("T")


@cache
def make_model(cls: type) -> Any:
    """Create an artifact with one field of this class."""
    return create_model("Record", __base__=Artifact, value=(cls, ...))


def to_record(value: object) -> Any:
    record = make_model(type(value))(value=value)
    return json.loads(json.dumps(record.model_dump(mode="json")["value"], allow_nan=False))


def from_record(cls: type[T], record: object) -> T:
    return make_model(cls).model_validate({"value": record}).value

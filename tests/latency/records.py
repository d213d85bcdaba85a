"""Conversion of dataclasses to and from JSON types, as in the fields of an artifact."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import create_model

from sparseflow.core.artifact import Artifact

T = TypeVar("T")


def to_record(value: object) -> Any:
    model: Any = create_model("Record", __base__=Artifact, value=(type(value), ...))
    record = model(value=value)
    return json.loads(json.dumps(record.model_dump(mode="json")["value"], allow_nan=False))


def from_record(cls: type[T], record: object) -> T:
    model: Any = create_model("Record", __base__=Artifact, value=(cls, ...))
    return model.model_validate({"value": record}).value

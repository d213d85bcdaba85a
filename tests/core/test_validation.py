"""What pydantic found wrong, in a line."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from sparseflow.core.validation import first_problem


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
    assert first_problem(caught.value).startswith(said)

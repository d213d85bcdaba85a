"""What a server takes."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from sparseflow.adaptive.prompts.messages import RequestLimits
from sparseflow.errors import InputError


@pytest.mark.parametrize("name", [field.name for field in fields(RequestLimits)])
@pytest.mark.parametrize("value", [-1, 0, math.nan, math.inf])
def test_limits_that_are_none(name: str, value: float) -> None:
    if name == "images" and value == 0:
        assert RequestLimits(images=0).images == 0
        return
    with pytest.raises(InputError, match=f"`{name}`"):
        RequestLimits(**{name: value})  # pyright: ignore[reportArgumentType]


def test_an_answer_is_not_longer_than_any_may_be() -> None:
    with pytest.raises(InputError, match=r"`new_tokens` \(=9\) must not be above `max_new_tokens` \(=8\)"):
        RequestLimits(new_tokens=9, max_new_tokens=8)

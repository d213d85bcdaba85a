"""Errors as clients get them."""

from __future__ import annotations

import pytest

from sparseflow.adaptive.prompts.messages import ApiError, invalid
from sparseflow.errors import SparseFlowError


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (503, "server_error"),
    ],
)
def test_the_body_is_openais(status: int, kind: str) -> None:
    refusal = ApiError(status, "no", code="because", param="n", more={"least_feasible_ms": 7})
    assert refusal.body == {
        "error": {"message": "no", "type": kind, "param": "n", "code": "because", "least_feasible_ms": 7}
    }
    assert refusal.headers == {}
    assert isinstance(refusal, SparseFlowError)
    assert str(refusal) == "no"


@pytest.mark.parametrize(
    ("after_s", "seconds", "milliseconds"),
    [(0.0, "1", "1"), (0.0123, "1", "13"), (1.0, "1", "1000"), (1.2, "2", "1200")],
)
def test_when_to_try_again(after_s: float, seconds: str, milliseconds: str) -> None:
    headers = ApiError(429, "no", code="overloaded", retry_after_s=after_s).headers
    assert headers == {"Retry-After": seconds, "Retry-After-Ms": milliseconds}


def test_what_is_wrong_with_a_field() -> None:
    refusal = invalid("too many", "n")
    assert (refusal.status, refusal.code, refusal.param) == (400, "invalid_value", "n")

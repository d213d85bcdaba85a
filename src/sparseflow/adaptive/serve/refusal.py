"""Refusing a request, in the words that OpenAI's clients understand.

A client turns the status into one of its exceptions and shows the message; programs look at `code`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sparseflow.errors import SparseFlowError

_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class Refusal(SparseFlowError):
    """A request that gets an error for an answer.

    Args:
        status: Of HTTP, 400 to 599.
        message: What was given, what is expected and what to do.
        code: What went wrong, in a word that programs compare.
        param: The field to blame.
        retry_after_s: When another try may help.
        more: Numbers that programs need; they stand beside `message`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: float | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.more = dict(more or {})

    @property
    def body(self) -> dict[str, Any]:
        """What the client gets, as JSON keeps it."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
                **self.more,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Of the response. `Retry-After` knows whole seconds only; OpenAI's clients read milliseconds
        first."""
        if self.retry_after_s is None:
            return {}
        return {
            "Retry-After": str(max(1, math.ceil(self.retry_after_s))),
            "Retry-After-Ms": str(max(1, math.ceil(self.retry_after_s * 1000.0))),
        }


def invalid(message: str, param: str | None = None, *, code: str = "invalid_value") -> Refusal:
    """A request that no try can make work as it is."""
    return Refusal(400, message, code=code, param=param)

"""Reads the tokens of a schedule's line one by one, and says where one is not what it should be.

Numbers are plain decimals without sign or leading zeros and tokens stand one space apart, so that a line that
is read and written again keeps every byte.
"""

from __future__ import annotations

import math
import re
from typing import NoReturn

from sparseflow.errors import FileFormatError

MAX_DIGITS = 18
"""Longest number: what 64 bits can hold."""

NOTHING = "None"
"""Stands where a loop could be named and none is."""

_DECIMAL = re.compile(r"[0-9]{1,40}(\.[0-9]{1,40})?(e[+-]?[0-9]{1,4})?", re.ASCII | re.IGNORECASE)


class Tokens:
    """A cursor over the tokens of one line.

    Every method that takes a token raises `FileFormatError` when it is not what `expected` describes.
    """

    __slots__ = ("_at", "_tokens")

    def __init__(self, line: str) -> None:
        self._tokens = line.split(" ")
        self._at = 0

    def integer(self, expected: str, least: int = 0) -> int:
        """The next token, a number of at least `least`."""
        token = self._next(expected)
        if token.isdigit() and token.isascii() and len(token) <= MAX_DIGITS:
            value = int(token)
            if value >= least and (token[0] != "0" or token == "0"):
                return value
        bound = f" (a whole number of at least {least})" if least else " (a whole number)"
        self.refuse(expected + bound)

    def name(self, expected: str) -> str:
        """The next token, a name: letters, digits and underscores, and no digit first."""
        token = self._next(expected)
        if token.isidentifier() and token.isascii() and token != NOTHING:
            return token
        self.refuse(expected)

    def name_or_nothing(self, expected: str) -> str | None:
        """The next token, a name; None where it reads `None`."""
        if self._at < len(self._tokens) and self._tokens[self._at] == NOTHING:
            self._at += 1
            return None
        return self.name(f"{expected} or {NOTHING}")

    def decimal(self, expected: str) -> float:
        """The next token, a finite number above 0."""
        token = self._next(expected)
        if _DECIMAL.fullmatch(token) and 0.0 < (value := float(token)) < math.inf:
            return value
        self.refuse(f"{expected} (a finite number above 0)")

    def more(self) -> bool:
        """Whether a token is left."""
        return self._at < len(self._tokens)

    def end(self) -> None:
        """Refuses whatever is left."""
        if self.more():
            self._at += 1
            self.refuse("the end of the line")

    def refuse(self, expected: str) -> NoReturn:
        """Raises `FileFormatError` about the token that was taken last."""
        index = self._at - 1
        found = "the end of the line"
        if index < len(self._tokens):
            found = (
                repr(self._tokens[index]) if self._tokens[index] else "nothing (one space parts two tokens)"
            )
        column = 1 + sum(len(token) + 1 for token in self._tokens[:index])
        raise FileFormatError(
            f"schedule, column {column} (token {index + 1}): expected {expected}, found {found}"
        )

    def _next(self, expected: str) -> str:
        self._at += 1
        if self._at > len(self._tokens):
            self.refuse(expected)
        return self._tokens[self._at - 1]

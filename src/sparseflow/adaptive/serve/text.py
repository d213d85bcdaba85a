"""The text of an answer while its tokens come in: whole characters only, and nothing from a stop string on.

A character may be spread over several tokens, and a token may mean another text at the beginning than after
others (a blank before a word). So text is decoded in the light of the tokens before, and held back while it
may change: while it ends in the sign for a broken character, or in what may become a stop string.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

_BROKEN = "\ufffd"


class Decodes(Protocol):
    """What is needed of a tokenizer; those of transformers have it."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class Text:
    """The text of one answer.

    Args:
        tokenizer: Decodes its tokens.
        stops: Strings before which it ends; none is empty.

    Attributes:
        tokens: How many tokens came in.
        stopped: A stop string was met; more tokens change nothing.
    """

    def __init__(self, tokenizer: Decodes, stops: Sequence[str] = ()) -> None:
        self.tokens = 0
        self.stopped = False
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._seen = 0
        """Of `_ids`, those whose text is out or held back for a stop string only."""
        self._held = ""

    def push(self, ids: Iterable[int]) -> str:
        """Take tokens; gives the text that is certain now and was not before."""
        if self.stopped:
            return ""
        for token in ids:
            self.tokens += 1
            self._ids.append(token)
        return self._through(self._decoded(final=False), final=False)

    def close(self) -> str:
        """No more tokens come; gives the text that was held back."""
        if self.stopped:
            return ""
        return self._through(self._decoded(final=True), final=True)

    def _decoded(self, *, final: bool) -> str:
        """Text of the tokens that are not seen yet, or "" while it may change."""
        if len(self._ids) == self._seen:
            return ""
        before = self._decode(self._ids[: self._seen])
        text = self._decode(self._ids)
        if text.endswith(_BROKEN) and not final:
            return ""
        fresh = text[len(before) :]
        if not fresh:
            return ""
        # The last tokens seen are the light in which the next ones are decoded; older ones are not needed.
        del self._ids[: self._seen]
        self._seen = len(self._ids)
        return fresh

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True) if ids else ""

    def _through(self, fresh: str, *, final: bool) -> str:
        """What may go out of the text held back and fresh text."""
        text = self._held + fresh
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            # The one that ends first, as if the text had come character by character.
            return text[: min(found)[1]]
        keep = 0 if final else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text with which a stop string may begin."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

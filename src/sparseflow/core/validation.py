"""What pydantic found wrong, in a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


def first_problem(error: ValidationError) -> str:
    """The first thing that is wrong: where, and what."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or "the whole"
    return f"{where}: {first['msg']}"

"""Range checks of arguments. Every function names the argument and shows its value.

check_at_least(1, batch_size=batch_size, num_heads=num_heads)
check_positive(learning_rate=learning_rate)
"""

from __future__ import annotations

import math
from collections.abc import Collection

from sparseflow.errors import InputError


def check_at_least(minimum: int, /, **values: object) -> None:
    """Check that values are integers of at least `minimum`; booleans are refused.

    Raises:
        InputError: A value is something else.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise InputError(f"`{name}` (={value!r}) must be an integer of at least {minimum}")


def check_positive(**values: object) -> None:
    """Check that values are finite numbers above 0.

    Raises:
        InputError: A value is something else.
    """
    for name, value in values.items():
        if not _to_number(value) > 0:
            raise InputError(f"`{name}` (={value!r}) must be a finite number above 0")


def check_non_negative(**values: object) -> None:
    """Check that values are finite numbers of at least 0.

    Raises:
        InputError: A value is something else.
    """
    for name, value in values.items():
        if not _to_number(value) >= 0:
            raise InputError(f"`{name}` (={value!r}) must be a finite number of at least 0")


def check_between(low: float, high: float, /, **values: object) -> None:
    """Check that values are numbers from `low` to `high`, both included.

    Raises:
        InputError: A value is something else.
    """
    for name, value in values.items():
        if not low <= _to_number(value) <= high:
            raise InputError(f"`{name}` (={value!r}) must be a number from {low} to {high}")


def check_one_of(choices: Collection[object], /, **values: object) -> None:
    """Check that values are among `choices`.

    Raises:
        InputError: A value is not.
    """
    for name, value in values.items():
        if value not in choices:
            raise InputError(
                f"`{name}` (={value!r}) must be one of: {', '.join(map(str, choices)) or 'none'}"
            )


def _to_number(value: object) -> float:
    """Return a finite number as it is, and NaN, which fails every comparison, for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return math.nan
    return value

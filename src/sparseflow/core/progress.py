"""Progress callbacks of long operations."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with (message, fraction done from 0 to 1) as an operation advances."""


def subrange(progress: Progress | None, start: float, end: float, prefix: str = "") -> Progress | None:
    """Map the progress of a nested operation to a part of the progress of the whole operation.

    Args:
        progress: Callback of the whole operation; None stays None.
        start: Fraction of the whole operation that is done when the nested operation starts.
        end: Fraction that is done when the nested operation ends.
        prefix: Text in front of each message of the nested operation.

    Returns:
        A callback to pass to the nested operation.
    """
    if progress is None:
        return None
    return lambda message, fraction: progress(prefix + message, start + (end - start) * fraction)

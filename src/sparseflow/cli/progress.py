"""Progress of long work on standard error, fed by callbacks of the form (message, fraction)."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressDisplay

from sparseflow.core.progress import Progress

_LOG_INTERVAL_S = 15.0
"""Time between two lines where standard error is no terminal."""


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a progress bar with the time left while the body runs.

    If standard error is no terminal, log a line every 15 s.

    Yields:
        The callback that takes the current step and the fraction done.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _make_line_logger()
        return
    columns = (
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with ProgressDisplay(*columns, console=console, transient=True) as display:
        task = display.add_task("starting", total=1.0)

        def update(message: str, fraction: float) -> None:
            display.update(task, description=message, completed=fraction)

        yield update


def _make_line_logger() -> Progress:
    start_s = last_line_s = time.monotonic()

    def update(message: str, fraction: float) -> None:
        nonlocal last_line_s
        current_s = time.monotonic()
        if current_s - last_line_s >= _LOG_INTERVAL_S:
            last_line_s = current_s
            print(
                f"{100 * fraction:3.0f} %  {current_s - start_s:4.0f} s  {message}",
                file=sys.stderr,
                flush=True,
            )

    return update

"""Progress of long work on standard error, fed by callbacks of the form (what, fraction)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_LINE_S = 15.0
"""Between two lines where standard error is no terminal."""


@contextmanager
def bar() -> Iterator[Callable[[str, float], None]]:
    """Show a bar while the body runs, or a line now and then where standard error goes to a file.

    Yields what to call with the work's name and the fraction done.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    columns = (
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=1.0)

        def tell(what: str, fraction: float) -> None:
            progress.update(task, description=what, completed=fraction)

        yield tell


def _lines() -> Callable[[str, float], None]:
    begun = told = time.monotonic()

    def tell(what: str, fraction: float) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= _LINE_S:
            told = now
            print(f"{100 * fraction:3.0f} %  {now - begun:4.0f} s  {what}", file=sys.stderr, flush=True)

    return tell

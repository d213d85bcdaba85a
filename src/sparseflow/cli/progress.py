"""A progress bar on standard error, fed by callbacks of the form (what, fraction)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def bar() -> Iterator[Callable[[str, float], None]]:
    """Show a bar while the body runs; yields what to call with the work's name and the fraction done."""
    columns = (
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=1.0)

        def tell(what: str, fraction: float) -> None:
            progress.update(task, description=what, completed=fraction)

        yield tell

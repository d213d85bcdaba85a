"""Log messages: a person reads them on the console, a run keeps them in its `run.log`.

Library code calls `logging.getLogger(__name__)` of the standard library and never configures anything; the
command line calls `configure_console` once, and `log_to_file` while a run is on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = "sparseflow"
FILE_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def configure_console(*, verbose: bool = False, quiet: bool = False) -> None:
    """Send SparseFlow's messages to standard error, in colour where that is a terminal.

    Calling it again replaces the earlier choice.

    Args:
        verbose: From DEBUG up, instead of INFO.
        quiet: Warnings and errors only; wins over `verbose`.
    """
    from rich.console import Console
    from rich.logging import RichHandler

    logger = logging.getLogger(ROOT)
    for old in [handler for handler in logger.handlers if isinstance(handler, RichHandler)]:
        logger.removeHandler(old)
    handler = RichHandler(
        console=Console(stderr=True), show_path=False, show_time=verbose, rich_tracebacks=False
    )
    handler.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    # The handlers filter; the logger passes everything, so that a run's file is complete.
    logger.setLevel(logging.DEBUG)
    logger.propagate = False


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Also write every message, from DEBUG up, to the file `path` while the block runs."""
    logger = logging.getLogger(ROOT)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(FILE_FORMAT))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()

"""Console log messages of the command line.

Library code uses `logging.getLogger(__name__)` and configures nothing.
"""

from __future__ import annotations

import logging

ROOT = "sparseflow"


def configure_console(*, verbose: bool = False, quiet: bool = False) -> None:
    """Send SparseFlow's log messages to standard error, replacing an earlier configuration.

    Args:
        verbose: Show messages from DEBUG up, instead of INFO.
        quiet: Show warnings and errors only; wins over `verbose`.
    """
    from rich.console import Console
    from rich.logging import RichHandler

    logger = logging.getLogger(ROOT)
    for handler in [handler for handler in logger.handlers if isinstance(handler, RichHandler)]:
        logger.removeHandler(handler)
    handler = RichHandler(
        console=Console(stderr=True), show_path=False, show_time=verbose, rich_tracebacks=False
    )
    handler.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    # The handler filters; the logger passes everything, for handlers of the application.
    logger.setLevel(logging.DEBUG)
    logger.propagate = False

"""The `sparseflow` command: one thin module for each wing, without logic."""

from __future__ import annotations

import io
import os
import sys
import threading


def main() -> None:
    """Run the installed command `sparseflow`."""
    from sparseflow.cli.root import report_thread_error, run

    threading.excepthook = report_thread_error
    # Names of files need not be UTF-8, and standard output need not support all characters.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    code = run(sys.argv[1:])
    if sys.stdout is not None:  # None if the shell closed it with `>&-`
        try:
            sys.stdout.flush()
        except OSError:
            # Python would flush again at its end and print a traceback.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = code or 1
    sys.exit(code)

"""The `sparseflow` command: one thin module for each wing, without logic."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the installed command `sparseflow`."""
    from sparseflow.cli.root import run

    code = run(sys.argv[1:])
    output = sys.stdout  # None if the shell closed it with `>&-`
    try:
        if output is not None:
            output.flush()
    except OSError:
        # Python would flush again at its end and print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
        code = code or 1
    sys.exit(code)

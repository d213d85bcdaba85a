"""The `sparseflow` command: one thin module for each wing, without logic."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the installed command `sparseflow`."""
    from sparseflow.cli.root import run

    sys.exit(run(sys.argv[1:]))

"""The command `sparseflow`: one thin module a wing, and no logic."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the installed command."""
    from sparseflow.cli.root import run

    sys.exit(run(sys.argv[1:]))

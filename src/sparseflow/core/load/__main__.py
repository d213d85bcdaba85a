"""Entry point of one stressor process; only `Stressor` starts it."""

from __future__ import annotations

import sys

from sparseflow.core.load.worker import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Deciding about one request on the host; `stages.py` and `predictor/margins.py` say what it computes."""

from __future__ import annotations

from functools import cache
from typing import Any

from sparseflow.core.extras import require


@cache
def kernels() -> Any:
    """Those for a CPU: the module `cpu`, compiled by the first call, so that no request waits for it.

    Raises:
        MissingExtraError: Numba is missing.
    """
    require("numba", "adaptive")
    from sparseflow.adaptive.kernels.deciding import cpu

    cpu.compile_all()
    return cpu

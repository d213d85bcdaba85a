"""Deciding about one request on the host; `stages.py` and `predictor/margins.py` say what it computes."""

from __future__ import annotations

from typing import Any

from sparseflow.core.extras import require


def kernels() -> Any:
    """Those for a CPU: the module `cpu`.

    Raises:
        MissingExtraError: Numba is missing.
    """
    require("numba", "adaptive")
    from sparseflow.adaptive.kernels.deciding import cpu

    return cpu

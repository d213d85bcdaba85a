"""Deciding about one request on the host; `stages.py` and `predictor/margins.py` say what it computes."""

from __future__ import annotations

from functools import cache
from typing import Any

from sparseflow.core.extras import require
from sparseflow.errors import RunError


@cache
def kernels() -> Any:
    """Those for a CPU: the module `cpu`, compiled by the first call, so that no request waits for it.

    Raises:
        MissingExtraError: Numba is missing.
        RunError: There is no folder in which Numba could keep what it compiles.
    """
    require("numba", "adaptive")
    try:
        from sparseflow.adaptive.kernels.policy_inference import cpu
    except RuntimeError as error:
        raise RunError(
            f"Numba cannot keep what it compiles ({error}); set NUMBA_CACHE_DIR to a folder to write to"
        ) from error

    cpu.compile_all()
    return cpu

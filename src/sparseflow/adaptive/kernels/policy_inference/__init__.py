"""Plan selection for one request on the CPU.

`controllers.networks` and `predictor.calibration` define the operations.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from sparseflow.core.extras import require
from sparseflow.errors import RunError


@cache
def load_kernels() -> Any:
    """Load and compile the CPU kernels, so that no request waits for the compilation.

    Raises:
        MissingExtraError: Numba is missing.
        RunError: Numba has no writable cache folder.
    """
    require("numba", "adaptive")
    try:
        from sparseflow.adaptive.kernels.policy_inference import cpu
    except RuntimeError as error:
        raise RunError(f"Numba has no writable cache folder ({error}); set NUMBA_CACHE_DIR") from error

    cpu.compile_all()
    return cpu

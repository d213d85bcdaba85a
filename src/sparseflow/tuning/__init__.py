"""The fastest schedule for a computation with a sparse matrix: found by measuring, guided by a cost model.

::

    from sparseflow import tuning

    kernel = tuning.tune("spmm", A, n_cols=256, budget_s=60)
    C = kernel(B)

The names below are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparseflow.tuning.kernel import Kernel, load
    from sparseflow.tuning.schedule import Schedule
    from sparseflow.tuning.tuner import Tuned, explore, tune

__all__ = ["Kernel", "Schedule", "Tuned", "explore", "load", "tune"]

_HOME = {
    "Kernel": "sparseflow.tuning.kernel",
    "Schedule": "sparseflow.tuning.schedule",
    "Tuned": "sparseflow.tuning.tuner",
    "explore": "sparseflow.tuning.tuner",
    "load": "sparseflow.tuning.kernel",
    "tune": "sparseflow.tuning.tuner",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'sparseflow.tuning' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))

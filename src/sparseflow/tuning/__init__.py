"""The fastest schedule for a computation with a sparse matrix: found by measuring, guided by a cost model.

::

    from sparseflow import tuning

    kernel = tuning.tune("spmm", A, n_cols=256, budget_s=60)
    C = kernel(B)

The names below are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.core.lazy import attach

if TYPE_CHECKING:
    from sparseflow.tuning.codegen.kernel import Kernel, load
    from sparseflow.tuning.schedule.schedule import Schedule
    from sparseflow.tuning.search.session import Tuned, explore, tune

__all__ = ["Kernel", "Schedule", "Tuned", "explore", "load", "tune"]

__getattr__, __dir__ = attach(
    __name__,
    {
        "codegen.kernel": ["Kernel", "load"],
        "schedule.schedule": ["Schedule"],
        "search.session": ["Tuned", "explore", "tune"],
    },
)

"""Running a plan: a model on several slots, in one process or one a slot.

::

    from sparseflow.codesign.execution import LocalExecutor
    executor = LocalExecutor(Steps(model), homes=[0, 0, 1, 1], plan=rewrite_plan)
    logits = executor.run([clips])
    executor.moved                       # bytes between slots, what `plan_bytes` said
"""

from __future__ import annotations

from sparseflow.codesign.execution.launch import joined, launch
from sparseflow.codesign.execution.links import LinkError
from sparseflow.codesign.execution.local import LocalExecutor
from sparseflow.codesign.execution.ranks import Measured, RankExecutor

__all__ = [
    "LinkError",
    "LocalExecutor",
    "Measured",
    "RankExecutor",
    "joined",
    "launch",
]

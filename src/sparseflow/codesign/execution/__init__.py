"""Execution of a plan on several slots: in one process, or with one process per slot.

::

    from sparseflow.codesign.execution import LocalExecutor
    executor = LocalExecutor(Steps(model), assignment=[0, 0, 1, 1], plan=rewrite_plan)
    logits = executor.run([clips])
    executor.moved_bytes                 # equal to `compute_transfer_bytes` times the number of batches
"""

from __future__ import annotations

from sparseflow.codesign.execution.launch import join_processes, launch
from sparseflow.codesign.execution.links import LinkError
from sparseflow.codesign.execution.local import LocalExecutor
from sparseflow.codesign.execution.ranks import PipelineTiming, RankExecutor

__all__ = [
    "LinkError",
    "LocalExecutor",
    "PipelineTiming",
    "RankExecutor",
    "join_processes",
    "launch",
]

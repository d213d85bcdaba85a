"""Autotuning of sparse kernels: measured search over schedules, guided by a learned cost model.

::

    from sparseflow import tuning

    kernel = tuning.tune("spmm", A, n_cols=256, budget_s=60)
    C = kernel(B)

`schedule` describes operators, matrices and schedules, `codegen` compiles a schedule to a kernel, `measure`
times schedules and collects labels, `model` learns to rank schedules, and `search` searches. `evaluation`
compares cost models and searches, and `gnn` aggregates neighbors in graph neural networks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.core.lazy import attach

if TYPE_CHECKING:
    from sparseflow.tuning import gnn
    from sparseflow.tuning.api import tune
    from sparseflow.tuning.codegen.kernel import Kernel, load
    from sparseflow.tuning.measure.collection import collect
    from sparseflow.tuning.measure.label_import import import_labels
    from sparseflow.tuning.measure.labels import LabelSet
    from sparseflow.tuning.model.training import TrainConfig, train
    from sparseflow.tuning.schedule.schedule import Schedule
    from sparseflow.tuning.search.session import TuneResult, TuningSession

__all__ = [
    "Kernel",
    "LabelSet",
    "Schedule",
    "TrainConfig",
    "TuneResult",
    "TuningSession",
    "collect",
    "gnn",
    "import_labels",
    "load",
    "train",
    "tune",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "api": ["tune"],
        "codegen.kernel": ["Kernel", "load"],
        "measure.collection": ["collect"],
        "measure.label_import": ["import_labels"],
        "measure.labels": ["LabelSet"],
        "model.training": ["TrainConfig", "train"],
        "schedule.schedule": ["Schedule"],
        "search.session": ["TuneResult", "TuningSession"],
    },
    submodules=["gnn"],
)

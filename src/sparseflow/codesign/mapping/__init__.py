"""Mapping: which segment of a network runs on which slot, and how far that may be from the best.

::

    from sparseflow.codesign.mapping import MappingSolver, Problem
    problem = Problem.chain(latency_ms=..., memory_mb=..., limit_mb=..., traffic_bytes=..., fixed_ms=...,
                            ms_per_byte=...)
    found = MappingSolver(mode="balanced").solve_mapping(problem)
    found.mapping, found.total_latency_ms, found.gap
"""

from __future__ import annotations

from sparseflow.codesign.mapping.bounds import lower_bound
from sparseflow.codesign.mapping.objective import Evaluation, Goal, Mode, evaluate
from sparseflow.codesign.mapping.problem import Problem
from sparseflow.codesign.mapping.search import Mapping, Progress
from sparseflow.codesign.mapping.solver import MappingSolver

__all__ = [
    "Evaluation",
    "Goal",
    "Mapping",
    "MappingSolver",
    "Mode",
    "Problem",
    "Progress",
    "evaluate",
    "lower_bound",
]

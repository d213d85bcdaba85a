"""Mapping of segments to slots, with a lower bound on the optimum.

::

    from sparseflow.codesign.mapping import MappingProblem, MappingSolver
    problem = MappingProblem.chain(
        latency_ms=..., memory_mb=..., limit_mb=..., traffic_bytes=..., fixed_ms=..., ms_per_byte=...
    )
    result = MappingSolver(mode="balanced").solve_mapping(problem)
    result.mapping, result.total_latency_ms, result.gap
"""

from __future__ import annotations

from sparseflow.codesign.mapping.bounds import compute_lower_bound
from sparseflow.codesign.mapping.objective import MappingEvaluation, MappingGoal, Mode, evaluate_mapping
from sparseflow.codesign.mapping.problem import MappingProblem
from sparseflow.codesign.mapping.search import MappingResult
from sparseflow.codesign.mapping.solver import MappingSolver

__all__ = [
    "MappingEvaluation",
    "MappingGoal",
    "MappingProblem",
    "MappingResult",
    "MappingSolver",
    "Mode",
    "compute_lower_bound",
    "evaluate_mapping",
]

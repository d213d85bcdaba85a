"""Where chips stand on the wafer: on sites, by quadratic assignment, and from there anywhere.

::

    from sparseflow.codesign import layout

    sites = layout.grid_sites(layout.Wafer(radius_mm=150), sizes_mm)
    front = layout.pareto_front(sites, traffic_bytes, tdp_w, sigma_mm=layout.Package().spread_mm)
    places = sites.positions_mm[front.best.assignment]
    heat = layout.temperatures(sites.wafer, places, sizes_mm, tdp_w)

The names below are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.core.lazy import attach

if TYPE_CHECKING:
    from sparseflow.codesign.layout.pareto import Front, Layout, pareto_front
    from sparseflow.codesign.layout.qap.assignment import Assignment, assign
    from sparseflow.codesign.layout.qap.batch import assign_batch
    from sparseflow.codesign.layout.qap.problem import Instance, cost, lower_bound, padded, read_qaplib
    from sparseflow.codesign.layout.refinement import Refined, refine
    from sparseflow.codesign.layout.sites import Sites, Wafer, grid_sites
    from sparseflow.codesign.layout.thermal import Package, ThermalMap, temperatures
    from sparseflow.codesign.layout.wafer import WaferLayout, Weights

__all__ = [
    "Assignment",
    "Front",
    "Instance",
    "Layout",
    "Package",
    "Refined",
    "Sites",
    "ThermalMap",
    "Wafer",
    "WaferLayout",
    "Weights",
    "assign",
    "assign_batch",
    "cost",
    "grid_sites",
    "lower_bound",
    "padded",
    "pareto_front",
    "read_qaplib",
    "refine",
    "temperatures",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "pareto": ["Front", "Layout", "pareto_front"],
        "qap.assignment": ["Assignment", "assign"],
        "qap.batch": ["assign_batch"],
        "qap.problem": ["Instance", "cost", "lower_bound", "padded", "read_qaplib"],
        "refinement": ["Refined", "refine"],
        "sites": ["Sites", "Wafer", "grid_sites"],
        "thermal": ["Package", "ThermalMap", "temperatures"],
        "wafer": ["WaferLayout", "Weights"],
    },
)

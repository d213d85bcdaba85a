"""Placement of chips on the wafer: quadratic assignment to sites, then continuous refinement.

::

    from sparseflow.codesign import layout

    sites = layout.build_site_grid(layout.Wafer(radius_mm=150), sizes_mm)
    sigma_mm = layout.ThermalPackage().spread_mm
    front = layout.compute_pareto_front(sites, traffic_bytes, tdp_w, sigma_mm=sigma_mm)
    positions = sites.positions_mm[front.best.assignment]
    heat = layout.solve_temperatures(sites.wafer, positions, sizes_mm, tdp_w)

The exported names are imported on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.core.lazy import attach

if TYPE_CHECKING:
    from sparseflow.codesign.layout.pareto import LayoutFront, SiteLayout, compute_pareto_front
    from sparseflow.codesign.layout.qap.assignment import QapAssignment, assign
    from sparseflow.codesign.layout.qap.batch import assign_batch
    from sparseflow.codesign.layout.qap.problem import (
        QapInstance,
        compute_cost,
        gilmore_lawler_bound,
        pad_flow,
        read_qaplib,
    )
    from sparseflow.codesign.layout.sites import SiteGrid, Wafer, build_site_grid
    from sparseflow.codesign.layout.thermal import ThermalMap, ThermalPackage, solve_temperatures
    from sparseflow.codesign.layout.wafer import LayoutWeights, RefineResult, WaferLayout, refine_layout

__all__ = [
    "LayoutFront",
    "LayoutWeights",
    "QapAssignment",
    "QapInstance",
    "RefineResult",
    "SiteGrid",
    "SiteLayout",
    "ThermalMap",
    "ThermalPackage",
    "Wafer",
    "WaferLayout",
    "assign",
    "assign_batch",
    "build_site_grid",
    "compute_cost",
    "compute_pareto_front",
    "gilmore_lawler_bound",
    "pad_flow",
    "read_qaplib",
    "refine_layout",
    "solve_temperatures",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "pareto": ["LayoutFront", "SiteLayout", "compute_pareto_front"],
        "qap.assignment": ["QapAssignment", "assign"],
        "qap.batch": ["assign_batch"],
        "qap.problem": ["QapInstance", "compute_cost", "gilmore_lawler_bound", "pad_flow", "read_qaplib"],
        "sites": ["SiteGrid", "Wafer", "build_site_grid"],
        "thermal": ["ThermalMap", "ThermalPackage", "solve_temperatures"],
        "wafer": ["LayoutWeights", "RefineResult", "WaferLayout", "refine_layout"],
    },
)

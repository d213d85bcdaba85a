"""Co-design: choose chiplets, partition a model over them, place them on a wafer, and run the result.

::

    from sparseflow import codesign

    config = codesign.CodesignConfig(hardware=codesign.HardwareConfig(chips=("npu-s", "npu-m"), slots=4))
    plan = codesign.plan_design(config, model, "plan")             # model: any `core.layers.LayeredModel`
    plan.metrics                                                   # latency, energy, area
    codesign.verify(model, plan.decision, samples)                 # same logits, planned bytes

Describe: `workload` (layers, segments, splits) and `hardware` (chips, links, slots). Measure and learn:
`hardware.proxy` (layer costs). Decide: `mapping`, `partition`, `layout`, `design` (decisions and their cost)
and `joint` (training of model and hardware). Run: `execution` and `report`. `api` contains the workflows of
the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.core.lazy import attach

if TYPE_CHECKING:
    from sparseflow.codesign.api import PlanResult, plan_design
    from sparseflow.codesign.design.config import (
        CodesignConfig,
        HardwareConfig,
        Lambdas,
        MappingConfig,
        WaferConfig,
        read_config,
    )
    from sparseflow.codesign.design.decision import HardwareDecision
    from sparseflow.codesign.design.hardware import Hardware
    from sparseflow.codesign.design.saved_plan import SavedPlan, load_plan
    from sparseflow.codesign.execution.rewrite import apply_rewrite
    from sparseflow.codesign.execution.verification import VerifyResult, verify
    from sparseflow.codesign.hardware.chips import ChipLibrary, ChipType, LinkType, read_library
    from sparseflow.codesign.hardware.network import Network
    from sparseflow.codesign.hardware.proxy import LayerHwProxy, LayerProxyModel, build_layer_features
    from sparseflow.codesign.hardware.slots import ChipSlotConfig
    from sparseflow.codesign.joint.hw_loss import compute_hw_loss
    from sparseflow.codesign.joint.trace import replay
    from sparseflow.codesign.joint.trainer import JointTrainer
    from sparseflow.codesign.layout.wafer import WaferLayout
    from sparseflow.codesign.mapping.solver import MappingSolver
    from sparseflow.codesign.partition.planner import PartitionPlan, PartitionPlanner
    from sparseflow.codesign.partition.split_search import PartitionConfig
    from sparseflow.codesign.workload.segments import Segment, SegmentGraph
    from sparseflow.codesign.workload.sequential import SequentialModel
    from sparseflow.codesign.workload.splits import LayerSplit, RewritePlan
    from sparseflow.core.layers import LayerNode

__all__ = [
    "ChipLibrary",
    "ChipSlotConfig",
    "ChipType",
    "CodesignConfig",
    "Hardware",
    "HardwareConfig",
    "HardwareDecision",
    "JointTrainer",
    "Lambdas",
    "LayerHwProxy",
    "LayerNode",
    "LayerProxyModel",
    "LayerSplit",
    "LinkType",
    "MappingConfig",
    "MappingSolver",
    "Network",
    "PartitionConfig",
    "PartitionPlan",
    "PartitionPlanner",
    "PlanResult",
    "RewritePlan",
    "SavedPlan",
    "Segment",
    "SegmentGraph",
    "SequentialModel",
    "VerifyResult",
    "WaferConfig",
    "WaferLayout",
    "apply_rewrite",
    "build_layer_features",
    "compute_hw_loss",
    "load_plan",
    "plan_design",
    "read_config",
    "read_library",
    "replay",
    "verify",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "api": ["PlanResult", "plan_design"],
        "design.config": [
            "CodesignConfig",
            "HardwareConfig",
            "Lambdas",
            "MappingConfig",
            "WaferConfig",
            "read_config",
        ],
        "design.decision": ["HardwareDecision"],
        "design.hardware": ["Hardware"],
        "design.saved_plan": ["SavedPlan", "load_plan"],
        "execution.rewrite": ["apply_rewrite"],
        "execution.verification": ["VerifyResult", "verify"],
        "hardware.chips": ["ChipLibrary", "ChipType", "LinkType", "read_library"],
        "hardware.network": ["Network"],
        "hardware.proxy": ["LayerHwProxy", "LayerProxyModel", "build_layer_features"],
        "hardware.slots": ["ChipSlotConfig"],
        "joint.hw_loss": ["compute_hw_loss"],
        "joint.trace": ["replay"],
        "joint.trainer": ["JointTrainer"],
        "layout.wafer": ["WaferLayout"],
        "mapping.solver": ["MappingSolver"],
        "partition.planner": ["PartitionPlan", "PartitionPlanner"],
        "partition.split_search": ["PartitionConfig"],
        "workload.segments": ["LayerNode", "Segment", "SegmentGraph"],
        "workload.sequential": ["SequentialModel"],
        "workload.splits": ["LayerSplit", "RewritePlan"],
    },
)

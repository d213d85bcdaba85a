"""Co-design: choose chiplets, partition a model over them, place them on a wafer, and run the result.

::

    from sparseflow import codesign

    hardware = codesign.Hardware(codesign.read_config("version_c"))
    layers = model.describe_layers(hardware.batch_size)            # any `core.layers.LayeredModel`
    decision = hardware.refine(layers, hardware.initial_decision(layers), use_fine_split=True)
    hardware.evaluate_cost(layers, decision).stats                 # latency, energy, bytes
    codesign.verify(model, decision, samples)                      # same logits, planned bytes

Describe: `workload` (layers, segments, splits) and `hardware` (chips, links, slots). Measure and learn:
`hardware.proxy` (layer costs). Decide: `mapping`, `partition`, `layout`, `design` (decisions and their cost)
and `joint` (training of model and hardware). Run: `execution` and `report`. `api` contains the workflows of
the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.core.lazy import attach

if TYPE_CHECKING:
    from sparseflow.codesign.design.config import CodesignConfig, Lambdas, read_config
    from sparseflow.codesign.design.decision import HardwareDecision
    from sparseflow.codesign.design.hardware import Hardware
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
    from sparseflow.codesign.workload.splits import LayerSplit, RewritePlan
    from sparseflow.core.layers import LayerNode

__all__ = [
    "ChipLibrary",
    "ChipSlotConfig",
    "ChipType",
    "CodesignConfig",
    "Hardware",
    "HardwareDecision",
    "JointTrainer",
    "Lambdas",
    "LayerHwProxy",
    "LayerNode",
    "LayerProxyModel",
    "LayerSplit",
    "LinkType",
    "MappingSolver",
    "Network",
    "PartitionConfig",
    "PartitionPlan",
    "PartitionPlanner",
    "RewritePlan",
    "Segment",
    "SegmentGraph",
    "VerifyResult",
    "WaferLayout",
    "apply_rewrite",
    "build_layer_features",
    "compute_hw_loss",
    "read_config",
    "read_library",
    "replay",
    "verify",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "design.config": ["CodesignConfig", "Lambdas", "read_config"],
        "design.decision": ["HardwareDecision"],
        "design.hardware": ["Hardware"],
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
        "workload.splits": ["LayerSplit", "RewritePlan"],
    },
)

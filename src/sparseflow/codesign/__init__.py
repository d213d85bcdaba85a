"""Co-design: choose chiplets, partition a model over them, place them on a wafer, run the partitioned model.

::

    from sparseflow import codesign

    hardware = codesign.Hardware(codesign.read_settings("version_c"))
    layers = model.describe_layers(hardware.batch)                 # any `core.layers.LayeredModel`
    decision = hardware.polish(layers, hardware.begin(layers), fine=True)
    hardware.price(layers, decision).stats                # latency, energy, bytes
    codesign.verify(model, decision, samples)             # the same logits, the bytes that were planned

The names below are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.core.lazy import attach

if TYPE_CHECKING:
    from sparseflow.codesign.design.config import Lambdas, Settings, read_settings
    from sparseflow.codesign.design.decision import Decision
    from sparseflow.codesign.design.hardware import Hardware
    from sparseflow.codesign.execution.rewrite import apply
    from sparseflow.codesign.execution.verification import verify
    from sparseflow.codesign.hardware.chips import ChipLibrary, ChipType, Link, read_library
    from sparseflow.codesign.hardware.network import Network
    from sparseflow.codesign.hardware.proxy import LayerHwProxy
    from sparseflow.codesign.hardware.slots import ChipSlotConfig
    from sparseflow.codesign.joint.hw_loss import compute_hw_loss
    from sparseflow.codesign.joint.trace import replay
    from sparseflow.codesign.joint.trainer import JointTrainer
    from sparseflow.codesign.layout import WaferLayout
    from sparseflow.codesign.mapping import MappingSolver
    from sparseflow.codesign.partition.planner import PartitionPlanner, Plan
    from sparseflow.codesign.partition.split_search import PartitionConfig
    from sparseflow.codesign.workload.segments import LayerNode, Segment, SegmentGraph
    from sparseflow.codesign.workload.splits import RewritePlan, Split

__all__ = [
    "ChipLibrary",
    "ChipSlotConfig",
    "ChipType",
    "Decision",
    "Hardware",
    "JointTrainer",
    "Lambdas",
    "LayerHwProxy",
    "LayerNode",
    "Link",
    "MappingSolver",
    "Network",
    "PartitionConfig",
    "PartitionPlanner",
    "Plan",
    "RewritePlan",
    "Segment",
    "SegmentGraph",
    "Settings",
    "Split",
    "WaferLayout",
    "apply",
    "compute_hw_loss",
    "read_library",
    "read_settings",
    "replay",
    "verify",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "workload.segments": ["LayerNode", "Segment", "SegmentGraph"],
        "workload.splits": ["RewritePlan", "Split"],
        "hardware.chips": ["ChipLibrary", "ChipType", "Link", "read_library"],
        "hardware.network": ["Network"],
        "hardware.slots": ["ChipSlotConfig"],
        "hardware.proxy": ["LayerHwProxy"],
        "mapping": ["MappingSolver"],
        "partition.split_search": ["PartitionConfig"],
        "partition.planner": ["PartitionPlanner", "Plan"],
        "layout": ["WaferLayout"],
        "design.config": ["Lambdas", "Settings", "read_settings"],
        "design.decision": ["Decision"],
        "design.hardware": ["Hardware"],
        "joint.hw_loss": ["compute_hw_loss"],
        "joint.trace": ["replay"],
        "joint.trainer": ["JointTrainer"],
        "execution.rewrite": ["apply"],
        "execution.verification": ["verify"],
    },
)

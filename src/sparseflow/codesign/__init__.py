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
    from sparseflow.codesign.chips import ChipLibrary, ChipType, Link, read_library
    from sparseflow.codesign.decision import Decision
    from sparseflow.codesign.hardware import Hardware
    from sparseflow.codesign.hw_loss import Lambdas, compute_hw_loss
    from sparseflow.codesign.joint import JointTrainer
    from sparseflow.codesign.layout import WaferLayout
    from sparseflow.codesign.mapping import MappingSolver
    from sparseflow.codesign.network import Network
    from sparseflow.codesign.partition import PartitionPlanner, Plan
    from sparseflow.codesign.proxy import LayerHwProxy
    from sparseflow.codesign.rewrite import RewritePlan, Split, apply
    from sparseflow.codesign.segments import LayerNode, Segment, SegmentGraph
    from sparseflow.codesign.settings import Settings, read_settings
    from sparseflow.codesign.slots import ChipSlotConfig
    from sparseflow.codesign.splits import PartitionConfig
    from sparseflow.codesign.trace import replay
    from sparseflow.codesign.verification import verify

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
        "chips": ["ChipLibrary", "ChipType", "Link", "read_library"],
        "decision": ["Decision"],
        "hardware": ["Hardware"],
        "hw_loss": ["Lambdas", "compute_hw_loss"],
        "joint": ["JointTrainer"],
        "layout": ["WaferLayout"],
        "mapping": ["MappingSolver"],
        "network": ["Network"],
        "partition": ["PartitionPlanner", "Plan"],
        "proxy": ["LayerHwProxy"],
        "rewrite": ["RewritePlan", "Split", "apply"],
        "segments": ["LayerNode", "Segment", "SegmentGraph"],
        "settings": ["Settings", "read_settings"],
        "slots": ["ChipSlotConfig"],
        "splits": ["PartitionConfig"],
        "trace": ["replay"],
        "verification": ["verify"],
    },
)

"""Profiles: what plans take on this device, measured, with every sample kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.adaptive.profile.collect import Background, Progress, background, collect_profile, spread
from sparseflow.adaptive.profile.eager_runner import EagerRunner
from sparseflow.adaptive.profile.identity import model_id, weights_id
from sparseflow.adaptive.profile.measurement import Measurement
from sparseflow.adaptive.profile.metadata import ProfileMetadata
from sparseflow.adaptive.profile.runner import ProfileRunner, RequestTimes
from sparseflow.adaptive.profile.storage import PlanProfile
from sparseflow.core.lazy import attach

if TYPE_CHECKING:
    from sparseflow.adaptive.profile.background_traffic import RequestMix
    from sparseflow.adaptive.profile.engine_runner import EngineRunner, by_group

__all__ = [
    "Background",
    "EagerRunner",
    "EngineRunner",
    "Measurement",
    "PlanProfile",
    "ProfileMetadata",
    "ProfileRunner",
    "Progress",
    "RequestMix",
    "RequestTimes",
    "background",
    "by_group",
    "collect_profile",
    "model_id",
    "spread",
    "weights_id",
]

# These modules import the runtime, and with it transformers, which reading a profile does not need.
__getattr__, __dir__ = attach(
    __name__,
    {
        "engine_runner": ["EngineRunner", "by_group"],
        "background_traffic": ["RequestMix"],
    },
)

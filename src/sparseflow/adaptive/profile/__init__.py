"""Profiles: what plans take on this device, measured, with every sample kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.adaptive.profile.about import About
from sparseflow.adaptive.profile.choosing import spread
from sparseflow.adaptive.profile.collect import Progress, profile
from sparseflow.adaptive.profile.eager import EagerRunner
from sparseflow.adaptive.profile.identity import model_id, weights_id
from sparseflow.adaptive.profile.load import Background, background
from sparseflow.adaptive.profile.runner import Runner, Timed
from sparseflow.adaptive.profile.saved import Profile
from sparseflow.adaptive.profile.visits import Visit
from sparseflow.core.lazy import attach

if TYPE_CHECKING:
    from sparseflow.adaptive.profile.engine import EngineRunner, by_group
    from sparseflow.adaptive.profile.others import Mix

__all__ = [
    "About",
    "Background",
    "EagerRunner",
    "EngineRunner",
    "Mix",
    "Profile",
    "Progress",
    "Runner",
    "Timed",
    "Visit",
    "background",
    "by_group",
    "model_id",
    "profile",
    "spread",
    "weights_id",
]

# These modules import the runtime, and with it transformers, which reading a profile does not need.
__getattr__, __dir__ = attach(
    __name__,
    {
        "engine": ["EngineRunner", "by_group"],
        "others": ["Mix"],
    },
)

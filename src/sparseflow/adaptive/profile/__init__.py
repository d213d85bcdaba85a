"""Profiles: what plans take on this device, measured, with every sample kept."""

from __future__ import annotations

from sparseflow.adaptive.profile.about import About
from sparseflow.adaptive.profile.choosing import spread
from sparseflow.adaptive.profile.collect import Progress, profile
from sparseflow.adaptive.profile.eager import EagerRunner
from sparseflow.adaptive.profile.identity import model_id
from sparseflow.adaptive.profile.load import Background, background
from sparseflow.adaptive.profile.runner import Runner, Timed
from sparseflow.adaptive.profile.saved import Profile
from sparseflow.adaptive.profile.visits import Visit

__all__ = [
    "About",
    "Background",
    "EagerRunner",
    "Profile",
    "Progress",
    "Runner",
    "Timed",
    "Visit",
    "background",
    "model_id",
    "profile",
    "spread",
]

"""Profiles: what plans take on this device, measured, with every sample kept."""

from __future__ import annotations

from importlib import import_module
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

_HOME = {"EngineRunner": "engine", "Mix": "others", "by_group": "engine"}
"""Names whose modules load the runtime, and with it transformers, which a profile alone does not need."""


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'sparseflow.adaptive.profile' has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value

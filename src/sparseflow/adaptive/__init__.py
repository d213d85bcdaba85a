"""Adaptive: a multimodal mixture-of-experts model that keeps a latency budget, request by request.

::

    from sparseflow import adaptive

    ctl = adaptive.attach(model, profile="profile.parquet", controller="controllers.safetensors")
    out = ctl.generate(**inputs, latency_budget_ms=180, max_new_tokens=64)
    out.plan, out.predicted_ms, out.measured_ms, out.budget_met
    ctl.detach()

The names below are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.core.lazy import attach

if TYPE_CHECKING:
    from sparseflow.adaptive.attached import Attached, attach
    from sparseflow.adaptive.controllers import Controllers
    from sparseflow.adaptive.folder import Opened, open_folder
    from sparseflow.adaptive.importance import Importance
    from sparseflow.adaptive.knobs import Knobs
    from sparseflow.adaptive.plan import Geometry, Plan, PlanSpace
    from sparseflow.adaptive.predictor import Ask, Predictor
    from sparseflow.adaptive.profile import Profile

__all__ = [
    "Ask",
    "Attached",
    "Controllers",
    "Geometry",
    "Importance",
    "Knobs",
    "Opened",
    "Plan",
    "PlanSpace",
    "Predictor",
    "Profile",
    "attach",
    "open_folder",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "attached": ["Attached", "attach"],
        "controllers": ["Controllers"],
        "folder": ["Opened", "open_folder"],
        "importance": ["Importance"],
        "knobs": ["Knobs"],
        "plan": ["Geometry", "Plan", "PlanSpace"],
        "predictor": ["Ask", "Predictor"],
        "profile": ["Profile"],
    },
)

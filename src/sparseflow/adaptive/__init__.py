"""Adaptive inference: a multimodal mixture-of-experts model that meets a latency budget per request.

::

    from sparseflow import adaptive

    folder = adaptive.open_folder("DIRECTORY")
    profile = adaptive.profile_model(folder, "profile.parquet")
    model = adaptive.attach(folder.model, profile=profile.predictor)
    inputs = folder.prompt("What is in the picture?", images=["picture.png"]).inputs
    result = model.generate(**inputs, latency_budget_ms=180, max_new_tokens=64)
    result.plan, result.predicted_ms, result.measured_ms, result.budget_met
    model.detach()

Folders, from the ground up; imports point only upwards in this list:

- describe: `plan` (plans, the adapter protocol, running a plan), `adapters` (one per architecture),
  `controllers` (the two networks that choose plans), `engine` (batching, caches, CUDA graphs) with `kernels`
- measure: `profile` (latency of plans, importance of blocks, accuracy of plans)
- learn: `predictor` (latency quantiles)
- decide: `policy` (plan selection, baselines, evaluation), `training` (GRPO)
- run: `prompts` (chat messages and images to model inputs), `questions` (tasks), `serve` (OpenAI-compatible
  server), `study` (training and comparing controllers), `grid_vqa` (a synthetic task), `data` (pretrained
  models)

Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.core.lazy import attach as attach_lazily

if TYPE_CHECKING:
    from sparseflow.adaptive.api import Attached, attach
    from sparseflow.adaptive.controllers.controllers import Controllers
    from sparseflow.adaptive.data import get_pretrained_dir
    from sparseflow.adaptive.plan.runtime import PlanRuntime
    from sparseflow.adaptive.plan.space import ModelGeometry, Plan, PlanSpace
    from sparseflow.adaptive.predictor import LatencyQuery, PlanLatencyPredictor
    from sparseflow.adaptive.profile import PlanProfile
    from sparseflow.adaptive.profile.importance import BlockImportance
    from sparseflow.adaptive.profile.model_profile import (
        ModelProfileConfig,
        ModelProfileResult,
        profile_model,
    )
    from sparseflow.adaptive.prompts.model_folder import ModelFolder, open_folder

__all__ = [
    "Attached",
    "BlockImportance",
    "Controllers",
    "LatencyQuery",
    "ModelFolder",
    "ModelGeometry",
    "ModelProfileConfig",
    "ModelProfileResult",
    "Plan",
    "PlanLatencyPredictor",
    "PlanProfile",
    "PlanRuntime",
    "PlanSpace",
    "attach",
    "get_pretrained_dir",
    "open_folder",
    "profile_model",
]

__getattr__, __dir__ = attach_lazily(
    __name__,
    {
        "api": ["Attached", "attach"],
        "controllers.controllers": ["Controllers"],
        "data": ["get_pretrained_dir"],
        "plan.runtime": ["PlanRuntime"],
        "plan.space": ["ModelGeometry", "Plan", "PlanSpace"],
        "predictor": ["LatencyQuery", "PlanLatencyPredictor"],
        "profile": ["PlanProfile"],
        "profile.importance": ["BlockImportance"],
        "profile.model_profile": ["ModelProfileConfig", "ModelProfileResult", "profile_model"],
        "prompts.model_folder": ["ModelFolder", "open_folder"],
    },
)

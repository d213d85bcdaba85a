"""Profiles: measured latencies of plans on a device, with all samples.

- `measurement`, `storage`: a profile in memory and on disk
- `runner`: protocol of runners, and the model's own forward; `engine_runner`: requests as served
- `random_prompts`, `background_traffic`: requests to measure, and requests next to them
- `collect`: the order of measurements
- `identity`, `memory`: digests of models, and capacity checks
- `model_profile`: profiling of a model's directory
- `importance`: blocks that a model can skip; `plan_quality`: accuracy of plans
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.adaptive.profile.collect import (
    BackgroundLoad,
    collect_profile,
    make_background_load,
    select_representative_plans,
)
from sparseflow.adaptive.profile.identity import compute_model_id, compute_weights_id
from sparseflow.adaptive.profile.measurement import Measurement, ProfileMetadata
from sparseflow.adaptive.profile.runner import EagerRunner, ProfileRunner, RequestTimes
from sparseflow.adaptive.profile.storage import PlanProfile
from sparseflow.core.lazy import attach

if TYPE_CHECKING:
    from sparseflow.adaptive.profile.background_traffic import RequestMix
    from sparseflow.adaptive.profile.engine_runner import EngineRunner, collect_profile_by_group

__all__ = [
    "BackgroundLoad",
    "EagerRunner",
    "EngineRunner",
    "Measurement",
    "PlanProfile",
    "ProfileMetadata",
    "ProfileRunner",
    "RequestMix",
    "RequestTimes",
    "collect_profile",
    "collect_profile_by_group",
    "compute_model_id",
    "compute_weights_id",
    "make_background_load",
    "select_representative_plans",
]

# These modules import the engine, and with it transformers, which reading a profile does not need.
__getattr__, __dir__ = attach(
    __name__,
    {
        "engine_runner": ["EngineRunner", "collect_profile_by_group"],
        "background_traffic": ["RequestMix"],
    },
)

"""The HTTP app of a model folder with its profile and controllers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sparseflow.adaptive.api import attach
from sparseflow.adaptive.engine.engine import Engine
from sparseflow.adaptive.plan.space import TIERS, Tier
from sparseflow.adaptive.predictor import PlanLatencyPredictor
from sparseflow.adaptive.profile.model_profile import MAX_TOKENS, make_example_prompt
from sparseflow.adaptive.prompts.chat import PromptBuilder
from sparseflow.adaptive.prompts.messages import RequestLimits
from sparseflow.adaptive.prompts.model_folder import open_folder
from sparseflow.adaptive.serve import EngineBackend, PredictorForecast, Service, create_app, make_job_decider
from sparseflow.core.progress import Progress

if TYPE_CHECKING:
    from fastapi import FastAPI


def create_model_app(
    model: Path,
    profile: Path,
    *,
    controller: Path | None = None,
    plan_quality: Path | None = None,
    model_name: str,
    max_plans: int = 12,
    max_batch_size: int | None = None,
    device: torch.device | str = "cpu",
    limits: RequestLimits | None = None,
    api_keys: Sequence[str] = (),
    cors_origins: Sequence[str] = (),
    request_log: bool = True,
    progress: Progress,
) -> FastAPI:
    """Create the app of one server, with a warm engine.

    Args:
        model: Directory of the model.
        profile: Profile (Parquet) or predictor (JSON).
        controller: Trained controllers.
        plan_quality: Accuracy of plans, used without controllers.
        model_name: Name that clients request.
        max_plans: Maximum number of plans; requests of one plan share a batch.
        max_batch_size: Maximum number of concurrent requests; by default that of the profile, else 8.
        device: Device of the model.
        limits: Limits on the size of requests.
        api_keys: Accepted API keys; see `create_app`.
        cors_origins: Origins of web pages that may send requests.
        request_log: Whether requests are logged.
        progress: Callback that takes a message and the fraction done.

    Raises:
        InputError, FileFormatError, ModelError: See `open_folder` and `attach`.
    """
    folder = open_folder(model, device=device)
    attached = attach(folder.model, profile, controller, plan_quality=plan_quality)
    selector = attached.selector
    assert selector is not None
    settings = selector.predictor.metadata.config
    max_tokens = settings.get("max_tokens", min(folder.context, MAX_TOKENS))
    selector = replace(selector, max_total_tokens=max_tokens).select_front(max_plans)
    plans = selector.plans
    assert plans is not None
    tiers: list[Tier] = [tier for tier in TIERS if any(plan.tier == tier for plan in plans)]
    # Built before the engine, so that an unusable tokenizer or profile fails early.
    prompts = PromptBuilder(
        folder.tokenizer,
        context=max_tokens,
        image_processor=folder.image_processor,
        lowest=tiers[0] if tiers else "low",
    )
    # A copy, because it learns from other requests.
    idle_selector = replace(selector, predictor=PlanLatencyPredictor.from_dict(selector.predictor.to_dict()))
    slots = max_batch_size or settings.get("max_batch", 8)
    forecast = PredictorForecast(
        selector.predictor,
        plans,
        load=lambda: engine.load,
        idle_predictor=idle_selector.predictor,
        max_batch=slots,
        max_tokens=max_tokens,
    )
    engine = Engine(attached.adapter, attached.runtime, plans=plans, max_batch=slots, max_tokens=max_tokens)
    engine.warm_up(
        None if folder.image_processor is None else make_example_prompt(folder).inputs, progress=progress
    )
    backend = EngineBackend(
        engine, decider=make_job_decider(selector, idle_selector), forecast=forecast, stop=attached.stop
    )
    return create_app(
        Service(model_name, backend, prompts, limits=limits),
        api_keys=api_keys,
        cors_origins=cors_origins,
        request_log=request_log,
    )

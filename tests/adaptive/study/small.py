"""A small Grid-VQA model, a profile of it by a formula, and a study of both that takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.grid_vqa.dataset import VqaDataset
from sparseflow.adaptive.grid_vqa.learner import VqaLearner
from sparseflow.adaptive.grid_vqa.model import load_vqa_model, save_vqa_model
from sparseflow.adaptive.plan.space import Plan, PlanSpace
from sparseflow.adaptive.profile import (
    Measurement,
    PlanProfile,
    ProfileMetadata,
    compute_model_id,
    compute_weights_id,
)
from sparseflow.adaptive.profile.measurement import get_device_facts
from sparseflow.adaptive.study import SampleCounts, StudyConfig
from sparseflow.adaptive.training.config import GrpoConfig
from sparseflow.core.training.distributed import init_distributed
from tests.adaptive.fake_runner import VISION_TOKENS, compute_prefill_ms, compute_step_ms
from tests.adaptive.grid_vqa.little import bank, quick

SETTINGS = quick(
    **{
        "train.shares": {"left": 1.0}, "test_shares": {"left": 0.8, "list": 0.2}, "train.vision_steps": 0,
        "train.steps": 40, "train.batch_size": 16, "train.rate": 1e-2, "train.ema": 0.0,
    }
)  # fmt: skip
COUNTS = SampleCounts(train=48, validation=24, test=40)
CONFIG = GrpoConfig(
    steps=4, prompts=8, minibatches=2, reference_every=3, validate_every=2, validation=32, checkpoint_every=3
)


def model_folder(folder: Path) -> Path:
    """Train a model briefly and write it."""
    with init_distributed("cpu") as context:
        run = VqaLearner(SETTINGS, VqaDataset(SETTINGS, bank=bank()), context)
        for _ in range(run.num_steps):
            run.train_step()
        save_vqa_model(run.model, SETTINGS, run.data.vocabulary, folder)
    return folder


def opened(folder: Path) -> Any:
    """The model in float32."""
    return load_vqa_model(folder)[0]


def profile_of(model: Any, *, plans: int | None = None, repeats: int = 3, noise: float = 0.02) -> PlanProfile:
    """A profile of a model by a formula.

    Args:
        model: The model.
        plans: Of each tier, how many are measured; by default all.
        repeats: Requests of each plan at each of two lengths.
        noise: Relative scatter of whole requests.
    """
    geometry = get_adapter(model).geometry
    space = PlanSpace.from_importance(
        geometry, [float(geometry.depth - block) for block in range(geometry.depth)]
    )
    random = np.random.default_rng(0)
    measurements = [
        make_measurement(plan, tokens, round=index, factor=float(np.exp(noise * random.normal())))
        for index in range(repeats)
        for tier in geometry.tiers
        for plan in [plan for plan in space.plans if plan.tier == tier][slice(plans)]
        for tokens in (6, 12)
    ]
    metadata = ProfileMetadata(
        model_id=compute_model_id(model),
        device=get_device_facts("cpu"),
        space=space,
        vision_tokens=VISION_TOKENS,
        config={"runner": "formula", "dtype": str(model.dtype).removeprefix("torch.")},
    )
    return PlanProfile(metadata=metadata, environments=({},), measurements=tuple(measurements))


def make_measurement(
    plan: Plan, tokens: int, *, factor: float = 1.0, steps: int = 3, **options: Any
) -> Measurement:
    """Measurement with the times of the formula, times a factor."""
    return Measurement(
        plan=plan, text_tokens=tokens, prefill_ms=factor * prefill(plan, tokens),
        steps_ms=tuple(factor * step(plan, tokens, index) for index in range(steps)), **options,
    )  # fmt: skip


def prefill(plan: Plan, tokens: int) -> float:
    """Prefill time by the formula, for a model with top-k 3."""
    return compute_prefill_ms(plan, tokens, top_k=3)


def step(plan: Plan, tokens: int, step_index: int) -> float:
    """Time of a decode step by the formula."""
    assert plan.tier is not None
    return compute_step_ms(plan, tokens + VISION_TOKENS[plan.tier] + 1 + step_index, top_k=3)


def truth(plan: Plan, tokens: int, new_tokens: int) -> float:
    """Latency by the formula, without noise."""
    return prefill(plan, tokens) + sum(step(plan, tokens, index) for index in range(new_tokens - 1))


def make_config(folder: Path, **changes: Any) -> StudyConfig:
    """Config of a study of the model and profile in a directory, with its output in `study/`."""
    paths: dict[str, Any] = {"model": folder / "model", "profile": folder / "profile.parquet"}
    return StudyConfig(
        **paths | {"out": folder / "study", "counts": COUNTS, "num_budgets": 6, "bank": bank()} | changes
    )


def write_model_and_profile(folder: Path) -> str:
    """Write model and profile for `make_config`; return the id of the weights."""
    model = opened(model_folder(folder / "model"))
    profile_of(model).save(folder / "profile.parquet")
    return compute_weights_id(model)


def same(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether weights are identical."""
    return first.keys() == other.keys() and all(
        torch.equal(weight, other[name]) for name, weight in first.items()
    )

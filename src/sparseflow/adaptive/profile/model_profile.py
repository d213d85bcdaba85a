"""Profiling of a model folder: chooses plans and prompt lengths, measures, and fits a predictor."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan, PlanSpace, Tier
from sparseflow.adaptive.predictor import PlanLatencyPredictor
from sparseflow.adaptive.profile import (
    EagerRunner,
    EngineRunner,
    PlanProfile,
    RequestMix,
    collect_profile,
    collect_profile_by_group,
    compute_model_id,
    select_representative_plans,
)
from sparseflow.adaptive.profile.importance import load_plan_space
from sparseflow.adaptive.profile.measurement import get_device_facts
from sparseflow.adaptive.profile.memory import select_fitting_tiers
from sparseflow.adaptive.profile.random_prompts import RandomPrompts
from sparseflow.adaptive.prompts.chat import PromptBuilder
from sparseflow.adaptive.prompts.messages import Message
from sparseflow.core.progress import Progress
from sparseflow.errors import FileFormatError, InputError

if TYPE_CHECKING:
    from sparseflow.adaptive.prompts.messages import Prompt
    from sparseflow.adaptive.prompts.model_folder import ModelFolder

_LOG = logging.getLogger(__name__)

Runner = Literal["engine", "eager"]

MAX_TOKENS = 4096
"""Default limit of a request in tokens: keys and values of a long context need much memory."""

_SHORT_PROMPT, _LONG_PROMPT = 16, 64
"""Default text tokens of prompts."""

_LOADS: dict[Runner, list[float]] = {"engine": [0.0, 0.7], "eager": [0.0]}
"""Default loads. A predictor knows only measured loads; requests without load say nothing about the tail."""


@dataclass(frozen=True, kw_only=True)
class ModelProfileConfig:
    """What to measure of a model.

    Attributes:
        importance: Block importance file; without it plans skip blocks by a heuristic.
        num_plans: Plans to measure, spread over all; 0 for all.
        num_text_plans: Additional plans to measure without an image.
        text_tokens: Text tokens of the prompts; by default 16 and 64, or what fits.
        loads: Shares of the device that background requests use; by default 0 and 0.7 with an engine, else 0.
        batch_sizes: Concurrent requests; by default 1 and `max_batch_size` with an engine, else 1.
        max_batch_size: Maximum number of concurrent requests of an engine.
        max_tokens: Maximum tokens of a request; by default the model's context, at most `MAX_TOKENS`.
        plans_per_group: Plans whose CUDA graphs exist at the same time; by default what fits.
        runner: `"engine"` as a server runs requests, or `"eager"` as the model's forward does.
        rounds: Timing rounds.
        decode_steps: Tokens to generate after the first.
        seed: Random seed.
    """

    importance: Path | None = None
    num_plans: int = 48
    num_text_plans: int = 6
    text_tokens: Sequence[int] | None = None
    loads: Sequence[float] | None = None
    batch_sizes: Sequence[int] | None = None
    max_batch_size: int = 8
    max_tokens: int | None = None
    plans_per_group: int | None = None
    runner: Runner = "engine"
    rounds: int = 5
    decode_steps: int = 16
    seed: int = 0


_DEFAULTS = ModelProfileConfig()


@dataclass(frozen=True, kw_only=True)
class ModelProfileResult:
    """Files and summary of a profile.

    Attributes:
        profile: Profile, Parquet.
        predictor: Predictor, JSON.
        requests: Measured requests.
        failed: Failed requests.
        held_out_error: Relative error of predicted medians on held-out plans and lengths.
        tiers_left_out: Image tiers that do not fit into a request.
    """

    profile: Path
    predictor: Path
    requests: int
    failed: int
    held_out_error: float
    tiers_left_out: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return asdict(self) | {"profile": str(self.profile), "predictor": str(self.predictor)}


def profile_model(
    folder: ModelFolder,
    out_path: Path | str,
    config: ModelProfileConfig = _DEFAULTS,
    *,
    progress: Progress | None = None,
) -> ModelProfileResult:
    """Measure the latency of a model's plans and fit a predictor next to the profile.

    The predictor of `profile.parquet` is `predictor.json`, that of `NAME.parquet` is `NAME.predictor.json`.

    Args:
        folder: Model on its device.
        out_path: Parquet file; an interrupted profile is resumed.
        config: What to measure.
        progress: Called with a message and the fraction done.

    Raises:
        InputError: No plan fits into the limits, or a file of another model or device would be overwritten.
        ModelError: Plans are attached to the model.
    """
    out_path, device = Path(out_path), next(folder.model.parameters()).device
    predictor_path = _check_predictor_path(out_path, folder.model, device)
    max_tokens = config.max_tokens or min(folder.context, MAX_TOKENS)
    if max_tokens > folder.context:
        raise InputError(f"--max-tokens {max_tokens} exceeds the model's context of {folder.context} tokens")
    adapter = get_adapter(folder.model)
    space = load_plan_space(folder.model, adapter.geometry, config.importance)
    if config.importance is None:
        _LOG.warning(
            "without --importance, plans skip blocks by a heuristic; run `adaptive importance` first"
        )
    example = None if folder.image_processor is None else make_example_prompt(folder).inputs
    vision = {} if example is None else RandomPrompts(adapter, example, device="cpu").vision_tokens
    lengths = list(config.text_tokens or _default_lengths(vision, max_tokens - config.decode_steps))
    tiers = _select_tiers(vision, max(lengths), config.decode_steps + 1, max_tokens)
    tiers_left_out = [tier for tier in space.geometry.tiers if tier not in tiers]
    if not tiers:
        example = None  # No tier is measured, so requests with images are refused.
    plans = select_representative_plans(
        space,
        min(config.num_plans or len(space), len(space)),
        seed=config.seed,
        num_text_plans=config.num_text_plans,
        tiers=tiers if tiers_left_out else None,
    )
    if not plans:
        raise InputError(
            f"no plan fits into --max-tokens {max_tokens}; raise it, or measure plans without an image "
            f"(--num-text-plans {config.num_text_plans})"
        )
    runtime = PlanRuntime(adapter)
    try:
        profile = _measure(
            runtime, space, plans, out_path, config, lengths, example, max_tokens, device, progress
        )
    finally:
        runtime.remove()
    predictor = PlanLatencyPredictor.fit(profile, seed=config.seed)
    predictor.save(predictor_path)
    return ModelProfileResult(
        profile=out_path,
        predictor=predictor_path,
        requests=len(profile.successful),
        failed=len(profile.measurements) - len(profile.successful),
        held_out_error=predictor.held_out_error,
        tiers_left_out=tiers_left_out,
    )


def make_example_prompt(folder: ModelFolder) -> Prompt:
    """Make a prompt with one random image at the highest tier, of any length."""
    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "text", "text": "what"}]
    message = Message.model_validate({"role": "user", "content": parts})
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (3, 224, 224), generator=generator, dtype=torch.uint8)
    builder = PromptBuilder(folder.tokenizer, context=sys.maxsize, image_processor=folder.image_processor)
    return builder.prompt([message], [image])


def _measure(
    runtime: PlanRuntime,
    space: PlanSpace,
    plans: Sequence[Plan],
    out_path: Path,
    config: ModelProfileConfig,
    lengths: list[int],
    example: Mapping[str, Any] | None,
    max_tokens: int,
    device: torch.device,
    progress: Progress | None,
) -> PlanProfile:
    runner_options: dict[str, Any] = {"example": example, "max_tokens": max_tokens, "seed": config.seed}
    settings: dict[str, Any] = {
        "text_tokens": lengths,
        "loads": config.loads or _LOADS[config.runner],
        "rounds": config.rounds,
        "decode_steps": config.decode_steps,
        "seed": config.seed,
    }
    if config.runner == "eager":
        runner = EagerRunner(runtime, device=device, **runner_options)
        return collect_profile(
            runner,
            space,
            out_path,
            plans=plans,
            batch_sizes=config.batch_sizes or [1],
            progress=progress,
            **settings,
        )
    fraction_done = 0.0

    def report_measurement(message: str, fraction: float) -> None:
        nonlocal fraction_done
        fraction_done = fraction
        if progress is not None:
            progress(message, fraction)

    with EngineRunner(
        runtime,
        plans,
        max_batch=config.max_batch_size,
        plans_per_group=config.plans_per_group,
        mix=RequestMix(lengths=lengths, new_tokens=config.decode_steps + 1),
        progress=lambda message, _: report_measurement(message, fraction_done),
        **runner_options,
    ) as runner:
        batch_sizes = config.batch_sizes or sorted({1, config.max_batch_size})
        return collect_profile_by_group(
            runner, space, out_path, batch_sizes=batch_sizes, progress=report_measurement, **settings
        )


def _check_predictor_path(out_path: Path, model: Any, device: torch.device) -> Path:
    """Return the predictor's path; refuse to overwrite a predictor of another model or device."""
    name = "predictor.json" if out_path.name == "profile.parquet" else f"{out_path.stem}.predictor.json"
    path = out_path.with_name(name)
    if not path.exists():
        return path
    advice = "move it away, or change --out"
    try:
        metadata = PlanLatencyPredictor.load(path).metadata
    except FileFormatError as error:
        raise InputError(f"{path} would be overwritten: {error}; {advice}") from error
    for field, existing, current in (
        ("model", metadata.model_id, compute_model_id(model)),
        ("device", dict(metadata.device), get_device_facts(device)),
    ):
        if existing != current:
            raise InputError(
                f"{path} would be overwritten and has another {field} ({existing}, current: {current}); "
                f"{advice}"
            )
    return path


def _default_lengths(vision: Mapping[Tier, int], max_prompt_tokens: int) -> list[int]:
    """Choose the text tokens of prompts: as many as fit with the highest tier that leaves space for text."""
    free_tokens = [max_prompt_tokens - tokens for tokens in (*reversed(list(vision.values())), 0)]
    longest = next((tokens for tokens in free_tokens if tokens >= _SHORT_PROMPT), _LONG_PROMPT)
    return sorted({_SHORT_PROMPT, min(longest, _LONG_PROMPT)})


def _select_tiers(
    vision: Mapping[Tier, int], text_tokens: int, new_tokens: int, max_tokens: int
) -> tuple[Tier, ...]:
    """Select the tiers whose longest request fits into `max_tokens`; warn about the others."""
    request = f"{text_tokens} text tokens and {new_tokens} new tokens"
    if text_tokens + new_tokens - 1 > max_tokens:
        raise InputError(
            f"{request} exceed --max-tokens {max_tokens}; lower --text-tokens or --decode-steps, or raise "
            "--max-tokens"
        )
    tiers = select_fitting_tiers(
        vision, text_tokens=text_tokens, new_tokens=new_tokens, max_tokens=max_tokens
    )
    for tier in vision:
        if tier not in tiers:
            _LOG.warning(
                "tier %s is left out: %d vision tokens, %s exceed --max-tokens %d",
                tier,
                vision[tier],
                request,
                max_tokens,
            )
    return tiers

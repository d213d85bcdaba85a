"""Plan selection for requests with a latency budget.

A plan fits if its predicted p99 latency is at most the remaining budget. Before the vision encoder, stage 1
chooses tier and insertion position among those of fitting plans. At the insertion, stage 2 chooses among the
plans with that tier and position that still fit. Without controllers, the fitting plan of the highest
expected accuracy is chosen; without accuracies, the one with the most expert calls over all tokens. Without a
budget, the largest plan runs.

Measured accuracies have standard errors, and the maximum of many noisy values is too high. Therefore the
fitting plan with the most computation is chosen among those that are not significantly worse than the best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.controllers.cpu_policy import CpuControllers, CpuStage1Output, CpuWordEmbeddings
from sparseflow.adaptive.engine.requests.request import (
    GenerationRequest,
    InitialDecision,
    PlanDecision,
    Rejection,
)
from sparseflow.adaptive.kernels import policy_inference
from sparseflow.adaptive.plan.adapter import Adapter
from sparseflow.adaptive.plan.space import TIERS, Plan, Tier
from sparseflow.adaptive.predictor.features import CompletedStage
from sparseflow.adaptive.predictor.model import PlanLatencyPredictor
from sparseflow.adaptive.profile.plan_quality import select_pareto_plans
from sparseflow.core.checks import check_at_least, check_one_of
from sparseflow.errors import InputError

OnInfeasible = Literal["reject", "best_effort", "truncate"]
"""What happens to a request that no plan fits."""
ON_INFEASIBLE: tuple[OnInfeasible, ...] = get_args(OnInfeasible)

MAX_ENGINE_PLANS = 12
"""Default number of plans of an engine: enough to trade accuracy for latency, few enough for requests to
share batches.
"""

_MAX_STANDARD_ERRORS = 2.0
"""Standard errors by which one accuracy must exceed another to be considered higher."""
_DEFAULT_TIER_TOKENS = 256
"""Assumed vision tokens per tier step if the profile does not say."""


@dataclass(kw_only=True, eq=False)
class PlanSelector:
    """Selects plans for the requests of one model.

    Attributes:
        adapter: Adapter of the model.
        predictor: Latency predictor of the model on its device.
        controllers: Trained controllers; None to select by expected accuracy.
        plans: Plans of the predictor's space that may be selected; default: all. Tiers that the profile did
            not measure are excluded.
        plan_quality: Mean accuracy of each plan of the space; used without controllers.
        quality_samples: Number of answers of each mean; None if the accuracies are exact.
        max_total_tokens: Maximum number of tokens of prompt and answer together: plans whose tier needs more
            are not selected. Default: that of the profile's engine, or the model's context length.
        word_embeddings: Input of stage 1; created if there are controllers.

    Raises:
        InputError: The parts belong to different models or plan spaces.
        MissingExtraError: Numba is missing.
    """

    adapter: Adapter
    predictor: PlanLatencyPredictor
    controllers: Controllers | None = None
    plans: Sequence[Plan] | None = None
    plan_quality: Sequence[float] | None = None
    quality_samples: int | None = None
    max_total_tokens: int | None = None
    word_embeddings: CpuWordEmbeddings | None = field(default=None, repr=False)
    all_plans: tuple[Plan, ...] = field(init=False, repr=False)
    """Plans of the predictor's space."""
    allowed: np.ndarray = field(init=False, repr=False)
    """Plans that may be selected, [plans] bool."""
    stage1_choices: np.ndarray = field(init=False, repr=False)
    """Indices of tier and insertion position of each plan, [2, plans] int64."""
    vision: np.ndarray = field(init=False, repr=False)
    """Vision tokens per image of each plan, [plans] float64."""
    expert_calls: np.ndarray = field(init=False, repr=False)
    """Experts that one token visits under each plan, [plans] int64."""
    cpu_controllers: CpuControllers | None = field(init=False, repr=False)
    """Copy of the controllers at construction."""

    def __post_init__(self) -> None:
        space = self.predictor.space
        if space.geometry != self.adapter.geometry:
            raise InputError(f"the predictor has {space.geometry}, but the model {self.adapter.geometry}")
        if self.controllers is not None and self.controllers.space != space:
            raise InputError("controllers and predictor have different plans; train or profile again")
        if self.plan_quality is not None and len(self.plan_quality) != len(space):
            raise InputError(
                f"`plan_quality` has {len(self.plan_quality)} values, but there are {len(space)} plans"
            )
        all_plans = space.plans
        known = {plan: index for index, plan in enumerate(all_plans)}
        selectable = all_plans if self.plans is None else self.plans
        unknown = [plan.id for plan in selectable if plan not in known]
        if unknown or not selectable:
            named = f"{', '.join(unknown)} is not" if unknown else "none is given"
            raise InputError(f"`plans` must be some of the predictor's: {named}")
        allowed = np.zeros(len(space), dtype=bool)
        allowed[[known[plan] for plan in selectable]] = True
        if self.predictor.tiers:
            allowed &= np.array([plan.tier in self.predictor.tiers for plan in all_plans])
        if not allowed.any():
            measured_tiers = ", ".join(self.predictor.tiers)
            raise InputError(f"`plans` have tiers that the profile did not measure; it has {measured_tiers}")
        actions = [space.action(plan) for plan in all_plans]
        metadata, word_embeddings = self.predictor.metadata, self.word_embeddings
        if word_embeddings is None and self.controllers is not None:
            word_embeddings = CpuWordEmbeddings(self.adapter)
        if word_embeddings is not None and word_embeddings.adapter is not self.adapter:
            raise InputError("`word_embeddings` belong to another model; omit them")
        if word_embeddings is not None and self.controllers is not None and word_embeddings.width is not None:
            width = self.controllers.width
            if word_embeddings.width != width:
                raise InputError(
                    f"the controllers need width {width}, but this model has {word_embeddings.width}; "
                    "train them again"
                )
        if self.max_total_tokens is None:
            self.max_total_tokens = metadata.config.get("max_tokens", self.adapter.context)
        self.word_embeddings = word_embeddings
        self.all_plans, self.allowed = all_plans, allowed
        self.stage1_choices = np.array([(action.tier, action.position) for action in actions]).T
        self.vision = np.array(
            [_tokens_per_image(metadata.vision_tokens, plan) for plan in all_plans], dtype=float
        )
        self.expert_calls = np.array([space.geometry.expert_calls(plan) for plan in all_plans])
        self.cpu_controllers = None if self.controllers is None else CpuControllers(self.controllers)

    def make_policy(
        self,
        *,
        text_tokens: int,
        images: float,
        on_infeasible: OnInfeasible = "best_effort",
        batch: int = 1,
        load: float = 0.0,
        vision: Mapping[Tier, int] | None = None,
        input_ids: Tensor | None = None,
    ) -> RequestPolicy:
        """Create the policy of one request.

        Args:
            text_tokens: Prompt tokens that do not belong to images.
            images: Number of images of the profile's size (`ProfileMetadata.images`).
            on_infeasible: What happens if no plan fits: `"reject"`; `"best_effort"` runs the fastest plan;
                `"truncate"` runs the fastest plan for as many tokens as fit.
            batch: Requests that run concurrently, including this one.
            load: Fraction of the device that other work uses, 0 to 1.
            vision: Tokens of all its images at each tier, if known.
            input_ids: Prompt, [1, tokens] int64 on the CPU; default: the request's, which may have to be
                copied from the device.

        Raises:
            InputError: `on_infeasible` is invalid.
        """
        check_one_of(ON_INFEASIBLE, on_infeasible=on_infeasible)
        return RequestPolicy(
            selector=self, text_tokens=text_tokens, images=images, on_infeasible=on_infeasible, batch=batch,
            load=load, vision=vision, input_ids=input_ids,
        )  # fmt: skip

    def estimate_quality(self, *, text_tokens: int, images: float) -> np.ndarray:
        """Expected quality of each plan for a prompt, higher is better, [plans].

        Without `plan_quality`, the number of expert calls on the prompt, which is free of measurement noise.
        """
        if self.plan_quality is not None:
            return np.asarray(self.plan_quality)
        return self._count_expert_calls(text_tokens, images)

    def _count_expert_calls(self, text_tokens: int, images: float) -> np.ndarray:
        """Number of expert calls on a prompt, [plans]."""
        return (text_tokens + images * self.vision) * self.expert_calls

    def choose_best(self, among: np.ndarray, p50: np.ndarray, *, text_tokens: int, images: float) -> int:
        """Number of the plan with the highest expected quality, not chosen by noise.

        Args:
            among: Plans to choose among, [plans] bool.
            p50: Median latency of each plan, [plans]; ties select the faster plan.
            text_tokens: Prompt tokens that do not belong to images.
            images: Number of images of the profile's size.
        """
        indices = np.flatnonzero(among)
        quality = self.estimate_quality(text_tokens=text_tokens, images=images)[indices]
        if self.plan_quality is not None and self.quality_samples is not None:
            # Smoothed, because an accuracy of 1 has an error as well. Answers to the same questions are
            # positively correlated, so the error of a difference is an upper bound.
            smoothed = (quality * self.quality_samples + 1.0) / (self.quality_samples + 2.0)
            variance = smoothed * (1.0 - smoothed) / self.quality_samples
            best = quality.argmax()
            error = np.sqrt(variance + variance[best])
            indices = indices[quality >= quality[best] - _MAX_STANDARD_ERRORS * error]
            quality = self._count_expert_calls(text_tokens, images)[indices]
        return int(indices[np.lexsort((p50[indices], -quality))[0]])

    def plans_within_context(
        self, *, text_tokens: int, images: float, new_tokens: int, vision: Mapping[Tier, int] | None = None
    ) -> np.ndarray:
        """Plans that may be selected and leave room for a request's tokens, [plans] bool.

        If no plan does, the plans with the fewest vision tokens are returned; the error raised later reports
        the token count.

        Args:
            text_tokens: Prompt tokens that do not belong to images.
            images: Number of images of the profile's size, used if `vision` is not given.
            new_tokens: Tokens of the answer.
            vision: Tokens of all images at each tier, if known.
        """
        if self.max_total_tokens is None:
            return self.allowed
        num_images, tokens_per_image = float(images), self.vision
        if vision:
            of_tier = np.array([float(vision.get(tier, math.inf)) for tier in TIERS])
            num_images, tokens_per_image = 1.0, of_tier[self.stage1_choices[0]]
        capacity = self.max_total_tokens - text_tokens - new_tokens + 1
        return policy_inference.load_kernels().select_with_capacity(
            tokens_per_image, num_images, self.allowed, float(capacity)
        )

    def largest_plan(self, among: np.ndarray) -> int:
        """Number of the plan with the most computation among some, [plans] bool."""
        plans = self.all_plans
        return max(
            np.flatnonzero(among).tolist(),
            key=lambda index: (_tier_rank(plans[index]), len(plans[index].blocks), plans[index].top_k),
        )

    def select_front(
        self, max_plans: int = MAX_ENGINE_PLANS, *, text_tokens: int = 32, new_tokens: int = 16
    ) -> PlanSelector:
        """Copy that selects among few of the plans.

        With controllers, these are the plans chosen most often at validation; otherwise the Pareto front of
        latency and quality. The fastest and the largest plan are always included.

        Args:
            max_plans: Maximum number of plans, at least 2.
            text_tokens: Text tokens of the prompt for which latencies are compared; it has an image if the
                profile has.
            new_tokens: Tokens of its answer.

        Raises:
            InputError: `max_plans` is below 2.
        """
        check_at_least(2, max_plans=max_plans)
        images = int(bool(self.predictor.metadata.vision_tokens))
        ms, _ = self.predictor.predict_all(text_tokens=text_tokens, images=images, new_tokens=new_tokens)
        fitting = self.plans_within_context(text_tokens=text_tokens, images=images, new_tokens=new_tokens)
        among = np.flatnonzero(fitting)
        frequency = (
            np.zeros(0) if self.controllers is None else self.controllers.plan_frequency.numpy(force=True)
        )
        ends = {int(among[ms[among].argmin()]), self.largest_plan(fitting)}
        if max_plans == 2:
            selected_plans = []
        elif frequency.size and frequency[among].any():
            by_frequency = among[np.argsort(-frequency[among], kind="stable")]
            selected_plans = [
                int(index) for index in by_frequency if frequency[index] > 0.0 and index not in ends
            ][: max_plans - len(ends)]
        else:
            best = [
                self.choose_best(fitting & (ms <= limit_ms), ms, text_tokens=text_tokens, images=images)
                for limit_ms in np.unique(ms[among])
            ]
            # Each of them is the choice for some budget, so none is dominated.
            front = list(dict.fromkeys(best))
            selected_plans = select_pareto_plans(
                front, ms[front].tolist(), list(range(len(front))), max_plans - 1
            )
        selected = sorted({*selected_plans, *ends}, key=lambda index: ms[index])
        return replace(self, plans=[self.all_plans[index] for index in selected])


@dataclass(kw_only=True, eq=False)
class RequestPolicy:
    """Plan selection for one request; implements `engine.requests.request.PlanDecider`."""

    selector: PlanSelector
    text_tokens: int
    images: float
    on_infeasible: OnInfeasible
    batch: int
    load: float
    vision: Mapping[Tier, int] | None = None
    input_ids: Tensor | None = None
    _stage1_output: CpuStage1Output | None = None
    _candidates: np.ndarray | None = None
    _decided_plan: int | None = None
    _new_tokens: int = 0
    _insertion_prediction: tuple[np.ndarray, np.ndarray] | None = None

    def choose_initial(self, request: GenerationRequest, remaining_ms: float) -> InitialDecision | Rejection:
        """Choose tier and insertion position, or reject the request."""
        # A request that ran out of memory starts over.
        self._stage1_output = self._decided_plan = self._insertion_prediction = None
        p50, p99 = self._predict(request.max_new_tokens, "receipt")
        self._new_tokens = request.max_new_tokens
        self._candidates = self.selector.plans_within_context(
            text_tokens=self.text_tokens, images=self.images, new_tokens=self._new_tokens, vision=self.vision
        )
        fits = self._candidates & (p99 <= remaining_ms)
        if not fits.any():
            return self._handle_infeasible(request, remaining_ms)
        cpu_controllers, word_embeddings = self.selector.cpu_controllers, self.selector.word_embeddings
        if math.isinf(remaining_ms):
            index = self._decided_plan = self.selector.largest_plan(self._candidates)
        elif cpu_controllers is None:
            index = self._decided_plan = self.selector.choose_best(
                fits, p50, text_tokens=self.text_tokens, images=self.images
            )
        else:
            assert word_embeddings is not None
            ids = request.inputs["input_ids"] if self.input_ids is None else self.input_ids
            # Both stages were trained with the remaining budget at this point.
            self._stage1_output = cpu_controllers.choose_stage1(
                word_embeddings.compute_feature(ids), remaining_ms, fits
            )
            index = self._stage1_output.plan
        return self._make_initial_decision(index, p50, request)

    def prepare(self, request: GenerationRequest) -> None:
        """Predict latencies at the insertion, and run `choose_plan` once to warm the CPU cache."""
        self._insertion_prediction = self._predict(self._new_tokens, "insertion")
        cpu_controllers = self.selector.cpu_controllers
        zero_token = torch.zeros(1 if cpu_controllers is None else cpu_controllers.width, device="cpu")
        self.choose_plan(zero_token, request, math.inf)

    def choose_plan(
        self, latency_token: Tensor, request: GenerationRequest, remaining_ms: float
    ) -> PlanDecision:
        """Choose the plan, with the tier and position chosen before."""
        p50, p99 = self._insertion_prediction or self._predict(self._new_tokens, "insertion")
        if self._stage1_output is None:
            assert self._decided_plan is not None
            index = self._decided_plan
        else:
            index = self._choose_stage2(self._stage1_output, latency_token, p99, remaining_ms)
        return PlanDecision(
            plan=self._get_plan(index),
            max_new_tokens=self._new_tokens,
            feasible=bool(p99[index] <= remaining_ms),
            predicted_ms=_get_waited_ms(request) + float(p50[index]),
        )

    def _choose_stage2(
        self, stage1: CpuStage1Output, latency_token: Tensor, p99: np.ndarray, remaining_ms: float
    ) -> int:
        """Number of a plan with the tier and position chosen by stage 1."""
        assert self._candidates is not None and self.selector.cpu_controllers is not None
        tier, position = self.selector.stage1_choices
        candidates = self._candidates & (tier == stage1.tier) & (position == stage1.position)
        fits = candidates & (p99 <= remaining_ms)
        if not fits.any():
            # Time was lost in between: choose the fastest remaining plan.
            return int(np.flatnonzero(candidates)[p99[candidates].argmin()])
        return self.selector.cpu_controllers.choose_stage2(
            latency_token.float().numpy(force=True), stage1, fits
        )

    def _predict(self, new_tokens: int, after: CompletedStage) -> tuple[np.ndarray, np.ndarray]:
        return self.selector.predictor.predict_all(
            text_tokens=self.text_tokens, images=self.images, new_tokens=new_tokens, batch=self.batch,
            load=self.load, after=after,
        )  # fmt: skip

    def _handle_infeasible(
        self, request: GenerationRequest, remaining_ms: float
    ) -> InitialDecision | Rejection:
        p50, p99 = self._predict(request.max_new_tokens, "receipt")
        assert self._candidates is not None
        among = np.flatnonzero(self._candidates)
        index = int(among[p99[among].argmin()])
        min_budget_ms = _get_waited_ms(request) + float(p99[index])
        rejection = Rejection(reason="no plan keeps the budget", least_ms=min_budget_ms)
        if self.on_infeasible == "reject":
            return rejection
        tokens = request.max_new_tokens
        if self.on_infeasible == "truncate":
            tokens = self._max_feasible_tokens(index, tokens, remaining_ms)
            if tokens == 0:
                return replace(rejection, reason="no plan keeps the budget, not even for one token")
            self._new_tokens = tokens
            p50, _ = self._predict(tokens, "receipt")
        self._decided_plan = index
        choice = self._make_initial_decision(index, p50, request)
        truncated = self.on_infeasible == "truncate"
        return replace(choice, feasible=truncated, max_new_tokens=tokens if truncated else None)

    def _max_feasible_tokens(self, index: int, limit: int, remaining_ms: float) -> int:
        """Number of tokens of a plan that fit, 0 to `limit`."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self._predict(middle, "receipt")[1][index] <= remaining_ms:
                low = middle
            else:
                high = middle - 1
        return low

    def _make_initial_decision(
        self, index: int, p50: np.ndarray, request: GenerationRequest
    ) -> InitialDecision:
        plan = self._get_plan(index)
        predicted_ms = _get_waited_ms(request) + float(p50[index])
        return InitialDecision(
            tier=plan.tier, insertion_position=plan.insertion_position, predicted_ms=predicted_ms
        )

    def _get_plan(self, index: int) -> Plan:
        plan = self.selector.all_plans[index]
        return plan if self.images else replace(plan, tier=None)


def _get_waited_ms(request: GenerationRequest) -> float:
    return (time.perf_counter() - request.received_s) * 1e3


def _tier_rank(plan: Plan) -> int:
    return -1 if plan.tier is None else TIERS.index(plan.tier)


def _tokens_per_image(of_image: Mapping[Tier, int], plan: Plan) -> int:
    # Without token counts in the profile only the order of the tiers is known.
    return (
        0
        if plan.tier is None
        else of_image.get(plan.tier, _DEFAULT_TIER_TOKENS * (1 + TIERS.index(plan.tier)))
    )

"""Which plan keeps a request's budget: the predictor says which fit, the controllers which of them is best.

A plan fits where what 99 of 100 such requests stay below is no more than what is left of the budget. Before
the vision encoder, Stage 1 chooses tier and insertion position among those that some fitting plan begins
with. At the insertion, with what is left by then, Stage 2 chooses among the fitting plans that begin so.
Without controllers the plan of the highest worth that fits is taken; without anything to tell worth by, the
one that does most, as calls of experts over all tokens. Without a budget everything runs.
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
from sparseflow.adaptive.predictor.features import After
from sparseflow.adaptive.predictor.model import PlanLatencyPredictor
from sparseflow.adaptive.profile.plan_quality import pareto
from sparseflow.errors import InputError

OnInfeasible = Literal["reject", "best_effort", "truncate"]
"""What becomes of a request that no plan fits."""
ON_INFEASIBLE: tuple[OnInfeasible, ...] = get_args(OnInfeasible)

FEW = 12
"""Plans of an engine: enough to trade quality for time, and few enough for requests to meet in a batch."""

_CROP = 256
"""Vision tokens of a tier more, where nothing tells."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanSelector:
    """Chooses plans for the requests of one model.

    Attributes:
        adapter: Of the model.
        predictor: Of the model on its device.
        controllers: Both stages; None to go by worth alone.
        plans: Those that may be chosen, of the predictor's space; by default all of it. Of tiers that the
            profile left out none is.
        worth: For each plan of the predictor's space, how good it is, as its mean accuracy; used without
            controllers.
        most_tokens: Of a prompt and its answer together: plans whose tier makes more of a request are not
            chosen. By default those of the profile's engine, or that the model has positions for.
        words: What Stage 1 looks at; made where there are controllers.

    Raises:
        InputError: The parts are of different models or plans.
        MissingExtraError: Numba is missing.
    """

    adapter: Adapter
    predictor: PlanLatencyPredictor
    controllers: Controllers | None = None
    plans: Sequence[Plan] | None = None
    worth: Sequence[float] | None = None
    most_tokens: int | None = None
    words: CpuWordEmbeddings | None = field(default=None, repr=False)
    every: tuple[Plan, ...] = field(init=False, repr=False)
    """The predictor's plans."""
    allowed: np.ndarray = field(init=False, repr=False)
    """Which of them may be chosen, [plans] bool."""
    begins: np.ndarray = field(init=False, repr=False)
    """Their tiers and insertion positions, as indices: [2, plans] int64."""
    vision: np.ndarray = field(init=False, repr=False)
    """Vision tokens of an image under each, [plans] float64."""
    calls: np.ndarray = field(init=False, repr=False)
    """Experts that a token goes to under each, [plans] int64."""
    host: CpuControllers | None = field(init=False, repr=False)
    """The controllers as they were when this was made."""

    def __post_init__(self) -> None:
        space = self.predictor.space
        if space.geometry != self.adapter.geometry:
            raise InputError(f"the predictor is of {space.geometry}, the model of {self.adapter.geometry}")
        if self.controllers is not None and self.controllers.space != space:
            raise InputError("controllers and predictor are of different plans; train or profile anew")
        if self.worth is not None and len(self.worth) != len(space):
            raise InputError(f"`worth` has {len(self.worth)} values; there are {len(space)} plans")
        every = space.plans
        known = {plan: at for at, plan in enumerate(every)}
        chosen = every if self.plans is None else self.plans
        unknown = [plan.id for plan in chosen if plan not in known]
        if unknown or not chosen:
            named = f"{', '.join(unknown)} is not" if unknown else "none is given"
            raise InputError(f"`plans` must be some of the predictor's: {named}")
        allowed = np.zeros(len(space), dtype=bool)
        allowed[[known[plan] for plan in chosen]] = True
        if self.predictor.tiers:
            allowed &= np.array([plan.tier in self.predictor.tiers for plan in every])
        if not allowed.any():
            there = ", ".join(self.predictor.tiers)
            raise InputError(f"`plans` are of tiers that the profile did not measure; it has {there}")
        actions = [space.action(plan) for plan in every]
        about, words = self.predictor.about, self.words
        if words is None and self.controllers is not None:
            words = CpuWordEmbeddings(self.adapter)
        if words is not None and words.adapter is not self.adapter:
            raise InputError("`words` are of another model; leave them out")
        if words is not None and self.controllers is not None and words.width is not None:
            width = self.controllers.width
            if words.width != width:
                raise InputError(
                    f"the controllers are of a model of width {width}, this one has {words.width}; train anew"
                )
        most = about.how.get("max_tokens", self.adapter.context)
        for name, value in (
            ("most_tokens", most if self.most_tokens is None else self.most_tokens),
            ("every", every),
            ("allowed", allowed),
            ("begins", np.array([(each.tier, each.position) for each in actions]).T),
            ("vision", np.array([_vision(about.vision_tokens, plan) for plan in every], dtype=float)),
            ("calls", np.array([space.geometry.expert_calls(plan) for plan in every])),
            ("host", None if self.controllers is None else CpuControllers(self.controllers)),
            ("words", words),
        ):
            object.__setattr__(self, name, value)

    def decider(
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
        """Who decides about one request.

        Args:
            text_tokens: Tokens of its prompt that are not of images.
            images: How many it has, of the size of the profile's (`ProfileMetadata.images`).
            on_infeasible: What becomes of it where no plan fits: `"reject"`, `"best_effort"` runs the
                quickest plan, `"truncate"` runs that for as many tokens as fit.
            batch: Requests that run when its turn comes, itself included.
            load: Share of the device that others want, 0 to 1.
            vision: Tokens of all its images at each tier, where that is known.
            input_ids: Of its prompt, [1, tokens] int64 on the CPU; by default those of the request, which may
                have to be fetched from the device.

        Raises:
            InputError: `on_infeasible` is something else.
        """
        if on_infeasible not in ON_INFEASIBLE:
            raise InputError(
                f"`on_infeasible` (={on_infeasible!r}) must be one of {', '.join(ON_INFEASIBLE)}"
            )
        return RequestPolicy(
            chooser=self, text_tokens=text_tokens, images=images, on_infeasible=on_infeasible, batch=batch,
            load=load, vision=vision, input_ids=input_ids,
        )  # fmt: skip

    def worths(self, *, text_tokens: int, images: float) -> np.ndarray:
        """What plans are worth to a prompt, more is better: [plans].

        Without `worth` it is what they do to the prompt, in calls of experts: a count, so no noise of timing
        ranks them.
        """
        if self.worth is not None:
            return np.asarray(self.worth)
        return (text_tokens + images * self.vision) * self.calls

    def room(
        self, *, text_tokens: int, images: float, new_tokens: int, vision: Mapping[Tier, int] | None = None
    ) -> np.ndarray:
        """Which plans may be chosen for a request and leave it room for its tokens: [plans] bool.

        Where none does, those that come nearest: the error that follows tells how many tokens there are.

        Args:
            text_tokens: As of `decider`, as the others.
            images: In proportion to which tokens are counted where `vision` does not tell.
            new_tokens: Of the answer.
            vision: As of `decider`.
        """
        if self.most_tokens is None:
            return self.allowed
        times, seen = float(images), self.vision
        if vision:
            of_tier = np.array([float(vision.get(tier, math.inf)) for tier in TIERS])
            times, seen = 1.0, of_tier[self.begins[0]]
        most = self.most_tokens - text_tokens - new_tokens + 1
        return policy_inference.kernels().with_room(seen, times, self.allowed, float(most))

    def fullest(self, among: np.ndarray) -> int:
        """The number of the plan that does most, of some: [plans] bool."""
        plans = self.every
        return max(
            np.flatnonzero(among).tolist(),
            key=lambda at: (_tier(plans[at]), len(plans[at].blocks), plans[at].top_k),
        )

    def only(self, plans: Sequence[Plan]) -> PlanSelector:
        """The same, choosing among some plans."""
        return replace(self, plans=plans)

    def few(self, most: int = FEW, *, text_tokens: int = 32, new_tokens: int = 16) -> PlanSelector:
        """The same, choosing among few of its plans.

        With controllers, those that they chose most often where they were trained; else those that no other
        one beats in time and worth. The quickest plan and the one that does most are always kept.

        Args:
            most: How many at most, 2 or more.
            text_tokens: Of the prompt that times are compared for; it has an image where the profile has.
            new_tokens: Of its answer.

        Raises:
            InputError: `most` is out of range.
        """
        if most < 2:
            raise InputError(
                f"`most` (={most}) must be at least 2: the quickest plan, and the one that does most"
            )
        images = int(bool(self.predictor.about.vision_tokens))
        ms, _ = self.predictor.predict_all(text_tokens=text_tokens, images=images, new_tokens=new_tokens)
        room = self.room(text_tokens=text_tokens, images=images, new_tokens=new_tokens)
        among = np.flatnonzero(room)
        chosen = np.zeros(0) if self.controllers is None else self.controllers.chosen.numpy(force=True)
        ends = {int(among[ms[among].argmin()]), self.fullest(room)}
        if most == 2:
            kept = []
        elif chosen.size and chosen[among].any():
            often = among[np.argsort(-chosen[among], kind="stable")]
            kept = [int(at) for at in often if chosen[at] > 0.0 and at not in ends][: most - len(ends)]
        else:
            worths = self.worths(text_tokens=text_tokens, images=images)
            plans = [self.every[at] for at in among]
            front = pareto(plans, ms[among].tolist(), worths[among].tolist(), most - 1)
            kept = [self.every.index(plan) for plan in front]
        return self.only([self.every[at] for at in sorted({*kept, *ends}, key=lambda at: ms[at])])


@dataclass(kw_only=True, eq=False)
class RequestPolicy:
    """Decides about one request; a `runtime.requests.PlanDecider`."""

    chooser: PlanSelector
    text_tokens: int
    images: float
    on_infeasible: OnInfeasible
    batch: int
    load: float
    vision: Mapping[Tier, int] | None = None
    input_ids: Tensor | None = None
    _begun: CpuStage1Output | None = None
    _room: np.ndarray | None = None
    _settled: int | None = None
    _new_tokens: int = 0
    _inserted: tuple[np.ndarray, np.ndarray] | None = None

    def first(self, request: GenerationRequest, remaining_ms: float) -> InitialDecision | Rejection:
        """Tier and insertion position, or a refusal."""
        # A request that found no memory is asked about once more.
        self._begun = self._settled = self._inserted = None
        p50, p99 = self._predicted(request.max_new_tokens, "receipt")
        self._new_tokens = request.max_new_tokens
        self._room = self.chooser.room(
            text_tokens=self.text_tokens, images=self.images, new_tokens=self._new_tokens, vision=self.vision
        )
        fits = self._room & (p99 <= remaining_ms)
        if not fits.any():
            return self._infeasible(request, remaining_ms)
        host = self.chooser.host
        if math.isinf(remaining_ms):
            self._settled = self.chooser.fullest(self._room)
        elif host is None:
            self._settled = self._worthiest(fits, p50)
        else:
            words = self.chooser.words
            assert words is not None
            ids = request.inputs["input_ids"] if self.input_ids is None else self.input_ids
            # What is left now is what both stages were trained to be told.
            self._begun = host.begin(words.feature(ids), remaining_ms, fits)
            return self._choice(self._begun.plan, p50, request)
        return self._choice(self._settled, p50, request)

    def prepare(self, request: GenerationRequest) -> None:
        """Predict what will be left, and go through `second` once: what it needs is then near."""
        self._inserted = self._predicted(self._new_tokens, "insertion")
        host = self.chooser.host
        nothing = torch.zeros(1 if host is None else host.width, device="cpu")
        self.second(nothing, request, math.inf)

    def second(self, latency_token: Tensor, request: GenerationRequest, remaining_ms: float) -> PlanDecision:
        """The plan, of the tier and position that were chosen."""
        p50, p99 = self._inserted or self._predicted(self._new_tokens, "insertion")
        if self._begun is None:
            assert self._settled is not None
            return self._decision(self._settled, request, p50, p99, remaining_ms)
        begun = self._beginning()
        fits = begun & (p99 <= remaining_ms)
        if not fits.any():
            # Time was lost since: what is quickest of what is left to choose.
            at = int(np.flatnonzero(begun)[p99[begun].argmin()])
            return self._decision(at, request, p50, p99, remaining_ms)
        assert self.chooser.host is not None
        at = self.chooser.host.finish(latency_token.float().numpy(force=True), self._begun, fits)
        return self._decision(at, request, p50, p99, remaining_ms)

    def _beginning(self) -> np.ndarray:
        """Which plans may be chosen and begin as was chosen."""
        assert self._begun is not None and self._room is not None
        tier, position = self.chooser.begins
        return self._room & (tier == self._begun.tier) & (position == self._begun.position)

    def _predicted(self, new_tokens: int, after: After) -> tuple[np.ndarray, np.ndarray]:
        return self.chooser.predictor.predict_all(
            text_tokens=self.text_tokens, images=self.images, new_tokens=new_tokens, batch=self.batch,
            load=self.load, after=after,
        )  # fmt: skip

    def _worthiest(self, fits: np.ndarray, p50: np.ndarray) -> int:
        worth = self.chooser.worths(text_tokens=self.text_tokens, images=self.images)
        among = np.flatnonzero(fits)
        # Of equal worth, the quicker.
        return int(among[np.lexsort((p50[among], -worth[among]))[0]])

    def _infeasible(self, request: GenerationRequest, remaining_ms: float) -> InitialDecision | Rejection:
        p50, p99 = self._predicted(request.max_new_tokens, "receipt")
        assert self._room is not None
        among = np.flatnonzero(self._room)
        at = int(among[p99[among].argmin()])
        least_ms = _waited_ms(request) + float(p99[at])
        refusal = Rejection(reason="no plan keeps the budget", least_ms=least_ms)
        if self.on_infeasible == "reject":
            return refusal
        tokens = request.max_new_tokens
        if self.on_infeasible == "truncate":
            tokens = self._most_tokens(at, tokens, remaining_ms)
            if tokens == 0:
                return replace(refusal, reason="no plan keeps the budget, not even for one token")
            self._new_tokens = tokens
            p50, _ = self._predicted(tokens, "receipt")
        self._settled = at
        choice = self._choice(at, p50, request)
        truncated = self.on_infeasible == "truncate"
        return replace(choice, feasible=truncated, max_new_tokens=tokens if truncated else None)

    def _most_tokens(self, at: int, most: int, remaining_ms: float) -> int:
        """How many tokens of a plan fit: 0 to `most`."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self._predicted(middle, "receipt")[1][at] <= remaining_ms:
                low = middle
            else:
                high = middle - 1
        return low

    def _choice(self, at: int, p50: np.ndarray, request: GenerationRequest) -> InitialDecision:
        plan = self._plan(at)
        predicted_ms = _waited_ms(request) + float(p50[at])
        return InitialDecision(
            tier=plan.tier, insertion_position=plan.insertion_position, predicted_ms=predicted_ms
        )

    def _decision(
        self, at: int, request: GenerationRequest, p50: np.ndarray, p99: np.ndarray, remaining_ms: float
    ) -> PlanDecision:
        return PlanDecision(
            plan=self._plan(at),
            max_new_tokens=self._new_tokens,
            feasible=bool(p99[at] <= remaining_ms),
            predicted_ms=_waited_ms(request) + float(p50[at]),
        )

    def _plan(self, at: int) -> Plan:
        plan = self.chooser.every[at]
        return plan if self.images else replace(plan, tier=None)


def _waited_ms(request: GenerationRequest) -> float:
    return (time.perf_counter() - request.received_s) * 1e3


def _tier(plan: Plan) -> int:
    return -1 if plan.tier is None else TIERS.index(plan.tier)


def _vision(of_image: Mapping[Tier, int], plan: Plan) -> int:
    # Profiles need not say how many tokens a tier has; only the tiers' order is known then.
    return 0 if plan.tier is None else of_image.get(plan.tier, _CROP * (1 + TIERS.index(plan.tier)))

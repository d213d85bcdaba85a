"""Which plan keeps a request's budget: the predictor says which fit, the controllers which of them is best.

A plan fits where what 99 of 100 such requests stay below is no more than what is left of the budget. Before
the vision encoder, Stage 1 chooses tier and insertion position among those that some fitting plan begins
with. At the insertion, with what is left by then, Stage 2 chooses among the fitting plans that begin so.
Without controllers the plan of the highest worth that fits is taken; without anything to tell worth by, the
one that takes longest, which does most. Without a budget everything runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from sparseflow.adaptive.adapters.base import Adapter
from sparseflow.adaptive.controllers import Controllers
from sparseflow.adaptive.features import language_features
from sparseflow.adaptive.plan import TIERS, Plan
from sparseflow.adaptive.predictor.ask import After
from sparseflow.adaptive.predictor.model import Predictor
from sparseflow.adaptive.runtime.requests import Choice, Decision, Refusal, Request
from sparseflow.errors import InputError

OnInfeasible = Literal["reject", "best_effort", "truncate"]
"""What becomes of a request that no plan fits."""
ON_INFEASIBLE: tuple[OnInfeasible, ...] = get_args(OnInfeasible)


@dataclass(frozen=True, kw_only=True, eq=False)
class Chooser:
    """Chooses plans for the requests of one model.

    Attributes:
        adapter: Of the model.
        predictor: Of the model on its device.
        controllers: Both stages; None to go by worth alone.
        plans: Those that may be chosen, of the predictor's space; by default all of it.
        worth: For each plan of the predictor's space, how good it is, as its mean accuracy; used without
            controllers.

    Raises:
        InputError: The parts are of different models or plans.
    """

    adapter: Adapter
    predictor: Predictor
    controllers: Controllers | None = None
    plans: Sequence[Plan] | None = None
    worth: Sequence[float] | None = None
    _allowed: np.ndarray = field(init=False, repr=False)
    _begins: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        space = self.predictor.space
        if space.geometry != self.adapter.geometry:
            raise InputError(f"the predictor is of {space.geometry}, the model of {self.adapter.geometry}")
        if self.controllers is not None and self.controllers.space != space:
            raise InputError("controllers and predictor are of different plans; train or profile anew")
        if self.worth is not None and len(self.worth) != len(space):
            raise InputError(f"`worth` has {len(self.worth)} values; there are {len(space)} plans")
        known = {plan: at for at, plan in enumerate(space.plans)}
        chosen = space.plans if self.plans is None else self.plans
        unknown = [plan.id for plan in chosen if plan not in known]
        if unknown or not chosen:
            named = f"{', '.join(unknown)} is not" if unknown else "none is given"
            raise InputError(f"`plans` must be some of the predictor's: {named}")
        allowed = np.zeros(len(space), dtype=bool)
        allowed[[known[plan] for plan in chosen]] = True
        actions = [space.action(plan) for plan in space.plans]
        object.__setattr__(self, "_allowed", allowed)
        object.__setattr__(self, "_begins", np.array([(each.tier, each.position) for each in actions]))

    def decider(
        self,
        *,
        text_tokens: int,
        images: int,
        on_infeasible: OnInfeasible = "best_effort",
        batch: int = 1,
        load: float = 0.0,
    ) -> Budgeted:
        """Who decides about one request.

        Args:
            text_tokens: Tokens of its prompt that are not of images.
            images: How many it has.
            on_infeasible: What becomes of it where no plan fits: `"reject"`, `"best_effort"` runs the
                quickest plan, `"truncate"` runs that for as many tokens as fit.
            batch: Requests that will be decoded together with it, itself included.
            load: Share of the device that others want, 0 to 1.

        Raises:
            InputError: `on_infeasible` is something else.
        """
        if on_infeasible not in ON_INFEASIBLE:
            raise InputError(
                f"`on_infeasible` (={on_infeasible!r}) must be one of {', '.join(ON_INFEASIBLE)}"
            )
        return Budgeted(
            chooser=self, text_tokens=text_tokens, images=images, on_infeasible=on_infeasible, batch=batch,
            load=load,
        )  # fmt: skip

    def only(self, plans: Sequence[Plan]) -> Chooser:
        """The same, choosing among some plans."""
        return replace(self, plans=plans)

    def allowed(self, begun: Tensor | None = None) -> np.ndarray:
        """Which plans of the space may be chosen: [plans] bool.

        Args:
            begun: Tier and position that they must begin with, as indices: [1, 2].
        """
        if begun is None:
            return self._allowed
        return self._allowed & (self._begins == begun.numpy(force=True)).all(1)


@dataclass(kw_only=True, eq=False)
class Budgeted:
    """Decides about one request; a `runtime.requests.Decider`."""

    chooser: Chooser
    text_tokens: int
    images: int
    on_infeasible: OnInfeasible
    batch: int
    load: float
    _begun: Tensor | None = None
    _budget_ms: Tensor | None = None
    _settled: int | None = None
    _new_tokens: int = 0

    def first(self, request: Request, remaining_ms: float) -> Choice | Refusal:
        """Tier and insertion position, or a refusal."""
        p50, p99 = self._predicted(request.max_new_tokens, "receipt")
        self._new_tokens = request.max_new_tokens
        fits = self.chooser.allowed() & (p99 <= remaining_ms)
        if not fits.any():
            return self._infeasible(request, remaining_ms)
        if math.isinf(remaining_ms):
            self._settled = self._full()
        elif self.chooser.controllers is None:
            self._settled = self._worthiest(fits, p50)
        else:
            # What is left now is what both stages were trained to be told.
            self._budget_ms = torch.tensor([remaining_ms])
            language = language_features(self.chooser.adapter, request.inputs["input_ids"])
            self._begun = self.chooser.controllers.begin(
                language, self._budget_ms, allowed=torch.from_numpy(fits)[None]
            )
            return self._choice(
                int(np.flatnonzero(self.chooser.allowed(self._begun) & fits)[0]), p50, request
            )
        return self._choice(self._settled, p50, request)

    def second(self, latency_token: Tensor, request: Request, remaining_ms: float) -> Decision:
        """The plan, of the tier and position that were chosen."""
        p50, p99 = self._predicted(self._new_tokens, "insertion")
        if self._begun is None:
            assert self._settled is not None
            return self._decision(self._settled, request, p50, p99, remaining_ms)
        begun = self.chooser.allowed(self._begun)
        fits = begun & (p99 <= remaining_ms)
        if not fits.any():
            # Time was lost since: what is quickest of what is left to choose.
            at = int(np.flatnonzero(begun)[p99[begun].argmin()])
            return self._decision(at, request, p50, p99, remaining_ms)
        assert self.chooser.controllers is not None and self._budget_ms is not None
        found = self.chooser.controllers.finish(
            latency_token[None], self._budget_ms, self._begun, allowed=torch.from_numpy(fits)[None]
        )
        return self._decision(int(found[0]), request, p50, p99, remaining_ms)

    def _predicted(self, new_tokens: int, after: After) -> tuple[np.ndarray, np.ndarray]:
        return self.chooser.predictor.predict_all(
            text_tokens=self.text_tokens, images=self.images, new_tokens=new_tokens, batch=self.batch,
            load=self.load, after=after,
        )  # fmt: skip

    def _full(self) -> int:
        """The plan that does most."""
        plans = self.chooser.predictor.space.plans
        among = np.flatnonzero(self.chooser.allowed())
        return max(among.tolist(), key=lambda at: (_tier(plans[at]), len(plans[at].blocks), plans[at].top_k))

    def _worthiest(self, fits: np.ndarray, p50: np.ndarray) -> int:
        worth = p50 if self.chooser.worth is None else np.asarray(self.chooser.worth)
        among = np.flatnonzero(fits)
        # Of equal worth, the quicker.
        return int(among[np.lexsort((p50[among], -worth[among]))[0]])

    def _infeasible(self, request: Request, remaining_ms: float) -> Choice | Refusal:
        p50, p99 = self._predicted(request.max_new_tokens, "receipt")
        among = np.flatnonzero(self.chooser.allowed())
        at = int(among[p99[among].argmin()])
        least_ms = _waited_ms(request) + float(p99[at])
        refusal = Refusal(reason="no plan keeps the budget", least_ms=least_ms)
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

    def _choice(self, at: int, p50: np.ndarray, request: Request) -> Choice:
        plan = self._plan(at)
        predicted_ms = _waited_ms(request) + float(p50[at])
        return Choice(tier=plan.tier, insertion_position=plan.insertion_position, predicted_ms=predicted_ms)

    def _decision(
        self, at: int, request: Request, p50: np.ndarray, p99: np.ndarray, remaining_ms: float
    ) -> Decision:
        return Decision(
            plan=self._plan(at),
            max_new_tokens=self._new_tokens,
            feasible=bool(p99[at] <= remaining_ms),
            predicted_ms=_waited_ms(request) + float(p50[at]),
        )

    def _plan(self, at: int) -> Plan:
        plan = self.chooser.predictor.space.plans[at]
        return plan if self.images else replace(plan, tier=None)


def _waited_ms(request: Request) -> float:
    return (time.perf_counter() - request.received_s) * 1e3


def _tier(plan: Plan) -> int:
    return -1 if plan.tier is None else TIERS.index(plan.tier)

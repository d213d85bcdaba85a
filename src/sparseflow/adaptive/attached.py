"""A model that keeps latency budgets: knobs, predictor and controllers put together, and taken off again."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseflow.adaptive.adapters import adapter_of
from sparseflow.adaptive.adapters.base import Adapter
from sparseflow.adaptive.controllers import Controllers
from sparseflow.adaptive.decide import Chooser, OnInfeasible
from sparseflow.adaptive.generation import Generated, generate
from sparseflow.adaptive.knobs import Knobs
from sparseflow.adaptive.plan import Plan
from sparseflow.adaptive.predictor import Ask, Predictor
from sparseflow.adaptive.profile import Profile, model_id, weights_id
from sparseflow.adaptive.runtime.sampling import Sampling
from sparseflow.adaptive.worth import Worth
from sparseflow.errors import InputError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_LOG = logging.getLogger(__name__)


def attach(
    model: PreTrainedModel,
    profile: Path | str | Profile | Predictor | None = None,
    controller: Path | str | Controllers | None = None,
    *,
    plans: Sequence[Plan] | None = None,
    worth: Path | str | Worth | Sequence[float] | None = None,
    adapter: Adapter | None = None,
) -> Attached:
    """Make a model keep latency budgets. It is changed on the instance only; `detach` takes everything off.

    Args:
        model: Of transformers, where it is to run.
        profile: Times of this model on this device: a profile (Parquet), or a predictor (JSON) that was
            fitted to one. Without it plans can be run, but no budget can be kept.
        controller: Trained controllers (safetensors). Without them the plan is chosen by worth.
        plans: Those that may be chosen; by default all of the profile's space.
        worth: How good each plan of the space is, as its mean accuracy; used without controllers.
        adapter: How the model's knobs are found; by default the one for its architecture.

    Raises:
        ModelError: No adapter knows the architecture, a knob would change nothing, or knobs are on already.
        InputError: Profile, controllers or worth are of another model, device or plans, or a file is not
            there.
        FileFormatError: A file is damaged, or something else.
    """
    adapter = adapter_of(model) if adapter is None else adapter
    if profile is None and (controller is not None or plans is not None or worth is not None):
        raise InputError("controllers, plans and worth need a profile: it says which plans keep a budget")
    chooser = None
    if profile is not None:
        device = next(model.parameters()).device
        predictor = _predictor(profile, model, device)
        if isinstance(controller, str | Path):
            controller = Controllers.load(controller, model_id=weights_id(model), device=device)
        chooser = Chooser(
            adapter=adapter, predictor=predictor, controllers=controller, plans=plans,
            worth=_values(worth, model, predictor),
        )  # fmt: skip
    return Attached(adapter, Knobs(adapter), chooser)


class Attached:
    """A model with knobs; made by `attach`.

    Attributes:
        adapter: The model, as `adapter.model`, and where its knobs are.
        knobs: To run plans by hand: `with attached.knobs.running(plan): model(...)`.
        chooser: Who chooses plans for budgets; None without a profile.
    """

    def __init__(self, adapter: Adapter, knobs: Knobs, chooser: Chooser | None) -> None:
        self.adapter, self.knobs, self.chooser = adapter, knobs, chooser

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def generate(
        self,
        *,
        latency_budget_ms: float | None = None,
        on_infeasible: OnInfeasible = "best_effort",
        max_new_tokens: int = 64,
        plan: Plan | None = None,
        sampling: Sampling | None = None,
        stop: Collection[int] | None = None,
        load: float = 0.0,
        received_s: float | None = None,
        **inputs: Any,
    ) -> Generated:
        """Generate an answer within a budget.

        Args:
            latency_budget_ms: From now (or `received_s`) to the last token; None for as long as it takes.
            on_infeasible: What becomes of a request whose budget no plan keeps: `"reject"` raises,
                `"best_effort"` runs the quickest plan, `"truncate"` runs it for as many tokens as fit.
            max_new_tokens: Most tokens to generate.
            plan: Run this one, whatever the budget.
            sampling: How tokens are drawn; greedy by default.
            stop: Tokens that end the answer; by default the model's own.
            load: Share of the device that others want, 0 to 1.
            received_s: When the request came, by `time.perf_counter`; by default now.
            **inputs: What the model's processor gives for the highest tier: `input_ids` [1, tokens] and, with
                images, their pixels.

        Raises:
            InputError: A value is out of range, or there is a budget and neither profile nor plan.
            Refused: No plan keeps the budget; `least_ms` is the least that one does.
        """
        received = time.perf_counter() if received_s is None else received_s
        asked = None
        if plan is not None:
            decide: Any = plan
        elif self.chooser is None:
            if latency_budget_ms is not None:
                raise InputError("a budget needs a profile: attach(model, profile=...), or give a plan")
            decide = self.knobs.geometry.full(images=self.adapter.vision_tokens(inputs) > 0)
        else:
            asked = self._asked(inputs)
            text, images = asked
            decide = self.chooser.decider(
                text_tokens=text, images=images, on_infeasible=on_infeasible, load=load
            )
        found = generate(
            self.adapter, self.knobs, inputs, decide, max_new_tokens=max_new_tokens, sampling=sampling,
            budget_ms=latency_budget_ms, received_s=received, stop=self.stop if stop is None else stop,
        )  # fmt: skip
        if asked is not None:
            self._learn(found, *asked, load)
        return found

    @property
    def stop(self) -> tuple[int, ...]:
        """Tokens that end an answer, by the model's own configuration."""
        found = getattr(getattr(self.adapter.model, "generation_config", None), "eos_token_id", None)
        return () if found is None else tuple(found) if isinstance(found, list) else (found,)

    def detach(self) -> None:
        """Take everything off; the model is as it was, bit for bit. A second time does nothing."""
        self.knobs.remove()

    def _asked(self, inputs: dict[str, Any]) -> tuple[int, int]:
        """Text tokens and images of a prompt."""
        assert self.chooser is not None
        vision = self.adapter.vision_tokens(inputs)
        of_one = list(self.chooser.predictor.about.vision_tokens.values())
        images = max(1, round(vision / of_one[-1])) if vision and of_one else 0
        return inputs["input_ids"].shape[1] - vision, images

    def _learn(self, found: Generated, text: int, images: int, load: float) -> None:
        assert self.chooser is not None
        asked = Ask(
            plan=found.plan, text_tokens=text, images=images, new_tokens=found.new_tokens.shape[1], load=load
        )
        try:
            self.chooser.predictor.observe(asked, found.timings.total_ms)
        except InputError:
            _LOG.warning("what a request took could not be learnt from", exc_info=True)


def _predictor(
    given: Path | str | Profile | Predictor, model: PreTrainedModel, device: torch.device
) -> Predictor:
    if isinstance(given, str | Path):
        given = Predictor.load(given) if Path(given).suffix == ".json" else Profile.read(given)
    if isinstance(given, Profile):
        given.check(model_id(model), device)
        return Predictor.fit(given)
    given.check(model_id(model), device)
    return given


def _values(
    given: Path | str | Worth | Sequence[float] | None, model: PreTrainedModel, predictor: Predictor
) -> Sequence[float] | None:
    if isinstance(given, str | Path):
        given = Worth.read(given)
    if isinstance(given, Worth):
        given.check(weights_id(model), predictor.space)
        return given.accuracy
    return given

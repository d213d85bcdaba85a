"""A model that keeps latency budgets: knobs, predictor and controllers put together, and taken off again."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseflow.adaptive.adapters import adapter_of
from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.engine.engine import Engine
from sparseflow.adaptive.engine.generate import GenerationResult, generate, generate_on
from sparseflow.adaptive.engine.requests.request import check_inputs, check_limits
from sparseflow.adaptive.engine.requests.sampling import SamplingParams
from sparseflow.adaptive.plan.adapter import Adapter
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.policy.selector import OnInfeasible, PlanSelector
from sparseflow.adaptive.predictor import LatencyQuery, PlanLatencyPredictor
from sparseflow.adaptive.profile import PlanProfile, model_id, weights_id
from sparseflow.adaptive.profile.plan_quality import PlanQuality
from sparseflow.errors import InputError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_LOG = logging.getLogger(__name__)


def attach(
    model: PreTrainedModel,
    profile: Path | str | PlanProfile | PlanLatencyPredictor | None = None,
    controller: Path | str | Controllers | None = None,
    *,
    plans: Sequence[Plan] | None = None,
    worth: Path | str | PlanQuality | Sequence[float] | None = None,
    adapter: Adapter | None = None,
) -> Attached:
    """Make a model keep latency budgets. It is changed on the instance only; `detach` takes everything off.

    Requests run as those of the profile ran: of one that an engine made, by an engine with the same sizes (on
    a GPU with its recordings, as `serve` does), else by the model's own forward.

    Args:
        model: Of transformers, where it is to run.
        profile: Times of this model on this device: a profile (Parquet), or a predictor (JSON) that was
            fitted to one. Without it plans can be run, but no budget can be kept.
        controller: Trained controllers (safetensors). Without them the plan is chosen by worth.
        plans: Those that may be chosen; by default all of the profile's space, or of an engine the few that
            no other one beats (`PlanSelector.few`).
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
        chooser = PlanSelector(
            adapter=adapter, predictor=predictor, controllers=controller, plans=plans,
            worth=_values(worth, model, predictor),
        )  # fmt: skip
    return Attached(adapter, PlanRuntime(adapter), chooser)


class Attached:
    """A model with knobs; made by `attach`.

    Attributes:
        adapter: The model, as `adapter.model`, and where its knobs are.
        knobs: To run plans by hand: `with attached.knobs.running(plan): model(...)`.
        chooser: Who chooses plans for budgets; None without a profile.
        engine: What requests run on; None before the first one, and where they run by the model's forward.
    """

    def __init__(self, adapter: Adapter, knobs: PlanRuntime, chooser: PlanSelector | None) -> None:
        self.adapter, self.knobs, self.chooser = adapter, knobs, chooser
        self.engine: Engine | None = None
        # Looked up once: it takes longer than all else that is checked of a request.
        self._named = frozenset(inspect.signature(type(adapter.model).forward).parameters)
        self._making = threading.Lock()
        self._turns: threading.Semaphore | None = None

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def warm(self, *, progress: Callable[[int, int], None] | None = None, **inputs: Any) -> None:
        """Make ready what requests need, so that none is late for it.

        Where requests run on an engine, `generate` does so before its first one: on a GPU each plan is
        recorded, which takes a while.

        Args:
            progress: Called with (done, in all) while an engine records.
            **inputs: Of a request, as of `generate`, with as many images as requests will have.

        Raises:
            InputError: The inputs are no request's.
            OutOfMemoryError: The engine's caches do not fit; profile with a smaller `--max-batch`.
        """
        self._check(inputs)
        engine = self._engine(inputs, progress)
        # A request that nobody learns from makes what is made when it is first used: that of the fullest plan
        # that has room for it.
        if self.chooser is None:
            decide: Any = self.knobs.geometry.full(images=self._sees(inputs))
        else:
            decide = self.chooser.decider(**self._asked(inputs, engine, load=None))
        if engine is None:
            generate(self.adapter, self.knobs, inputs, decide, max_new_tokens=2)
        else:
            generate_on(engine, self.adapter, inputs, decide, max_new_tokens=2)

    def generate(
        self,
        *,
        latency_budget_ms: float | None = None,
        on_infeasible: OnInfeasible = "best_effort",
        max_new_tokens: int = 64,
        plan: Plan | None = None,
        sampling: SamplingParams | None = None,
        stop: Collection[int] | None = None,
        load: float | None = None,
        received_s: float | None = None,
        **inputs: Any,
    ) -> GenerationResult:
        """Generate an answer within a budget.

        Args:
            latency_budget_ms: From now (or `received_s`) to the last token; None for as long as it takes.
            on_infeasible: What becomes of a request whose budget no plan keeps: `"reject"` raises,
                `"best_effort"` runs the quickest plan, `"truncate"` runs it for as many tokens as fit.
            max_new_tokens: Most tokens to generate.
            plan: Run this one, whatever the budget.
            sampling: How tokens are drawn; greedy by default.
            stop: Tokens that end the answer; by default the model's own.
            load: Share of the device that others want, 0 to 1; by default what the engine knows of its own
                requests, else 0.
            received_s: When the request came, by `time.perf_counter`; by default now.
            **inputs: Those of the model's forward for the highest tier: `input_ids` [1, tokens] and, with
                images, their pixels; `open_folder(...).prompt(...)` makes some. With `plan`, several rows may
                run by the model's forward.

        Raises:
            InputError: A value is out of range, or there is a budget and neither profile nor plan.
            Refused: No plan keeps the budget; `least_ms` is the least that one does.
            RunError: The engine cannot run it, such as for want of memory.
        """
        self._check(inputs)
        check_limits(max_new_tokens, latency_budget_ms)
        engine = self._engine_for(inputs, plan)
        received = time.perf_counter() if received_s is None else received_s
        asked, decide = None, plan
        if decide is None and self.chooser is None:
            if latency_budget_ms is not None:
                raise InputError("a budget needs a profile: attach(model, profile=...), or give a plan")
            decide = self.knobs.geometry.full(images=self._sees(inputs))
        how: dict[str, Any] = {
            "max_new_tokens": max_new_tokens, "budget_ms": latency_budget_ms, "received_s": received,
            "sampling": sampling, "stop": self.stop if stop is None else stop,
        }  # fmt: skip
        # Who waits for a slot waits here: what is predicted begins where a request has one.
        with self._turns if engine is not None and self._turns is not None else nullcontext():
            waited_ms = max(0.0, (time.perf_counter() - received) * 1e3)
            if decide is None:
                assert self.chooser is not None
                asked = self._asked(inputs, engine, load)
                decide = self.chooser.decider(**asked, on_infeasible=on_infeasible)
            if engine is None:
                most = None if asked is None or self.chooser is None else self.chooser.most_tokens
                found = generate(self.adapter, self.knobs, inputs, decide, most_tokens=most, **how)
            else:
                found = generate_on(engine, self.adapter, inputs, decide, **how)
        if asked is not None:
            self._learn(found, asked, waited_ms)
        return found

    @property
    def stop(self) -> tuple[int, ...]:
        """Tokens that end an answer, by the model's own configuration."""
        found = getattr(getattr(self.adapter.model, "generation_config", None), "eos_token_id", None)
        return () if found is None else tuple(found) if isinstance(found, list) else (found,)

    def detach(self) -> None:
        """Take everything off; the model is as it was, bit for bit. A second time does nothing.

        Requests that other threads still run on an engine are finished before.
        """
        with self._making:
            if self.engine is not None:
                self.engine.shutdown()
                self.engine = None
            self.knobs.remove()

    def _sees(self, inputs: Mapping[str, Any]) -> bool:
        """Whether a request has images."""
        return self.adapter.vision_tokens(inputs) > 0

    def _check(self, inputs: Mapping[str, Any]) -> None:
        """That what is no option is an input of the model, and no option that was misspelt; and that these
        are inputs of a request."""
        unknown = [name for name in inputs if name not in self._named]
        if unknown:
            options = [name for name in inspect.signature(self.generate).parameters if name != "inputs"]
            raise InputError(
                f"{', '.join(map(repr, unknown))}: neither inputs of {type(self.adapter.model).__name__} nor "
                f"options, which are {', '.join(options)}"
            )
        check_inputs(inputs)

    def _engine_for(self, inputs: dict[str, Any], plan: Plan | None) -> Engine | None:
        """What a request runs on; None for the model's own forward."""
        if self._sizes is None or len(inputs["input_ids"]) > 1:
            return None
        if plan is not None and self.chooser is not None:
            known = self.chooser.plans or self.chooser.few().plans or ()
            if plan not in known and plan not in {replace(each, tier=None) for each in known}:
                return None
        return self._engine(inputs)

    @property
    def _sizes(self) -> Mapping[str, Any] | None:
        """Of the engine that made the profile, if one did."""
        how = {} if self.chooser is None else self.chooser.predictor.about.how
        return how if how.get("runner") == "engine" else None

    def _engine(
        self, example: dict[str, Any], progress: Callable[[int, int], None] | None = None
    ) -> Engine | None:
        """The engine, made and warmed when it is first asked for; None where the profile is of none."""
        sizes = self._sizes
        if sizes is None:
            return None
        with self._making:
            if not self.knobs.installed:
                raise InputError("these knobs were detached; attach to the model again")
            if self.engine is None:
                assert self.chooser is not None
                chooser = self.chooser if self.chooser.plans is not None else self.chooser.few()
                engine = Engine(
                    self.adapter, self.knobs, plans=chooser.plans or (), max_batch=sizes["max_batch"],
                    max_tokens=sizes["max_tokens"], graphs=sizes["graphs"],
                )  # fmt: skip
                try:
                    if engine.graphs.enabled:
                        engine.warm(example if self._sees(example) else None, progress=progress)
                except BaseException:
                    engine.shutdown(drain=False)
                    raise
                self.engine, self.chooser = engine, chooser
                self._turns = threading.Semaphore(engine.max_batch)
            return self.engine

    def _asked(self, inputs: dict[str, Any], engine: Engine | None, load: float | None) -> dict[str, Any]:
        """What a predictor is told of a request, but its plan and its tokens."""
        assert self.chooser is not None
        vision = self.adapter.vision_tokens(inputs)
        images = self.chooser.predictor.about.images(vision)
        text, batch = inputs["input_ids"].shape[1] - vision, 1
        if engine is not None:
            there = engine.snapshot()
            batch = min(there.queued + there.running + 1, there.slots)
            load = there.load if load is None else load
        return {"text_tokens": text, "images": images, "batch": batch, "load": load or 0.0}

    def _learn(self, found: GenerationResult, asked: dict[str, Any], waited_ms: float) -> None:
        assert self.chooser is not None
        times = found.timings
        took = LatencyQuery(
            plan=found.plan, new_tokens=found.new_tokens.shape[1], queued_ms=waited_ms, **asked
        )
        try:
            self.chooser.predictor.observe(
                took, times.total_ms, prefill_ms=times.total_ms - waited_ms - times.decode_ms
            )
        except InputError:
            _LOG.warning("what a request took could not be learnt from", exc_info=True)


def _predictor(
    given: Path | str | PlanProfile | PlanLatencyPredictor, model: PreTrainedModel, device: torch.device
) -> PlanLatencyPredictor:
    if isinstance(given, str | Path):
        given = PlanLatencyPredictor.load(given) if Path(given).suffix == ".json" else PlanProfile.read(given)
    if isinstance(given, PlanProfile):
        given.check(model_id(model), device)
        return PlanLatencyPredictor.fit(given)
    given.check(model_id(model), device)
    return given


def _values(
    given: Path | str | PlanQuality | Sequence[float] | None,
    model: PreTrainedModel,
    predictor: PlanLatencyPredictor,
) -> Sequence[float] | None:
    if isinstance(given, str | Path):
        given = PlanQuality.read(given)
    if isinstance(given, PlanQuality):
        given.check(weights_id(model), predictor.space)
        return given.accuracy
    return given

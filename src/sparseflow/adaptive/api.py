"""Attach plan selection to a model, so that its requests meet latency budgets."""

from __future__ import annotations

import inspect
import logging
import math
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.engine.engine import Engine
from sparseflow.adaptive.engine.generate import GenerationResult, generate, generate_on
from sparseflow.adaptive.engine.requests.request import (
    GenerationRequest,
    PlanDecider,
    as_policy,
    check_inputs,
    check_limits,
)
from sparseflow.adaptive.engine.requests.sampling import SamplingParams
from sparseflow.adaptive.plan.adapter import Adapter, Inputs
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.policy.selector import OnInfeasible, PlanSelector
from sparseflow.adaptive.predictor import LatencyQuery, PlanLatencyPredictor
from sparseflow.adaptive.profile import PlanProfile, compute_model_id, compute_weights_id
from sparseflow.adaptive.profile.plan_quality import PlanQuality
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

_LOG = logging.getLogger(__name__)
DEFAULT_NEW_TOKENS = 64
_CONTROLLED_ARGS = frozenset(
    {
        "past_key_values", "use_cache", "position_ids", "cache_position", "inputs_embeds", "labels",
        "logits_to_keep", "num_logits_to_keep", "return_dict",
    }
)  # fmt: skip
"""Arguments of a model's forward that `Attached.generate` sets itself."""


def attach(
    model: PreTrainedModel,
    profile: Path | str | PlanProfile | PlanLatencyPredictor | None = None,
    controller: Path | str | Controllers | None = None,
    *,
    plans: Sequence[Plan] | None = None,
    plan_quality: Path | str | PlanQuality | Sequence[float] | None = None,
    adapter: Adapter | None = None,
) -> Attached:
    """Attach plan selection to a model.

    The model is changed on the instance only; `Attached.detach` restores it. Requests run the way the profile
    was measured: on an engine of the same size if an engine measured it (with CUDA graphs on a GPU, as
    `serve` does), otherwise with the model's own forward.

    Args:
        model: A transformers model, on the device on which it shall run.
        profile: Latencies of this model on this device: a profile (Parquet) or a predictor fitted to one
            (JSON). Without it plans can be run, but no budget can be met.
        controller: Trained controllers (safetensors). Without them plans are selected by `plan_quality`.
        plans: Plans that may be selected. Default: all plans of the profile's space; with an engine, the
            Pareto front of latency and quality (`PlanSelector.select_front`).
        plan_quality: Mean accuracy of each plan of the space; used without controllers. The numbers of a
            sequence are taken as exact; those of a file or a `PlanQuality` have the error of their samples.
        adapter: Adapter of the model; default: the one registered for its architecture.

    Returns:
        The attached model.

    Raises:
        ModelError: No adapter knows the architecture, or plans are attached already.
        InputError: Profile, controllers or plan quality belong to another model, device or plan space, or a
            file is missing.
        FileFormatError: A file is damaged or has another format.
    """
    adapter = get_adapter(model) if adapter is None else adapter
    if profile is None and (controller is not None or plans is not None or plan_quality is not None):
        raise InputError("controllers, plans and plan quality need a profile")
    selector = None
    if profile is not None:
        device = next(model.parameters()).device
        predictor = _load_predictor(profile, model, device)
        if isinstance(controller, str | Path):
            controller = Controllers.load(controller, model_id=compute_weights_id(model), device=device)
        selector = PlanSelector(
            adapter=adapter, predictor=predictor, controllers=controller, plans=plans,
            **_load_plan_quality(plan_quality, model, predictor),
        )  # fmt: skip
    return Attached(adapter, PlanRuntime(adapter), selector)


class Attached:
    """A model with a plan runtime and plan selection; created by `attach`.

    Attributes:
        adapter: Adapter of the model; `adapter.model` is the model.
        runtime: Runs a given plan: `with attached.runtime.use_plan(plan): model(...)`.
        selector: Selects plans for budgets; None without a profile.
        engine: Engine that runs requests; None before the first request and without an engine profile.
    """

    def __init__(self, adapter: Adapter, runtime: PlanRuntime, selector: PlanSelector | None) -> None:
        self.adapter, self.runtime, self.selector = adapter, runtime, selector
        self.engine: Engine | None = None
        # Computed once, because it is slower than all other checks of a request.
        self._forward_params = frozenset(
            name
            for name, parameter in inspect.signature(type(adapter.model).forward).parameters.items()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ) - {"self"}
        self._engine_lock = threading.Lock()
        self._slots: threading.Semaphore | None = None

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def warm_up(self, *, progress: Progress | None = None, **inputs: Tensor) -> None:
        """Run one request so that no later request pays for one-time work.

        With an engine, `generate` does this before its first request; on a GPU each plan is captured as CUDA
        graphs, which takes a while.

        Args:
            progress: Called while an engine captures graphs.
            **inputs: Inputs of a request, as for `generate`, with as many images as requests will have.

        Raises:
            InputError: The inputs are not those of a request.
            OutOfMemoryError: The engine's caches do not fit; profile with a smaller `--max-batch-size`.
        """
        self._check_inputs(inputs)
        engine = self._get_engine(inputs, progress)
        # Runs the one-time work of a request, without updating the predictor.
        policy: Plan | PlanDecider = self.runtime.geometry.full_plan(images=self._has_images(inputs))
        if self.selector is not None:
            policy = self.selector.make_policy(**self._make_query_args(inputs, engine, load=None))
        self._run(engine, inputs, policy, max_new_tokens=2)

    def generate(
        self,
        *,
        latency_budget_ms: float | None = None,
        on_infeasible: OnInfeasible = "best_effort",
        max_new_tokens: int | None = None,
        plan: Plan | None = None,
        sampling: SamplingParams | None = None,
        stop: Collection[int] | None = None,
        load: float | None = None,
        received_s: float | None = None,
        **inputs: Tensor,
    ) -> GenerationResult:
        """Generate an answer within a latency budget.

        Args:
            latency_budget_ms: Time from now (or `received_s`) to the last token; None for no budget.
            on_infeasible: Behavior if no plan meets the budget: `"reject"` raises, `"best_effort"` runs
                the fastest plan, `"truncate"` runs the fastest plan for as many tokens as fit.
            max_new_tokens: Maximum number of tokens to generate; by default 64, or as many as fit at the
                highest tier. A tier that leaves no room for them is not chosen.
            plan: Plan to run, independent of the budget.
            sampling: Sampling parameters; greedy by default.
            stop: Token ids that end the answer; default: those of the model's generation config.
            load: Fraction of the device that other work uses, 0 to 1; default: the utilization that the
                engine measures for its own requests, or 0.
            received_s: Arrival time on the `time.perf_counter` clock; default: now.
            **inputs: Inputs of the model's forward at the highest tier: `input_ids` [1, tokens] and, with
                images, their pixels, as `open_folder(...).prompt(...)` makes them. With `plan`, several rows
                may run with the model's own forward; shorter rows are padded on the left and masked.

        Raises:
            InputError: A value is out of range, or a budget is given without profile and plan.
            RequestRejected: No plan meets the budget; `least_ms` is the smallest feasible budget.
            RunError: The engine cannot run the request, for example because memory is exhausted.
        """
        self._check_inputs(inputs)
        if max_new_tokens is None:
            max_new_tokens = self._default_new_tokens(inputs)
        check_limits(max_new_tokens, latency_budget_ms)
        engine = self._select_engine(inputs, plan)
        received = time.perf_counter() if received_s is None else received_s
        query_args: dict[str, Any] | None = None
        policy: Plan | PlanDecider | None = plan
        if policy is None and self.selector is None:
            if latency_budget_ms is not None:
                raise InputError("a budget needs a profile: attach(model, profile=...), or pass `plan`")
            policy = self.runtime.geometry.full_plan(images=self._has_images(inputs))
        # Wait for a slot here, because predictions start when the request has one.
        with self._slots if engine is not None and self._slots is not None else nullcontext():
            waited_ms = max(0.0, (time.perf_counter() - received) * 1e3)
            if policy is None:
                assert self.selector is not None
                query_args = self._make_query_args(inputs, engine, load)
                policy = self.selector.make_policy(**query_args, on_infeasible=on_infeasible)
            result = self._run(
                engine, inputs, policy, max_new_tokens=max_new_tokens, budget_ms=latency_budget_ms,
                received_s=received, sampling=sampling or SamplingParams(),
                stop=self.stop if stop is None else stop,
            )  # fmt: skip
        if query_args is not None:
            self._observe(result, query_args, waited_ms)
        return result

    @property
    def stop(self) -> tuple[int, ...]:
        """Token ids that end an answer, from the model's generation config."""
        token_ids = getattr(getattr(self.adapter.model, "generation_config", None), "eos_token_id", None)
        return () if token_ids is None else tuple(token_ids) if isinstance(token_ids, list) else (token_ids,)

    def detach(self) -> None:
        """Restore the model exactly; a second call does nothing.

        Requests of other threads that still run on the engine finish first.
        """
        with self._engine_lock:
            if self.engine is not None:
                self.engine.shutdown()
                self.engine = None
            self.runtime.remove()

    def _run(
        self, engine: Engine | None, inputs: Inputs, policy: Plan | PlanDecider, **options: Any
    ) -> GenerationResult:
        if engine is not None:
            request = GenerationRequest(inputs=inputs, decide=as_policy(policy), **options)
            return generate_on(engine, self.adapter, request)
        selector = None if isinstance(policy, Plan) else self.selector
        max_total_tokens = None if selector is None else selector.max_total_tokens
        return generate(
            self.adapter, self.runtime, inputs, policy, max_total_tokens=max_total_tokens, **options
        )

    def _default_new_tokens(self, inputs: Inputs) -> int:
        max_total = self.adapter.context if self.selector is None else self.selector.max_total_tokens
        # The last token is never run and needs no room.
        capacity = math.inf if max_total is None else max_total - inputs["input_ids"].shape[1] + 1
        return DEFAULT_NEW_TOKENS if capacity < 1 else int(min(capacity, DEFAULT_NEW_TOKENS))

    def _has_images(self, inputs: Inputs) -> bool:
        return self.adapter.count_vision_tokens(inputs) > 0

    def _check_inputs(self, inputs: Inputs) -> None:
        """Reject arguments that `generate` sets itself, unknown names and invalid inputs."""
        controlled = [
            name
            for name, value in inputs.items()
            if value is not None and (name in _CONTROLLED_ARGS or name.startswith("output_"))
        ]
        if controlled:
            raise InputError(
                f"`{controlled[0]}` is not an input of `generate`, which sets it itself; leave it out, or "
                "call the model within `attached.runtime.use_plan(plan)`"
            )
        unknown = [name for name in inputs if name not in self._forward_params]
        if unknown:
            options = [name for name in inspect.signature(self.generate).parameters if name != "inputs"]
            raise InputError(
                f"unknown arguments {', '.join(map(repr, unknown))}: expected inputs of "
                f"{type(self.adapter.model).__name__} or one of {', '.join(options)}"
            )
        check_inputs(inputs)
        if inputs.get("attention_mask") is None:
            self._refuse_unmasked_padding(inputs["input_ids"])

    def _refuse_unmasked_padding(self, input_ids: Tensor) -> None:
        config = getattr(self.adapter.model, "generation_config", None)
        pad, start = (getattr(config, name, None) for name in ("pad_token_id", "bos_token_id"))
        if pad is None or pad == start or pad in self.stop:
            return
        if bool((input_ids[:, [0, -1]] == pad).any()):
            raise InputError(
                f"`input_ids` starts or ends with the padding token {pad}; pass the `attention_mask` of the "
                "tokenizer, with padding on the left"
            )

    def _select_engine(self, inputs: Inputs, plan: Plan | None) -> Engine | None:
        """Engine that runs the request; None for the model's own forward."""
        if self._engine_settings is None or len(inputs["input_ids"]) > 1:
            return None
        if plan is not None and self.selector is not None:
            known = self.selector.plans or self.selector.select_front().plans or ()
            if plan not in known and plan not in {replace(known_plan, tier=None) for known_plan in known}:
                return None
        return self._get_engine(inputs)

    @property
    def _engine_settings(self) -> Mapping[str, Any] | None:
        """Settings of the engine that measured the profile; None if no engine did."""
        settings = {} if self.selector is None else self.selector.predictor.metadata.config
        return settings if settings.get("runner") == "engine" else None

    def _get_engine(self, example: Inputs, progress: Progress | None = None) -> Engine | None:
        """Engine, created and warmed up on first use; None if no engine measured the profile."""
        sizes = self._engine_settings
        if sizes is None:
            return None
        with self._engine_lock:
            if not self.runtime.installed:
                raise InputError("the model was detached; attach again")
            if self.engine is None:
                assert self.selector is not None
                selector = self.selector if self.selector.plans is not None else self.selector.select_front()
                engine = Engine(
                    self.adapter, self.runtime, plans=selector.plans or (), max_batch=sizes["max_batch"],
                    max_tokens=sizes["max_tokens"], graphs=sizes["graphs"],
                )  # fmt: skip
                try:
                    if engine.graphs.enabled:
                        engine.warm_up(example if self._has_images(example) else None, progress=progress)
                except BaseException:
                    engine.shutdown(drain=False)
                    raise
                self.engine, self.selector = engine, selector
                self._slots = threading.Semaphore(engine.max_batch)
            return self.engine

    def _make_query_args(self, inputs: Inputs, engine: Engine | None, load: float | None) -> dict[str, Any]:
        """Arguments of a latency query except plan and token count."""
        assert self.selector is not None
        vision = self.adapter.count_vision_tokens(inputs)
        images = self.selector.predictor.metadata.count_images(vision)
        text_tokens, batch = inputs["input_ids"].shape[1] - vision, 1
        if engine is not None:
            snapshot = engine.snapshot()
            batch = min(snapshot.queued + snapshot.running + 1, snapshot.slots)
            load = snapshot.load if load is None else load
        return {"text_tokens": text_tokens, "images": images, "batch": batch, "load": load or 0.0}

    def _observe(self, result: GenerationResult, query_args: dict[str, Any], waited_ms: float) -> None:
        assert self.selector is not None
        times = result.timings
        query = LatencyQuery(
            plan=result.plan, new_tokens=result.new_tokens.shape[1], queued_ms=waited_ms, **query_args
        )
        try:
            self.selector.predictor.observe(
                query, times.total_ms, prefill_ms=times.total_ms - waited_ms - times.decode_ms
            )
        except InputError:
            _LOG.warning("cannot update the predictor from a request", exc_info=True)


def _load_predictor(
    profile: Path | str | PlanProfile | PlanLatencyPredictor, model: PreTrainedModel, device: torch.device
) -> PlanLatencyPredictor:
    if isinstance(profile, str | Path):
        profile = (
            PlanLatencyPredictor.load(profile)
            if Path(profile).suffix == ".json"
            else PlanProfile.load(profile)
        )
    if isinstance(profile, PlanProfile):
        profile.check(compute_model_id(model), device)
        return PlanLatencyPredictor.fit(profile)
    profile.check(compute_model_id(model), device)
    return profile


def _load_plan_quality(
    plan_quality: Path | str | PlanQuality | Sequence[float] | None,
    model: PreTrainedModel,
    predictor: PlanLatencyPredictor,
) -> dict[str, Any]:
    """Return the arguments of the selector for a plan quality."""
    if isinstance(plan_quality, str | Path):
        plan_quality = PlanQuality.load(plan_quality)
    if isinstance(plan_quality, PlanQuality):
        plan_quality.check(compute_weights_id(model), predictor.space)
        return {"plan_quality": plan_quality.accuracy, "quality_samples": plan_quality.samples}
    return {"plan_quality": plan_quality}

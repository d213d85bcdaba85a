"""Profile runners: the protocol, and `EagerRunner`, which calls the model's own forward.

`EagerRunner` times each decode step from an idle device to an idle device. On a GPU, serving does not work
like this; `EngineRunner` measures what is served.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sparseflow.adaptive.plan.adapter import Inputs
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.adaptive.profile.identity import compute_model_id
from sparseflow.adaptive.profile.random_prompts import RandomPrompts
from sparseflow.core.checks import check_at_least
from sparseflow.core.timing import measure
from sparseflow.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class RequestTimes:
    """Times of one request.

    Attributes:
        prefill_ms: Time to the first token.
        steps_ms: Time of each further token, in order.
    """

    prefill_ms: float
    steps_ms: tuple[float, ...] = ()


def describe_computation(model: PreTrainedModel) -> dict[str, Any]:
    """Number format and implementations of attention and experts, which latency depends on."""
    config: Any = model.config
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return {
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "attention": getattr(text_config, "_attn_implementation", None),
        "experts": getattr(text_config, "_experts_implementation", None),
    }


class ProfileRunner(Protocol):
    """Runs requests of given sizes on one device.

    `EngineRunner` serves them by an engine, `EagerRunner` calls the model's own forward.
    """

    @property
    def model_id(self) -> str:
        """Digest of the model; see `identity.compute_model_id`."""
        ...

    @property
    def device(self) -> str:
        """Device, as torch names it."""
        ...

    @property
    def vision_tokens(self) -> Mapping[Tier, int]:
        """Tokens of one image at each tier; empty if the model takes no images."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """Further settings that latency depends on, in JSON types; available before the first run."""
        ...

    def run(self, plan: Plan, text_tokens: int, *, steps: int, batch: int = 1) -> RequestTimes:
        """Run a prompt, then decode steps of a batch of such requests.

        Args:
            plan: Plan; the prompt has one image if it has a tier.
            text_tokens: Prompt tokens that do not belong to the image, at least 1.
            steps: Tokens after the first, 0 or more.
            batch: Concurrent requests when this one starts to run, including itself. They have any plans in
                an engine and are rows of each step elsewhere.

        Raises:
            RuntimeError: The request failed, for example out of memory. The profile records it and continues.
            RunError: Nothing can be measured. It ends the collection.
        """
        ...


class EagerRunner:
    """Runs plans by the model's own forward. Implements `ProfileRunner`.

    Args:
        runtime: Runtime of the model, which is in evaluation mode.
        device: Device of the model.
        example: Inputs of a request with one image at the highest tier, batch size 1, as the model's
            processor makes them; None measures requests without images only.
        max_tokens: Maximum tokens of a request, prompt and answer together; longer requests are refused here
            and by servers that use the profile. None is no limit.
        seed: Seed of the prompts.

    Raises:
        InputError: The model is in training mode or on another device, or the example is not one request with
            an image.
    """

    def __init__(
        self,
        runtime: PlanRuntime,
        *,
        device: torch.device | str,
        example: Inputs | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        self._runtime, self._adapter, self._max_tokens = runtime, runtime.adapter, max_tokens
        model = self._adapter.model
        weight = next(model.parameters())
        self._device = weight.device
        requested = torch.device(device)
        if requested.type != self._device.type or requested.index not in (None, self._device.index):
            raise InputError(f"`device` (={device}) must be the model's: {self._device}")
        if model.training:
            raise InputError("the model is in training mode; call `model.eval()` first")
        self._keeps_last_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._prompts = RandomPrompts(
            self._adapter, example, device=self._device, dtype=weight.dtype, seed=seed
        )
        self.model_id, self.device = compute_model_id(model), str(self._device)
        self.vision_tokens = self._prompts.vision_tokens

    @property
    def config(self) -> Mapping[str, Any]:
        limit = {} if self._max_tokens is None else {"max_tokens": self._max_tokens}
        return {"runner": "eager", **describe_computation(self._adapter.model), **limit}

    def run(self, plan: Plan, text_tokens: int, *, steps: int, batch: int = 1) -> RequestTimes:
        """Run a request; see `ProfileRunner.run`.

        Raises:
            InputError: A number is out of range, or the plan has a tier and there is no example.
        """
        check_at_least(1, text_tokens=text_tokens, batch=batch)
        check_at_least(0, steps=steps)
        inputs, model = self._prompts.make_prompt(plan.tier, text_tokens), self._adapter.model
        num_tokens = inputs["input_ids"].shape[1] + steps
        if self._max_tokens is not None and num_tokens > self._max_tokens:
            raise InputError(
                f"a prompt and {steps} steps have {num_tokens} tokens, more than `max_tokens` "
                f"(={self._max_tokens}); use fewer steps or text tokens, or a lower tier"
            )
        options: dict[str, Any] = {"use_cache": True}
        if self._keeps_last_logits:
            options["logits_to_keep"] = 1
        state: dict[str, Any] = {}

        def run_prefill() -> None:
            output = model(**inputs, **options)
            state["cache"] = output.past_key_values
            state["token"] = output.logits[:, -1].argmax(-1)

        # Step tokens are random: a random model soon repeats itself, and equal tokens in a batch would be
        # routed to the same experts.
        tokens = iter(self._prompts.sample_tokens(batch * steps).view(steps, batch, 1).to(self._device))

        def run_step() -> None:
            output = model(input_ids=next(tokens), past_key_values=state["cache"], **options)
            state["token"] = output.logits[:, -1].argmax(-1)

        with torch.inference_mode(), self._runtime.use_plan(plan):
            prefill_ms = measure(run_prefill, warmup=0, repeats=1, device=self._device).times_ms[0]
            if not steps:
                return RequestTimes(prefill_ms=prefill_ms)
            if batch > 1:
                state["cache"].batch_repeat_interleave(batch)
            decode = measure(run_step, warmup=0, repeats=steps, device=self._device)
        return RequestTimes(prefill_ms=prefill_ms, steps_ms=decode.times_ms)

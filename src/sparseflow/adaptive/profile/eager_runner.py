"""Running requests of any model of transformers as it is, call by call, and timing them.

Steps are timed one by one, each from an idle device to an idle device: a reader waits for every token. On a
GPU this is not what is served: `EngineRunner` measures that.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from sparseflow.adaptive.plan.adapter import Inputs
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.adaptive.profile.identity import model_id
from sparseflow.adaptive.profile.random_prompts import RandomPrompts
from sparseflow.adaptive.profile.runner import RequestTimes, computed
from sparseflow.core.timing import measure
from sparseflow.errors import InputError


class EagerRunner:
    """Runs plans on a model by its own forward. It is a `ProfileRunner`.

    Args:
        knobs: On the model, which is in evaluation mode.
        device: Where the model is, as torch names it.
        example: Inputs of a request with one image at the highest tier, batch 1, as the model's processor
            makes them; None measures requests without image only.
        max_tokens: Most tokens of a request, prompt and answer together: longer ones are refused, here and by
            who goes by the profile. None is no limit.
        seed: What words are drawn from.

    Raises:
        InputError: The model trains or is elsewhere, or the example is not one request with an image.
    """

    def __init__(
        self,
        knobs: PlanRuntime,
        *,
        device: torch.device | str,
        example: Inputs | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        self._knobs, self._adapter, self._max_tokens = knobs, knobs.adapter, max_tokens
        model = self._adapter.model
        here = next(model.parameters())
        self._device = here.device
        asked = torch.device(device)
        if asked.type != here.device.type or (asked.index is not None and asked.index != here.device.index):
            raise InputError(f"`device` (={device}) must be where the model is: {here.device}")
        if model.training:
            raise InputError("the model is in training mode; call `model.eval()` first")
        self._few = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._prompts = RandomPrompts(self._adapter, example, device=here.device, dtype=here.dtype, seed=seed)
        self._id = model_id(model)

    @property
    def model_id(self) -> str:
        return self._id

    @property
    def device(self) -> str:
        return str(self._device)

    @property
    def vision_tokens(self) -> Mapping[Tier, int]:
        return self._prompts.vision

    @property
    def how(self) -> Mapping[str, Any]:
        limit = {} if self._max_tokens is None else {"max_tokens": self._max_tokens}
        return {"runner": "eager", **computed(self._adapter.model), **limit}

    def run(self, plan: Plan, text_tokens: int, *, steps: int, batch: int = 1) -> RequestTimes:
        """Run a request; see `ProfileRunner.run`.

        Raises:
            InputError: Too few text tokens, too many in all, or a plan with a tier and no example.
        """
        if text_tokens < 1 or steps < 0 or batch < 1:
            raise InputError(
                f"`text_tokens` (={text_tokens}) and `batch` (={batch}) must be at least 1, `steps` "
                f"(={steps}) not negative"
            )
        inputs, model, found = self._prompts.prompt(plan.tier, text_tokens), self._adapter.model, {}
        tokens = inputs["input_ids"].shape[1] + steps
        if self._max_tokens is not None and tokens > self._max_tokens:
            raise InputError(
                f"a prompt and {steps} steps are {tokens} tokens, more than the {self._max_tokens} of "
                "`max_tokens`; ask for fewer, or for a lower tier"
            )
        named = {"use_cache": True, **({"logits_to_keep": 1} if self._few else {})}

        def first() -> None:
            out = model(**inputs, **named)
            found["cache"] = out.past_key_values
            found["token"] = out.logits[:, -1].argmax(-1)

        # A step's tokens are drawn and not the model's own: those of a random model soon repeat themselves,
        # and a batch of equal tokens would go to the same experts.
        drawn = iter(self._prompts.draw(batch * steps).view(steps, batch, 1).to(self._device))

        def step() -> None:
            out = model(input_ids=next(drawn), past_key_values=found["cache"], **named)
            found["token"] = out.logits[:, -1].argmax(-1)

        with torch.inference_mode(), self._knobs.running(plan):
            prefill = measure(first, warmup=0, repeats=1, device=self._device).times_ms[0]
            if not steps:
                return RequestTimes(prefill_ms=prefill)
            if batch > 1:
                found["cache"].batch_repeat_interleave(batch)
            taken = measure(step, warmup=0, repeats=steps, device=self._device)
        return RequestTimes(prefill_ms=prefill, steps_ms=taken.times_ms)

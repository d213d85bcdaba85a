"""Running requests of any model of transformers as it is, call by call, and timing them.

A prompt is made of random words, which are drawn anew for each request so that tokens go to other experts
each time, and of the pixels of an example. Steps are timed one by one, each from an idle device to an idle
device: a reader waits for every token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sparseflow.adaptive.adapters.base import Adapter, Inputs
from sparseflow.adaptive.knobs import Knobs
from sparseflow.adaptive.plan import Plan, Tier
from sparseflow.adaptive.profile.identity import model_id
from sparseflow.adaptive.profile.runner import Timed
from sparseflow.core.timing import measure
from sparseflow.errors import InputError


class EagerRunner:
    """Runs plans on a model by its own forward. It is a `Runner`.

    Args:
        knobs: On the model, which is in evaluation mode.
        device: Where the model is, as torch names it.
        example: Inputs of a request with one image at the highest tier, batch 1, as the model's processor
            makes them; None measures requests without image only.
        seed: What words are drawn from.

    Raises:
        InputError: The model trains or is elsewhere, or the example is not one request with an image.
    """

    def __init__(
        self, knobs: Knobs, *, device: torch.device | str, example: Inputs | None = None, seed: int = 0
    ) -> None:
        self._knobs, self._adapter = knobs, knobs.adapter
        model = self._adapter.model
        here = next(model.parameters())
        self._device = here.device
        asked = torch.device(device)
        if asked.type != here.device.type or (asked.index is not None and asked.index != here.device.index):
            raise InputError(f"`device` (={device}) must be where the model is: {here.device}")
        if model.training:
            raise InputError("the model is in training mode; call `model.eval()` first")
        self._generator = torch.Generator().manual_seed(seed)
        self._words = _words(self._adapter)
        self._few = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._prompts: dict[Tier, dict[str, Any]] = {}
        self._vision: dict[Tier, int] = {}
        if example is not None:
            self._take(_placed(example, here.device, here.dtype))
        self._id = model_id(model)

    @property
    def model_id(self) -> str:
        return self._id

    @property
    def device(self) -> str:
        return str(self._device)

    @property
    def vision_tokens(self) -> Mapping[Tier, int]:
        return self._vision

    @property
    def how(self) -> Mapping[str, Any]:
        config = self._adapter.model.config
        inner = config.get_text_config() if hasattr(config, "get_text_config") else config
        return {
            "runner": "eager",
            "dtype": str(next(self._adapter.model.parameters()).dtype).removeprefix("torch."),
            "attention": getattr(inner, "_attn_implementation", None),
            "experts": getattr(inner, "_experts_implementation", None),
        }

    def run(self, plan: Plan, text_tokens: int, *, steps: int, batch: int = 1) -> Timed:
        """Run a request; see `Runner.run`.

        Raises:
            InputError: Too few text tokens, or a plan with a tier and no example.
        """
        if text_tokens < 1 or steps < 0 or batch < 1:
            raise InputError(
                f"`text_tokens` (={text_tokens}) and `batch` (={batch}) must be at least 1, `steps` "
                f"(={steps}) not negative"
            )
        inputs, model, found = self._prompt(plan.tier, text_tokens), self._adapter.model, {}
        named = {"use_cache": True, **({"logits_to_keep": 1} if self._few else {})}

        def first() -> None:
            out = model(**inputs, **named)
            found["cache"] = out.past_key_values
            found["token"] = out.logits[:, -1].argmax(-1)

        # A step's tokens are drawn and not the model's own: those of a random model soon repeat themselves,
        # and a batch of equal tokens would go to the same experts.
        drawn = iter(self._draw(batch * steps).view(steps, batch, 1).to(self._device))

        def step() -> None:
            out = model(input_ids=next(drawn), past_key_values=found["cache"], **named)
            found["token"] = out.logits[:, -1].argmax(-1)

        with torch.inference_mode(), self._knobs.running(plan):
            prefill = measure(first, warmup=0, repeats=1, device=self._device).times_ms[0]
            if not steps:
                return Timed(prefill_ms=prefill)
            if batch > 1:
                found["cache"].batch_repeat_interleave(batch)
            taken = measure(step, warmup=0, repeats=steps, device=self._device)
        return Timed(prefill_ms=prefill, steps_ms=taken.times_ms)

    def _take(self, example: dict[str, Any]) -> None:
        """Reduce the example to each tier."""
        if example["input_ids"].ndim != 2 or len(example["input_ids"]) != 1:
            raise InputError(
                f"`example` must be one request: `input_ids` is {list(example['input_ids'].shape)}"
            )
        if not self._adapter.vision_tokens(example):
            raise InputError("`example` has no image; give a request with one, or None to do without")
        for tier in self._knobs.geometry.tiers:
            self._prompts[tier] = self._adapter.at_tier(example, tier)
            self._vision[tier] = self._adapter.vision_tokens(self._prompts[tier])

    def _prompt(self, tier: Tier | None, text_tokens: int) -> dict[str, Any]:
        if tier is None:
            ids = self._draw(text_tokens)[None].to(self._device)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if tier not in self._prompts:
            raise InputError(f"tier {tier!r} needs an image, and the runner was given no `example`")
        prompt = self._prompts[tier]
        ids = prompt["input_ids"]
        more = text_tokens - (ids.shape[1] - self._vision[tier])
        found = {
            name: _longer(value, more, 1 if name == "attention_mask" else 0)
            if isinstance(value, Tensor) and value.shape == ids.shape
            else value
            for name, value in prompt.items()
        }
        if more > 0:
            found["input_ids"][0, -more:] = self._draw(more).to(self._device)
        elif self._adapter.vision_tokens(found) != self._vision[tier]:
            raise InputError(
                f"`text_tokens` (={text_tokens}) would cut the image off: the example has "
                f"{ids.shape[1] - self._vision[tier]} text tokens, some before the image; ask for more, or "
                "give an example with less text before"
            )
        return found

    def _draw(self, count: int) -> Tensor:
        """Random words: [count] int64."""
        return self._words[torch.randint(len(self._words), (count,), generator=self._generator)]


def _words(adapter: Adapter) -> Tensor:
    """Token ids that mean nothing special to the model: [n] int64."""
    embeddings: Any = adapter.model.get_input_embeddings()
    vocabulary = len(embeddings.weight)
    special = set(_special(adapter.model.config.to_dict()))
    words = [at for at in range(vocabulary) if at not in special]
    if not words:
        raise InputError(
            f"all {vocabulary} tokens of the model are special ones: there is nothing to prompt with"
        )
    return torch.tensor(words)


def _special(config: Any) -> Iterator[int]:
    """Ids that a configuration gives a meaning, as that of an image."""
    if not isinstance(config, Mapping):
        return
    for name, value in config.items():
        if str(name).endswith(("token_id", "token_ids", "token_index")):
            yield from (
                one for one in (value if isinstance(value, list | tuple) else [value]) if one is not None
            )
        else:
            yield from _special(value)


def _placed(inputs: Inputs, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: value.to(device, dtype if value.is_floating_point() else None)
        if isinstance(value, Tensor)
        else value
        for name, value in inputs.items()
    }


def _longer(value: Tensor, more: int, fill: int) -> Tensor:
    """[1, T] with `more` columns at the end, or fewer; always a copy."""
    if more <= 0:
        return value[:, : value.shape[1] + more].clone()
    return torch.cat([value, value.new_full((len(value), more), fill)], dim=1)

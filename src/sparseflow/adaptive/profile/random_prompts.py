"""Prompts of given sizes: random words, drawn anew for each so that tokens go to other experts each time, and
the pixels of an example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sparseflow.adaptive.plan.adapter import Adapter, Inputs
from sparseflow.adaptive.plan.space import Tier
from sparseflow.errors import InputError


class RandomPrompts:
    """Makes prompts of one model.

    Args:
        adapter: The model.
        example: Inputs of a request with one image at the highest tier, batch 1, as the model's processor
            makes them; None for prompts without image only.
        device: Where prompts are to lie.
        dtype: Of pixels; by default as in the example.
        seed: What words are drawn from.

    Attributes:
        vision: Tokens of the example's image at each tier.

    Raises:
        InputError: The example is not one request with an image.
    """

    def __init__(
        self,
        adapter: Adapter,
        example: Inputs | None,
        *,
        device: torch.device | str,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        self._device = torch.device(device)
        self._generator = torch.Generator().manual_seed(seed)
        self._words = _words(adapter)
        self._adapter = adapter
        self._prompts: dict[Tier, dict[str, Any]] = {}
        self.vision: dict[Tier, int] = {}
        if example is not None:
            self._take(_placed(example, self._device, dtype))

    def prompt(self, tier: Tier | None, text_tokens: int) -> dict[str, Any]:
        """A prompt.

        Args:
            tier: Of its image; None for none.
            text_tokens: Those that are not of the image; at least 1.

        Raises:
            InputError: A tier and no example, or the example has so much text before its image.
        """
        if tier is None:
            ids = self.draw(text_tokens)[None].to(self._device)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if tier not in self._prompts:
            raise InputError(f"tier {tier!r} needs an image, and the runner was given no `example`")
        prompt = self._prompts[tier]
        ids = prompt["input_ids"]
        more = text_tokens - (ids.shape[1] - self.vision[tier])
        found = {
            name: _longer(value, more, 1 if name == "attention_mask" else 0)
            if isinstance(value, Tensor) and value.shape == ids.shape
            else value
            for name, value in prompt.items()
        }
        if more > 0:
            found["input_ids"][0, -more:] = self.draw(more).to(self._device)
        elif self._adapter.vision_tokens(found) != self.vision[tier]:
            raise InputError(
                f"`text_tokens` (={text_tokens}) would cut the image off: the example has "
                f"{ids.shape[1] - self.vision[tier]} text tokens, some before the image; ask for more, or "
                "give an example with less text before"
            )
        return found

    def draw(self, count: int) -> Tensor:
        """Random words: [count] int64, on the CPU."""
        return self._words[torch.randint(len(self._words), (count,), generator=self._generator)]

    def _take(self, example: dict[str, Any]) -> None:
        """Reduce the example to each tier."""
        if example["input_ids"].ndim != 2 or len(example["input_ids"]) != 1:
            raise InputError(
                f"`example` must be one request: `input_ids` is {list(example['input_ids'].shape)}"
            )
        if not self._adapter.vision_tokens(example):
            raise InputError("`example` has no image; give a request with one, or None to do without")
        for tier in self._adapter.geometry.tiers:
            self._prompts[tier] = self._adapter.at_tier(example, tier)
            self.vision[tier] = self._adapter.vision_tokens(self._prompts[tier])


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


def _placed(inputs: Inputs, device: torch.device, dtype: torch.dtype | None) -> dict[str, Any]:
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

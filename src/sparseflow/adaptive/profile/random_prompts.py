"""Random prompts of given sizes.

Words are new in each prompt, so that tokens are routed to different experts; pixels are those of an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sparseflow.adaptive.plan.adapter import Adapter, Inputs
from sparseflow.adaptive.plan.space import Tier
from sparseflow.errors import InputError


class RandomPrompts:
    """Generates prompts for one model.

    Args:
        adapter: Model.
        example: Inputs of a request with one image at the highest tier, batch size 1, as the model's
            processor makes them; None for prompts without images only.
        device: Device of the prompts.
        dtype: Number format of pixels; by default that of the example.
        seed: Random seed.

    Attributes:
        vision_tokens: Tokens of the example's image at each tier.

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
        self._words = _list_words(adapter)
        self._adapter = adapter
        self._examples: dict[Tier, dict[str, Any]] = {}
        self.vision_tokens: dict[Tier, int] = {}
        if example is not None:
            self._add_example(_move_inputs(example, self._device, dtype))

    def make_prompt(self, tier: Tier | None, text_tokens: int) -> dict[str, Any]:
        """Make the inputs of a prompt.

        Args:
            tier: Tier of its image; None for no image.
            text_tokens: Tokens that do not belong to the image, at least 1.

        Raises:
            InputError: There is a tier and no example, or the example has too much text before its image.
        """
        if tier is None:
            ids = self.sample_tokens(text_tokens)[None].to(self._device)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if tier not in self._examples:
            raise InputError(f"tier {tier!r} needs an image; pass an `example` that has one")
        example = self._examples[tier]
        ids = example["input_ids"]
        num_added = text_tokens - (ids.shape[1] - self.vision_tokens[tier])
        prompt = {
            name: _resize_columns(value, num_added, 1 if name == "attention_mask" else 0)
            if isinstance(value, Tensor) and value.shape == ids.shape
            else value
            for name, value in example.items()
        }
        if num_added > 0:
            prompt["input_ids"][0, -num_added:] = self.sample_tokens(num_added).to(self._device)
        elif self._adapter.count_vision_tokens(prompt) != self.vision_tokens[tier]:
            raise InputError(
                f"`text_tokens` (={text_tokens}) would cut off the image: the example has "
                f"{ids.shape[1] - self.vision_tokens[tier]} text tokens, some of them before the image; pass "
                "more text tokens, or an example with less text before the image"
            )
        return prompt

    def sample_tokens(self, count: int) -> Tensor:
        """Sample words: [count] int64, on the CPU."""
        return self._words[torch.randint(len(self._words), (count,), generator=self._generator)]

    def _add_example(self, example: dict[str, Any]) -> None:
        """Reduce the example to each tier."""
        if example["input_ids"].ndim != 2 or len(example["input_ids"]) != 1:
            raise InputError(
                f"`example` must be one request, got `input_ids` of shape {list(example['input_ids'].shape)}"
            )
        if not self._adapter.count_vision_tokens(example):
            raise InputError("`example` has no image; pass one with an image, or None for text only")
        for tier in self._adapter.geometry.tiers:
            self._examples[tier] = self._adapter.reduce_to_tier(example, tier)
            self.vision_tokens[tier] = self._adapter.count_vision_tokens(self._examples[tier])


def _list_words(adapter: Adapter) -> Tensor:
    """Ids of tokens without a special meaning: [n] int64."""
    embeddings: Any = adapter.model.get_input_embeddings()
    num_tokens = len(embeddings.weight)
    special_ids = set(_iterate_special_ids(adapter.model.config.to_dict()))
    words = [token for token in range(num_tokens) if token not in special_ids]
    if not words:
        raise InputError(f"all {num_tokens} tokens of the model are special tokens; no prompt can be made")
    return torch.tensor(words)


def _iterate_special_ids(config: Any) -> Iterator[int]:
    """Ids with a meaning in a configuration, such as that of an image."""
    if not isinstance(config, Mapping):
        return
    for name, value in config.items():
        if str(name).endswith(("token_id", "token_ids", "token_index")):
            ids = value if isinstance(value, list | tuple) else [value]
            yield from (token for token in ids if token is not None)
        else:
            yield from _iterate_special_ids(value)


def _move_inputs(inputs: Inputs, device: torch.device, dtype: torch.dtype | None) -> dict[str, Any]:
    return {
        name: value.to(device, dtype if value.is_floating_point() else None)
        if isinstance(value, Tensor)
        else value
        for name, value in inputs.items()
    }


def _resize_columns(value: Tensor, num_added: int, fill: int) -> Tensor:
    """Copy [1, T] with `num_added` more columns at the end, or fewer if negative."""
    if num_added <= 0:
        return value[:, : value.shape[1] + num_added].clone()
    return torch.cat([value, value.new_full((len(value), num_added), fill)], dim=1)

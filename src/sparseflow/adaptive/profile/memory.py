"""What there is room for: requests in a slot, and the slots of a plan on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.errors import InputError

if TYPE_CHECKING:
    from sparseflow.adaptive.plan.adapter import Adapter

_GB = 1e9


def fitting(
    vision_tokens: Mapping[Tier, int], *, text_tokens: int, new_tokens: int, max_tokens: int
) -> tuple[Tier, ...]:
    """Tiers at which a request with one image fits.

    Args:
        vision_tokens: Of the image, at each.
        text_tokens: Of the prompt, those that are not of the image.
        new_tokens: Of its answer; the last of them is never run, so it needs no place.
        max_tokens: Of a slot.
    """
    rest = max_tokens - text_tokens - new_tokens + 1
    return tuple(tier for tier, seen in vision_tokens.items() if seen <= rest)


def cache_bytes(adapter: Adapter, plan: Plan, *, slots: int, tokens: int) -> int:
    """What the keys and values of a plan take in an engine."""
    config: Any = adapter.model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = next(adapter.decoder.parameters()).element_size()
    return 2 * len(plan.blocks) * slots * tokens * heads * width * size


def check_memory(adapter: Adapter, plan: Plan, *, slots: int, tokens: int, free: int) -> None:
    """That the keys and values of a plan can be had at all.

    Args:
        adapter: The model.
        plan: The dearest plan.
        slots: Of its cache.
        tokens: Of each slot.
        free: Bytes that the device has left.

    Raises:
        InputError: They cannot.
    """
    needed = cache_bytes(adapter, plan, slots=slots, tokens=tokens)
    if needed > free:
        raise InputError(
            f"keys and values of one plan take {needed / _GB:.3g} GB at `max_batch` {slots} and `max_tokens` "
            f"{tokens}, and the device has {free / _GB:.3g} GB left: lower `max_tokens` or `max_batch`"
        )

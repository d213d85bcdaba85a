"""Capacity checks: which tiers fit into a slot, and whether a KV cache fits into memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.errors import InputError

if TYPE_CHECKING:
    from sparseflow.adaptive.plan.adapter import Adapter

_GB = 1e9


def select_fitting_tiers(
    vision_tokens: Mapping[Tier, int], *, text_tokens: int, new_tokens: int, max_tokens: int
) -> tuple[Tier, ...]:
    """Select the tiers at which a request with one image fits into a slot.

    Args:
        vision_tokens: Tokens of the image at each tier.
        text_tokens: Prompt tokens that do not belong to the image.
        new_tokens: Tokens of the answer; the last one is never run, so it needs no entry.
        max_tokens: Tokens of a slot.
    """
    max_vision_tokens = max_tokens - text_tokens - new_tokens + 1
    return tuple(tier for tier, tokens in vision_tokens.items() if tokens <= max_vision_tokens)


def compute_cache_bytes(adapter: Adapter, plan: Plan, *, slots: int, tokens: int) -> int:
    """Size of the KV cache of a plan in an engine."""
    config: Any = adapter.model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    element_size = next(adapter.decoder.parameters()).element_size()
    return 2 * len(plan.blocks) * slots * tokens * heads * head_dim * element_size


def check_cache_memory(adapter: Adapter, plan: Plan, *, slots: int, tokens: int, free_bytes: int) -> None:
    """Check that the KV cache of a plan fits into memory.

    Args:
        adapter: Model.
        plan: Largest plan.
        slots: Slots of the cache.
        tokens: Tokens of each slot.
        free_bytes: Free memory of the device.

    Raises:
        InputError: It does not fit.
    """
    required_bytes = compute_cache_bytes(adapter, plan, slots=slots, tokens=tokens)
    if required_bytes > free_bytes:
        raise InputError(
            f"the KV cache of one plan takes {required_bytes / _GB:.3g} GB at `max_batch` {slots} and "
            f"`max_tokens` {tokens}, and the device has {free_bytes / _GB:.3g} GB free; lower "
            "`max_tokens` or `max_batch`"
        )

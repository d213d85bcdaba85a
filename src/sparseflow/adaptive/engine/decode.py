"""Decode steps with static shapes: tokens in, logits and most probable tokens out.

Tokens, positions and rope offsets are copied into fixed buffers. The batch is padded to one of a few sizes,
and so is the attended context, so the steps of one plan need few CUDA graphs. Padding rows write into free
slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from sparseflow.adaptive.engine.cache import SlotCache
from sparseflow.adaptive.engine.graphs import GraphCache
from sparseflow.adaptive.engine.kernel_patcher import KernelPatcher
from sparseflow.adaptive.engine.requests.sampling import argmax_tokens
from sparseflow.adaptive.plan.adapter import Adapter
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import ModelGeometry, Plan
from sparseflow.errors import InputError, ModelError


@lru_cache(maxsize=4096)
def get_decode_plan(plan: Plan, geometry: ModelGeometry) -> Plan:
    """The part of a plan that matters after the prompt; requests with equal ones share a batch.

    The vision tokens are in the cache by then, and with the model's own top-k the insertion position has no
    effect.
    """
    position = 1 if plan.top_k == geometry.top_k else plan.insertion_position
    return replace(plan, tier=None, insertion_position=position)


def doubling_sizes(max_size: int, *, first: int = 1) -> tuple[int, ...]:
    """Doubling sizes ending with `max_size`: `(1, 2, 4, 6)` for 6."""
    sizes = []
    size = first
    while size < max_size:
        sizes.append(size)
        size *= 2
    return (*sizes, max_size)


def select_size(sizes: Sequence[int], count: int) -> int:
    """Smallest size of at least `count`.

    Raises:
        InputError: No size is large enough.
    """
    for size in sizes:
        if size >= count:
            return size
    raise InputError(f"{count} exceeds the largest size {sizes[-1]}")


def last_logits_args(model: nn.Module, keep: int | Tensor = 1) -> dict[str, Any]:
    """Forward arguments that restrict logits to the last token, if the model supports it.

    Args:
        model: The model.
        keep: Number of last tokens, or index of the last token, [1] int64.
    """
    return {"logits_to_keep": keep} if "logits_to_keep" in signature(model.forward).parameters else {}


class DecodeRunner:
    """Runs decode steps of a model.

    Args:
        adapter: Adapter of the model.
        runtime: Plan runtime of the model.
        graphs: CUDA graphs of the steps.
        kernel_patcher: Kernels used in captured steps.
        rows: Maximum number of rows of a step.
        tokens: Maximum number of tokens of a request.
        contexts: Padded context sizes; default: doubling sizes from 128.

    Raises:
        ModelError: The model's attention takes no mask, or has a sliding window.
    """

    def __init__(
        self,
        adapter: Adapter,
        runtime: PlanRuntime,
        graphs: GraphCache,
        *,
        kernel_patcher: KernelPatcher,
        rows: int,
        tokens: int,
        contexts: Sequence[int] | None = None,
    ) -> None:
        check_attention(adapter, tokens)
        self.adapter, self.runtime, self.graphs = adapter, runtime, graphs
        self.kernel_patcher = kernel_patcher
        self.batches = doubling_sizes(rows)
        sizes = contexts or doubling_sizes(tokens, first=min(tokens, 128))
        self.contexts = tuple(sorted({size for size in sizes if size < tokens} | {tokens}))
        device = graphs.device
        self._dtype = next(adapter.decoder.parameters()).dtype
        self._staged = torch.zeros(3, rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        # Shares memory; NumPy converts lists faster than torch.
        self._staged_array = self._staged.numpy()
        self._inputs = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._best = torch.zeros(rows, dtype=torch.int64, device=device)
        self._logits: Tensor | None = None

    def run(
        self, cache: SlotCache, tokens: Sequence[int], ropes: Sequence[int] | None = None, *, first: int = 0
    ) -> tuple[Tensor, list[int]]:
        """Decode one token of each of several consecutive slots, and count it in the cache.

        Args:
            cache: Cache of the requests.
            tokens: Last token of each request.
            ropes: Offset from cache index to rotary position of each request; default: 0.
            first: First slot.

        Returns:
            Logits [rows, vocabulary], in a buffer that the next step overwrites, and the most probable
            tokens, -1 where logits are NaN.

        Raises:
            InputError: A slot is not in use, or is full.
        """
        count = len(tokens)
        lengths = cache.lengths[first : first + count]
        if count == 0 or len(lengths) < count:
            raise InputError(f"slots {first} to {first + count - 1} are not all in use; {cache.count} are")
        if max(lengths) >= cache.tokens:
            raise InputError(f"a request with {max(lengths)} tokens has filled its slot of {cache.tokens}")
        # Padding rows write into free slots, so only a step of all slots in use is padded.
        all_slots = count == cache.count
        rows = min(select_size(self.batches, count), cache.slots) if all_slots else count
        context = select_size(self.contexts, max(lengths) + 1)
        self._staged_array[:, :rows] = 0
        self._staged_array[0, :count] = tokens
        self._staged_array[1, :count] = lengths
        if ropes is not None:
            self._staged_array[2, :count] = ropes
        # Complete, because a slice is not contiguous and its copy would synchronize.
        self._inputs.copy_(self._staged, non_blocking=True)
        body = partial(self._body, cache, rows, context, first)
        if all_slots:
            self.graphs.run(("decode", cache.plan.id, id(cache), rows, context), body)
        else:
            body()
        assert self._logits is not None
        best = self._best[:count].tolist()
        cache.advance(range(first, first + count))
        return self._logits[:count], best

    def warm_up(self, cache: SlotCache) -> list[Callable[[], None]]:
        """Tasks that run every step size of an empty cache once."""

        def once(rows: int, context: int) -> None:
            slots = [cache.allocate() for _ in range(rows)]
            cache.advance(slots, max(1, context - 1))
            try:
                self.run(cache, [0] * rows)
            finally:
                for slot in reversed(slots):
                    cache.release(slot)

        sizes = [(rows, context) for rows in self.batches for context in self.contexts if context > 1]
        return [partial(once, *size) for size in sizes]

    def _body(self, cache: SlotCache, rows: int, context: int, first: int) -> None:
        ids, positions, ropes = self._inputs[:, :rows]
        visible = torch.arange(context, device=ids.device)[None] <= positions[:, None]
        mask = torch.zeros(rows, context, dtype=self._dtype, device=ids.device)
        mask = mask.masked_fill(~visible, torch.finfo(self._dtype).min)[:, None, None]
        with (
            self.runtime.use_plan(cache.plan) as running,
            cache.decoding(positions, context=context, first=first),
            self.kernel_patcher.patch(rows, running),
        ):
            output: Any = self.adapter.model(
                input_ids=ids[:, None],
                attention_mask=mask,
                position_ids=(positions + ropes)[:, None],
                past_key_values=cache,
                use_cache=True,
                **last_logits_args(self.adapter.model),
            )
        logits = output.logits[:, -1]
        if self._logits is None:
            self._logits = torch.zeros(
                self._inputs.shape[1], logits.shape[1], dtype=logits.dtype, device=logits.device
            )
        self._logits[:rows].copy_(logits)
        self._best[:rows].copy_(argmax_tokens(logits))


def check_attention(adapter: Adapter, tokens: int) -> None:
    """Check that a model's attention supports static buffers and masks for requests of `tokens` tokens.

    Raises:
        ModelError: It does not.
    """
    config: Any = adapter.decoder.config
    implementation = getattr(config, "_attn_implementation", "eager")
    if implementation not in ("sdpa", "eager"):
        raise ModelError(
            f"attention implementation {implementation!r} takes no mask; load the model with "
            "attn_implementation='sdpa'"
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and window < tokens:
        raise ModelError(
            f"the model has a sliding window of {window} tokens; `max_tokens` (={tokens}) must be "
            "at most that"
        )
    max_positions = adapter.context
    if max_positions is not None and max_positions < tokens:
        raise ModelError(
            f"the model has {max_positions} positions; `max_tokens` (={tokens}) must be at most that"
        )

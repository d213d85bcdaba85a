"""One decode step of several requests: tokens in, logits and most probable tokens out.

Everything is static. Tokens, places and rope offsets are copied into buffers that never move; the batch is
rounded up to a bucket of rows, and attention to a bucket of places. So a step of one plan is one of few
recordings. Rows that fill a bucket up write into slots that are free.
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
from sparseflow.adaptive.engine.requests.sampling import most_probable
from sparseflow.adaptive.plan.adapter import Adapter
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import ModelGeometry, Plan
from sparseflow.errors import InputError, ModelError


@lru_cache(maxsize=4096)
def decode_plan(plan: Plan, geometry: ModelGeometry) -> Plan:
    """What of a plan matters after the prompt; requests whose plans agree in it are batched.

    The vision tokens are in the cache by then, and where top-k is the model's own, it does not matter from
    which block on it holds.
    """
    position = 1 if plan.top_k == geometry.top_k else plan.insertion_position
    return replace(plan, tier=None, insertion_position=position)


def buckets(most: int, *, first: int = 1) -> tuple[int, ...]:
    """Doubling sizes up to one that is at least `most`, which is the last: `(1, 2, 4, 6)` for 6."""
    sizes = []
    size = first
    while size < most:
        sizes.append(size)
        size *= 2
    return (*sizes, most)


def bucket(sizes: Sequence[int], wanted: int) -> int:
    """The smallest size that holds so many.

    Raises:
        InputError: None does.
    """
    for size in sizes:
        if size >= wanted:
            return size
    raise InputError(f"{wanted} is more than the largest bucket, {sizes[-1] if sizes else 0}")


def last_logits(model: nn.Module, at: int | Tensor = 1) -> dict[str, Any]:
    """Arguments that have a model compute logits of its last token only, where it can.

    Args:
        model: The model.
        at: How many last tokens, or the index of the one that is the last, [1] int64.
    """
    return {"logits_to_keep": at} if "logits_to_keep" in signature(model.forward).parameters else {}


class DecodeRunner:
    """Decode steps of a model.

    Args:
        adapter: The model.
        knobs: The knobs on it.
        graphs: Where steps are recorded.
        fused: What is replaced while they are; by default what the model allows.
        rows: Most rows of a step.
        tokens: Most tokens of a request.
        batches: Sizes that batches are rounded up to.
        contexts: Sizes that attention is rounded up to.

    Raises:
        ModelError: The model's attention takes no mask, or looks at a window only.
    """

    def __init__(
        self,
        adapter: Adapter,
        knobs: PlanRuntime,
        graphs: GraphCache,
        *,
        fused: KernelPatcher | None = None,
        rows: int,
        tokens: int,
        batches: Sequence[int] | None = None,
        contexts: Sequence[int] | None = None,
    ) -> None:
        check(adapter, tokens)
        self.adapter, self.knobs, self.graphs = adapter, knobs, graphs
        self.fused = fused if fused is not None else KernelPatcher(adapter)
        self.batches = tuple(sorted({size for size in batches or buckets(rows) if size < rows} | {rows}))
        sizes = contexts or buckets(tokens, first=min(tokens, 128))
        self.contexts = tuple(sorted({size for size in sizes if size < tokens} | {tokens}))
        device = graphs.device
        self._dtype = next(adapter.decoder.parameters()).dtype
        self._staged = torch.zeros(3, rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        # The same memory: NumPy takes lists sooner than torch does.
        self._written = self._staged.numpy()
        self._given = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._best = torch.zeros(rows, dtype=torch.int64, device=device)
        self._logits: Tensor | None = None

    def run(
        self, cache: SlotCache, tokens: Sequence[int], ropes: Sequence[int] | None = None, *, first: int = 0
    ) -> tuple[Tensor, list[int]]:
        """Decode one token of each of some successive slots, and count it in the cache.

        Args:
            cache: Where the requests are.
            tokens: The last token of each.
            ropes: What to add to a token's place to get its rotary position, for each; by default 0.
            first: Their first slot.

        Returns:
            Logits, [rows, vocabulary], in a buffer that the next step overwrites; and the most probable
            tokens, -1 where logits are NaN.

        Raises:
            InputError: A slot is not in use, or full.
        """
        count = len(tokens)
        lengths = cache.lengths[first : first + count]
        if count == 0 or len(lengths) < count:
            raise InputError(
                f"slots {first} to {first + count - 1} are not all in use: there are {cache.count}"
            )
        if max(lengths) >= cache.tokens:
            raise InputError(f"a request with {max(lengths)} tokens has filled its slot of {cache.tokens}")
        # What fills a bucket up writes into free slots, so only a step of all slots in use is rounded up.
        whole = count == cache.count
        rows = min(bucket(self.batches, count), cache.slots) if whole else count
        context = bucket(self.contexts, max(lengths) + 1)
        self._written[:, :rows] = 0
        self._written[0, :count] = tokens
        self._written[1, :count] = lengths
        if ropes is not None:
            self._written[2, :count] = ropes
        # Whole, as a part of it would not lie in one piece, and be copied in a way that waits.
        self._given.copy_(self._staged, non_blocking=True)
        body = partial(self._body, cache, rows, context, first)
        if whole:
            self.graphs.run(("decode", cache.plan.id, id(cache), rows, context), body)
        else:
            body()
        assert self._logits is not None
        best = self._best[:count].tolist()
        cache.advance(range(first, first + count))
        return self._logits[:count], best

    def warm(self, cache: SlotCache) -> list[Callable[[], None]]:
        """Work that runs every step of an empty cache once."""

        def once(rows: int, context: int) -> None:
            slots = [cache.take() for _ in range(rows)]
            cache.advance(slots, max(1, context - 1))
            try:
                self.run(cache, [0] * rows)
            finally:
                for slot in reversed(slots):
                    cache.release(slot)

        sizes = [(rows, context) for rows in self.batches for context in self.contexts if context > 1]
        return [partial(once, *size) for size in sizes]

    def _body(self, cache: SlotCache, rows: int, context: int, first: int) -> None:
        ids, positions, ropes = self._given[:, :rows]
        seen = torch.arange(context, device=ids.device)[None] <= positions[:, None]
        mask = torch.zeros(rows, context, dtype=self._dtype, device=ids.device)
        mask = mask.masked_fill(~seen, torch.finfo(self._dtype).min)[:, None, None]
        with (
            self.knobs.running(cache.plan) as running,
            cache.decoding(positions, context=context, first=first),
            self.fused.installed(rows, running),
        ):
            found: Any = self.adapter.model(
                input_ids=ids[:, None],
                attention_mask=mask,
                position_ids=(positions + ropes)[:, None],
                past_key_values=cache,
                use_cache=True,
                **last_logits(self.adapter.model),
            )
        logits = found.logits[:, -1]
        if self._logits is None:
            self._logits = torch.zeros(
                self._given.shape[1], logits.shape[1], dtype=logits.dtype, device=logits.device
            )
        self._logits[:rows].copy_(logits)
        self._best[:rows].copy_(most_probable(logits))


def check(adapter: Adapter, tokens: int) -> None:
    """That a model's attention can be given static buffers and a mask.

    Args:
        adapter: The model.
        tokens: Most tokens of a request.

    Raises:
        ModelError: It cannot.
    """
    config: Any = adapter.decoder.config
    kind = getattr(config, "_attn_implementation", "eager")
    if kind not in ("sdpa", "eager"):
        raise ModelError(
            f"attention by {kind!r} takes no mask of places; load the model with attn_implementation='sdpa'"
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and window < tokens:
        raise ModelError(
            f"the model's attention looks at a window of {window} tokens; slots keep whole requests, so give "
            f"at most so many as `max_tokens` (={tokens})"
        )
    most = adapter.context
    if most is not None and most < tokens:
        raise ModelError(f"the model knows {most} positions, fewer than `max_tokens` (={tokens})")

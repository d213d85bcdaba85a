"""Key-value cache with static slots, so that CUDA graphs can be replayed on it.

A cache belongs to one plan and holds, for each block of the plan, two buffers [slots, heads, tokens,
head_dim]. A request owns a slot, which is its row in every batch. The slots in use are always the first ones:
when a request ends, the last one is moved to its slot. The number of tokens per slot is known on the CPU, so
reading it does not synchronize.

After each forward that ran in Python, the cache checks that every block of the plan received equally many
tokens and other blocks none. A captured forward is checked at capture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sparseflow.adaptive.plan.execution import CachePlan
from sparseflow.adaptive.plan.space import Plan
from sparseflow.core.checks import check_at_least
from sparseflow.core.extras import require
from sparseflow.errors import InputError, PlanError

if TYPE_CHECKING:
    from transformers.cache_utils import Cache, CacheLayerMixin
else:
    _module = require("transformers.cache_utils", "adaptive")
    Cache, CacheLayerMixin = _module.Cache, _module.CacheLayerMixin


@dataclass(kw_only=True)
class _CacheWrite:
    """Keys and values that a forward writes, and where.

    Attributes:
        first: First slot of a decode step.
        positions: Cache index of each row's token, [rows] int64; None for a prefill.
        context: Number of cache entries that a decode step attends to.
        slots: Slots that a prefill writes, [rows] int64; None for a decode step.
        before: Blocks written by an earlier part of the same prefill.
        written_tokens: Block -> tokens written.
    """

    first: int = 0
    positions: Tensor | None = None
    context: int = 0
    slots: Tensor | None = None
    before: tuple[int, ...] = ()
    written_tokens: dict[int, int] = field(default_factory=dict)


class SlotLayer(CacheLayerMixin):
    """Keys and values of one block; no buffers if the plan skips it."""

    is_sliding = False

    def __init__(self, cache: SlotCache, block: int) -> None:
        super().__init__()
        self._cache, self._block = cache, block

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate buffers for keys and values of these shapes, [rows, heads, tokens, head_dim]."""
        cache = self._cache
        for name, like in (("keys", key_states), ("values", value_states)):
            shape = (cache.slots, like.shape[1], cache.tokens, like.shape[3])
            # Zeros, because masked values are multiplied by zero, and NaN times zero is NaN.
            setattr(self, name, like.new_zeros(shape))
        self.is_initialized = True

    def buffers(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers, allocated on first use."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values, and return those that the attention reads."""
        write = self._cache.current_write
        if not self._cache.plan.runs(self._block):
            raise PlanError(f"block {self._block} does not run in {self._cache.plan.id} and has no cache")
        buffers = self.buffers(key_states, value_states)
        rows, heads, tokens, _ = key_states.shape
        write.written_tokens |= dict.fromkeys((*write.before, self._block), tokens)
        if write.positions is None:
            assert write.slots is not None
            for buffer, new in zip(buffers, (key_states, value_states), strict=True):
                buffer[:, :, :tokens].index_copy_(0, write.slots, new)
            # A prefill attends only to itself.
            return key_states, value_states
        row_slice = slice(write.first, write.first + rows)
        views = []
        for buffer, new in zip(buffers, (key_states, value_states), strict=True):
            view = buffer[row_slice, :, : write.context]
            token_index = write.positions[:, None, None, None].expand(rows, heads, 1, new.shape[3])
            views.append(view.scatter_(2, token_index, new))
        return views[0], views[1]

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Tokens of the longest slot; during a prefill, those of its prompt."""
        return self._cache.length(self._block)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Mask size of a prefill, which attends only to itself; a decode step passes its own mask."""
        # Older releases of transformers pass the positions instead of their count.
        return (query_length if isinstance(query_length, int) else len(query_length)), 0

    def get_max_length(self) -> int:
        """Tokens per slot."""
        return self._cache.tokens

    get_max_cache_shape = get_max_length


class SlotCache(Cache):
    """Cache of one plan.

    Args:
        plan: Plan of the requests.
        depth: Number of blocks of the model.
        slots: Maximum number of concurrent requests, above 0.
        tokens: Maximum number of tokens of a request, above 0.
        state: Number of attributes in `Adapter.state`.

    Attributes:
        plan: Plan of the requests.
        slots: Number of slots.
        tokens: Tokens per slot.
        blocks: Keys and values of each block.

    Raises:
        InputError: A count is not above 0.
    """

    def __init__(self, plan: Plan, depth: int, *, slots: int, tokens: int, state: int = 0) -> None:
        check_at_least(1, slots=slots, tokens=tokens)
        self.plan, self.slots, self.tokens = plan, slots, tokens
        self._lengths: list[int] = []
        self._call: _CacheWrite | None = None
        self.blocks = [SlotLayer(self, block) for block in range(depth)]
        super().__init__(layers=list(self.blocks))
        self._state = state

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each slot in use, in order."""
        return tuple(self._lengths)

    @property
    def count(self) -> int:
        """Number of slots in use."""
        return len(self._lengths)

    @property
    def memory_bytes(self) -> int:
        """Size of the buffers; 0 before the first tokens."""
        buffers = [
            buffer for layer in self.blocks for buffer in (layer.keys, layer.values) if buffer is not None
        ]
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    @property
    def current_write(self) -> _CacheWrite:
        """The write of the current forward."""
        if self._call is None:
            raise InputError("a slot cache can only be written within `prefilling` or `decoding`")
        return self._call

    def length(self, block: int) -> int:
        """Sequence length of a block, for `SlotLayer.get_seq_length`."""
        if not self.plan.runs(block):
            return 0
        written_tokens = 0 if self._call is None else self._call.written_tokens.get(block, 0)
        if self._call is not None and self._call.slots is not None:
            return written_tokens
        return max(self._lengths, default=0) + written_tokens

    def allocate(self) -> int:
        """Allocate an empty slot.

        Raises:
            InputError: All slots are in use.
        """
        if len(self._lengths) == self.slots:
            raise InputError(f"all {self.slots} slots of {self.plan.id} are in use; release one first")
        self._lengths.append(0)
        return len(self._lengths) - 1

    def release(self, slot: int) -> None:
        """Release a slot; the last slot in use is moved to its index.

        Raises:
            InputError: The slot is not in use.
        """
        self._check_slot(slot)
        length = self._lengths.pop()
        last = len(self._lengths)
        if slot == last:
            return
        self._lengths[slot] = length
        for layer in self.blocks:
            for buffer in (layer.keys, layer.values):
                if buffer is not None:
                    buffer[slot, :, :length].copy_(buffer[last, :, :length])

    def advance(self, slots: Sequence[int], tokens: int = 1) -> None:
        """Count tokens that a forward wrote into slots.

        Raises:
            InputError: A slot is not in use, or is full.
        """
        for slot in slots:
            self._check_slot(slot)
            if self._lengths[slot] + tokens > self.tokens:
                raise InputError(
                    f"slot {slot} of {self.plan.id} holds {self._lengths[slot]} of at most {self.tokens} "
                    f"tokens; {tokens} more do not fit"
                )
        for slot in slots:
            self._lengths[slot] += tokens

    def rewind(self, lengths: Sequence[int]) -> None:
        """Restore `lengths` from before a failed forward; the slots in use must be the same."""
        assert len(lengths) == len(self._lengths)
        self._lengths = [min(pair) for pair in zip(self._lengths, lengths, strict=True)]

    def copy_from(self, slot: int, cache: Any, *, row: int = 0) -> None:
        """Copy one row of another cache into a newly allocated slot.

        Args:
            slot: The slot.
            cache: A transformers cache filled by a forward of the same plan.
            row: Row of that cache.

        Raises:
            InputError: The slot is not in use, or too small.
            PlanError: The cache holds other blocks than the plan runs.
        """
        self._check_slot(slot)
        filled_layers = {
            block_index: layer
            for block_index, layer in enumerate(cache.layers)
            if layer.keys is not None and layer.get_seq_length()
        }
        if tuple(filled_layers) != self.plan.blocks:
            raise PlanError(
                f"a cache with tokens of blocks {tuple(filled_layers)} does not match {self.plan.id}"
            )
        length = {layer.keys.shape[2] for layer in filled_layers.values()}
        if len(length) > 1 or max(length) > self.tokens:
            raise InputError(f"{sorted(length)} tokens do not fit into a slot of {self.tokens}")
        for block, source_layer in filled_layers.items():
            buffers = self.blocks[block].buffers(source_layer.keys, source_layer.values)
            for buffer, new in zip(buffers, (source_layer.keys, source_layer.values), strict=True):
                buffer[slot, :, : new.shape[2]].copy_(new[row])
        self._lengths[slot] = max(length)

    @contextmanager
    def prefilling(self, slots: Tensor, *, after: int = 0) -> Iterator[None]:
        """Context of a forward that writes complete prompts.

        Args:
            slots: Slot of each row, [rows] int64, on the device of the buffers.
            after: Blocks before this one were written by an earlier part.
        """
        before = tuple(block for block in self.plan.blocks if block < after)
        with self._writing(_CacheWrite(slots=slots, before=before)):
            yield

    @contextmanager
    def decoding(self, positions: Tensor, *, context: int, first: int = 0) -> Iterator[None]:
        """Context of a forward that writes one token into each of several consecutive slots.

        Args:
            positions: Tokens already in each slot, [rows] int64, on the device of the buffers.
            context: Number of cache entries to attend to; above every position.
            first: First slot.
        """
        with self._writing(_CacheWrite(positions=positions, context=context, first=first)):
            yield

    @contextmanager
    def _writing(self, call: _CacheWrite) -> Iterator[None]:
        assert self._call is None, "forwards on one cache come one after the other"
        # Positions are passed at each step, so no model state has to be restored.
        CachePlan(plan=self.plan, state=[None] * self._state).attach_to(self)
        self._call = call
        try:
            yield
            if (
                tuple(sorted(call.written_tokens)) != self.plan.blocks
                or len(set(call.written_tokens.values())) > 1
            ):
                raise PlanError(
                    f"a forward of {self.plan.id} wrote unequal tokens per block: {call.written_tokens}"
                )
        finally:
            self._call = None

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < len(self._lengths):
            raise InputError(
                f"slot {slot} of {self.plan.id} is not in use; slots in use are below {len(self._lengths)}"
            )

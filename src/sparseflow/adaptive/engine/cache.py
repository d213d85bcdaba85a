"""Keys and values of many requests in buffers that never move: what a recorded step can be played on.

A cache belongs to one plan and holds, for each block that the plan runs, two buffers [slots, heads, tokens,
head_dim]. A request owns a slot, which is its row in every batch. The slots in use are always the first ones:
when a request ends, the last one takes its place. How many tokens a slot holds is known on the host, so
nobody ever waits for a device to find out.

After each forward that ran in Python, the cache compares what was written with its plan: as many tokens of
each of its blocks, none of others. A recorded forward is compared when it is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sparseflow.adaptive.plan.execution import CachePlan
from sparseflow.adaptive.plan.space import Plan
from sparseflow.core.extras import require
from sparseflow.errors import InputError, PlanError

if TYPE_CHECKING:
    from transformers.cache_utils import Cache, CacheLayerMixin
else:
    _module = require("transformers.cache_utils", "adaptive")
    Cache, CacheLayerMixin = _module.Cache, _module.CacheLayerMixin


@dataclass(kw_only=True)
class _CacheWrite:
    """What a forward writes, and where.

    Attributes:
        first: First row of a decode step.
        positions: Place of each row's token, [rows] int64; None in a prefill.
        context: How many tokens attention looks at in a decode step.
        slots: Slots that a prefill writes, [rows] int64; None in a decode step.
        before: Blocks that an earlier part of the same prefill wrote.
        wrote: Block -> tokens written.
    """

    first: int = 0
    positions: Tensor | None = None
    context: int = 0
    slots: Tensor | None = None
    before: tuple[int, ...] = ()
    wrote: dict[int, int] = field(default_factory=dict)


class SlotLayer(CacheLayerMixin):
    """One block's keys and values; without buffers where the plan skips the block."""

    is_sliding = False

    def __init__(self, cache: SlotCache, block: int) -> None:
        super().__init__()
        self._cache, self._block = cache, block

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the buffers, for keys and values of these shapes: [rows, heads, tokens, head_dim]."""
        cache = self._cache
        for name, like in (("keys", key_states), ("values", value_states)):
            shape = (cache.slots, like.shape[1], cache.tokens, like.shape[3])
            # Zeros, not garbage: what is masked is multiplied by zero, and NaN times zero is NaN.
            setattr(self, name, like.new_zeros(shape))
        self.is_initialized = True

    def buffers(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers, made for such keys and values where there are none yet."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a forward's keys and values, and give what its attention looks at."""
        call = self._cache.call
        if not self._cache.plan.runs(self._block):
            raise PlanError(
                f"block {self._block} does not run in {self._cache.plan.id}; its cache has no place for it"
            )
        buffers = self.buffers(key_states, value_states)
        rows, heads, tokens, _ = key_states.shape
        call.wrote |= dict.fromkeys((*call.before, self._block), tokens)
        if call.positions is None:
            assert call.slots is not None
            for buffer, new in zip(buffers, (key_states, value_states), strict=True):
                buffer[:, :, :tokens].index_copy_(0, call.slots, new)
            # A prefill sees nothing but itself.
            return key_states, value_states
        here = slice(call.first, call.first + rows)
        found = []
        for buffer, new in zip(buffers, (key_states, value_states), strict=True):
            view = buffer[here, :, : call.context]
            at = call.positions[:, None, None, None].expand(rows, heads, 1, new.shape[3])
            found.append(view.scatter_(2, at, new))
        return found[0], found[1]

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Tokens of the fullest slot; while a prefill runs, those of its prompt."""
        return self._cache.length(self._block)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Of a prefill, which sees only itself; a decode step brings its own mask."""
        # Older releases of transformers give the positions in place of their count.
        return (query_length if isinstance(query_length, int) else len(query_length)), 0

    def get_max_length(self) -> int:
        """Tokens that a slot has room for."""
        return self._cache.tokens

    get_max_cache_shape = get_max_length


class SlotCache(Cache):
    """The cache of one plan.

    Args:
        plan: What its requests run.
        depth: Blocks of the model.
        slots: Most requests at a time, > 0.
        tokens: Most tokens of a request, > 0.
        state: How many attributes the model keeps on itself for a request; see `Adapter.state`.

    Attributes:
        plan: As given.
        slots: As given.
        tokens: As given.
        blocks: Keys and values of each block of the model.

    Raises:
        InputError: A count is not above zero.
    """

    def __init__(self, plan: Plan, depth: int, *, slots: int, tokens: int, state: int = 0) -> None:
        for name, value in (("slots", slots), ("tokens", tokens)):
            if value < 1:
                raise InputError(f"`{name}` (={value}) must be at least 1")
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
        """Slots in use."""
        return len(self._lengths)

    @property
    def memory_bytes(self) -> int:
        """What the buffers take; 0 before the first tokens."""
        buffers = [each for layer in self.blocks for each in (layer.keys, layer.values) if each is not None]
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    @property
    def call(self) -> _CacheWrite:
        """The forward that runs."""
        if self._call is None:
            raise InputError("a slot cache is written within `prefilling` or `decoding` only")
        return self._call

    def length(self, block: int) -> int:
        """As `SlotLayer.get_seq_length` tells it."""
        if not self.plan.runs(block):
            return 0
        wrote = 0 if self._call is None else self._call.wrote.get(block, 0)
        if self._call is not None and self._call.slots is not None:
            return wrote
        return max(self._lengths, default=0) + wrote

    def take(self) -> int:
        """A free slot; it holds no token yet.

        Raises:
            InputError: All are in use.
        """
        if len(self._lengths) == self.slots:
            raise InputError(f"all {self.slots} slots of {self.plan.id} are in use; release one first")
        self._lengths.append(0)
        return len(self._lengths) - 1

    def release(self, slot: int) -> int | None:
        """Free a slot. The last slot in use takes its place.

        Returns:
            The slot that moved here, None where none had to.

        Raises:
            InputError: It is not in use.
        """
        self._check(slot)
        length = self._lengths.pop()
        last = len(self._lengths)
        if slot == last:
            return None
        self._lengths[slot] = length
        for layer in self.blocks:
            for buffer in (layer.keys, layer.values):
                if buffer is not None:
                    buffer[slot, :, :length].copy_(buffer[last, :, :length])
        return last

    def advance(self, slots: Sequence[int], tokens: int = 1) -> None:
        """Count tokens that a forward has written into slots.

        Raises:
            InputError: A slot is not in use, or has no room for them.
        """
        for slot in slots:
            self._check(slot)
            if self._lengths[slot] + tokens > self.tokens:
                raise InputError(
                    f"slot {slot} of {self.plan.id} holds {self._lengths[slot]} of at most {self.tokens} "
                    f"tokens; there is no room for {tokens} more"
                )
        for slot in slots:
            self._lengths[slot] += tokens

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget tokens that were counted since `lengths` was read, with the same slots in use."""
        assert len(lengths) == len(self._lengths)
        self._lengths = [min(pair) for pair in zip(self._lengths, lengths, strict=True)]

    def adopt(self, slot: int, cache: Any, *, row: int = 0) -> None:
        """Copy what a request's own cache holds into a slot that was just taken.

        Args:
            slot: The slot.
            cache: A cache of transformers that grew with a forward of the same plan.
            row: Which row of it.

        Raises:
            InputError: The slot is not in use, or too small.
            PlanError: The cache holds other blocks than the plan runs.
        """
        self._check(slot)
        held = {
            at: layer
            for at, layer in enumerate(cache.layers)
            if layer.keys is not None and layer.get_seq_length()
        }
        if tuple(held) != self.plan.blocks:
            raise PlanError(f"a cache with tokens of blocks {tuple(held)} does not belong to {self.plan.id}")
        length = {layer.keys.shape[2] for layer in held.values()}
        if len(length) > 1 or max(length) > self.tokens:
            raise InputError(f"{sorted(length)} tokens do not fit into a slot of {self.tokens}")
        for block, given in held.items():
            buffers = self.blocks[block].buffers(given.keys, given.values)
            for buffer, new in zip(buffers, (given.keys, given.values), strict=True):
                buffer[slot, :, : new.shape[2]].copy_(new[row])
        self._lengths[slot] = max(length)

    @contextmanager
    def prefilling(self, slots: Tensor, *, after: int = 0) -> Iterator[None]:
        """The forward within writes whole prompts, from the first token on.

        Args:
            slots: The slot of each row, [rows] int64, where the buffers are.
            after: Blocks before this one were written by an earlier part.
        """
        before = tuple(block for block in self.plan.blocks if block < after)
        with self._calling(_CacheWrite(slots=slots, before=before)):
            yield

    @contextmanager
    def decoding(self, positions: Tensor, *, context: int, first: int = 0) -> Iterator[None]:
        """The forward within writes one token into each of some successive slots.

        Args:
            positions: Tokens that each slot holds already, [rows] int64, where the buffers are.
            context: Attention looks at so many places; above every position.
            first: The first slot.
        """
        with self._calling(_CacheWrite(positions=positions, context=context, first=first)):
            yield

    @contextmanager
    def _calling(self, call: _CacheWrite) -> Iterator[None]:
        assert self._call is None, "forwards on one cache come one after the other"
        # Positions are told to the model at each step, so nothing of its own has to be put back.
        CachePlan(plan=self.plan, state=[None] * self._state).mark(self)
        self._call = call
        try:
            yield
            if tuple(sorted(call.wrote)) != self.plan.blocks or len(set(call.wrote.values())) > 1:
                raise PlanError(f"a forward of {self.plan.id} wrote these tokens of blocks: {call.wrote}")
        finally:
            self._call = None

    def _check(self, slot: int) -> None:
        if not 0 <= slot < len(self._lengths):
            raise InputError(
                f"slot {slot} of {self.plan.id} is not in use; those in use are below {len(self._lengths)}"
            )

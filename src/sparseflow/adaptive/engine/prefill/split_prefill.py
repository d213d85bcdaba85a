"""A prompt in two parts, so that each can be recorded, with the second controller in between.

(a) The blocks before the insertion: one recording for each position and size. (b) The other blocks of the
plan: one for each plan and size. Prompts are filled up on their right, where a causal mask keeps that from
being seen, and logits are taken at the last token's index. What lies between the parts is kept in buffers
that never move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparseflow.adaptive.engine.cache import SlotCache
from sparseflow.adaptive.engine.decode import bucket, decode_plan, last_logits
from sparseflow.adaptive.engine.graphs import GraphCache
from sparseflow.adaptive.engine.kernel_patcher import KernelPatcher
from sparseflow.adaptive.engine.requests.sampling import most_probable
from sparseflow.adaptive.plan.adapter import Adapter
from sparseflow.adaptive.plan.runtime import PlanExecution, PlanRuntime
from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.errors import PlanError

Place = Callable[[Plan], tuple[SlotCache, list[int]]]
"""Where the rows of a plan go: a cache, and slots of it that were just taken."""

Decided = Callable[[Tensor], Plan]
"""From the latency token [d] to the plan."""


@dataclass(frozen=True, kw_only=True)
class PrefillOutput:
    """Prompts that stand in their slots.

    Attributes:
        plan: What was decided.
        cache: Where they are.
        slots: The slot of each row.
        ropes: What to add to a token's place to get its rotary position, for each row.
        logits: Of the first new token, [rows, vocabulary]; the next prompt may overwrite them.
        best: The most probable first token of each row, as `most_probable` gives it, [rows] int64; likewise.
            None where nobody asked.
    """

    plan: Plan
    cache: SlotCache
    slots: tuple[int, ...]
    ropes: tuple[int, ...]
    logits: Tensor
    best: Tensor | None = None


@dataclass(kw_only=True)
class _RemainingBlocks(PlanExecution):
    """A plan from some block on."""

    after: int = 0

    def runs(self, block: int) -> bool:
        return block >= self.after and super().runs(block)


class SplitPrefill:
    """Prompts of one row, in parts.

    Args:
        adapter: The model.
        knobs: The knobs on it.
        graphs: Where parts are recorded.
        fused: What is replaced while they are.
        sizes: Sizes that prompts are filled up to, ascending; at least one.

    Attributes:
        entrance: What the first part reads, [1, largest size, d]. Who has a prompt's embeddings there gives
            `run` a view of it, and nothing is copied; what is behind the prompt may be any finite numbers.
    """

    def __init__(
        self,
        adapter: Adapter,
        knobs: PlanRuntime,
        graphs: GraphCache,
        fused: KernelPatcher,
        sizes: Sequence[int],
    ) -> None:
        self.adapter, self.knobs, self.graphs, self.fused = adapter, knobs, graphs, fused
        self.sizes = tuple(sizes)
        weight = next(adapter.decoder.parameters())
        self._last, self._slot, self._zero = torch.zeros(3, 1, dtype=torch.int64, device=weight.device)
        with torch.no_grad():
            width = adapter.embed(self._zero[None]).shape[2]
        self.entrance = torch.zeros(1, self.sizes[-1], width, dtype=weight.dtype, device=weight.device)
        self._hidden = torch.zeros_like(self.entrance)
        self._token = torch.zeros_like(self.entrance[0, 0])
        self._staging: dict[int, SlotCache] = {}
        self._best = torch.zeros(1, dtype=torch.int64, device=weight.device)
        self._logits: Tensor | None = None

    def run(
        self,
        embedded: Tensor,
        tier: Tier | None,
        position: int,
        decide: Decided,
        place: Place,
        meanwhile: Callable[[], None] | None = None,
    ) -> PrefillOutput:
        """Run a prompt.

        Args:
            embedded: What enters the first block, [1, tokens, d].
            tier: What was decided.
            position: The insertion position that was decided; the model has it.
            decide: Gives the plan.
            place: Called when the plan is known.
            meanwhile: Called when the first part was handed to the device.

        Raises:
            PlanError: The decisions do not fit together, or the model cannot run them.
        """
        geometry = self.adapter.geometry
        tokens = embedded.shape[1]
        size = bucket(self.sizes, tokens)
        if embedded.data_ptr() != self.entrance.data_ptr():
            self.entrance[:, :tokens].copy_(embedded)
            self.entrance[:, tokens:size].zero_()
        self._last.fill_(tokens - 1)
        self.graphs.run(("prompt", position, size), partial(self._first, position, size))
        if meanwhile is not None:
            meanwhile()
        plan = decide(self._token.clone())
        if (plan.tier, plan.insertion_position) != (tier, position):
            raise PlanError(
                f"the second controller chose {plan.id}, but tier {tier!r} and position {position} were "
                "decided before"
            )
        self.knobs.check(plan)
        cache, slots = place(plan)
        if cache.plan != decode_plan(plan, geometry):
            raise PlanError(f"{plan.id} cannot go into a cache of {cache.plan.id}")
        (slot,) = slots
        self._slot.fill_(slot)
        key = ("prompt", cache.plan.id, id(cache), position, size)
        self.graphs.run(key, partial(self._second, cache, position, size))
        cache.advance([slot], tokens)
        assert self._logits is not None
        return PrefillOutput(
            plan=plan, cache=cache, slots=(slot,), ropes=(0,), logits=self._logits[None], best=self._best
        )

    def _first(self, position: int, size: int) -> None:
        """From embeddings to what leaves the last block before the insertion."""
        geometry = self.adapter.geometry
        plan = Plan(
            tier=None, insertion_position=position, top_k=geometry.top_k, blocks=tuple(range(position))
        )
        if position not in self._staging:
            self._staging[position] = SlotCache(
                plan, geometry.depth, slots=1, tokens=self.sizes[-1], state=len(self.adapter.state)
            )
        staging = self._staging[position]

        def keep(module: nn.Module, given: Any, found: Any) -> None:
            hidden = self.adapter.hidden(found)
            self._hidden[:, :size].copy_(hidden)
            self._token.copy_(hidden[0].index_select(0, self._last)[0])

        hook = self.adapter.blocks[position - 1].register_forward_hook(keep)
        try:
            with (
                self.knobs.running(plan) as running,
                staging.prefilling(self._zero),
                self.fused.installed(size, running),
            ):
                self.adapter.decoder(
                    inputs_embeds=self.entrance[:, :size], position_ids=self._places(size),
                    past_key_values=staging, use_cache=True,
                )  # fmt: skip
        finally:
            hook.remove()

    def _second(self, cache: SlotCache, position: int, size: int) -> None:
        """From there to logits, with all keys and values in the slot."""
        staging, plan = self._staging[position], cache.plan
        for block in range(position):
            keys, values = staging.blocks[block].keys, staging.blocks[block].values
            assert keys is not None and values is not None
            buffers = cache.blocks[block].buffers(keys, values)
            for buffer, new in zip(buffers, (keys, values), strict=True):
                buffer[:, :, :size].index_copy_(0, self._slot, new[:, :, :size])
        kept = last_logits(self.adapter.model, self._last)
        rest = _RemainingBlocks(
            tier=None, insertion_position=plan.insertion_position, plan=plan, after=position
        )
        with (
            self.knobs._enter(rest),
            cache.prefilling(self._slot, after=position),
            self.fused.installed(size, rest),
        ):
            found: Any = self.adapter.model(
                inputs_embeds=self._hidden[:, :size], position_ids=self._places(size), past_key_values=cache,
                use_cache=True, **kept,
            )  # fmt: skip
        logits = found.logits[0, -1] if kept else found.logits[0].index_select(0, self._last)[0]
        if self._logits is None:
            self._logits = torch.zeros_like(logits)
        self._logits.copy_(logits)
        self._best.copy_(most_probable(logits[None]))

    def _places(self, size: int) -> Tensor:
        return torch.arange(size, device=self._last.device)[None]

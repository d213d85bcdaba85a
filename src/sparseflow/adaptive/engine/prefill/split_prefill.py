"""Prefill in two parts that can be captured, with the plan decision in between.

Part 1 runs the blocks before the insertion: one graph per position and size. Part 2 runs the other blocks of
the plan: one graph per plan and size. Prompts are padded on the right, which a causal mask hides, and logits
are taken at the last token's index. The hidden states between the parts are kept in fixed buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparseflow.adaptive.engine.cache import SlotCache
from sparseflow.adaptive.engine.decode import get_decode_plan, last_logits_args, select_size
from sparseflow.adaptive.engine.graphs import GraphCache
from sparseflow.adaptive.engine.kernel_patcher import KernelPatcher
from sparseflow.adaptive.engine.requests.sampling import argmax_tokens
from sparseflow.adaptive.plan.adapter import Adapter
from sparseflow.adaptive.plan.runtime import PlanExecution, PlanRuntime
from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.errors import PlanError

AllocateSlots = Callable[[Plan], tuple[SlotCache, list[int]]]
"""Maps a plan to its cache and newly allocated slots for the rows."""

ChoosePlan = Callable[[Tensor], Plan]
"""Maps the latency token [d] to the plan."""


@dataclass(frozen=True, kw_only=True)
class PrefillOutput:
    """Prefilled prompts.

    Attributes:
        plan: Chosen plan.
        ropes: Offset from cache index to rotary position of each row.
        logits: Logits of the first new token, [rows, vocabulary]; the next prompt may overwrite them.
        best: Most probable first token of each row, [rows] int64, as from `argmax_tokens`; may be
            overwritten. None if not computed.
    """

    plan: Plan
    ropes: tuple[int, ...]
    logits: Tensor
    best: Tensor | None = None


@dataclass(kw_only=True)
class _RemainingBlocks(PlanExecution):
    """Execution of a plan's blocks from `after` on."""

    after: int = 0

    def runs(self, block: int) -> bool:
        return block >= self.after and super().runs(block)


class SplitPrefill:
    """Runs prompts of one row in two parts.

    Args:
        adapter: Adapter of the model.
        runtime: Plan runtime of the model.
        graphs: CUDA graphs of the parts.
        kernel_patcher: Kernels used in captured parts.
        sizes: Padded prompt sizes, ascending; at least one.

    Attributes:
        input_buffer: Input of part 1, [1, largest size, d]. Embeddings written there need no copy: pass a
            view of it to `run`. The values after the prompt may be any finite numbers.
    """

    def __init__(
        self,
        adapter: Adapter,
        runtime: PlanRuntime,
        graphs: GraphCache,
        kernel_patcher: KernelPatcher,
        sizes: Sequence[int],
    ) -> None:
        self.adapter, self.runtime, self.graphs = adapter, runtime, graphs
        self.kernel_patcher = kernel_patcher
        self.sizes = tuple(sizes)
        weight = next(adapter.decoder.parameters())
        self._last_index, self._slot, self._zero = torch.zeros(3, 1, dtype=torch.int64, device=weight.device)
        with torch.no_grad():
            width = adapter.embed(self._zero[None]).shape[2]
        self.input_buffer = torch.zeros(1, self.sizes[-1], width, dtype=weight.dtype, device=weight.device)
        self._hidden = torch.zeros_like(self.input_buffer)
        self._latency_token = torch.zeros_like(self.input_buffer[0, 0])
        self._staging: dict[int, SlotCache] = {}
        self._best = torch.zeros(1, dtype=torch.int64, device=weight.device)
        self._logits: Tensor | None = None

    def run(
        self,
        embedded: Tensor,
        tier: Tier | None,
        position: int,
        decide: ChoosePlan,
        allocate: AllocateSlots,
        meanwhile: Callable[[], None] | None = None,
    ) -> PrefillOutput:
        """Run a prompt.

        Args:
            embedded: Input of the first block, [1, tokens, d].
            tier: Chosen tier.
            position: Chosen insertion position.
            decide: Maps the latency token to the plan.
            allocate: Called when the plan is known.
            meanwhile: Called after part 1 was launched.

        Raises:
            PlanError: The decisions are inconsistent, or the model cannot run them.
        """
        geometry = self.adapter.geometry
        tokens = embedded.shape[1]
        size = select_size(self.sizes, tokens)
        if embedded.data_ptr() != self.input_buffer.data_ptr():
            self.input_buffer[:, :tokens].copy_(embedded)
            self.input_buffer[:, tokens:size].zero_()
        self._last_index.fill_(tokens - 1)
        self.graphs.run(("prompt", position, size), partial(self._run_first_part, position, size))
        if meanwhile is not None:
            meanwhile()
        plan = decide(self._latency_token.clone())
        if (plan.tier, plan.insertion_position) != (tier, position):
            raise PlanError(
                f"stage 2 chose {plan.id}, but stage 1 chose tier {tier!r} and position {position}"
            )
        self.runtime.check(plan)
        cache, slots = allocate(plan)
        if cache.plan != get_decode_plan(plan, geometry):
            raise PlanError(f"{plan.id} does not match the cache of {cache.plan.id}")
        (slot,) = slots
        self._slot.fill_(slot)
        key = ("prompt", cache.plan.id, id(cache), position, size)
        self.graphs.run(key, partial(self._run_second_part, cache, position, size))
        cache.advance([slot], tokens)
        assert self._logits is not None
        return PrefillOutput(plan=plan, ropes=(0,), logits=self._logits[None], best=self._best)

    def _run_first_part(self, position: int, size: int) -> None:
        """Run the blocks before the insertion."""
        geometry = self.adapter.geometry
        plan = Plan(
            tier=None, insertion_position=position, top_k=geometry.top_k, blocks=tuple(range(position))
        )
        if position not in self._staging:
            self._staging[position] = SlotCache(
                plan, geometry.depth, slots=1, tokens=self.sizes[-1], state=len(self.adapter.state)
            )
        staging = self._staging[position]

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            hidden = self.adapter.get_hidden_states(output)
            self._hidden[:, :size].copy_(hidden)
            self._latency_token.copy_(hidden[0].index_select(0, self._last_index)[0])

        hook = self.adapter.blocks[position - 1].register_forward_hook(keep)
        try:
            with (
                self.runtime.use_plan(plan) as running,
                staging.prefilling(self._zero),
                self.kernel_patcher.patch(size, running),
            ):
                self.adapter.decoder(
                    inputs_embeds=self.input_buffer[:, :size], position_ids=self._position_ids(size),
                    past_key_values=staging, use_cache=True,
                )  # fmt: skip
        finally:
            hook.remove()

    def _run_second_part(self, cache: SlotCache, position: int, size: int) -> None:
        """Run the remaining blocks and the head, with all keys and values in the slot."""
        staging, plan = self._staging[position], cache.plan
        for block in range(position):
            keys, values = staging.blocks[block].keys, staging.blocks[block].values
            assert keys is not None and values is not None
            buffers = cache.blocks[block].buffers(keys, values)
            for buffer, new in zip(buffers, (keys, values), strict=True):
                buffer[:, :, :size].index_copy_(0, self._slot, new[:, :, :size])
        logits_args = last_logits_args(self.adapter.model, self._last_index)
        execution = _RemainingBlocks(
            tier=None, insertion_position=plan.insertion_position, plan=plan, after=position
        )
        with (
            self.runtime.activate(execution),
            cache.prefilling(self._slot, after=position),
            self.kernel_patcher.patch(size, execution),
        ):
            output: Any = self.adapter.model(
                inputs_embeds=self._hidden[:, :size],
                position_ids=self._position_ids(size),
                past_key_values=cache,
                use_cache=True,
                **logits_args,
            )
        logits = (
            output.logits[0, -1] if logits_args else output.logits[0].index_select(0, self._last_index)[0]
        )
        if self._logits is None:
            self._logits = torch.zeros_like(logits)
        self._logits.copy_(logits)
        self._best.copy_(argmax_tokens(logits[None]))

    def _position_ids(self, size: int) -> Tensor:
        return torch.arange(size, device=self._last_index.device)[None]

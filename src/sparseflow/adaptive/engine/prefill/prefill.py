"""Prefill of prompts into cache slots, with the logits of the first new token.

In one piece: the model's own forward, which calls stage 2; correct for every model and batch. Split: in two
captured parts, one row at a time, for models whose decoder consists only of its blocks; a short prompt checks
whether it does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparseflow.adaptive.engine.cache import SlotCache
from sparseflow.adaptive.engine.decode import get_decode_plan, last_logits_args
from sparseflow.adaptive.engine.graphs import GraphCache
from sparseflow.adaptive.engine.kernel_patcher import KernelPatcher, compare_outputs
from sparseflow.adaptive.engine.prefill.embedding import PromptEmbedder, move_to_device, on_decoder_call
from sparseflow.adaptive.engine.prefill.split_prefill import (
    AllocateSlots,
    ChoosePlan,
    PrefillOutput,
    SplitPrefill,
)
from sparseflow.adaptive.plan.adapter import Adapter, Inputs
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.core.extras import require

_LOG = logging.getLogger(__name__)


class PrefillRunner:
    """Runs prompts of a model.

    Args:
        adapter: Adapter of the model.
        runtime: Plan runtime of the model.
        graphs: CUDA graphs of the parts.
        kernel_patcher: Kernels used in captured parts.
        tokens: Maximum number of tokens of a request.
        sizes: Padded sizes of split prompts; longer prompts and several rows run in one piece. Default: eight
            sizes up to `tokens` if graphs are captured, otherwise none.
    """

    def __init__(
        self,
        adapter: Adapter,
        runtime: PlanRuntime,
        graphs: GraphCache,
        *,
        kernel_patcher: KernelPatcher,
        tokens: int,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.adapter, self.runtime = adapter, runtime
        self._device = graphs.device
        self._embedder: PromptEmbedder | None = None
        self._split: SplitPrefill | None = None
        if sizes is None:
            sizes = _default_sizes(tokens) if graphs.enabled else ()
        if sizes:
            padded_sizes = sorted({min(size, tokens) for size in sizes})
            uncaptured = GraphCache(self._device, enabled=False)
            if self._check_split(
                SplitPrefill(adapter, runtime, uncaptured, kernel_patcher, padded_sizes[:1])
            ):
                self._split = SplitPrefill(adapter, runtime, graphs, kernel_patcher, padded_sizes)
                self._embedder = PromptEmbedder(adapter, graphs, padded_sizes, self._split.input_buffer)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Padded sizes of split prompts; empty if all run in one piece."""
        return () if self._split is None else self._split.sizes

    def run(
        self,
        inputs: Inputs,
        tier: Tier | None,
        position: int,
        *,
        images: bool,
        decide: ChoosePlan,
        allocate: AllocateSlots,
        on_first_block: Callable[[], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> PrefillOutput:
        """Run prompts of one plan.

        Args:
            inputs: Rows of equal length without padding, at the tier.
            tier: Chosen tier.
            position: Chosen insertion position.
            images: Whether the prompts have images.
            decide: Maps the latency token of the first row to the plan.
            allocate: Called when the plan is known.
            on_first_block: Called before the first block; the device has finished the vision encoder by then.
            meanwhile: Called while a GPU runs the first part of a split prompt.

        Raises:
            PlanError: The decisions are inconsistent, or the model cannot run them.
        """

        def enter_blocks() -> None:
            if images and self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            if on_first_block is not None:
                on_first_block()

        parts, embedded = self._split, self._embed(inputs, images)
        if parts is None or embedded is None:
            return self._run_whole(inputs, tier, position, decide, allocate, enter_blocks)
        if self._device.type != "cuda":
            meanwhile = None
        if meanwhile is not None and images:
            meanwhile()
            meanwhile = None
        enter_blocks()
        return parts.run(embedded, tier, position, decide, allocate, meanwhile)

    def warm_up(
        self, plan: Plan, cache: SlotCache, example: Inputs | None = None
    ) -> list[Callable[[], None]]:
        """Tasks that run prompts of a plan of every size once, into an empty cache.

        Args:
            plan: The plan.
            cache: Cache of the plan.
            example: A prompt of the plan's tier.
        """

        def allocate(plan: Plan) -> tuple[SlotCache, list[int]]:
            return cache, [cache.allocate()]

        def run_split(size: int) -> None:
            assert self._split is not None
            embedded = self.adapter.embed(torch.zeros(1, size, dtype=torch.int64, device=self._device))
            self._split.run(embedded, plan.tier, plan.insertion_position, lambda hidden: plan, allocate)
            cache.release(0)

        def run_whole() -> None:
            text = replace(plan, tier=None)
            ids = torch.zeros(1, min(8, cache.tokens), dtype=torch.int64, device=self._device)
            self._run_whole({"input_ids": ids}, None, plan.insertion_position, lambda _: text, allocate)
            cache.release(0)

        vision_tasks = [] if example is None or self._embedder is None else self._embedder.warm_up(example)
        return [run_whole, *(partial(run_split, size) for size in self.sizes), *vision_tasks]

    def _run_whole(
        self,
        inputs: Inputs,
        tier: Tier | None,
        position: int,
        decide: ChoosePlan,
        allocate: AllocateSlots,
        on_first_block: Callable[[], None] = lambda: None,
    ) -> PrefillOutput:
        cache = require("transformers.cache_utils", "adaptive").DynamicCache()
        device_inputs = move_to_device(inputs, self._device)
        position_ids, next_position = self.adapter.compute_positions(device_inputs)
        with (
            self.runtime.use_decided_plan(tier, position, lambda hidden: decide(hidden[0, -1])) as running,
            on_decoder_call(self.adapter, lambda _: on_first_block()),
        ):
            output: Any = self.adapter.model(
                **{**device_inputs, "position_ids": position_ids}, past_key_values=cache, use_cache=True,
                **last_logits_args(self.adapter.model),
            )  # fmt: skip
        assert running.plan is not None
        slot_cache, slots = allocate(running.plan)
        for row, slot in enumerate(slots):
            slot_cache.copy_from(slot, cache, row=row)
        return PrefillOutput(
            plan=running.plan,
            ropes=tuple((next_position - device_inputs["input_ids"].shape[1]).tolist()),
            logits=output.logits[:, -1],
        )

    def _embed(self, inputs: Inputs, images: bool) -> Tensor | None:
        """Input of the first block if the prompt can be split, otherwise None."""
        rows, tokens = inputs["input_ids"].shape
        if self._embedder is None or rows > 1 or tokens > self._embedder.sizes[-1]:
            return None
        if images and self._embedder.fallback_reason is not None:
            return None
        return self._embedder.embed(inputs, images=images)

    @torch.no_grad()
    def _check_split(self, parts: SplitPrefill) -> bool:
        """Whether a split prompt gives the same logits, so the decoder is only its blocks."""
        geometry, state = self.adapter.geometry, len(self.adapter.state)
        plan = replace(geometry.full_plan(images=False), insertion_position=geometry.positions[-1])
        tokens = min(4, parts.sizes[0])
        cache = SlotCache(
            get_decode_plan(plan, geometry), geometry.depth, slots=2, tokens=parts.sizes[0], state=state
        )

        def allocate(plan: Plan) -> tuple[SlotCache, list[int]]:
            return cache, [cache.allocate()]

        ids, position = torch.arange(tokens, device=self._device)[None], plan.insertion_position
        expected = self._run_whole({"input_ids": ids}, None, position, lambda _: plan, allocate).logits
        actual = parts.run(self.adapter.embed(ids), None, position, lambda _: plan, allocate).logits
        difference, is_close = compare_outputs(actual, expected)
        if not is_close:
            _LOG.warning("prompts run in one piece, not captured: split logits differ by %.1e", difference)
        return is_close


def _default_sizes(tokens: int) -> tuple[int, ...]:
    """Eight sizes up to `tokens`, in multiples of 16."""
    step = max(16, -(-tokens // 8 // 16) * 16)
    return tuple(min(size, tokens) for size in range(step, tokens + step, step))

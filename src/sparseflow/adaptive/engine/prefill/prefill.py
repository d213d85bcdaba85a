"""Prompts: from inputs to a slot with keys and values, and the logits of the first new token.

Whole: the model's own forward, with the second controller asked within it. That is right for every model and
every batch. In parts, recorded: one row at a time, where a model's decoder is its blocks and nothing more;
whether it is, is tried on a short prompt first.
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
from sparseflow.adaptive.engine.decode import decode_plan, last_logits
from sparseflow.adaptive.engine.graphs import GraphCache
from sparseflow.adaptive.engine.kernel_patcher import KernelPatcher, compared
from sparseflow.adaptive.engine.prefill.embedding import PromptEmbedder, at_decoder, placed
from sparseflow.adaptive.engine.prefill.split_prefill import Decided, Place, PrefillOutput, SplitPrefill
from sparseflow.adaptive.plan.adapter import Adapter, Inputs
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.core.extras import require
from sparseflow.errors import PlanError

_LOG = logging.getLogger(__name__)

Replan = Callable[[int], int]
"""From the insertion position that was decided to the one to go on with."""


class PrefillRunner:
    """Prompts of a model.

    Args:
        adapter: The model.
        knobs: The knobs on it.
        graphs: Where parts are recorded.
        fused: What is replaced while they are; by default what the model allows.
        tokens: Most tokens of a request.
        sizes: Sizes that prompts in parts are filled up to; longer ones, and those of several rows, run
            whole. By default eight up to `tokens` where parts are recorded, and none elsewhere.
    """

    def __init__(
        self,
        adapter: Adapter,
        knobs: PlanRuntime,
        graphs: GraphCache,
        *,
        fused: KernelPatcher | None = None,
        tokens: int,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.adapter, self.knobs = adapter, knobs
        self._device = graphs.device
        self._vision: PromptEmbedder | None = None
        self._parts: SplitPrefill | None = None
        if sizes is None:
            sizes = _sizes(tokens) if graphs.enabled else ()
        if sizes:
            fused = KernelPatcher(adapter) if fused is None else fused
            held = sorted({min(size, tokens) for size in sizes})
            if self._agrees(
                SplitPrefill(adapter, knobs, GraphCache(self._device, enabled=False), fused, held[:1])
            ):
                self._parts = SplitPrefill(adapter, knobs, graphs, fused, held)
                self._vision = PromptEmbedder(adapter, graphs, held, self._parts.entrance)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes that prompts in parts are filled up to; none where all run whole."""
        return () if self._parts is None else self._parts.sizes

    def run(
        self,
        inputs: Inputs,
        tier: Tier | None,
        position: int,
        *,
        images: bool,
        replan: Replan,
        decide: Decided,
        place: Place,
        meanwhile: Callable[[], None] | None = None,
    ) -> PrefillOutput:
        """Run prompts of one plan.

        Args:
            inputs: Rows of equal length without padding, of the tier.
            tier: What was decided.
            position: The insertion position that was decided.
            images: Whether the prompts have any.
            replan: Called after the vision encoder, which the device has finished by then where there are
                images.
            decide: From the latency token of the first row to the plan.
            place: Called when the plan is known.
            meanwhile: Called while a GPU works on what has to be there before the plan is decided, where the
                prompt runs in parts.

        Raises:
            PlanError: The decisions do not fit together, or the model cannot run them.
        """
        parts, embedded = self._parts, self._embed(inputs, images)
        if parts is None or embedded is None:
            return self._whole(inputs, tier, position, images, replan, decide, place)
        if self._device.type != "cuda":
            meanwhile = None
        if meanwhile is not None and images:
            meanwhile()
            meanwhile = None
        self._finish_vision(images)
        position = self._replanned(replan, position)
        return parts.run(embedded, tier, position, decide, place, meanwhile)

    def warm(self, plan: Plan, cache: SlotCache, example: Inputs | None = None) -> list[Callable[[], None]]:
        """Work that runs prompts of a plan of every size once, into an empty cache.

        Args:
            plan: The plan.
            cache: The cache of it.
            example: A prompt of the plan's tier.
        """

        def place(plan: Plan) -> tuple[SlotCache, list[int]]:
            return cache, [cache.take()]

        def in_parts(size: int) -> None:
            assert self._parts is not None
            embedded = self.adapter.embed(torch.zeros(1, size, dtype=torch.int64, device=self._device))
            self._parts.run(embedded, plan.tier, plan.insertion_position, lambda hidden: plan, place)
            cache.release(0)

        def whole() -> None:
            text = replace(plan, tier=None)
            ids = torch.zeros(1, min(8, cache.tokens), dtype=torch.int64, device=self._device)
            self._whole(
                {"input_ids": ids}, None, plan.insertion_position, False, _same, lambda _: text, place
            )
            cache.release(0)

        seen = [] if example is None or self._vision is None else self._vision.warm(example)
        return [whole, *(partial(in_parts, size) for size in self.sizes), *seen]

    def _whole(
        self,
        inputs: Inputs,
        tier: Tier | None,
        position: int,
        images: bool,
        replan: Replan,
        decide: Decided,
        place: Place,
    ) -> PrefillOutput:
        cache = require("transformers.cache_utils", "adaptive").DynamicCache()
        given = placed(inputs, self._device)
        places, after = self.adapter.positions(given)
        with self.knobs.deciding(tier, position, lambda hidden: decide(hidden[0, -1])) as running:

            def entered(named: dict[str, Any]) -> None:
                self._finish_vision(images)
                running.insertion_position = self._replanned(replan, position)

            with at_decoder(self.adapter, entered):
                found: Any = self.adapter.model(
                    **{**given, "position_ids": places}, past_key_values=cache, use_cache=True,
                    **last_logits(self.adapter.model),
                )  # fmt: skip
        assert running.plan is not None
        slot_cache, slots = place(running.plan)
        for row, slot in enumerate(slots):
            slot_cache.adopt(slot, cache, row=row)
        return PrefillOutput(
            plan=running.plan, cache=slot_cache, slots=tuple(slots),
            ropes=tuple((after - given["input_ids"].shape[1]).tolist()), logits=found.logits[:, -1],
        )  # fmt: skip

    def _embed(self, inputs: Inputs, images: bool) -> Tensor | None:
        """What enters the first block, of a prompt that can be run in parts."""
        rows, tokens = inputs["input_ids"].shape
        if self._vision is None or rows > 1 or tokens > self._vision.sizes[-1]:
            return None
        if images and self._vision.refused is not None:
            return None
        return self._vision.embed(inputs, images=images)

    def _replanned(self, replan: Replan, position: int) -> int:
        """The position to go on with, which the model has."""
        found, positions = replan(position), self.adapter.geometry.positions
        if found not in positions:
            raise PlanError(f"`insertion_position` (={found}) must be one of {positions}")
        return found

    def _finish_vision(self, images: bool) -> None:
        if images and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @torch.no_grad()
    def _agrees(self, parts: SplitPrefill) -> bool:
        """Whether a prompt in parts gives what it gives whole; not if the decoder is more than its blocks."""
        geometry, state = self.adapter.geometry, len(self.adapter.state)
        plan = replace(geometry.full(images=False), insertion_position=geometry.positions[-1])
        tokens = min(4, parts.sizes[0])
        cache = SlotCache(
            decode_plan(plan, geometry), geometry.depth, slots=2, tokens=parts.sizes[0], state=state
        )

        def place(plan: Plan) -> tuple[SlotCache, list[int]]:
            return cache, [cache.take()]

        ids, position = torch.arange(tokens, device=self._device)[None], plan.insertion_position
        whole = self._whole({"input_ids": ids}, None, position, False, _same, lambda _: plan, place).logits
        found = parts.run(self.adapter.embed(ids), None, position, lambda _: plan, place).logits
        difference, good = compared(found, whole)
        if not good:
            _LOG.warning("prompts run whole, unrecorded: in parts their logits differ by %.1e", difference)
        return good


def _same(position: int) -> int:
    return position


def _sizes(tokens: int) -> tuple[int, ...]:
    """Eight sizes, in steps of a multiple of 16, up to `tokens`."""
    step = max(16, -(-tokens // 8 // 16) * 16)
    return tuple(min(size, tokens) for size in range(step, tokens + step, step))

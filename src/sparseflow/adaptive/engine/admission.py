"""Admission of waiting requests into batches: choose a plan, prefill, sample the first token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparseflow.adaptive.engine.batch import BatchRow, DecodeBatch, RequestTimestamps
from sparseflow.adaptive.engine.cache import SlotCache
from sparseflow.adaptive.engine.prefill.prefill import PrefillRunner
from sparseflow.adaptive.engine.prefill.split_prefill import AllocateSlots
from sparseflow.adaptive.engine.requests.handle import RequestHandle
from sparseflow.adaptive.engine.requests.plan_request import PlanRequest
from sparseflow.adaptive.engine.requests.request import FixedPlan, GenerationRequest, RequestCancelled
from sparseflow.adaptive.engine.requests.sampling import UniformStream, sample_tokens
from sparseflow.adaptive.plan.adapter import Adapter, Inputs
from sparseflow.adaptive.plan.space import Plan
from sparseflow.errors import InputError


class RequestAdmission:
    """Prefills requests and adds them to their batch.

    Args:
        adapter: Adapter of the model.
        prefill: Runs prompts.
        batch: Returns the batch of a plan.
        plans: Plans that may be chosen.
        max_tokens: Maximum number of tokens of a request.
        clock: Current time in seconds, on the clock of `received_s`.
    """

    def __init__(
        self,
        adapter: Adapter,
        prefill: PrefillRunner,
        batch: Callable[[Plan], DecodeBatch],
        *,
        plans: Sequence[Plan],
        max_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._adapter, self._prefill, self._batch = adapter, prefill, batch
        # Requests without images run the plans without their tier.
        self._plans = frozenset(plans) | {replace(plan, tier=None) for plan in plans}
        self._max_tokens, self._clock = max_tokens, clock

    def select_group(self, first: RequestHandle, waiting: Iterable[RequestHandle]) -> list[RequestHandle]:
        """Requests that can be prefilled as one batch with `first`: same fixed plan and input shapes."""
        compatible = [
            handle
            for handle in waiting
            if handle is not first and _are_compatible(handle.request, first.request)
        ]
        return [first, *compatible] if isinstance(first.request.decide, FixedPlan) else [first]

    def prefill(self, handles: Sequence[RequestHandle]) -> tuple[list[BatchRow], list[int]]:
        """Prefill requests that form one group; the decisions for the first hold for all.

        Returns:
            Their rows, already in their batch, and the first token of each.

        Raises:
            RequestRejected: The policy rejects the request.
            PlanError: The chosen plan cannot be run.
            InputError: A request does not fit.
        """
        slots: list[int] = []
        batch: DecodeBatch | None = None

        def allocate(plan: Plan) -> tuple[SlotCache, list[int]]:
            nonlocal batch
            batch = self._batch(plan)
            for _ in handles:
                slots.append(batch.cache.allocate())
            return batch.cache, slots

        try:
            rows, first_tokens = self._run_prompts(handles, allocate)
        except BaseException:
            if batch is not None:
                for slot in reversed(slots):
                    batch.cache.release(slot)
            raise
        assert batch is not None
        batch.rows += rows
        return rows, first_tokens

    def _run_prompts(
        self, handles: Sequence[RequestHandle], allocate: AllocateSlots
    ) -> tuple[list[BatchRow], list[int]]:
        request, times = handles[0].request, RequestTimestamps(start_s=self._clock())
        plan_request = PlanRequest(
            request.decide,
            request,
            lambda: min(handle.request.remaining_ms(self._clock()) for handle in handles),
            plans=self._plans,
        )
        choice = plan_request.choose_initial()
        times.policy_before_s = plan_request.policy_s
        reduced = [self._adapter.reduce_to_tier(handle.request.inputs, choice.tier) for handle in handles]
        for inputs in reduced:
            self._adapter.check_tier(inputs, choice.tier)
        tokens = reduced[0]["input_ids"].shape[1]
        for handle in handles:
            check_length(tokens, plan_request.limit(handle.request.max_new_tokens), self._max_tokens)

        def enter_blocks() -> None:
            times.first_block_s = self._clock()
            if all(handle.cancelled for handle in handles):
                raise RequestCancelled(f"request {request.id} was cancelled")

        output = self._prefill.run(
            concat_inputs(reduced),
            choice.tier,
            choice.insertion_position,
            images=self._adapter.count_vision_tokens(reduced[0]) > 0,
            decide=plan_request.choose_plan,
            allocate=allocate,
            on_first_block=enter_blocks,
            meanwhile=plan_request.prepare,
        )
        streams = [UniformStream(handle.request.sampling) for handle in handles]
        first_tokens = sample_tokens(
            output.logits,
            [stream.sampling for stream in streams],
            [stream.next() for stream in streams],
            best=output.best,
        ).tolist()
        times.first_token_s, times.policy_s = self._clock(), plan_request.policy_s
        rows = [
            BatchRow(
                handle=handle, plan=output.plan, prompt_tokens=tokens, rope_offset=rope, stream=stream,
                max_new_tokens=plan_request.limit(handle.request.max_new_tokens),
                feasible=plan_request.feasible, predicted_ms=plan_request.predicted_ms, times=replace(times),
            )
            for handle, rope, stream in zip(handles, output.ropes, streams, strict=True)
        ]  # fmt: skip
        return rows, first_tokens


def check_request(adapter: Adapter, request: GenerationRequest, max_tokens: int) -> None:
    """Check that a request can run under some plan.

    Raises:
        InputError: It cannot.
    """
    check_token_ids(adapter, request.inputs)
    if not adapter.count_vision_tokens(request.inputs):
        # The length of a prompt with images depends on its tier.
        check_length(request.tokens, request.max_new_tokens, max_tokens)


def check_token_ids(adapter: Adapter, inputs: Inputs) -> None:
    """Check that all tokens are in the vocabulary.

    On a GPU an unknown token would abort the process.

    Raises:
        InputError: A token is not in the vocabulary.
    """
    ids = inputs["input_ids"]
    embeddings: Any = adapter.model.get_input_embeddings()
    vocabulary_size = embeddings.weight.shape[0]
    token_ids = ids.numpy(force=True)
    min_id, max_id = int(token_ids.min()), int(token_ids.max())
    if min_id < 0 or max_id >= vocabulary_size:
        raise InputError(
            f"`input_ids` range from {min_id} to {max_id}; the model's vocabulary is 0 to "
            f"{vocabulary_size - 1}"
        )


def check_length(tokens: int, new_tokens: int, max_tokens: int) -> None:
    """Check that prompt and answer fit.

    The last token of an answer is never run and needs no cache entry.

    Raises:
        InputError: They do not fit.
    """
    if tokens + new_tokens - 1 > max_tokens:
        raise InputError(
            f"a prompt of {tokens} tokens and {new_tokens} new tokens exceed the limit of "
            f"{max_tokens}; request at most {max(0, max_tokens - tokens + 1)} new tokens, or "
            "shorten the prompt"
        )


def concat_inputs(batch_inputs: Sequence[Inputs]) -> dict[str, Any]:
    """Concatenate the inputs of several requests along the rows of all tensors."""
    if len(batch_inputs) == 1:
        return dict(batch_inputs[0])
    return {
        name: torch.cat([inputs[name] for inputs in batch_inputs]) if isinstance(value, Tensor) else value
        for name, value in batch_inputs[0].items()
    }


def _are_compatible(request: GenerationRequest, other: GenerationRequest) -> bool:
    """Whether two requests can be prefilled as one batch."""

    def shapes(inputs: Inputs) -> dict[str, Any]:
        return {name: value.shape if isinstance(value, Tensor) else value for name, value in inputs.items()}

    fixed = isinstance(request.decide, FixedPlan) and request.decide == other.decide
    return fixed and shapes(request.inputs) == shapes(other.inputs)

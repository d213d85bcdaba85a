"""How a waiting request becomes a row of a batch: decide, reduce, see, decide again, prefill, first token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparseflow.adaptive.engine.batch import BatchRow, DecodeBatch, RequestTimestamps
from sparseflow.adaptive.engine.cache import SlotCache
from sparseflow.adaptive.engine.prefill.prefill import PrefillRunner
from sparseflow.adaptive.engine.requests.handle import RequestHandle
from sparseflow.adaptive.engine.requests.plan_request import PlanRequest
from sparseflow.adaptive.engine.requests.request import FixedPlan, GenerationRequest, RequestCancelled
from sparseflow.adaptive.engine.requests.sampling import UniformStream, pick
from sparseflow.adaptive.plan.adapter import Adapter, Inputs
from sparseflow.adaptive.plan.space import Plan
from sparseflow.errors import InputError


class RequestAdmission:
    """Begins requests.

    Args:
        adapter: The model.
        prefill: Runs their prompts.
        batch: Gives the batch of a plan.
        plans: Those that deciders may choose.
        max_tokens: Most tokens of a request.
        clock: Seconds, as requests were received by.
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
        # Requests without image run them, too.
        self._plans = frozenset(plans) | {replace(plan, tier=None) for plan in plans}
        self._max_tokens, self._clock = max_tokens, clock

    def together(self, first: RequestHandle, waiting: Iterable[RequestHandle]) -> list[RequestHandle]:
        """The requests that can begin as one prompt with a waiting one: of one fixed plan, and one length."""
        others = [
            handle for handle in waiting if handle is not first and _alike(handle.request, first.request)
        ]
        return [first, *others] if isinstance(first.request.decide, FixedPlan) else [first]

    def begin(self, handles: Sequence[RequestHandle]) -> tuple[list[BatchRow], list[int]]:
        """Run the prompts of requests that can begin together.

        Returns:
            Their rows, which are in their batch, and the first token of each.

        Raises:
            Refused: The decider refuses.
            PlanError: What it decides cannot be run.
            InputError: A request does not fit.
        """
        call = _AdmittedGroup(self._adapter, self._plans, self._clock, self._batch, handles)
        try:
            return call.run(self._prefill, self._max_tokens)
        except BaseException:
            call.give_back()
            raise


class _AdmittedGroup:
    """The beginning of some requests; what is decided of the first one holds for all."""

    def __init__(
        self,
        adapter: Adapter,
        plans: frozenset[Plan],
        clock: Callable[[], float],
        batch: Callable[[Plan], DecodeBatch],
        handles: Sequence[RequestHandle],
    ) -> None:
        self._adapter, self._clock, self._batch, self._handles = adapter, clock, batch, handles
        self._times = RequestTimestamps(began=clock())
        self._taken: tuple[DecodeBatch, list[int]] | None = None
        request = handles[0].request
        self._asking = PlanRequest(
            request.decide,
            request,
            lambda: min(handle.request.remaining_ms(clock()) for handle in handles),
            plans=plans,
        )

    def run(self, prefill: PrefillRunner, max_tokens: int) -> tuple[list[BatchRow], list[int]]:
        asking, times = self._asking, self._times
        choice = asking.first()
        times.decided_before = asking.spent_s
        given = [self._adapter.at_tier(handle.request.inputs, choice.tier) for handle in self._handles]
        for inputs in given:
            self._adapter.check_tier(inputs, choice.tier)
        tokens = given[0]["input_ids"].shape[1]
        for handle in self._handles:
            check_room(tokens, asking.limit(handle.request.max_new_tokens), max_tokens)
        images = self._adapter.vision_tokens(given[0]) > 0
        found = prefill.run(
            joined(given), choice.tier, choice.insertion_position, images=images,
            replan=self._again, decide=asking.second, place=self._place, meanwhile=asking.prepare,
        )  # fmt: skip
        draws = [UniformStream(handle.request.sampling) for handle in self._handles]
        picked = pick(
            found.logits, [each.sampling for each in draws], [each.next() for each in draws], best=found.best
        ).tolist()
        times.first, times.decided = self._clock(), asking.spent_s
        rows = [
            BatchRow(
                handle=handle, plan=found.plan, prompt_tokens=tokens, rope=rope, draws=drawn,
                limit=asking.limit(handle.request.max_new_tokens), feasible=asking.feasible,
                predicted_ms=asking.predicted_ms, times=replace(times),
            )
            for handle, rope, drawn in zip(self._handles, found.ropes, draws, strict=True)
        ]  # fmt: skip
        assert self._taken is not None
        self._taken[0].rows += rows
        self._taken = None
        return rows, picked

    def give_back(self) -> None:
        """Free slots that were taken for requests that did not begin."""
        if self._taken is not None:
            batch, slots = self._taken
            for slot in reversed(slots):
                batch.cache.release(slot)
            self._taken = None

    def _again(self, position: int) -> int:
        self._times.entered = self._clock()
        if all(handle.cancelled for handle in self._handles):
            raise RequestCancelled(f"request {self._handles[0].request.id} was called off")
        return self._asking.again(position)

    def _place(self, plan: Plan) -> tuple[SlotCache, list[int]]:
        batch = self._batch(plan)
        self._taken = (batch, [])
        for _ in self._handles:
            self._taken[1].append(batch.cache.take())
        return batch.cache, self._taken[1]


def check_request(adapter: Adapter, request: GenerationRequest, max_tokens: int) -> None:
    """That a request can be run under some plan.

    Raises:
        InputError: It cannot.
    """
    check_words(adapter, request.inputs)
    if not adapter.vision_tokens(request.inputs):
        # How long a prompt with images is, its tier decides.
        check_room(request.tokens, request.max_new_tokens, max_tokens)


def check_words(adapter: Adapter, inputs: Inputs) -> None:
    """That the model knows all words of a prompt; on a GPU another one would end the process.

    Raises:
        InputError: It does not.
    """
    ids = inputs["input_ids"]
    embeddings: Any = adapter.model.get_input_embeddings()
    words = embeddings.weight.shape[0]
    written = ids.numpy(force=True)
    least, most = int(written.min()), int(written.max())
    if least < 0 or most >= words:
        raise InputError(f"`input_ids` are {least} to {most}; the model knows 0 to {words - 1}")


def check_room(tokens: int, new_tokens: int, max_tokens: int) -> None:
    """That a prompt and its answer fit; the last token of an answer is never run, so it needs no place.

    Raises:
        InputError: They do not.
    """
    if tokens + new_tokens - 1 > max_tokens:
        raise InputError(
            f"a prompt of {tokens} tokens and {new_tokens} new ones are more than the {max_tokens} tokens "
            f"that there is room for; ask for at most {max(0, max_tokens - tokens + 1)} new tokens, or "
            "shorten the prompt"
        )


def joined(given: Sequence[Inputs]) -> dict[str, Any]:
    """Inputs of several requests as one. Whatever is a tensor has rows in front."""
    if len(given) == 1:
        return dict(given[0])
    return {
        name: torch.cat([each[name] for each in given]) if isinstance(value, Tensor) else value
        for name, value in given[0].items()
    }


def _alike(one: GenerationRequest, other: GenerationRequest) -> bool:
    """Whether two requests can run as one prompt."""

    def shapes(inputs: Inputs) -> dict[str, Any]:
        return {name: value.shape if isinstance(value, Tensor) else value for name, value in inputs.items()}

    fixed = isinstance(one.decide, FixedPlan) and one.decide == other.decide
    return fixed and shapes(one.inputs) == shapes(other.inputs)

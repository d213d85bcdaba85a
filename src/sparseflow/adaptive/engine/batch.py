"""Batch of requests that decode together, because their plans agree after the prompt."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from sparseflow.adaptive.engine.cache import SlotCache
from sparseflow.adaptive.engine.decode import DecodeRunner
from sparseflow.adaptive.engine.requests.handle import RequestHandle
from sparseflow.adaptive.engine.requests.request import RequestFailed, RequestOutOfMemory
from sparseflow.adaptive.engine.requests.sampling import UniformStream, sample_tokens
from sparseflow.adaptive.plan.space import Plan

_LOG = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RequestTimestamps:
    """Timestamps of a request in seconds of the engine's clock.

    Attributes:
        start_s: Start of the work.
        policy_s: Time spent in the policy.
        policy_before_s: Part of it before the first block.
        first_block_s: Start of the first block.
        first_token_s: First token available.
    """

    start_s: float
    policy_s: float = 0.0
    policy_before_s: float = 0.0
    first_block_s: float = 0.0
    first_token_s: float = 0.0


@dataclass(kw_only=True, eq=False)
class BatchRow:
    """A decoding request.

    Attributes:
        handle: Handle of the caller.
        plan: Plan of the request.
        max_new_tokens: Maximum number of tokens to generate under the plan.
        prompt_tokens: Number of tokens of the prompt.
        rope_offset: Offset from a token's cache index to its rotary position.
        stream: Random numbers for sampling.
        feasible: See `RequestOutput`.
        predicted_ms: See `RequestOutput`.
        times: Timestamps.
        tokens: Tokens generated so far.
    """

    handle: RequestHandle
    plan: Plan
    max_new_tokens: int
    prompt_tokens: int
    rope_offset: int
    stream: UniformStream
    feasible: bool
    predicted_ms: float | None
    times: RequestTimestamps
    tokens: list[int] = field(default_factory=list)


class DecodeBatch:
    """Requests of one cache; the index of a row is its slot.

    Args:
        cache: Cache of the requests.

    Attributes:
        rows: The requests.
        steps_waited: Number of steps of other batches since the last step of this batch.
    """

    def __init__(self, cache: SlotCache) -> None:
        self.cache = cache
        self.rows: list[BatchRow] = []
        self.steps_waited = 0

    @property
    def deadline_s(self) -> float:
        """Earliest deadline of the requests."""
        return min(row.handle.request.deadline_s for row in self.rows)

    def drop(self, row: BatchRow) -> None:
        """Remove a request and release its slot."""
        slot = next(index for index, active_row in enumerate(self.rows) if active_row is row)
        self.cache.release(slot)
        last = self.rows.pop()
        if last is not row:
            self.rows[slot] = last

    def step(self, runner: DecodeRunner) -> list[tuple[BatchRow, int | Exception]]:
        """Decode one token of each request.

        A failed batch is retried in halves, so that a request that fails or runs out of memory does not
        affect the others.

        Args:
            runner: Runs the decode step.

        Returns:
            Each request with its token or its error.

        Raises:
            RuntimeError: The device is unusable.
        """
        rows = list(self.rows)
        uniform = [row.stream.next() for row in rows]
        return list(zip(rows, self._decode(runner, rows, uniform, 0), strict=True))

    def _decode(
        self, runner: DecodeRunner, rows: list[BatchRow], uniform: list[float], first_slot: int
    ) -> list[int | Exception]:
        """Decode one token of consecutive rows; `uniform` has a random number for each."""
        lengths = self.cache.lengths
        try:
            logits, greedy_tokens = runner.run(
                self.cache,
                [row.tokens[-1] for row in rows],
                [row.rope_offset for row in rows],
                first=first_slot,
            )
            samplings = [row.stream.sampling for row in rows]
            if all(sampling.greedy for sampling in samplings):
                return list(greedy_tokens)
            return list(sample_tokens(logits, samplings, uniform).tolist())
        except Exception as error:
            if is_fatal(error):
                raise
            self.cache.rewind(lengths)
            if is_out_of_memory(error):
                free_memory()
            if len(rows) == 1:
                return [make_request_error(error, rows[0].handle.request.id)]
            _LOG.warning("a step of %d requests failed (%s); retrying in halves", len(rows), error)
        half = len(rows) // 2
        return [
            *self._decode(runner, rows[:half], uniform[:half], first_slot),
            *self._decode(runner, rows[half:], uniform[half:], first_slot + half),
        ]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error reports exhausted device memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error).lower()


def is_fatal(error: BaseException) -> bool:
    """Whether the device is unusable after an error."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and "CUDA error" in str(error)
    )


def free_memory() -> None:
    """Release cached memory to the device."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def make_request_error(error: Exception, request_id: str) -> Exception:
    """Create the error that the request's caller receives."""
    if is_out_of_memory(error):
        request_error: Exception = RequestOutOfMemory(
            f"out of memory for request {request_id}, even without other requests ({error}); send "
            "a smaller one, or give the engine fewer slots or tokens"
        )
    else:
        request_error = RequestFailed(f"request {request_id} failed: {type(error).__name__}: {error}")
    request_error.__cause__ = error
    return request_error

"""The requests that decode together: what of their plans matters by then is the same."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from sparseflow.adaptive.engine.cache import SlotCache
from sparseflow.adaptive.engine.decode import DecodeRunner
from sparseflow.adaptive.engine.requests.handle import RequestHandle
from sparseflow.adaptive.engine.requests.request import RequestFailed, RequestOutOfMemory
from sparseflow.adaptive.engine.requests.sampling import UniformStream, pick
from sparseflow.adaptive.plan.space import Plan

_LOG = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RequestTimestamps:
    """When things happened to a request, in seconds of the engine's clock.

    Attributes:
        began: Work began.
        decided: Spent in the decider.
        decided_before: Spent there before the first block.
        entered: The first block began.
        first: The first token was there.
    """

    began: float
    decided: float = 0.0
    decided_before: float = 0.0
    entered: float = 0.0
    first: float = 0.0


@dataclass(kw_only=True, eq=False)
class BatchRow:
    """A request that decodes.

    Attributes:
        handle: Its owner's end.
        plan: What it runs.
        limit: Most tokens that it may generate.
        prompt_tokens: Of its prompt.
        rope: What to add to a token's place to get its rotary position.
        draws: What its tokens are drawn with.
        feasible: As in `RequestOutput`.
        predicted_ms: As in `RequestOutput`.
        times: When things happened.
        tokens: Generated so far.
    """

    handle: RequestHandle
    plan: Plan
    limit: int
    prompt_tokens: int
    rope: int
    draws: UniformStream
    feasible: bool
    predicted_ms: float | None
    times: RequestTimestamps
    tokens: list[int] = field(default_factory=list)


class DecodeBatch:
    """Requests of one cache; a request's place is its slot.

    Args:
        cache: Their cache.

    Attributes:
        rows: The requests.
        waited: Steps of other batches since its last one.
    """

    def __init__(self, cache: SlotCache) -> None:
        self.cache = cache
        self.rows: list[BatchRow] = []
        self.waited = 0

    @property
    def deadline_s(self) -> float:
        """The earliest of all."""
        return min(row.handle.request.deadline_s for row in self.rows)

    def drop(self, row: BatchRow) -> None:
        """Free a request's slot."""
        slot = next(at for at, each in enumerate(self.rows) if each is row)
        self.cache.release(slot)
        last = self.rows.pop()
        if last is not row:
            self.rows[slot] = last

    def step(self, steps: DecodeRunner) -> list[tuple[BatchRow, int | Exception]]:
        """Decode a token of each request.

        A batch that fails is tried again in halves, so that a request for which there is no memory, or one
        that fails by itself, takes no other with it.

        Returns:
            Each request with its token, or with what it failed by.

        Raises:
            RuntimeError: The device is broken, so nothing can go on.
        """
        rows = list(self.rows)
        uniform = [row.draws.next() for row in rows]
        return list(zip(rows, self._decode(steps, rows, uniform, 0), strict=True))

    def _decode(
        self, steps: DecodeRunner, rows: list[BatchRow], uniform: list[float], first: int
    ) -> list[int | Exception]:
        before = self.cache.lengths
        try:
            logits, best = steps.run(
                self.cache, [row.tokens[-1] for row in rows], [row.rope for row in rows], first=first
            )
            samplings = [row.draws.sampling for row in rows]
            if all(sampling.greedy for sampling in samplings):
                return list(best)
            return list(pick(logits, samplings, uniform).tolist())
        except Exception as error:
            if is_fatal(error):
                raise
            self.cache.rewind(before)
            if is_out_of_memory(error):
                free_memory()
            if len(rows) == 1:
                return [as_failure(error, rows[0].handle.request.id)]
            _LOG.warning("a step of %d requests failed (%s); trying halves", len(rows), error)
        half = len(rows) // 2
        return self._decode(steps, rows[:half], uniform[:half], first) + self._decode(
            steps, rows[half:], uniform[half:], first + half
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error).lower()


def is_fatal(error: BaseException) -> bool:
    """Whether a device cannot be used any more after an error."""
    if is_out_of_memory(error):
        return False
    broken = getattr(torch, "AcceleratorError", ())
    return isinstance(error, broken) or (isinstance(error, RuntimeError) and "CUDA error" in str(error))


def free_memory() -> None:
    """Give memory that is kept for later use back to the device."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def as_failure(error: Exception, request_id: str) -> Exception:
    """What a request's owner is told of an error."""
    if is_out_of_memory(error):
        found: Exception = RequestOutOfMemory(
            f"request {request_id} found no memory on the device, not even alone ({error}); send a smaller "
            "one, or give the engine fewer slots or tokens"
        )
    else:
        found = RequestFailed(f"request {request_id} failed: {type(error).__name__}: {error}")
    found.__cause__ = error
    return found

"""An engine: one thread owns the model, and requests of many threads share it.

Which plan a request runs, its decider says; who runs next, and what happens to a request that fails,
`schedule.py`.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch

from sparseflow.adaptive.engine.admission import check_request
from sparseflow.adaptive.engine.decode import DecodeRunner
from sparseflow.adaptive.engine.graphs import GraphCache
from sparseflow.adaptive.engine.kernel_patcher import KernelPatcher
from sparseflow.adaptive.engine.metrics import EngineMetrics, EngineSnapshot
from sparseflow.adaptive.engine.prefill.prefill import PrefillRunner
from sparseflow.adaptive.engine.requests.handle import RequestHandle
from sparseflow.adaptive.engine.requests.request import EngineStopped, GenerationRequest, RequestRejected
from sparseflow.adaptive.engine.scheduler import Scheduler
from sparseflow.adaptive.plan.adapter import Adapter, Inputs
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan
from sparseflow.errors import InputError

_LOG = logging.getLogger(__name__)


class Engine:
    """Runs requests on a model.

    Args:
        adapter: The model.
        knobs: The knobs on it.
        plans: Those that deciders may choose, without their tier for requests without image: 8 to 16 are
            enough to trade quality for time, and few enough for requests to meet in a batch.
        device: Where the model is; by default wherever that is.
        max_batch: Most requests that decode at a time, over all plans.
        max_tokens: Most tokens of a request, prompt and answer together. From its first request on, each plan
            of other blocks or another top-k keeps keys and values of `max_batch * max_tokens` tokens.
        graphs: Whether to record steps and prompts, where there is a GPU.
        batches: Sizes that batches are rounded up to; by default doubling ones.
        contexts: Sizes that attention is rounded up to; by default doubling ones from 128 on.
        prompts: Sizes that prompts are filled up to; by default eight where they are recorded, else none.
        fused: What is replaced by kernels; by default what the model and its device allow.
        fairness: After so many steps of other batches it is a batch's turn, and after so many requests that
            overtook it, that of one that waits.
        queue_limit: Most requests that wait; more are refused.
        start: Whether to start the thread. Without it, `turn` is what moves things.

    Raises:
        InputError: A count is out of range, there is no plan, or the model is elsewhere.
        PlanError: The model cannot run one of the plans.
        ModelError: The model's attention cannot be run in slots.
    """

    def __init__(
        self,
        adapter: Adapter,
        knobs: PlanRuntime,
        *,
        plans: Sequence[Plan],
        device: torch.device | str | None = None,
        max_batch: int = 8,
        max_tokens: int = 2048,
        graphs: bool = True,
        batches: Sequence[int] | None = None,
        contexts: Sequence[int] | None = None,
        prompts: Sequence[int] | None = None,
        fused: KernelPatcher | None = None,
        fairness: int = 4,
        queue_limit: int = 1024,
        start: bool = True,
    ) -> None:
        for name, value in (
            ("max_batch", max_batch), ("max_tokens", max_tokens), ("fairness", fairness),
            ("queue_limit", queue_limit),
        ):  # fmt: skip
            if value < 1:
                raise InputError(f"`{name}` (={value}) must be at least 1")
        if not plans:
            raise InputError("`plans` is empty; give the engine the plans that deciders choose among")
        for plan in plans:
            knobs.check(plan)
        self.plans = tuple(dict.fromkeys(plans))
        self.max_batch, self.max_tokens = max_batch, max_tokens
        here = _placed(adapter, device)
        self.graphs = GraphCache(here, enabled=graphs)
        fused = KernelPatcher(adapter) if fused is None else fused
        self._metrics = EngineMetrics()
        self._changed = threading.Condition(threading.RLock())
        self._adapter, self._queue_limit = adapter, queue_limit
        self._schedule = Scheduler(
            adapter,
            PrefillRunner(adapter, knobs, self.graphs, fused=fused, tokens=max_tokens, sizes=prompts),
            DecodeRunner(
                adapter, knobs, self.graphs, fused=fused, rows=max_batch, tokens=max_tokens, batches=batches,
                contexts=contexts,
            ),
            plans=self.plans, max_batch=max_batch, max_tokens=max_tokens, fairness=fairness,
            metrics=self._metrics, lock=self._changed,
        )  # fmt: skip
        self._jobs: deque[Callable[[], None]] = deque()
        self._news = False
        self._stopping: Literal["drain", "now"] | None = None
        self._give_up_s = math.inf
        self._broken: BaseException | None = None
        self._thread: threading.Thread | None = None
        if start:
            self._thread = threading.Thread(target=self._main, name="sparseflow-engine", daemon=True)
            self._thread.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown(drain=error[0] is None)

    @property
    def load(self) -> float:
        """As in `EngineSnapshot`, without the rest of it."""
        return self._metrics.load(busy=self._has_work())

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return self._has_work()

    @property
    def worked_s(self) -> float:
        """For how long its thread has worked so far."""
        return self._metrics.worked_s

    @property
    def prompts(self) -> tuple[int, ...]:
        """Sizes that prompts are filled up to; none where they run as long as they are."""
        return self._schedule.prompts

    @property
    def contexts(self) -> tuple[int, ...]:
        """Sizes that the attention of steps is rounded up to."""
        return self._schedule.contexts

    def submit(
        self, request: GenerationRequest, listener: Callable[[RequestHandle], None] | None = None
    ) -> RequestHandle:
        """Hand in a request.

        Args:
            request: The request.
            listener: Called with the handle whenever there is something new, as by `RequestHandle.listen`,
                from the first token on.

        Raises:
            InputError: It can never be run.
            Refused: Too many wait already.
            Stopped: The engine takes no more, or broke.
        """
        check_request(self._adapter, request, self.max_tokens)
        handle = RequestHandle(request, self._wake)
        if listener is not None:
            handle.listen(partial(listener, handle))
        with self._changed:
            self._check_open()
            if self._schedule.waiting >= self._queue_limit:
                raise RequestRejected(f"{self._schedule.waiting} requests wait already, the most that may")
            self._metrics.arrived(busy=self._schedule.busy)
            self._metrics.submitted += 1
            self._schedule.add(handle)
            self._changed.notify_all()
        return handle

    def snapshot(self) -> EngineSnapshot:
        """What it has done, and how busy it is."""
        schedule, metrics, now = self._schedule, self._metrics, self._metrics.clock()
        with self._changed:
            oldest_s = schedule.oldest_s()
            running = {batch.cache.plan.id: len(batch.rows) for batch in schedule.batches if batch.rows}
            return EngineSnapshot(
                queued=schedule.waiting, running=sum(running.values()), slots=self.max_batch,
                oldest_wait_ms=0.0 if oldest_s is None else (now - oldest_s) * 1e3,
                load=metrics.load(busy=self._has_work()), tokens_per_s=metrics.tokens_per_s(),
                submitted=metrics.submitted, ended=dict(metrics.ended), tokens=metrics.tokens,
                plans=dict(metrics.plans), batches=running,
                cache_bytes=sum(batch.cache.memory_bytes for batch in schedule.batches),
                recorded=len(self.graphs.recorded), unrecorded=tuple(self.graphs.reasons.values()),
                healthy=self._broken is None,
            )  # fmt: skip

    def warm(
        self, example: Inputs | None = None, *, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Run every prompt and every step once, so that no request waits for a recording.

        While something is recorded for the first time, no other thread of the process may wait for the
        device.

        Args:
            example: Inputs of a request with as many images of one size as requests will have, at the highest
                tier.
            progress: Called with (done, in all), on the engine's thread.

        Raises:
            InputError: Requests run.
            Stopped: The engine is shut down, or broke.
            OutOfMemoryError: The caches do not fit; give fewer slots, tokens or plans.
        """

        def work() -> None:
            if self._schedule.running:
                raise InputError("requests run; warm the engine up before the first of them")
            parts = self._schedule.warm(example)
            for done, part in enumerate(parts):
                if self._stopping == "now":
                    raise EngineStopped("the engine was shut down while it was warmed")
                part()
                if progress is not None:
                    progress(done + 1, len(parts))

        self._on_thread(work)

    def shutdown(self, *, drain: bool = True, timeout_s: float | None = None) -> bool:
        """Take no more requests, and end.

        Args:
            drain: Whether requests that were taken are finished first; else they get `EngineStopped`.
            timeout_s: How long to finish them at most; the rest get `EngineStopped`.

        Returns:
            Whether all that were taken came to their own end.
        """
        with self._changed:
            self._stopping = "drain" if drain else "now"
            if timeout_s is not None:
                self._give_up_s = self._metrics.clock() + timeout_s
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        else:
            while not self._is_over():
                self.turn()
            self._abandon(EngineStopped("the engine was shut down before this request was done"))
        return self._metrics.ended["stopped"] == 0

    def turn(self) -> bool:
        """Do what is next; for who drives an engine without its thread.

        Returns:
            Whether there was anything to do.

        Raises:
            InputError: The engine has a thread, which takes the turns.
        """
        if self._thread not in (None, threading.current_thread()):
            raise InputError("this engine's thread takes the turns; make one with `start=False` to take them")
        with self._changed:
            self._news = False
        with torch.no_grad():
            while self._jobs:
                self._jobs.popleft()()
            return self._schedule.turn()

    def _main(self) -> None:
        if self.graphs.device.type == "cuda":
            torch.cuda.set_device(self.graphs.device)
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._has_work() or self._stopping is not None)
                    self._metrics.spent(busy=False)
                    if self._is_over():
                        break
                self.turn()
                self._metrics.spent(busy=True)
            self._abandon(EngineStopped("the engine was shut down before this request was done"))
        except BaseException as error:
            # Whatever it is, nobody may be left waiting.
            _LOG.exception("the engine broke")
            with self._changed:
                self._broken = error
            stopped = EngineStopped(f"the engine broke: {error}")
            stopped.__cause__ = error
            self._abandon(stopped)

    def _abandon(self, error: EngineStopped) -> None:
        self._schedule.abandon(error)
        while self._jobs:
            self._jobs.popleft()()

    def _check_open(self) -> None:
        if self._broken is not None:
            raise EngineStopped(f"the engine broke: {self._broken}; start another") from self._broken
        if self._stopping is not None:
            raise EngineStopped("the engine is shut down and takes no more requests")

    def _has_work(self) -> bool:
        return bool(self._schedule.busy or self._jobs or self._news)

    def _is_over(self) -> bool:
        if self._stopping is None:
            return False
        late = self._metrics.clock() >= self._give_up_s
        return self._stopping == "now" or late or not self._has_work()

    def _wake(self) -> None:
        with self._changed:
            self._news = True
            self._changed.notify_all()

    def _on_thread(self, work: Callable[[], None]) -> None:
        """Do something on the engine's thread, and wait for it."""
        done = threading.Event()
        failed: list[Exception] = []

        def job() -> None:
            try:
                self._check_open()
                work()
            except Exception as error:
                failed.append(error)
            finally:
                done.set()

        with self._changed:
            self._check_open()
            self._jobs.append(job)
            self._changed.notify_all()
        if self._thread is None:
            self.turn()
        done.wait()
        if failed:
            raise failed[0]


def _placed(adapter: Adapter, device: torch.device | str | None) -> torch.device:
    """Where the model is, which is where it was said to be."""
    here = next(adapter.decoder.parameters()).device
    asked = here if device is None else torch.device(device)
    if asked.type != here.type or asked.index not in (None, here.index):
        raise InputError(f"`device` (={device}) must be where the model is: {here}")
    return here

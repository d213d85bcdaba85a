"""Serving engine: one thread owns the model, and requests of many threads share it.

Each request's policy decides its plan; `scheduler` decides which request runs next and handles failures.
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
from sparseflow.core.checks import check_at_least
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError

_LOG = logging.getLogger(__name__)


class Engine:
    """Runs requests on a model.

    Args:
        adapter: Adapter of the model.
        runtime: Plan runtime of the model.
        plans: Plans that may be chosen; requests without images run them without their tier. 8 to 16 plans
            are enough to trade accuracy for latency, and few enough for requests to share batches.
        max_batch: Maximum number of concurrently decoding requests, over all plans.
        max_tokens: Maximum number of tokens of prompt and answer together. From its first request on, each
            distinct decode plan keeps keys and values of `max_batch * max_tokens` tokens.
        graphs: Whether to capture steps and prompts as CUDA graphs on a GPU.
        contexts: Padded context sizes; default: doubling sizes from 128.
        prompts: Padded prompt sizes; default: eight if prompts are captured, otherwise none.
        fairness: A batch runs after at most this many steps of other batches, and a waiting request is
            admitted after at most this many requests that overtook it.
        queue_limit: Maximum number of waiting requests.
        start: Whether to start the thread. Without it, call `step`.

    Raises:
        InputError: A count is out of range, or there is no plan.
        PlanError: The model cannot run one of the plans.
        ModelError: The model's attention does not support static slots.
    """

    def __init__(
        self,
        adapter: Adapter,
        runtime: PlanRuntime,
        *,
        plans: Sequence[Plan],
        max_batch: int = 8,
        max_tokens: int = 2048,
        graphs: bool = True,
        contexts: Sequence[int] | None = None,
        prompts: Sequence[int] | None = None,
        fairness: int = 4,
        queue_limit: int = 1024,
        start: bool = True,
    ) -> None:
        check_at_least(
            1, max_batch=max_batch, max_tokens=max_tokens, fairness=fairness, queue_limit=queue_limit
        )
        if not plans:
            raise InputError("`plans` is empty; pass the plans that policies may choose")
        for plan in plans:
            runtime.check(plan)
        self.plans = tuple(dict.fromkeys(plans))
        self.max_batch, self.max_tokens = max_batch, max_tokens
        self.graphs = GraphCache(next(adapter.decoder.parameters()).device, enabled=graphs)
        kernel_patcher = KernelPatcher(adapter)
        self._prefill = PrefillRunner(
            adapter, runtime, self.graphs, kernel_patcher=kernel_patcher, tokens=max_tokens, sizes=prompts
        )
        self._decode = DecodeRunner(
            adapter, runtime, self.graphs, kernel_patcher=kernel_patcher, rows=max_batch, tokens=max_tokens,
            contexts=contexts,
        )  # fmt: skip
        self._metrics = EngineMetrics()
        self._changed = threading.Condition(threading.RLock())
        self._adapter, self._queue_limit = adapter, queue_limit
        self._schedule = Scheduler(
            adapter,
            self._prefill,
            self._decode,
            plans=self.plans,
            max_batch=max_batch,
            max_tokens=max_tokens,
            fairness=fairness,
            metrics=self._metrics,
            lock=self._changed,
        )
        self._jobs: deque[Callable[[], None]] = deque()
        self._wake_requested = False
        self._stopping: Literal["drain", "now"] | None = None
        self._deadline_s = math.inf
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        if start:
            self._thread = threading.Thread(target=self._run_loop, name="sparseflow-engine", daemon=True)
            self._thread.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown(drain=error[0] is None)

    @property
    def load(self) -> float:
        """Utilization, as in `EngineSnapshot`."""
        return self._metrics.load(busy=self.busy)

    @property
    def busy(self) -> bool:
        """Whether requests run or wait."""
        return bool(self._schedule.busy or self._jobs or self._wake_requested)

    @property
    def busy_s(self) -> float:
        """Total time that the thread has worked, in seconds."""
        return self._metrics.busy_s

    @property
    def prompts(self) -> tuple[int, ...]:
        """Padded prompt sizes; empty if prompts are not padded."""
        return self._prefill.sizes

    @property
    def contexts(self) -> tuple[int, ...]:
        """Padded context sizes of decode steps."""
        return self._decode.contexts

    def submit(
        self, request: GenerationRequest, listener: Callable[[RequestHandle], None] | None = None
    ) -> RequestHandle:
        """Submit a request.

        Args:
            request: The request.
            listener: Called with the handle on every change from the first token on, like
                `RequestHandle.add_listener`.

        Raises:
            InputError: The request can never run.
            RequestRejected: The queue is full.
            EngineStopped: The engine is shut down or failed.
        """
        check_request(self._adapter, request, self.max_tokens)
        handle = RequestHandle(request, self._wake)
        if listener is not None:
            handle.add_listener(partial(listener, handle))
        with self._changed:
            self._check_open()
            if self._schedule.waiting >= self._queue_limit:
                raise RequestRejected(f"the queue is full with {self._schedule.waiting} requests")
            self._metrics.record_arrival(busy=self._schedule.busy)
            self._metrics.submitted += 1
            self._schedule.add(handle)
            self._changed.notify_all()
        return handle

    def snapshot(self) -> EngineSnapshot:
        """Current counters and utilization."""
        schedule, metrics = self._schedule, self._metrics
        with self._changed:
            running = {batch.cache.plan.id: len(batch.rows) for batch in schedule.batches if batch.rows}
            return EngineSnapshot(
                queued=schedule.waiting, running=sum(running.values()), slots=self.max_batch,
                load=self.load, submitted=metrics.submitted, ended=dict(metrics.ended), batches=running,
                cache_bytes=sum(batch.cache.memory_bytes for batch in schedule.batches),
                captured=len(self.graphs.captured), uncaptured=tuple(self.graphs.failures.values()),
                healthy=self._failure is None,
            )  # fmt: skip

    def warm_up(self, example: Inputs | None = None, *, progress: Progress | None = None) -> None:
        """Run every prompt and step size once, so that no request waits for a capture.

        During a capture, no other thread of the process may synchronize with the device.

        Args:
            example: Inputs of a request at the highest tier, with as many images of one size as requests will
                have.
            progress: Called on the engine's thread.

        Raises:
            InputError: Requests are running.
            EngineStopped: The engine is shut down or failed.
            OutOfMemoryError: The caches do not fit; use fewer slots, tokens or plans.
        """

        def work() -> None:
            if self._schedule.running:
                raise InputError("requests are running; warm up before the first request")
            tasks = self._schedule.warm_up(example)
            for completed, task in enumerate(tasks, start=1):
                if self._stopping == "now":
                    raise EngineStopped("the engine was shut down during the warm-up")
                task()
                if progress is not None:
                    progress(f"warmed up {completed} of {len(tasks)} steps", completed / len(tasks))

        self._on_thread(work)

    def shutdown(self, *, drain: bool = True, timeout_s: float | None = None) -> bool:
        """Stop accepting requests, and end.

        Args:
            drain: Whether to finish accepted requests; otherwise they get `EngineStopped`.
            timeout_s: Maximum time to finish them; the remaining ones get `EngineStopped`.

        Returns:
            Whether all accepted requests ended on their own.
        """
        with self._changed:
            self._stopping = "drain" if drain else "now"
            if timeout_s is not None:
                self._deadline_s = self._metrics.clock() + timeout_s
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        else:
            while not self._is_over():
                self.step()
            self._abandon(EngineStopped("the engine was shut down before this request ended"))
        return self._metrics.ended["stopped"] == 0

    def step(self) -> bool:
        """Run one scheduler step, for an engine without a thread.

        Returns:
            Whether there was work.

        Raises:
            InputError: The engine has a thread.
        """
        if self._thread not in (None, threading.current_thread()):
            raise InputError("this engine has a thread; create it with `start=False` to call `step`")
        with self._changed:
            self._wake_requested = False
        with torch.no_grad():
            while self._jobs:
                self._jobs.popleft()()
            return self._schedule.step()

    def _run_loop(self) -> None:
        if self.graphs.device.type == "cuda":
            torch.cuda.set_device(self.graphs.device)
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self.busy or self._stopping is not None)
                    self._metrics.record_time(busy=False)
                    if self._is_over():
                        break
                self.step()
                self._metrics.record_time(busy=True)
            self._abandon(EngineStopped("the engine was shut down before this request ended"))
        except BaseException as error:
            # After any error, no caller may be left waiting.
            _LOG.exception("the engine failed")
            with self._changed:
                self._failure = error
            stopped = EngineStopped(f"the engine failed: {error}")
            stopped.__cause__ = error
            self._abandon(stopped)

    def _abandon(self, error: EngineStopped) -> None:
        self._schedule.abort_all(error)
        while self._jobs:
            self._jobs.popleft()()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise EngineStopped(f"the engine failed: {self._failure}; create another") from self._failure
        if self._stopping is not None:
            raise EngineStopped("the engine is shut down")

    def _is_over(self) -> bool:
        if self._stopping is None:
            return False
        late = self._metrics.clock() >= self._deadline_s
        return self._stopping == "now" or late or not self.busy

    def _wake(self) -> None:
        with self._changed:
            self._wake_requested = True
            self._changed.notify_all()

    def _on_thread(self, work: Callable[[], None]) -> None:
        """Run a function on the engine's thread and wait for it."""
        completed = threading.Event()
        failed: list[Exception] = []

        def job() -> None:
            try:
                self._check_open()
                work()
            except Exception as error:
                failed.append(error)
            finally:
                completed.set()

        with self._changed:
            self._check_open()
            self._jobs.append(job)
            self._changed.notify_all()
        if self._thread is None:
            self.step()
        completed.wait()
        if failed:
            raise failed[0]

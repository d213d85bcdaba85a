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
from sparseflow.errors import InputError

_LOG = logging.getLogger(__name__)


class Engine:
    """Runs requests on a model.

    Args:
        adapter: Adapter of the model.
        runtime: Plan runtime of the model.
        plans: Plans that may be chosen; requests without images run them without their tier. 8 to 16 plans
            are enough to trade accuracy for latency, and few enough for requests to share batches.
        device: Device of the model; default: where it is.
        max_batch: Maximum number of concurrently decoding requests, over all plans.
        max_tokens: Maximum number of tokens of prompt and answer together. From its first request on, each
            distinct decode plan keeps keys and values of `max_batch * max_tokens` tokens.
        graphs: Whether to capture steps and prompts as CUDA graphs on a GPU.
        batches: Padded batch sizes; default: doubling sizes.
        contexts: Padded context sizes; default: doubling sizes from 128.
        prompts: Padded prompt sizes; default: eight if prompts are captured, otherwise none.
        kernel_patcher: Kernels used in captured forwards; default: those that the model and device support.
        fairness: A batch runs after at most this many steps of other batches, and a waiting request is
            admitted after at most this many requests that overtook it.
        queue_limit: Maximum number of waiting requests.
        start: Whether to start the thread. Without it, call `step`.

    Raises:
        InputError: A count is out of range, there is no plan, or the model is on another device.
        PlanError: The model cannot run one of the plans.
        ModelError: The model's attention does not support static slots.
    """

    def __init__(
        self,
        adapter: Adapter,
        runtime: PlanRuntime,
        *,
        plans: Sequence[Plan],
        device: torch.device | str | None = None,
        max_batch: int = 8,
        max_tokens: int = 2048,
        graphs: bool = True,
        batches: Sequence[int] | None = None,
        contexts: Sequence[int] | None = None,
        prompts: Sequence[int] | None = None,
        kernel_patcher: KernelPatcher | None = None,
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
            raise InputError("`plans` is empty; pass the plans that policies may choose")
        for plan in plans:
            runtime.check(plan)
        self.plans = tuple(dict.fromkeys(plans))
        self.max_batch, self.max_tokens = max_batch, max_tokens
        model_device = _check_device(adapter, device)
        self.graphs = GraphCache(model_device, enabled=graphs)
        kernel_patcher = KernelPatcher(adapter) if kernel_patcher is None else kernel_patcher
        self._metrics = EngineMetrics()
        self._changed = threading.Condition(threading.RLock())
        self._adapter, self._queue_limit = adapter, queue_limit
        self._schedule = Scheduler(
            adapter,
            PrefillRunner(
                adapter, runtime, self.graphs, kernel_patcher=kernel_patcher, tokens=max_tokens, sizes=prompts
            ),
            DecodeRunner(
                adapter,
                runtime,
                self.graphs,
                kernel_patcher=kernel_patcher,
                rows=max_batch,
                tokens=max_tokens,
                batches=batches,
                contexts=contexts,
            ),
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
        return self._metrics.load(busy=self._has_work())

    @property
    def busy(self) -> bool:
        """Whether requests run or wait."""
        return self._has_work()

    @property
    def busy_s(self) -> float:
        """Total time that the thread has worked, in seconds."""
        return self._metrics.busy_s

    @property
    def prompts(self) -> tuple[int, ...]:
        """Padded prompt sizes; empty if prompts are not padded."""
        return self._schedule.prompts

    @property
    def contexts(self) -> tuple[int, ...]:
        """Padded context sizes of decode steps."""
        return self._schedule.contexts

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
        schedule, metrics, current_time_s = self._schedule, self._metrics, self._metrics.clock()
        with self._changed:
            oldest_s = schedule.oldest_s()
            running = {batch.cache.plan.id: len(batch.rows) for batch in schedule.batches if batch.rows}
            return EngineSnapshot(
                queued=schedule.waiting, running=sum(running.values()), slots=self.max_batch,
                oldest_wait_ms=0.0 if oldest_s is None else (current_time_s - oldest_s) * 1e3,
                load=metrics.load(busy=self._has_work()), tokens_per_s=metrics.tokens_per_s(),
                submitted=metrics.submitted, ended=dict(metrics.ended), tokens=metrics.tokens,
                plans=dict(metrics.plans), batches=running,
                cache_bytes=sum(batch.cache.memory_bytes for batch in schedule.batches),
                captured=len(self.graphs.captured), uncaptured=tuple(self.graphs.failures.values()),
                healthy=self._failure is None,
            )  # fmt: skip

    def warm_up(
        self, example: Inputs | None = None, *, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Run every prompt and step size once, so that no request waits for a capture.

        During a capture, no other thread of the process may synchronize with the device.

        Args:
            example: Inputs of a request at the highest tier, with as many images of one size as requests will
                have.
            progress: Called with (tasks completed, tasks in total) on the engine's thread.

        Raises:
            InputError: Requests are running.
            EngineStopped: The engine is shut down or failed.
            OutOfMemoryError: The caches do not fit; use fewer slots, tokens or plans.
        """

        def work() -> None:
            if self._schedule.running:
                raise InputError("requests are running; warm up before the first request")
            tasks = self._schedule.warm_up(example)
            for count, task in enumerate(tasks):
                if self._stopping == "now":
                    raise EngineStopped("the engine was shut down during the warm-up")
                task()
                if progress is not None:
                    progress(count + 1, len(tasks))

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
                    self._changed.wait_for(lambda: self._has_work() or self._stopping is not None)
                    self._metrics.record_time(busy=False)
                    if self._is_over():
                        break
                self.step()
                self._metrics.record_time(busy=True)
            self._abandon(EngineStopped("the engine was shut down before this request ended"))
        except BaseException as error:
            # No caller may be left waiting, whatever the error.
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

    def _has_work(self) -> bool:
        return bool(self._schedule.busy or self._jobs or self._wake_requested)

    def _is_over(self) -> bool:
        if self._stopping is None:
            return False
        late = self._metrics.clock() >= self._deadline_s
        return self._stopping == "now" or late or not self._has_work()

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


def _check_device(adapter: Adapter, device: torch.device | str | None) -> torch.device:
    """Device of the model, which must match `device`."""
    model_device = next(adapter.decoder.parameters()).device
    requested = model_device if device is None else torch.device(device)
    if requested.type != model_device.type or requested.index not in (None, model_device.index):
        raise InputError(f"`device` (={device}) must be the model's device {model_device}")
    return model_device

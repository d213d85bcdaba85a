"""Compilation of Triton kernels in several processes, before their first launch.

Triton compiles a kernel at its first launch, which takes up to a second of one processor. Kernels are
independent, so forked processes compile them and fill Triton's cache on disk.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from typing import Any

MAX_PROCESSES = 16
TIMEOUT_S = 120.0
"""Time after which the remaining kernels are compiled at their first launch."""


def compile_kernels(request: Callable[[], object]) -> int:
    """Compile kernels in forked processes; kernels that do not compile are left out.

    Does nothing where processes cannot be forked or Triton interprets its kernels.

    Args:
        request: Calls the `warmup` of each kernel instead of launching it.

    Returns:
        The number of different kernels.
    """
    import triton
    from triton import knobs

    if "fork" not in multiprocessing.get_all_start_methods() or knobs.runtime.interpret:
        return 0
    compiler = _ForkingExecutor()
    with triton.AsyncCompileMode(compiler, ignore_errors=True):
        try:
            request()
        finally:
            compiler.compile()
    return len(compiler.tasks)


class _ForkingExecutor(Executor):
    """Collects compilations, then runs them in forked processes.

    Their results stay in the processes; the next launch reads them from the disk.
    """

    def __init__(self) -> None:
        self.tasks: list[Callable[[], Any]] = []
        self._futures: list[Future[Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.tasks.append(lambda: fn(*args, **kwargs))
        self._futures.append(future)
        return future

    def compile(self) -> None:
        """Run all tasks and wait for them."""
        num_processes = min(len(self.tasks), len(os.sched_getaffinity(0)), MAX_PROCESSES)
        context, deadline = multiprocessing.get_context("fork"), time.monotonic() + TIMEOUT_S
        processes = [
            context.Process(target=_run_tasks, args=(self.tasks[index::num_processes],), daemon=True)
            for index in range(num_processes)
        ]
        collects = gc.isenabled()
        gc.disable()  # a forked process must not free memory of the GPU
        try:
            with warnings.catch_warnings(category=DeprecationWarning, action="ignore"):  # they only compile
                for process in processes:
                    process.start()
        finally:
            if collects:
                gc.enable()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
        for future in self._futures:
            future.set_exception(CancelledError("compiled by another process"))


def _run_tasks(tasks: list[Callable[[], Any]]) -> None:
    """Run tasks in a forked process, which must not use the GPU."""
    for task in tasks:
        try:
            task()
        except BaseException:  # a variant that does not compile is left out when it is timed
            continue
    os._exit(0)

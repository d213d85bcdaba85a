"""Map a function over many items: in this process, in local processes, or on a Ray cluster.

A measurement must not share its device with another one, so `cpus_per_task` says how much of a machine one
call occupies; on a cluster, a call that occupies a whole machine has it to itself.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

from sparseflow.core.checks import check_at_least
from sparseflow.core.extras import require
from sparseflow.errors import DeviceError

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_unordered(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    workers: int = 1,
    cluster: str | None = None,
    cpus_per_task: float = 1.0,
    gpus_per_task: float = 0.0,
) -> Iterator[tuple[int, Result]]:
    """Call `function` with each item and yield (index of the item, result) as calls complete.

    Args:
        function: Module-level function, so that other processes can import it.
        items: Arguments. Items and results are pickled between processes.
        workers: Local processes; 1 calls the function in this process, one item at a time. Ignored if
            `cluster` is given.
        cluster: Address of a Ray cluster; `"auto"` is the cluster that this machine belongs to.
        cpus_per_task: CPUs that a call occupies on the cluster.
        gpus_per_task: GPUs that a call occupies on the cluster.

    Raises:
        InputError: `workers` is less than 1, and there is no `cluster`.
        DeviceError: There is no cluster at the address.
        MissingExtraError: Ray is not installed.
        Exception: The first exception that `function` raises; calls that have not started are canceled.
    """
    if cluster is not None:
        yield from _map_on_ray(function, items, cluster, cpus_per_task, gpus_per_task)
        return
    check_at_least(1, workers=workers)
    if workers == 1 or len(items) < 2:
        for index, item in enumerate(items):
            yield index, function(item)
    else:
        # A forked process would share the threads and the CUDA context of this process.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(workers, len(items)), mp_context=context) as pool:
            futures = {pool.submit(function, item): index for index, item in enumerate(items)}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _map_on_ray(
    function: Callable[[Any], Any], items: Sequence[Any], cluster: str, num_cpus: float, num_gpus: float
) -> Iterator[tuple[int, Any]]:
    ray = require("ray", "distributed")
    connects = not ray.is_initialized()
    try:
        ray.init(address=cluster, ignore_reinit_error=True, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise DeviceError(f"there is no Ray cluster at {cluster!r}: {error}") from error
    pending: list[Any] = []
    try:
        remote = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=0)(function)
        index_of = {remote.remote(item): index for index, item in enumerate(items)}
        pending = list(index_of)
        while pending:
            ready, pending = ray.wait(pending)
            for reference in ready:
                try:
                    yield index_of[reference], ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    raise (error.cause or error) from None
    finally:
        for reference in pending:
            ray.cancel(reference)
        if connects:
            ray.shutdown()

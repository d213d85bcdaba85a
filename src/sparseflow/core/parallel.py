"""The same function over many items: here, in processes of this machine, or on a Ray cluster.

What is measured must not share its device, so `cpus_per_task` says how much of a machine one call takes; on a
cluster a call that takes a whole machine gets it for itself.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

from sparseflow.core.extras import require
from sparseflow.errors import DeviceError, InputError

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
    """Call `function` with each item; gives (place of the item, result) as they come in.

    Args:
        function: Of a module, so that another process can import it.
        items: What to call it with; they and the results travel by pickle between our own processes.
        workers: Processes of this machine; 1 calls it here, one item after the other. Not looked at with
            `cluster`.
        cluster: Address of a Ray cluster, `"auto"` for the one that this machine belongs to.
        cpus_per_task: CPUs that a call takes of its machine, on a cluster.
        gpus_per_task: GPUs that a call takes of its machine, on a cluster.

    Raises:
        InputError: `workers` is looked at and not positive.
        DeviceError: There is no cluster at the address.
        MissingExtraError: Ray is missing.
        Exception: Whatever `function` raised; calls that have not begun are dropped then.
    """
    if workers < 1 and cluster is None:
        raise InputError(f"`workers` (={workers}) must be at least 1")
    if cluster is not None:
        yield from _on_ray(function, items, cluster, cpus_per_task, gpus_per_task)
    elif workers == 1 or len(items) < 2:
        for place, item in enumerate(items):
            yield place, function(item)
    else:
        # Spawned: a fork would share the threads and the CUDA context of this process.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(workers, len(items)), mp_context=context) as pool:
            futures = {pool.submit(function, item): place for place, item in enumerate(items)}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _on_ray(
    function: Callable[[Any], Any], items: Sequence[Any], cluster: str, cpus: float, gpus: float
) -> Iterator[tuple[int, Any]]:
    ray = require("ray", "distributed")
    begun = not ray.is_initialized()
    try:
        ray.init(address=cluster, ignore_reinit_error=True, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise DeviceError(f"there is no Ray cluster at {cluster!r}: {error}") from error
    waiting: list[Any] = []
    try:
        remote = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(function)
        places = {remote.remote(item): place for place, item in enumerate(items)}
        waiting = list(places)
        while waiting:
            ready, waiting = ray.wait(waiting)
            for reference in ready:
                try:
                    yield places[reference], ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    raise (error.cause or error) from None
    finally:
        for other in waiting:
            ray.cancel(other)
        if begun:
            ray.shutdown()

"""Execution of a C callback on as many threads as torch uses.

torch's own OpenMP team is used if its runtime (libgomp) is found: its threads are awake right after a torch
operation, and a second pool would compete with them for cores. Otherwise a Python thread pool is used; the
callbacks do not hold the GIL.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def _load_openmp() -> Any:
    """Load `GOMP_parallel` of the OpenMP runtime that torch uses; None if there is none."""
    # The wheels bundle their own copy; otherwise use the one loaded by the process.
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    for library in (*map(str, bundled), None):
        try:
            entry = ctypes.CDLL(library).GOMP_parallel
        except (AttributeError, OSError):
            continue
        entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        entry.restype = None
        return entry
    return None


@functools.cache
def _get_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="sparseflow-events")


@functools.cache
def _get_callback(function: int) -> Callable[[int], None]:
    return _CALLBACK(function)


def run_on_threads(function: int, record: int, threads: int | None = None) -> None:
    """Call `function(record)` once on each thread, concurrently, and wait.

    Args:
        function: Address of a C function `void(void*)` that processes work items of its record until none is
            left.
        record: Address of the record.
        threads: Number of threads; torch's if None.
    """
    threads = torch.get_num_threads() if threads is None else threads
    if threads == 1:
        _get_callback(function)(record)
        return
    openmp = _load_openmp()
    if openmp is not None:
        openmp(function, record, threads, 0)
        return
    call = _get_callback(function)
    futures = [_get_pool(threads - 1).submit(call, record) for _ in range(threads - 1)]
    call(record)
    for other in futures:
        other.result()

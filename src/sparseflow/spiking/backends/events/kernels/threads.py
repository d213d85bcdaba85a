"""Runs a C callback on as many threads as torch uses.

torch's own OpenMP team does the work where its runtime (libgomp) can be found: its threads are awake right
after a torch operation, and a second pool would compete with them for the same cores. Elsewhere a Python
thread pool does; the callbacks hold no GIL.
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
def _openmp() -> Any:
    """`GOMP_parallel` of the OpenMP runtime that torch has loaded, or None."""
    # The wheels bring their own copy; elsewhere it is the one that the process has loaded for all.
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
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="sparseflow-events")


@functools.cache
def _callback(function: int) -> Callable[[int], None]:
    return _CALLBACK(function)


def run(function: int, record: int, threads: int | None = None) -> None:
    """Call `function(record)` once on every thread, at the same time, and wait.

    Args:
        function: Address of a C function `void(void*)` that takes work items from its record until none is
        left. record: Address of the record. threads: How many; torch's own number when None.
    """
    threads = torch.get_num_threads() if threads is None else threads
    if threads == 1:
        _callback(function)(record)
        return
    openmp = _openmp()
    if openmp is not None:
        openmp(function, record, threads, 0)
        return
    call = _callback(function)
    others = [_pool(threads - 1).submit(call, record) for _ in range(threads - 1)]
    call(record)
    for other in others:
        other.result()

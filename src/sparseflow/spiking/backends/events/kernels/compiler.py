"""Compilation of kernels to C callbacks, and their execution on as many threads as torch uses.

Kernels are compiled once per machine: Numba caches the machine code on disk. They run on torch's own OpenMP
team if its runtime (libgomp) is found: its threads are awake right after a torch operation, and a second pool
would compete with them for cores. Otherwise a Python thread pool is used; the callbacks do not hold the GIL.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from numba import cfunc, njit, types

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def jit(function: Callable[..., Any]) -> Any:
    """Decorator of the functions that kernels call."""
    return njit(nogil=True, error_model="numpy", boundscheck=False)(function)


@functools.cache
def _hash_sources() -> str:
    """Hash the sources of this package: Numba notices changes of one file only, and kernels span several."""
    folder = Path(__file__).parent
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))).hexdigest()


@functools.cache
def compile_kernel(make: Callable[[str], Callable[[Any], None]]) -> int:
    """Compile a kernel, or load it from the disk cache.

    Args:
        make: Takes a digest of the sources and returns the Python function of a C `void(void*)`. The function
            must use the digest: its closure variables are part of Numba's cache key.

    Returns:
        Address of the C function.
    """
    compiled = cfunc(types.void(types.voidptr), cache=True, nogil=True, error_model="numpy")(
        make(_hash_sources())
    )
    _COMPILED.append(compiled)
    address: Any = compiled.address
    return address


_COMPILED: list[object] = []
"""Owners of the machine code; addresses must stay valid for the life of the process."""


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

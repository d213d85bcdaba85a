"""Compilation of kernels to C callbacks, once per machine: Numba caches the machine code on disk."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import cfunc, njit, types


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

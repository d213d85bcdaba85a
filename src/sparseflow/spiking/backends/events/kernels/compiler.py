"""Compiles a kernel to a C callback, once per machine: Numba keeps the machine code on disk."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import cfunc, njit, types


def jit(function: Callable[..., Any]) -> Any:
    """Decorator of every function that a kernel calls."""
    return njit(nogil=True, error_model="numpy", boundscheck=False)(function)


@functools.cache
def _sources_digest() -> str:
    """Digest of this package: Numba notices changes of one file only, and a kernel spans several."""
    folder = Path(__file__).parent
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))).hexdigest()


@functools.cache
def compile_kernel(make: Callable[[str], Callable[[Any], None]]) -> int:
    """Compile a kernel or load it from the disk cache.

    Args:
        make: Takes a digest of the sources and returns the Python function of a C `void(void*)`, which must
            mention the digest: variables of the enclosing function are part of the key under which Numba
            stores machine code.

    Returns:
        Address of the C function.
    """
    compiled = cfunc(types.void(types.voidptr), cache=True, nogil=True, error_model="numpy")(
        make(_sources_digest())
    )
    _KEPT.append(compiled)
    address: Any = compiled.address
    return address


_KEPT: list[object] = []
"""Owners of the machine code: an address must stay valid for the life of the process."""

"""Faster Triton interpreter: removes repeated work, most of the time of kernel tests on a CPU.

The interpreter computes every integer sum a second time in 64 bits for an assertion that is only active in
debug mode, and it patches `triton.language` again at every call between interpreted functions although the
patch lasts until the launch ends. It describes the type of every intermediate result anew, and it reduces
with a user's function one element at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest


@contextmanager
def patch_interpreter() -> Iterator[None]:
    """Patch the interpreter while the context is active; no effect without the interpreter.

    Patches private names of Triton; a version without them fails immediately.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        yield
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder, patch_lang = interpreter.interpreter_builder, interpreter._patch_lang
    launch = interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def launch_and_reset(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        try:
            launch(self, *args, **kwargs)
        finally:
            patched.clear()

    def patch_once(function: Any) -> Any:
        if (module := id(function.__globals__)) in patched:
            return None
        patched.add(module)
        return patch_lang(function)

    with pytest.MonkeyPatch.context() as patch:
        if not builder.options.debug:
            patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        patch.setattr(interpreter.GridExecutor, "__call__", launch_and_reset)
        patch.setattr(interpreter, "_patch_lang", patch_once)
        _patch_types(patch, interpreter)
        patch.setattr(interpreter.ReduceOps, "generic_reduce", _reduce_slices)
        yield


def _patch_types(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Describe each shape and each data type once."""
    core: Any = importlib.import_module("triton.language.core")
    make_block_type = core.block_type.__init__
    find_numpy_type = functools.cache(interpreter._get_np_dtype)

    @functools.cache
    def describe_block(shape: tuple[int, ...]) -> tuple[Any, int, str]:
        block = object.__new__(core.block_type)
        make_block_type(block, core.int32, list(shape))
        return block.shape, block.numel, str(block.shape)

    @functools.cache
    def describe_tensor(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        if any(type(size) is not int for size in shape):
            make_block_type(self, element_ty, shape)
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = describe_block(tuple(shape))
        self.name = f"<{text}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = describe_tensor(tuple(type.shape) if type.is_block() else ())

    def get_numpy_type(data_type: Any) -> np.dtype[Any]:
        scalar = data_type.scalar
        return np.dtype(np.uint64) if scalar.is_ptr() else find_numpy_type(scalar)

    patch.setattr(core.block_type, "__init__", init_block_type)
    patch.setattr(core.tensor, "__init__", init_tensor)
    patch.setattr(interpreter, "_get_np_dtype", get_numpy_type)


def _reduce_slices(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """Reduce along an axis, all elements of a slice at once; the order of each reduction does not change."""
    original_axis = self.axis
    inputs, axis = self.unravel(inputs, self.axis)
    slices = [np.moveaxis(value.handle.data, axis, 0) for value in inputs]

    def select(i: int) -> list[Any]:
        return [self.to_tensor(data[i], value.dtype) for data, value in zip(slices, inputs, strict=True)]

    sums = select(0)
    for i in range(1, len(slices[0])):
        combined = self.combine_fn.fn(*sums, *select(i))
        combined = combined if isinstance(combined, tuple) else (combined,)
        sums = [
            self.to_tensor(result.handle.data.reshape(data.shape[1:]), value.dtype)
            for result, data, value in zip(combined, slices, inputs, strict=True)
        ]
    if not self.keep_dims:
        return sums
    axes = tuple(range(slices[0].ndim)) if original_axis is None else axis
    return [
        self.to_tensor(np.expand_dims(total.handle.data.reshape(data.shape[1:]), axes), value.dtype)
        for total, data, value in zip(sums, slices, inputs, strict=True)
    ]

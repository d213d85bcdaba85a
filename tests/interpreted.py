"""Triton's interpreter without what it does twice, which is half of the time of kernels' tests on a CPU.

It computes every sum of integers once more in 64 bits, for an assertion that it leaves out where it is not
debugging. And it patches `triton.language`, which stays patched until a launch ends, again at every call from
one interpreted function to another.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def once() -> Iterator[None]:
    """Within, neither is done. Where nothing is interpreted, nothing is changed.

    Names of Triton that are not public are patched; another version that lacks them fails at once.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        yield
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder, patch_lang = interpreter.interpreter_builder, interpreter._patch_lang
    launch = interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def launch_afresh(self: Any, *args: Any, **kwargs: Any) -> None:
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
        patch.setattr(interpreter.GridExecutor, "__call__", launch_afresh)
        patch.setattr(interpreter, "_patch_lang", patch_once)
        yield

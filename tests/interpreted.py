"""Faster Triton interpreter: removes repeated work, half of the time of kernel tests on a CPU.

The interpreter computes every integer sum a second time in 64 bits for an assertion that is only active in
debug mode, and it patches `triton.language` again at every call between interpreted functions although the
patch lasts until the launch ends.
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
        yield

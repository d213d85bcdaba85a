"""User models named as `package.module:factory` or `path/to/file.py:factory`."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sparseflow.errors import InputError, ModelError, SparseFlowError

if TYPE_CHECKING:
    from torch import nn


def import_factory(name: str) -> Callable[..., object]:
    """Import a model factory: a function or a class, `package.module:factory` or `path/to/file.py:factory`.

    The current directory is importable, and so is the directory of a file.

    Raises:
        InputError: The factory cannot be imported or is not callable.
    """
    factory = _import_object(name)
    if not callable(factory):
        raise InputError(
            f"{name!r} is of type {type(factory).__name__}, expected a function returning a model"
        )
    return factory


def _import_object(name: str) -> Any:
    module_name, _, attribute = name.rpartition(":")
    try:
        is_file = module_name.endswith(".py")
        module = _import_file(Path(module_name)) if is_file else _import_module(module_name)
        return getattr(module, attribute)
    except (ImportError, AttributeError, ValueError, OSError) as error:
        raise InputError(f"cannot import {name!r}: {error}") from error
    except Exception as error:
        raise InputError(f"importing {name!r} failed: {type(error).__name__}: {error}") from error


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    """Import a Python file under its own name, once, so that its objects can be pickled."""
    file, loaded = path.resolve(), sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    if loaded is not None:
        raise ImportError(f"a module named {path.stem} is imported already; rename the file")
    spec = util.spec_from_file_location(path.stem, file)
    assert spec is not None and spec.loader is not None
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    module = sys.modules[path.stem] = util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def parse_arguments(assignments: Sequence[str]) -> dict[str, Any]:
    """Parse arguments of a factory, `NAME=VALUE`.

    A value is a Python literal, `module:object`, which is imported, or a string.

    Raises:
        InputError: An assignment has another form, or an object cannot be imported.
    """
    arguments: dict[str, Any] = {}
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator or not name.isidentifier():
            raise InputError(f"argument {assignment!r} must have the form NAME=VALUE")
        try:
            arguments[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            arguments[name] = _import_object(text) if ":" in text else text
    return arguments


def build_model(name: str, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Import a model factory and call it.

    Args:
        name: See `import_factory`.
        arguments: Keyword arguments of the factory.

    Raises:
        InputError: The factory cannot be imported, is not callable, or does not accept the arguments.
        ModelError: The factory failed or returned something else than a module.
    """
    from torch import nn

    arguments = dict(arguments or {})
    factory = import_factory(name)
    try:
        inspect.signature(factory).bind(**arguments)
    except (TypeError, ValueError) as error:
        raise InputError(f"cannot call {name} with {arguments}: {error}") from error
    try:
        model = factory(**arguments)
    except SparseFlowError:
        raise
    except Exception as error:
        raise ModelError(f"{name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{name} returned an object of type {type(model).__name__}, expected torch.nn.Module"
        )
    return model

"""User models named as `package.module:factory`."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sparseflow.errors import InputError, ModelError, SparseFlowError

if TYPE_CHECKING:
    from torch import nn


def import_factory(name: str) -> Callable[..., object]:
    """Import a model factory, `package.module:factory`. The current directory is importable.

    Raises:
        InputError: The factory cannot be imported or is not callable.
    """
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"cannot import {name!r}: {error}") from error
    except Exception as error:
        raise InputError(f"importing {name!r} failed: {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise InputError(
            f"{name!r} is of type {type(factory).__name__}, expected a function returning a model"
        )
    return factory


def build_model(name: str, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Import a model factory and call it; see `import_factory`.

    Args:
        name: `package.module:factory`.
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

"""User models named as `package.module:factory`."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparseflow.errors import InputError, ModelError

if TYPE_CHECKING:
    from torch import nn


def build_model(name: str, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Import a model factory and call it. The current directory is importable.

    Args:
        name: `package.module:factory`.
        arguments: Keyword arguments of the factory.

    Raises:
        InputError: The factory cannot be imported, is not callable, or does not accept the arguments.
        ModelError: The factory returned something else than a module.
    """
    from torch import nn

    arguments = dict(arguments or {})
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"cannot import {name!r}: {error}") from error
    if not callable(factory):
        raise InputError(
            f"{name!r} is of type {type(factory).__name__}, expected a function returning a model"
        )
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise InputError(f"cannot call {name} with {arguments}: {error}") from error
    model = factory(**arguments)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{name} returned an object of type {type(model).__name__}, expected torch.nn.Module"
        )
    return model

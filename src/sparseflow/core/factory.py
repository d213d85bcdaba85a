"""Networks of the user's own, named as `package.module:factory`."""

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
    """Import a factory, the current folder included, and call it.

    Args:
        name: `package.module:factory`.
        arguments: What to call it with, by name.

    Raises:
        InputError: It cannot be imported, is no callable, or does not take the arguments.
        ModelError: What it returned is no module.
    """
    from torch import nn

    given = dict(arguments or {})
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"{name!r} cannot be imported: {error}") from error
    if not callable(factory):
        raise InputError(f"{name!r} is a {type(factory).__name__}, not a function that makes a network")
    try:
        inspect.signature(factory).bind(**given)
    except TypeError as error:
        raise InputError(f"{name} cannot be called with {given}: {error}") from error
    model = factory(**given)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} returned a {type(model).__name__}, not a torch.nn.Module")
    return model

"""A forward in front of a module's own: on one instance, and gone without a trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


class Front:
    """Stands in front of a module's forward.

    A copy or a pickle of the module has none: it would reach back to the module that it was copied from.

    Args:
        module: The module.
        inside: Called with the front, `args`, and the positional and named arguments of a call.
        args: What else `inside` is told.

    Attributes:
        module: The module.
        original: The forward that stands behind.
    """

    def __init__(self, module: nn.Module, inside: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.original: Callable[..., Any] = module.forward
        # `inspect.signature` sees the signature behind.
        functools.update_wrapper(self, self.original)
        self.module = module
        self._inside, self._args = inside, args
        self._replaced: Any = vars(module).get("forward")

    @staticmethod
    def of(module: nn.Module) -> Front | None:
        """The front that a module has."""
        found = vars(module).get("forward")
        return found if isinstance(found, Front) else None

    @staticmethod
    def is_foreign(module: nn.Module) -> bool:
        """Whether a module has a forward on the instance that is neither a front nor that of its class."""
        found = vars(module).get("forward")
        own = isinstance(found, MethodType) and found.__self__ is module
        return not (
            found is None or isinstance(found, Front) or (own and found.__func__ is type(module).forward)
        )

    def install(self) -> None:
        """Put it in front."""
        vars(self.module)["forward"] = self

    def remove(self) -> None:
        """Take it away; whatever stood there stands there again."""
        if self._replaced is None:
            del vars(self.module)["forward"]
        else:
            vars(self.module)["forward"] = self._replaced

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._inside(self, *self._args, given, named)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _behind, (self.module, self._replaced)


def _behind(module: nn.Module, replaced: Any) -> Any:
    return MethodType(type(module).forward, module) if replaced is None else replaced

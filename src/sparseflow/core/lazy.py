"""Lazy exports of a package: names that are imported on first access (PEP 562).

A package lists its public names under `TYPE_CHECKING`, for type checkers and IDEs, and passes the same
names to `attach`::

    if TYPE_CHECKING:
        from sparseflow.tuning.api import tune

    __all__ = ["tune"]
    __getattr__, __dir__ = attach(__name__, {"api": ["tune"]})
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def attach(
    package: str, exports: Mapping[str, Sequence[str]], *, submodules: Sequence[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Create `__getattr__` and `__dir__` of a package.

    Args:
        package: The package's `__name__`.
        exports: Module, relative to the package, to the names that it defines.
        submodules: Submodules that are themselves public attributes.

    Returns:
        The functions to assign to the package's `__getattr__` and `__dir__`.
    """
    modules = {name: f"{package}.{module}" for module, names in exports.items() for name in names}

    def get_attribute(name: str) -> object:
        if name in submodules:
            return import_module(f"{package}.{name}")
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        # Cached, so that the next access does not come here; it also replaces a submodule of the same name.
        setattr(sys.modules[package], name, value)
        return value

    def list_attributes() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules, *submodules})

    return get_attribute, list_attributes

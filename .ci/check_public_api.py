#!/usr/bin/env python3
"""Check the signatures and docstrings of all public names: check_public_api.py [--list].

A public name is in `__all__` of `sparseflow` or of a wing. Every function and every public method must have
a docstring, annotated arguments, a return annotation that is not `Any`, and no `**kwargs` that hide options.
Prints the names that break a rule, and exits with 1 if there are any. `--list` also prints every public name
with its signature and summary.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import FunctionType

WINGS = ("adaptive", "codesign", "latency", "pruning", "spiking", "tuning")
MAX_SUMMARY = 100


def iter_functions(name: str, value: object) -> Iterator[tuple[str, Callable[..., object]]]:
    """Yield a function, or the constructor and the public methods of a class, each with its dotted name."""
    if isinstance(value, FunctionType):
        yield name, value
    elif inspect.isclass(value):
        for attribute, member in vars(value).items():
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            function = function.fget if isinstance(function, property) else function
            is_public = attribute == "__init__" or not attribute.startswith("_")
            if (
                is_public
                and isinstance(function, FunctionType)
                and function.__module__.startswith("sparseflow")
            ):
                yield f"{name}.{attribute}", function


def find_faults(name: str, function: Callable[..., object]) -> list[str]:
    """List the faults of a function's signature and docstring."""
    faults = []
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.annotation is parameter.empty:
            faults.append(f"`{parameter.name}` has no annotation")
        if parameter.kind is parameter.VAR_KEYWORD and parameter.annotation in ("Any", "object"):
            faults.append(f"`**{parameter.name}` hides options")
    generated = function.__qualname__.startswith("__create_fn__")
    if not name.endswith("__init__") and not generated:
        if signature.return_annotation is signature.empty:
            faults.append("the return type is missing")
        elif signature.return_annotation == "Any":
            faults.append("the return type is Any")
    return faults


def summarize(value: object) -> str:
    """Return the first line of a docstring; empty without a docstring."""
    return (inspect.getdoc(value) or "").partition("\n")[0]


def main(list_names: bool) -> int:
    faults = []
    for module_name in ("sparseflow", *(f"sparseflow.{wing}" for wing in WINGS)):
        module = import_module(module_name)
        for name in sorted(module.__all__):
            value, full_name = getattr(module, name), f"{module_name}.{name}"
            if not callable(value):
                continue
            if list_names:
                print(f"{full_name}{inspect.signature(value)}\n    {summarize(value)}")
            if not summarize(value) or len(summarize(value)) > MAX_SUMMARY:
                faults.append(f"{full_name}: the summary must have 1 to {MAX_SUMMARY} characters")
            for function_name, function in iter_functions(full_name, value):
                faults += [f"{function_name}: {fault}" for fault in find_faults(function_name, function)]
    print(*faults, f"{len(faults)} faults in the public API", sep="\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main("--list" in sys.argv[1:]))

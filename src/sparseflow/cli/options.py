"""Options that several commands have: settings that are changed, and the device to compute on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def changes_of(changes: Sequence[str] | None, *, extra: str) -> dict[str, Any]:
    """What `--set name=value` says, by name.

    Args:
        changes: One text each.
        extra: The extra that brings PyYAML, which reads values.

    Raises:
        InputError: One is not a name and a value.
        MissingExtraError: PyYAML is missing.
    """
    from sparseflow.core.config import parse_yaml
    from sparseflow.errors import InputError

    found: dict[str, Any] = {}
    for change in changes or []:
        name, equals, value = change.partition("=")
        if not equals or not name:
            raise InputError(f"`--set {change}` must be a name and a value, such as train.epochs=3")
        try:
            found[name] = parse_yaml(value, extra=extra)
        except ValueError as error:
            raise InputError(f"`--set {change}` has no value that YAML can read") from error
    return found


def device_of(name: str) -> torch.device:
    """What `--device` names.

    Raises:
        InputError: It is neither a CPU nor a CUDA device.
        DeviceError: There is no such CUDA device here.
    """
    import torch

    from sparseflow.errors import DeviceError, InputError

    try:
        found = torch.device(name) if name.partition(":")[0] in ("cpu", "cuda") else None
    except RuntimeError:
        found = None
    if found is None:
        raise InputError(f"`--device {name}` must be cpu or cuda, or a GPU by number: cuda:0")
    count = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= count:
        there = "no CUDA device" if not count else "1 CUDA device" if count == 1 else f"{count} CUDA devices"
        raise DeviceError(f"`--device {name}`: torch sees {there} here; name another, or use cpu")
    return found

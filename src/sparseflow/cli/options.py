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
    from sparseflow.core.extras import require
    from sparseflow.errors import InputError

    yaml = require("yaml", extra)
    found: dict[str, Any] = {}
    for change in changes or []:
        name, equals, value = change.partition("=")
        if not equals or not name:
            raise InputError(f"`--set {change}` must be a name and a value, such as train.epochs=3")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise InputError(f"`--set {change}` has no value that YAML can read") from error
    return found


def device_of(name: str) -> torch.device:
    """What `--device` names.

    Raises:
        InputError: It is neither a CPU nor a CUDA device.
        DeviceError: There is no CUDA device here.
    """
    import torch

    from sparseflow.errors import DeviceError, InputError

    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise InputError(f"`--device {name}` must be cpu or cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise DeviceError(f"`--device {name}`: torch sees no CUDA device here; use cpu")
    return torch.device(name)

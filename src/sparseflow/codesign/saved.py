"""A plan on disk, `plan.json`: the decision, and all that is needed to price it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparseflow.codesign.decision import Decision
from sparseflow.codesign.hardware import Hardware
from sparseflow.codesign.trace import hardware_of, hardware_record, layer_records, layers_of
from sparseflow.core.files import write_atomic
from sparseflow.core.layers import LayerNode
from sparseflow.errors import FileFormatError, InputError

PLAN = "plan.json"

_OWN = ("settings", "library", "reference", "proxy", "layers", "decision", "priced")
"""What a plan is; everything else in the file is extra."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What `load_plan` reads.

    Attributes:
        hardware: What the decision is priced by.
        layers: Of the model.
        decision: What was decided.
        extra: What else the file tells.
    """

    hardware: Hardware
    layers: list[LayerNode]
    decision: Decision
    extra: Mapping[str, Any] = field(default_factory=dict)


def save_plan(
    folder: Path | str,
    hardware: Hardware,
    layers: Sequence[LayerNode],
    decision: Decision,
    *,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write `plan.json` into a folder, in place of what is there; gives its path.

    Args:
        folder: Must exist.
        hardware: What the decision is priced by.
        layers: Of the model. By them a plan is known to be of another model; see `verify`.
        decision: What was decided.
        extra: More to tell, in JSON's types.

    Raises:
        InputError: The decision has no price: it does not fit, or there is no reference.
        OSError: The file cannot be written; the one before is still there.
    """
    told = hardware_record(hardware, Path(folder)) | {
        "layers": layer_records(layers),
        "decision": decision.to_dict(),
        "priced": asdict(hardware.price(layers, decision)),
        **(extra or {}),
    }
    path = Path(folder) / PLAN
    write_atomic(path, json.dumps(told, indent=1) + "\n")
    return path


def load_plan(path: Path | str) -> Saved:
    """Read what `save_plan` wrote.

    Raises:
        InputError: There is no such file.
        FileFormatError: It is something else, or the proxy that belongs to it is gone.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"there is no plan {file}; `sparseflow codesign plan` makes one")
    try:
        told = json.loads(file.read_bytes())
    except ValueError as error:
        raise FileFormatError(f"{file} is not JSON: {error}") from error
    if not isinstance(told, dict) or not {"layers", "decision"} <= set(told):
        raise FileFormatError(f"{file} is not a plan: it must hold `layers` and a `decision`")
    try:
        hardware = hardware_of(told, file)
        layers, decision = layers_of(told["layers"]), Decision.from_dict(told["decision"])
        hardware.check(layers, decision)
    except FileFormatError as error:
        raise FileFormatError(f"{file} is not a plan: {error}") from error
    extra = {name: value for name, value in told.items() if name not in _OWN}
    return Saved(hardware=hardware, layers=layers, decision=decision, extra=extra)

"""A plan on disk, `plan.json`: the decision, and all that is needed to price it again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparseflow.codesign.design.config import settings_of
from sparseflow.codesign.design.decision import Decision
from sparseflow.codesign.design.hardware import Hardware
from sparseflow.codesign.hardware.chips import library_of
from sparseflow.codesign.hardware.proxy import LayerHwProxy
from sparseflow.codesign.workload.layers import layer_records, layers_of
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


def hardware_of(told: Mapping[str, Any], file: Path) -> Hardware:
    """The hardware that a file's decisions are priced by.

    Args:
        told: `"settings"`, `"library"`, `"reference"`, and the digest of the `"proxy"` that lies beside the
            file; None for a plain roofline.
        file: The file.

    Raises:
        FileFormatError: One of them is missing or damaged, or the proxy is another one.
    """
    missing = [name for name in ("settings", "library", "reference", "proxy") if name not in told]
    if missing:
        raise FileFormatError(f"it holds no {', '.join(missing)}")
    proxy = _proxy_beside(file, told["proxy"]) if told["proxy"] else None
    try:
        settings = settings_of(told["settings"], "its settings")
        hardware = Hardware(settings, proxy, library_of(told["library"], "its library"))
        hardware.fix_reference(told["reference"])
    except InputError as error:
        raise FileFormatError(str(error)) from error
    return hardware


def hardware_record(hardware: Hardware, folder: Path) -> dict[str, Any]:
    """What `hardware_of` reads; of a proxy that was given a copy goes into the folder.

    Raises:
        InputError: There is no reference yet: see `Hardware.begin`.
    """
    reference = hardware.zeros
    proxy = hardware.proxy.digest if hardware.proxy_given else None
    if proxy is not None:
        hardware.proxy.save(_proxy_file(folder, proxy))
    return {
        "settings": hardware.settings.model_dump(mode="json"),
        "library": hardware.library.model_dump(mode="json"),
        "reference": asdict(reference),
        "proxy": proxy,
    }


def _proxy_file(folder: Path, digest: str) -> Path:
    # A name of its own: what was fitted anew must not take the place of what a plan was priced by.
    return folder / f"proxy-{digest[:12]}.safetensors"


def _proxy_beside(file: Path, digest: Any) -> LayerHwProxy:
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise FileFormatError(f"its `proxy` (={digest!r}) must be a digest, or none")
    path = _proxy_file(file.parent, digest)
    try:
        found = LayerHwProxy.load(path)
    except FileFormatError:
        raise
    except InputError as error:
        raise FileFormatError(f"it is priced by a proxy, and {error}: keep the two together") from error
    if found.digest != digest:
        raise FileFormatError(f"it is priced by another proxy than what {path} holds now: restore that")
    return found

"""Saved plans (`plan.json`): a decision and everything that is needed to evaluate it again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparseflow.codesign.design.config import parse_config
from sparseflow.codesign.design.decision import HardwareDecision
from sparseflow.codesign.design.hardware import Hardware
from sparseflow.codesign.hardware.chips import parse_library
from sparseflow.codesign.hardware.proxy import LayerHwProxy
from sparseflow.codesign.workload.layers import layers_to_records, parse_layers
from sparseflow.core.files import write_json
from sparseflow.core.layers import LayerNode
from sparseflow.errors import FileFormatError, InputError

PLAN_FILE = "plan.json"

_RECORD_KEYS = ("settings", "library", "reference", "proxy", "layers", "decision", "priced")
"""Keys of the plan itself; all others are extra."""


@dataclass(frozen=True, kw_only=True)
class SavedPlan:
    """Content of a plan file.

    Attributes:
        hardware: Evaluates the decision.
        layers: Layers of the model.
        decision: The decision.
        extra: Additional information.
    """

    hardware: Hardware
    layers: list[LayerNode]
    decision: HardwareDecision
    extra: Mapping[str, Any] = field(default_factory=dict)


def save_plan(
    out_dir: Path | str,
    hardware: Hardware,
    layers: Sequence[LayerNode],
    decision: HardwareDecision,
    *,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write `plan.json` and return its path.

    Args:
        out_dir: Existing output directory.
        hardware: Evaluates the decision.
        layers: Layers of the model, used to detect plans of other models; see `verify`.
        decision: The decision.
        extra: Additional information, as JSON types.

    Raises:
        InputError: The decision does not fit, or there is no reference.
        OSError: The file cannot be written; an existing one is unchanged.
    """
    record = hardware_to_record(hardware, Path(out_dir)) | {
        "layers": layers_to_records(layers),
        "decision": decision.to_dict(),
        "priced": asdict(hardware.evaluate_cost(layers, decision)),
        **(extra or {}),
    }
    path = Path(out_dir) / PLAN_FILE
    write_json(path, record, indent=1)
    return path


def load_plan(path: Path | str) -> SavedPlan:
    """Read what `save_plan` wrote.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file is invalid, or its proxy is missing.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"{file} does not exist; create a plan with `sparseflow codesign plan`")
    try:
        record = json.loads(file.read_bytes())
    except ValueError as error:
        raise FileFormatError(f"{file} is not JSON: {error}") from error
    if not isinstance(record, dict) or not {"layers", "decision"} <= set(record):
        raise FileFormatError(f"{file} is not a plan: `layers` or `decision` is missing")
    try:
        hardware = hardware_from_record(record, file)
        layers, decision = parse_layers(record["layers"]), HardwareDecision.from_dict(record["decision"])
        hardware.check_decision(layers, decision)
    except FileFormatError as error:
        raise FileFormatError(f"{file} is not a plan: {error}") from error
    extra = {name: value for name, value in record.items() if name not in _RECORD_KEYS}
    return SavedPlan(hardware=hardware, layers=layers, decision=decision, extra=extra)


def hardware_from_record(record: Mapping[str, Any], file: Path) -> Hardware:
    """Rebuild the hardware of a file.

    Args:
        record: `"settings"`, `"library"`, `"reference"`, and the digest of the `"proxy"` in the same
            directory; None for a plain roofline.
        file: The file.

    Raises:
        FileFormatError: A part is missing or invalid, or the proxy has changed.
    """
    missing = [name for name in ("settings", "library", "reference", "proxy") if name not in record]
    if missing:
        raise FileFormatError(f"missing {', '.join(missing)}")
    proxy = _load_proxy(file, record["proxy"]) if record["proxy"] else None
    try:
        settings = parse_config(record["settings"], "its settings")
        hardware = Hardware(settings, proxy, parse_library(record["library"], "its library"))
        hardware.set_reference(record["reference"])
    except InputError as error:
        raise FileFormatError(str(error)) from error
    return hardware


def hardware_to_record(hardware: Hardware, out_dir: Path) -> dict[str, Any]:
    """Convert hardware to JSON types; a custom proxy is copied to the directory.

    Raises:
        InputError: There is no reference; see `Hardware.initial_decision`.
    """
    reference = hardware.required_reference
    proxy = hardware.proxy.digest if hardware.has_custom_proxy else None
    if proxy is not None:
        hardware.proxy.save(_proxy_path(out_dir, proxy))
    return {
        "settings": hardware.config.model_dump(mode="json"),
        "library": hardware.library.model_dump(mode="json"),
        "reference": asdict(reference),
        "proxy": proxy,
    }


def _proxy_path(folder: Path, digest: str) -> Path:
    # Named by digest, so that a refitted proxy does not replace the one of an existing plan.
    return folder / f"proxy-{digest[:12]}.safetensors"


def _load_proxy(file: Path, digest: Any) -> LayerHwProxy:
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise FileFormatError(f"`proxy` (={digest!r}) must be a SHA-256 digest or null")
    path = _proxy_path(file.parent, digest)
    try:
        proxy = LayerHwProxy.load(path)
    except FileFormatError:
        raise
    except InputError as error:
        raise FileFormatError(
            f"the proxy of the plan is missing: {error}; keep both files in one directory"
        ) from error
    if proxy.digest != digest:
        raise FileFormatError(
            f"{path} contains another proxy than the one of the plan; restore the original file"
        )
    return proxy

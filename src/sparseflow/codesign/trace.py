"""The trace of a co-design: a JSON line for each epoch and round, from which objectives can be priced again.

The first row says what the run is of: settings, chip library, reference, and the digest of a proxy of which a
copy lies beside the trace. Each of the others holds

    kind, mode        "epoch", "round" of hardware after the last epoch, or "end"; and whose
    epoch, round      how many there have been
    accuracy          of the model, 0 to 1
    lambda_hw         weight of L_hw in that epoch
    guard, numbers    state of the guard; means over the steps of the epoch
    alpha             what slots hold in a draw without noise, one type each, [S, T + 1]; types are in the
                      order of the settings' chips, the last is empty
    probabilities     how likely a draw gives each slot each type, likewise
    layers            of the model
    decision, priced  what was decided, and what that costs

`replay` prices every decision again and compares: the same numbers must come out, to the last bit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from sparseflow.codesign.chips import library_of
from sparseflow.codesign.decision import Decision
from sparseflow.codesign.hardware import Hardware
from sparseflow.codesign.proxy import LayerHwProxy
from sparseflow.codesign.segments import number
from sparseflow.codesign.settings import settings_of
from sparseflow.core.config import describe_validation_error
from sparseflow.core.journal import JsonLinesWriter, read_json_lines
from sparseflow.core.layers import LayerNode
from sparseflow.errors import FileFormatError, InputError

TRACE = "trace.jsonl"


class Trace:
    """The open end of a trace; a context manager.

    Args:
        path: The file. Its folder must exist.
        rows: Rows that count; what comes after them was written by a run that was stopped before its
            checkpoint, and is taken away.

    Raises:
        FileFormatError: There are fewer rows, or one is damaged.
        RunError: Another process writes in the folder.
    """

    def __init__(self, path: Path, *, rows: int) -> None:
        there = len(read_json_lines(path))
        if there < rows:
            raise FileFormatError(
                f"{path} holds {there} rows, and the checkpoint beside it stands after {rows}: it was "
                "cut short; restore it, or begin in another folder"
            )
        self.rows = rows
        self._writer = JsonLinesWriter(path)
        self._writer.truncate(rows)

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def write(self, row: dict[str, Any]) -> None:
        """Add a row; it is on the disk when this returns."""
        self._writer.write(row)
        self._writer.sync()
        self.rows += 1


def layer_records(layers: Sequence[LayerNode]) -> list[dict[str, Any]]:
    """Layers in JSON's types."""
    return [vars(layer) | {"flops": number(layer.flops), "bytes": number(layer.bytes)} for layer in layers]


class _Layer(BaseModel):
    """`LayerNode` as a file holds it."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    id: int
    name: str
    layer_type: str
    flops: float
    bytes: float
    weight_bytes: int
    memory_bytes: int
    seq_len: int
    embed_dim: int
    num_heads: int
    mlp_ratio: float
    precision: str
    batch: int
    traffic_in_bytes: int
    traffic_out_bytes: int
    splittable: bool
    units: int
    split_in_bytes: int
    split_out_bytes: int
    split_joins: bool


def layers_of(records: Any) -> list[LayerNode]:
    """What `layer_records` gave.

    Raises:
        FileFormatError: It is something else.
    """
    try:
        read = TypeAdapter(Annotated[list[_Layer], MinLen(1)]).validate_python(records)
    except ValidationError as error:
        raise FileFormatError(f"these are no layers: {describe_validation_error(error)}") from error
    if [layer.id for layer in read] != list(range(len(read))):
        raise FileFormatError("these are no layers: their ids do not count from 0")
    return [LayerNode(**layer.model_dump()) for layer in read]


def opened(path: Path | str) -> tuple[Hardware, list[dict[str, Any]]]:
    """The hardware that a trace's decisions are priced by, and its rows.

    Raises:
        InputError: There is no such file.
        FileFormatError: A row is damaged, the first does not say what the run was of, or there is no other.
        MissingExtraError: An optional package is missing.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"there is no trace {file}; `sparseflow codesign train` writes one")
    rows = read_json_lines(file)
    if len(rows) < 2 or rows[0].get("kind") != "begin":
        raise FileFormatError(f"{file} does not begin with what the run was of, and an epoch")
    try:
        return hardware_of(rows[0], file), rows
    except FileFormatError as error:
        raise FileFormatError(f"{file}, first row: {error}") from error


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


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A row that was priced again.

    Attributes:
        row: Its place in the trace, from 0.
        recorded: The objective that it holds.
        again: What it comes to now.
    """

    row: int
    recorded: float
    again: float

    @property
    def same(self) -> bool:
        """To the last bit."""
        return self.recorded == self.again


def replay(path: Path | str) -> list[Replayed]:
    """Price every decision of a trace again, from nothing but the trace.

    Raises:
        InputError: There is no such file.
        FileFormatError: A row is damaged, or the first does not say what the run was of.
        MissingExtraError: An optional package is missing.
    """
    hardware, rows = opened(path)
    found = []
    for place, row in enumerate(rows[1:], start=1):
        try:
            layers, decision = layers_of(row["layers"]), Decision.from_dict(row["decision"])
            hardware.check(layers, decision)
            recorded = float(row["priced"]["objective"])
        except (InputError, LookupError, TypeError, ValueError) as error:
            raise FileFormatError(f"{path}, row {place}, cannot be priced: {error}") from error
        again = hardware.price(layers, decision).objective
        found.append(Replayed(row=place, recorded=recorded, again=again))
    return found

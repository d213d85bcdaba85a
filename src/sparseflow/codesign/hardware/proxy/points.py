"""Measured layers on disk: Parquet, and a journal beside it while points come in.

::

    points.parquet    rows; devices and environments in the metadata of its schema
    points.jsonl      what came in since, a line each; gone once it is in the other file

Whatever kills the writer, all points that it added are there when the file is read or opened again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from sparseflow.codesign.hardware.proxy.device import DeviceSpec
from sparseflow.codesign.workload.layers import number
from sparseflow.core.files import write_atomic
from sparseflow.core.journal import JsonLinesWriter, read_json_lines
from sparseflow.core.layers import LayerNode
from sparseflow.errors import FileFormatError, InputError, RunError

MODES = ("eager", "graph")
PROVENANCES = ("measured", "analytic")

_FORMAT = "sparseflow-layer-points-1"
_LAYER = tuple(each.name for each in fields(LayerNode))
_OWN = (
    "mode", "lat_ms", "samples_ms", "mem_mb", "mem_provenance", "power_w", "provenance", "environment",
)  # fmt: skip
_CONFIGURATION = tuple(name for name in _LAYER if name not in ("id", "name"))


@dataclass(frozen=True, kw_only=True)
class Point:
    """What one layer took on one device.

    Attributes:
        layer: Its configuration; operations and bytes are numbers.
        device: Where.
        mode: `"eager"`, launched call by call, or `"graph"`, replayed as a CUDA graph without launches.
        lat_ms: Median of the samples, milliseconds.
        samples_ms: Each; none for an analytic point.
        mem_mb: MB (1e6 bytes) that it held: weights, input, and what came on top.
        mem_provenance: Whether memory was `"measured"` or is `"analytic"`.
        power_w: Watts while it ran over and over; None where it was not measured.
        provenance: Whether latency was `"measured"` or is `"analytic"`.
        environment: Id of the circumstances that it was measured in; empty for an analytic one.
    """

    layer: LayerNode
    device: DeviceSpec
    mode: str
    lat_ms: float
    samples_ms: tuple[float, ...] = ()
    mem_mb: float
    mem_provenance: str = "measured"
    power_w: float | None = None
    provenance: str = "measured"
    environment: str = ""

    @property
    def configuration(self) -> tuple[Any, ...]:
        """What the layer is, whatever it is called and wherever it runs."""
        return tuple(getattr(self.layer, name) for name in _CONFIGURATION)

    @property
    def key(self) -> tuple[Any, ...]:
        """What is not measured twice."""
        return (self.device.name, self.mode, self.layer.name, *self.configuration)

    def check(self, where: str) -> None:
        """Raise InputError, with `where`, if a figure is no measurement."""
        told = {"lat_ms": self.lat_ms, "mem_mb": self.mem_mb}
        told |= {} if self.power_w is None else {"power_w": self.power_w}
        told |= {f"samples_ms[{at}]": value for at, value in enumerate(self.samples_ms)}
        for name, value in told.items():
            if not (math.isfinite(value) and value > 0.0):
                raise InputError(
                    f"{where} ({self.layer.name} on {self.device.name}): `{name}` is {value}; expected a "
                    "finite number above 0: leave the point out, or measure it again"
                )
        for name, value, allowed in (
            ("mode", self.mode, MODES), ("provenance", self.provenance, PROVENANCES),
            ("mem_provenance", self.mem_provenance, PROVENANCES),
        ):  # fmt: skip
            if value not in allowed:
                raise InputError(f"{where}: `{name}` is {value!r}; expected one of {', '.join(allowed)}")


@dataclass(frozen=True, kw_only=True)
class Points:
    """What a file holds.

    Attributes:
        points: In the order that they came in.
        environments: Id -> circumstances.
    """

    points: tuple[Point, ...] = ()
    environments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def devices(self) -> dict[str, DeviceSpec]:
        """Name -> device."""
        return {point.device.name: point.device for point in self.points}


class PointFile:
    """A file of points, open for more. Use it as a context manager, or close it.

    Opening it takes up what an earlier writer left. Its folder is locked meanwhile: one writer at a time.

    Args:
        path: The Parquet file; made when it is closed. Its folder must exist.

    Raises:
        FileFormatError: The file, or its journal, holds something else.
        RunError: Another process writes into its folder.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._writer: JsonLinesWriter | None = JsonLinesWriter(_journal(self.path))
        try:
            held = read_points(self.path, missing_ok=True)
        except BaseException:
            self._writer.close()
            raise
        self._points, self._environments = list(held.points), dict(held.environments)
        self._devices = held.devices
        self._keys = {point.key for point in self._points}

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(self._points)

    @property
    def devices(self) -> dict[str, DeviceSpec]:
        """Name -> device."""
        return dict(self._devices)

    def __contains__(self, point: object) -> bool:
        """Whether a point of the same key is there."""
        return isinstance(point, Point) and point.key in self._keys

    def add_environment(self, environment: Mapping[str, Any]) -> str:
        """Note circumstances; gives their id."""
        text = json.dumps(dict(environment), sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:12]
        if name not in self._environments:
            self._write({"environment": name, "content": dict(environment)})
            self._environments[name] = dict(environment)
        return name

    def add(self, point: Point) -> None:
        """Append a point; it survives the death of this process.

        Raises:
            InputError: A figure of it is no measurement, its device has the name of another one, or it is
                there already.
            RunError: The disk takes no more.
        """
        point.check(f"point {len(self._points)}")
        device = self._devices.get(point.device.name)
        if device not in (None, point.device):
            raise InputError(
                f"{self.path} holds another device named {point.device.name}: give yours a new name"
            )
        if point.key in self._keys:
            raise InputError(f"{self.path} holds {point.layer.name} on {point.device.name} already")
        if device is None:
            self._write({"device": point.device.to_dict()})
            self._devices[point.device.name] = point.device
        self._write({"point": _row(point)})
        self._points.append(point)
        self._keys.add(point.key)

    def close(self) -> None:
        """Put all into the Parquet file. Closing twice changes nothing."""
        if self._writer is None:
            return
        if self._points:
            self._writer.sync()
            write_points(self.path, self._points, self._environments)
        # Last, so that the points are always in one of the two files.
        _journal(self.path).unlink(missing_ok=True)
        self._writer.close()
        self._writer = None

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._writer is None:
            raise RunError(f"{self.path} is closed; open it again to add points")
        self._writer.write(line)

    def __enter__(self) -> PointFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_points(
    path: Path | str, points: Sequence[Point], environments: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Write a Parquet file of points, in place of what is there.

    Raises:
        InputError: There is no point.
        OSError: The file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not points:
        raise InputError("a file of points needs at least one")
    rows = [_row(point) for point in points]
    names = ("device", *_LAYER, *_OWN)
    kinds = {"samples_ms": pa.list_(pa.float64()), "power_w": pa.float64()}
    kinds |= {name: pa.float64() for name in ("flops", "bytes", "mlp_ratio", "lat_ms", "mem_mb")}
    table = pa.table({name: pa.array([row[name] for row in rows], type=kinds.get(name)) for name in names})
    about = {
        "format": _FORMAT,
        "devices": [device.to_dict() for device in Points(points=tuple(points)).devices.values()],
        "environments": dict(environments or {}),
    }
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({"sparseflow": json.dumps(about)}), sink, compression="zstd")
    write_atomic(Path(path), sink.getvalue().to_pybytes())


def read_points(path: Path | str, *, missing_ok: bool = False) -> Points:
    """Read a file of points, and what its journal holds if its writer died.

    Args:
        path: The Parquet file.
        missing_ok: Whether no file is no points.

    Raises:
        InputError: There is no such file, or a figure is no measurement; says in which row.
        FileFormatError: It holds something else.
    """
    file = Path(path)
    about, rows = _read_parquet(file) if file.is_file() else ({"devices": [], "environments": {}}, [])
    lines = read_json_lines(_journal(file))
    if not file.is_file() and not lines and not missing_ok:
        raise InputError(f"there is no file of points {file}")
    try:
        devices = {each["name"]: DeviceSpec.from_dict(each) for each in about["devices"]}
        environments = dict(about["environments"])
        for line in lines:
            if "device" in line:
                devices[line["device"]["name"]] = DeviceSpec.from_dict(line["device"])
            elif "environment" in line:
                environments[line["environment"]] = line["content"]
            else:
                rows.append(line["point"])
        found = {}
        for at, row in enumerate(rows):
            point = _point(row, devices)
            point.check(f"{file}, row {at}")
            # A kill between two steps of closing leaves a point in both files.
            found.setdefault(point.key, point)
    except (KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(f"{file} holds no points that can be read: {error!r}") from error
    return Points(points=tuple(found.values()), environments=environments)


def _journal(path: Path) -> Path:
    return path.with_suffix(".jsonl")


def _row(point: Point) -> dict[str, Any]:
    row = {name: getattr(point.layer, name) for name in _LAYER}
    row |= {name: number(row[name]) for name in ("flops", "bytes", "mlp_ratio")}
    row |= {name: getattr(point, name) for name in _OWN} | {"samples_ms": list(point.samples_ms)}
    return row | {"device": point.device.name}


def _point(row: Mapping[str, Any], devices: Mapping[str, DeviceSpec]) -> Point:
    own: dict[str, Any] = {name: row[name] for name in _OWN}
    own["samples_ms"] = tuple(row["samples_ms"])
    layer = LayerNode(**{name: row[name] for name in _LAYER})
    return Point(layer=layer, device=devices[row["device"]], **own)


def _read_parquet(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file)
        about = json.loads((table.schema.metadata or {}).get(b"sparseflow", b"null"))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FileFormatError(f"{file} is not a Parquet file that can be read: {error}") from error
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        raise FileFormatError(f"{file} holds no layer points of this version of SparseFlow")
    return about, table.to_pylist()

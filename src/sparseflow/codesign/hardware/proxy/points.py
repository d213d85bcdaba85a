"""Layer measurements on disk: a Parquet file, and a journal while measurements are in progress.

::

    points.parquet    rows; devices and environments in the schema metadata
    points.jsonl      points that are not in the Parquet file yet

No added point is lost if the process is killed; the next reader or writer finds it in the journal.
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
from sparseflow.codesign.workload.layers import to_float
from sparseflow.core.files import write_atomic
from sparseflow.core.journal import JsonLinesWriter, read_json_lines
from sparseflow.core.layers import LayerNode
from sparseflow.errors import FileFormatError, InputError, RunError

MODES = ("eager", "graph")
PROVENANCES = ("measured", "analytic")

_POINTS_FORMAT = "sparseflow-layer-points-1"
_LAYER_FIELDS = tuple(layer_field.name for layer_field in fields(LayerNode))
_POINT_FIELDS = (
    "mode", "lat_ms", "samples_ms", "mem_mb", "mem_provenance", "power_w", "provenance", "environment",
)  # fmt: skip
_CONFIG_FIELDS = tuple(name for name in _LAYER_FIELDS if name not in ("id", "name"))


@dataclass(frozen=True, kw_only=True)
class LayerPoint:
    """Measurement of one layer on one device.

    Attributes:
        layer: Configuration of the layer; `flops` and `bytes` are plain numbers.
        device: The device.
        mode: `"eager"` (each call launches kernels) or `"graph"` (replayed CUDA graph).
        lat_ms: Median latency, ms.
        samples_ms: All latency samples, ms; empty for an analytic point.
        mem_mb: Memory of weights, input and everything allocated during the call, MB (1e6 bytes).
        mem_provenance: `"measured"` or `"analytic"`.
        power_w: Mean power during repeated calls, W; None if not measured.
        provenance: `"measured"` or `"analytic"`.
        environment: Id of the environment; empty for an analytic point.
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
    def config_key(self) -> tuple[Any, ...]:
        """Configuration of the layer, without its id and name."""
        return tuple(getattr(self.layer, name) for name in _CONFIG_FIELDS)

    @property
    def key(self) -> tuple[Any, ...]:
        """Key that is unique within a file."""
        return (self.device.name, self.mode, self.layer.name, *self.config_key)

    def check(self, context: str) -> None:
        """Raise InputError, starting with `context`, if a value is invalid."""
        values_by_name = {"lat_ms": self.lat_ms, "mem_mb": self.mem_mb}
        values_by_name |= {} if self.power_w is None else {"power_w": self.power_w}
        values_by_name |= {f"samples_ms[{index}]": value for index, value in enumerate(self.samples_ms)}
        for name, value in values_by_name.items():
            if not (math.isfinite(value) and value > 0.0):
                raise InputError(
                    f"{context} ({self.layer.name} on {self.device.name}): `{name}` is {value}; expected a "
                    "finite number above 0; remove the point or measure it again"
                )
        for name, value, allowed in (
            ("mode", self.mode, MODES), ("provenance", self.provenance, PROVENANCES),
            ("mem_provenance", self.mem_provenance, PROVENANCES),
        ):  # fmt: skip
            if value not in allowed:
                raise InputError(f"{context}: `{name}` is {value!r}; expected one of {', '.join(allowed)}")


@dataclass(frozen=True, kw_only=True)
class LayerPoints:
    """Content of a file.

    Attributes:
        points: The points, in the order of measurement.
        environments: Environment id -> environment.
    """

    points: tuple[LayerPoint, ...] = ()
    environments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def devices(self) -> dict[str, DeviceSpec]:
        """Device name -> device."""
        return {point.device.name: point.device for point in self.points}


class LayerPointFile:
    """An open file of points; a context manager.

    Opening the file recovers the journal of an earlier writer. The directory is locked: there is one writer.

    Args:
        path: Parquet file, written on close. Its directory must exist.

    Raises:
        FileFormatError: The file or its journal is invalid.
        RunError: Another process writes to the directory.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._writer: JsonLinesWriter | None = JsonLinesWriter(_journal_path(self.path))
        try:
            existing = read_points(self.path, missing_ok=True)
        except BaseException:
            self._writer.close()
            raise
        self._points, self._environments = list(existing.points), dict(existing.environments)
        self._devices = existing.devices
        self._keys = {point.key for point in self._points}

    @property
    def points(self) -> tuple[LayerPoint, ...]:
        return tuple(self._points)

    @property
    def devices(self) -> dict[str, DeviceSpec]:
        """Device name -> device."""
        return dict(self._devices)

    def __contains__(self, point: object) -> bool:
        """Whether the file contains a point with the same key."""
        return isinstance(point, LayerPoint) and point.key in self._keys

    def add_environment(self, environment: Mapping[str, Any]) -> str:
        """Record an environment and return its id."""
        text = json.dumps(dict(environment), sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:12]
        if name not in self._environments:
            self._write({"environment": name, "content": dict(environment)})
            self._environments[name] = dict(environment)
        return name

    def add(self, point: LayerPoint) -> None:
        """Append a point; it survives the end of the process.

        Raises:
            InputError: The point is invalid, exists already, or another device has the name of its device.
            RunError: The disk is full.
        """
        point.check(f"point {len(self._points)}")
        device = self._devices.get(point.device.name)
        if device not in (None, point.device):
            raise InputError(
                f"{self.path} contains another device named {point.device.name}; use another name"
            )
        if point.key in self._keys:
            raise InputError(f"{self.path} already contains {point.layer.name} on {point.device.name}")
        if device is None:
            self._write({"device": point.device.to_dict()})
            self._devices[point.device.name] = point.device
        self._write({"point": _to_row(point)})
        self._points.append(point)
        self._keys.add(point.key)

    def close(self) -> None:
        """Write all points to the Parquet file. Further calls have no effect."""
        if self._writer is None:
            return
        if self._points:
            self._writer.sync()
            write_points(self.path, self._points, self._environments)
        # Deleted last, so that one of the two files always contains the points.
        _journal_path(self.path).unlink(missing_ok=True)
        self._writer.close()
        self._writer = None

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._writer is None:
            raise RunError(f"{self.path} is closed; open it again to add points")
        self._writer.write(line)

    def __enter__(self) -> LayerPointFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_points(
    path: Path | str,
    points: Sequence[LayerPoint],
    environments: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write points to a Parquet file.

    Raises:
        InputError: There are no points.
        OSError: The file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not points:
        raise InputError("there are no points to write")
    rows = [_to_row(point) for point in points]
    names = ("device", *_LAYER_FIELDS, *_POINT_FIELDS)
    types = {"samples_ms": pa.list_(pa.float64()), "power_w": pa.float64()}
    types |= {name: pa.float64() for name in ("flops", "bytes", "mlp_ratio", "lat_ms", "mem_mb")}
    table = pa.table({name: pa.array([row[name] for row in rows], type=types.get(name)) for name in names})
    metadata = {
        "format": _POINTS_FORMAT,
        "devices": [device.to_dict() for device in LayerPoints(points=tuple(points)).devices.values()],
        "environments": dict(environments or {}),
    }
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata({"sparseflow": json.dumps(metadata)}), sink, compression="zstd"
    )
    write_atomic(Path(path), sink.getvalue().to_pybytes())


def read_points(path: Path | str, *, missing_ok: bool = False) -> LayerPoints:
    """Read points from a Parquet file and its journal, if there is one.

    Args:
        path: The Parquet file.
        missing_ok: Return no points if the file does not exist.

    Raises:
        InputError: The file does not exist, or a point is invalid.
        FileFormatError: The file is damaged or foreign.
    """
    file = Path(path)
    metadata, rows = _read_parquet(file) if file.is_file() else ({"devices": [], "environments": {}}, [])
    lines = read_json_lines(_journal_path(file))
    if not file.is_file() and not lines and not missing_ok:
        raise InputError(f"{file} does not exist")
    try:
        devices = {record["name"]: DeviceSpec.from_dict(record) for record in metadata["devices"]}
        environments = dict(metadata["environments"])
        for line in lines:
            if "device" in line:
                devices[line["device"]["name"]] = DeviceSpec.from_dict(line["device"])
            elif "environment" in line:
                environments[line["environment"]] = line["content"]
            else:
                rows.append(line["point"])
        unique = {}
        for index, row in enumerate(rows):
            point = _from_row(row, devices)
            point.check(f"{file}, row {index}")
            # If the process was killed while closing, both files contain the point.
            unique.setdefault(point.key, point)
    except (KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(f"{file} contains invalid points: {error!r}") from error
    return LayerPoints(points=tuple(unique.values()), environments=environments)


def _journal_path(path: Path) -> Path:
    return path.with_suffix(".jsonl")


def _to_row(point: LayerPoint) -> dict[str, Any]:
    row = {name: getattr(point.layer, name) for name in _LAYER_FIELDS}
    row |= {name: to_float(row[name]) for name in ("flops", "bytes", "mlp_ratio")}
    row |= {name: getattr(point, name) for name in _POINT_FIELDS} | {"samples_ms": list(point.samples_ms)}
    return row | {"device": point.device.name}


def _from_row(row: Mapping[str, Any], devices: Mapping[str, DeviceSpec]) -> LayerPoint:
    values: dict[str, Any] = {name: row[name] for name in _POINT_FIELDS}
    values["samples_ms"] = tuple(row["samples_ms"])
    layer = LayerNode(**{name: row[name] for name in _LAYER_FIELDS})
    return LayerPoint(layer=layer, device=devices[row["device"]], **values)


def _read_parquet(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file)
        metadata = json.loads((table.schema.metadata or {}).get(b"sparseflow", b"null"))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FileFormatError(f"{file} is not a valid Parquet file: {error}") from error
    if not isinstance(metadata, dict) or metadata.get("format") != _POINTS_FORMAT:
        raise FileFormatError(
            f"{file} contains no layer points of this version of SparseFlow; measure them again with "
            "`sparseflow codesign profile`"
        )
    return metadata, table.to_pylist()

"""Layer measurements on disk: a journal that several runs can extend."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter

from sparseflow.codesign.hardware.proxy.device import DeviceSpec
from sparseflow.codesign.workload.layers import LayerField
from sparseflow.core.artifact import Artifact
from sparseflow.core.config import StrictModel
from sparseflow.core.journal import Journal, read_journal
from sparseflow.core.layers import LayerNode
from sparseflow.errors import FileFormatError, InputError

Mode = Literal["eager", "graph"]
Provenance = Literal["measured", "analytic"]
_Positive = Annotated[float, Field(gt=0.0)]

_CONFIG_FIELDS = tuple(item.name for item in fields(LayerNode) if item.name not in ("id", "name"))


class LayerPoint(StrictModel):
    """Measurement of one layer on one device."""

    layer: LayerField
    """Configuration of the layer; `flops` and `bytes` are plain numbers in files."""
    device: DeviceSpec
    mode: Mode
    """`"eager"` (each call launches kernels) or `"graph"` (replayed CUDA graph)."""
    lat_ms: _Positive
    """Median latency, ms."""
    samples_ms: tuple[_Positive, ...] = ()
    """All latency samples, ms; empty for an analytic point."""
    mem_mb: _Positive
    """Memory of weights, input and everything allocated during the call, MB (1e6 bytes)."""
    mem_provenance: Provenance = "measured"
    power_w: _Positive | None = None
    """Mean power during repeated calls, W; None if not measured."""
    provenance: Provenance = "measured"
    environment: str = ""
    """Id of the environment; empty for an analytic point."""

    @property
    def config_key(self) -> tuple[Any, ...]:
        """Configuration of the layer, without its id and name."""
        return tuple(getattr(self.layer, name) for name in _CONFIG_FIELDS)

    @property
    def key(self) -> tuple[Any, ...]:
        """Key that is unique within a file."""
        return (self.device.name, self.mode, self.layer.name, *self.config_key)


class _PointsHeader(Artifact):
    FORMAT: ClassVar[str] = "sparseflow.codesign.layer-points"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "measure layers with `sparseflow codesign profile`"


class _Environment(StrictModel):
    id: str
    content: dict[str, Any]


_ROW: TypeAdapter[Any] = TypeAdapter(LayerPoint | _Environment)


def _get_key(row: LayerPoint | _Environment) -> object:
    return row.id if isinstance(row, _Environment) else row.key


@dataclass(frozen=True, kw_only=True)
class LayerPoints:
    """Content of a file.

    Attributes:
        points: The points, in the order of measurement.
        environments: Environment id -> environment.
    """

    points: tuple[LayerPoint, ...] = ()
    environments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def from_rows(cls, path: Path, rows: list[Any]) -> LayerPoints:
        """Build the content from the rows of a file.

        Raises:
            FileFormatError: Two devices have the same name.
        """
        points = cls(
            points=tuple(row for row in rows if isinstance(row, LayerPoint)),
            environments={row.id: row.content for row in rows if isinstance(row, _Environment)},
        )
        names = [device.name for device in {point.device for point in points.points}]
        if len(set(names)) < len(names):
            raise FileFormatError(f"{path} contains different devices with one name: {', '.join(names)}")
        return points

    @property
    def devices(self) -> dict[str, DeviceSpec]:
        """Device name -> device."""
        return {point.device.name: point.device for point in self.points}


class LayerPointFile:
    """An open file of points; a context manager. The directory is locked: there is one writer.

    Args:
        path: File of JSON lines; extended if it exists. Its directory must exist.

    Raises:
        FileFormatError: The file is invalid.
        RunError: Another process writes to the directory.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._journal: Journal[Any] = Journal(self.path, _ROW, header=_PointsHeader(), key=_get_key)
        try:
            content = LayerPoints.from_rows(self.path, self._journal.rows)
        except BaseException:
            self._journal.close()
            raise
        self.points, self._devices = list(content.points), content.devices

    def add_environment(self, environment: Mapping[str, Any]) -> str:
        """Record an environment and return its id."""
        text = json.dumps(dict(environment), sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:12]
        if name not in self._journal:
            self._journal.append(_Environment(id=name, content=dict(environment)))
        return name

    def add(self, point: LayerPoint) -> None:
        """Append a point; it survives the end of the process.

        Raises:
            InputError: The point exists already, or another device has the name of its device.
            RunError: The file is closed, or the disk is full.
        """
        if self._devices.setdefault(point.device.name, point.device) != point.device:
            raise InputError(
                f"{self.path} contains another device named {point.device.name}; use another name"
            )
        self._journal.append(point)
        self.points.append(point)

    def __enter__(self) -> LayerPointFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()


def read_points(path: Path | str, *, missing_ok: bool = False) -> LayerPoints:
    """Read a file of points, also while it is being written.

    Args:
        path: The file.
        missing_ok: Return no points if the file does not exist.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file is damaged or foreign, or a point is invalid.
    """
    file = Path(path)
    if not missing_ok and not file.is_file():
        raise InputError(f"{file} does not exist; {_PointsHeader.HINT}")
    _, rows = read_journal(file, _ROW, header_type=_PointsHeader)
    return LayerPoints.from_rows(file, rows)

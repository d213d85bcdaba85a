"""Versioned artifact files: JSON, safetensors or Parquet with one format tag.

An artifact is a pydantic model with a format name, a version and a hint of how to create a new one::

    class BlockScores(Artifact):
        FORMAT: ClassVar[str] = "sparseflow.adaptive.block-scores"
        VERSION: ClassVar[int] = 2
        HINT: ClassVar[str] = "measure them with `sparseflow adaptive importance`"

        model_id: str
        scores: Annotated[np.ndarray, ArrayField(np.float64, ndim=1)]

    BlockScores(model_id="a1", scores=np.zeros(3)).save("scores.json")
    block_scores = BlockScores.load("scores.json")

The file starts with `{"format": "sparseflow.adaptive.block-scores", "version": 2, ...}`. In safetensors and
Parquet files the same record is the metadata entry `sparseflow`, beside the tensors or rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from pydantic import GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from sparseflow.core.config import StrictModel, describe_validation_error
from sparseflow.core.files import (
    find_file,
    parse_json,
    read_json,
    read_parquet,
    write_atomic,
    write_json,
    write_parquet,
)
from sparseflow.errors import FileFormatError, InputError

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from torch import Tensor

_METADATA = "sparseflow"
"""Metadata entry of safetensors and Parquet files that holds the record."""


class Artifact(StrictModel, arbitrary_types_allowed=True):
    """Base of everything that is saved to a versioned file.

    Fields may be JSON types, pydantic models, standard dataclasses, `ArrayField` arrays and, through
    `DictField`, classes with `to_dict` and `from_dict`. Raise ValueError in validators and `__post_init__`
    for inconsistent content.
    """

    FORMAT: ClassVar[str]
    """`sparseflow.<wing>.<kind>`."""
    VERSION: ClassVar[int]
    """Incremented by every change that older or newer code cannot read."""
    HINT: ClassVar[str]
    """How to create the artifact, such as "train one with `sparseflow latency train`"."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types, including the format tag."""
        return {"format": self.FORMAT, "version": self.VERSION, **self.model_dump(mode="json")}

    @classmethod
    def from_dict(cls, record: object, source: Path | str) -> Self:
        """Build the artifact from the result of `to_dict`.

        Args:
            record: Parsed JSON.
            source: File name for error messages.

        Raises:
            FileFormatError: The record is of another format or version, or its content is invalid.
        """
        if not isinstance(record, Mapping) or record.get("format") != cls.FORMAT:
            actual = record.get("format") if isinstance(record, Mapping) else type(record).__name__
            raise FileFormatError(f"{source}: expected format {cls.FORMAT!r}, got {actual!r}; {cls.HINT}")
        version = record.get("version")
        if type(version) is not int or version != cls.VERSION:
            age = "newer" if isinstance(version, int) and version > cls.VERSION else "older"
            advice = f"update SparseFlow, or {cls.HINT}" if age == "newer" else cls.HINT
            raise FileFormatError(
                f"{source}: expected version {cls.VERSION} of {cls.FORMAT}, got {version!r} ({age}); {advice}"
            )
        content = {name: value for name, value in record.items() if name not in ("format", "version")}
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise FileFormatError(
                f"{source}: invalid {cls.FORMAT}: {describe_validation_error(error)}; {cls.HINT}"
            ) from error

    def save(self, path: Path | str, *, indent: int | None = None, rescue: bool = True) -> Path:
        """Write the artifact as JSON, atomically; missing directories are created.

        Args:
            path: File to write.
            indent, rescue: As in `write_json`.

        Returns:
            The path.

        Raises:
            OutputError: The file cannot be written.
        """
        file = _prepare(path)
        write_json(file, self.to_dict(), indent=indent, rescue=rescue)
        return file

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a file that `save` wrote.

        Raises:
            InputError: The file does not exist.
            FileFormatError: The file is foreign, damaged, or of another version.
        """
        try:
            record = read_json(_require_file(cls, path))
        except FileFormatError as error:
            raise FileFormatError(f"{error}; {cls.HINT}") from error
        return cls.from_dict(record, path)

    def save_tensors(self, path: Path | str, tensors: Mapping[str, Tensor]) -> Path:
        """Write tensors as safetensors, with the artifact as metadata; missing directories are created.

        Args:
            path: File to write, usually `*.safetensors`.
            tensors: Name -> tensor, on any device.

        Raises:
            OutputError: The file cannot be written.
        """
        from safetensors.torch import save

        file = _prepare(path)
        contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        write_atomic(file, save(contiguous, metadata={_METADATA: self._to_json()}))
        return file

    @classmethod
    def load_tensors(
        cls, path: Path | str, *, device: torch.device | str = "cpu"
    ) -> tuple[Self, dict[str, Tensor]]:
        """Read a file that `save_tensors` wrote. Nothing is unpickled.

        Raises:
            InputError: The file does not exist.
            FileFormatError: The file is foreign, damaged, or of another version.
        """
        from safetensors import SafetensorError, safe_open

        file = _require_file(cls, path)
        try:
            with safe_open(file, framework="pt", device=str(device)) as stream:
                artifact = cls._from_json((stream.metadata() or {}).get(_METADATA), path)
                return artifact, {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise FileFormatError(
                f"{path} is not a readable safetensors file: {error}; {cls.HINT}"
            ) from error

    def save_table(
        self,
        path: Path | str,
        table: pa.Table,
        *,
        use_dictionary: bool | Sequence[str] = True,
        column_encoding: Mapping[str, str] | None = None,
    ) -> Path:
        """Write rows as Parquet, with the artifact as schema metadata; missing directories are created.

        Args:
            path: File to write, usually `*.parquet`.
            table: Rows.
            use_dictionary: As in `write_parquet`.
            column_encoding: As in `write_parquet`.

        Raises:
            OutputError: The file cannot be written.
        """
        file = _prepare(path)
        tagged = table.replace_schema_metadata({_METADATA: self._to_json()})
        write_parquet(file, tagged, use_dictionary=use_dictionary, column_encoding=column_encoding)
        return file

    @classmethod
    def load_table(cls, path: Path | str) -> tuple[Self, pa.Table]:
        """Read a file that `save_table` wrote.

        Raises:
            InputError: The file does not exist.
            FileFormatError: The file is foreign, damaged, or of another version.
        """
        try:
            table = read_parquet(_require_file(cls, path))
        except FileFormatError as error:
            raise FileFormatError(f"{error}; {cls.HINT}") from error
        text = (table.schema.metadata or {}).get(_METADATA.encode())
        return cls._from_json(text, path), table

    def _to_json(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)

    @classmethod
    def _from_json(cls, text: str | bytes | None, path: Path | str) -> Self:
        try:
            record = None if text is None else parse_json(text)
        except ValueError as error:
            raise FileFormatError(f"{path}: the metadata is not JSON: {error}; {cls.HINT}") from error
        return cls.from_dict(record, path)


class ArrayField:
    """Annotation of a NumPy array that is stored as nested lists.

    Args:
        dtype: NumPy dtype; lists and arrays are converted to it.
        ndim: Number of dimensions; None accepts any.
        ge: Smallest value.
        gt: Value that all values exceed.
        finite: Whether NaN and infinity are refused.
    """

    def __init__(
        self,
        dtype: type[np.generic],
        *,
        ndim: int | None = None,
        ge: float | None = None,
        gt: float | None = None,
        finite: bool = True,
    ) -> None:
        self._dtype, self._ndim, self._ge, self._gt, self._finite = np.dtype(dtype), ndim, ge, gt, finite

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(np.ndarray.tolist),
        )

    def _validate(self, value: object) -> np.ndarray:
        try:
            source = np.asarray(value)
        except ValueError as error:
            raise ValueError(f"not an array of {self._dtype}: {error}") from error
        # Overflow gives infinity or a changed integer; both are refused below.
        with np.errstate(over="ignore", invalid="ignore"):
            array: Any = source.astype(self._dtype, copy=False) if source.dtype.kind in "biuf" else None
        # An empty list has no dtype of its own.
        if array is None or (source.size and not np.can_cast(source.dtype, self._dtype, "same_kind")):
            raise ValueError(f"expected {self._dtype} values, got {source.dtype}")
        if array.dtype.kind in "iu" and not np.array_equal(array, source):
            raise ValueError(f"values do not fit {self._dtype}")
        if self._ndim is not None and array.ndim != self._ndim:
            raise ValueError(f"expected {self._ndim} dimensions, got shape {list(array.shape)}")
        if self._finite and array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError("values must be finite")
        if self._ge is not None and not (array >= self._ge).all():
            raise ValueError(f"values must be at least {self._ge}, got {array.min()}")
        if self._gt is not None and not (array > self._gt).all():
            raise ValueError(f"values must be above {self._gt}, got {array.min()}")
        return array


class DictField:
    """Annotation of a class that converts itself with `to_dict` and the class method `from_dict`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            _make_validator(source),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value.to_dict()),
        )


def _make_validator(cls: Any) -> Callable[[object], Any]:
    def validate(value: object) -> Any:
        if isinstance(value, cls):
            return value
        try:
            return cls.from_dict(value)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"invalid {cls.__name__}: {error!r}") from error

    return validate


def _prepare(path: Path | str) -> Path:
    file = Path(path)
    with suppress(OSError):  # the write reports the error and saves the content elsewhere
        file.parent.mkdir(parents=True, exist_ok=True)
    return file


def _require_file(cls: type[Artifact], path: Path | str) -> Path:
    try:
        return find_file(path)
    except InputError as error:
        raise InputError(f"{error}; {cls.HINT}") from error

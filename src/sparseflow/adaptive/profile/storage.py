"""Profiles on disk: a Parquet file, and a journal next to it during the collection.

::

    profile.parquet    one row per measurement; model, device, plans and environments in the metadata
    profile.jsonl      measurements since then, one per line; deleted once they are in the Parquet file

If the writer is killed, its measurements are read from the journal when the file is loaded or extended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import TypeAdapter, model_validator

from sparseflow.adaptive.plan.space import Plan, PlanSpace, Tier
from sparseflow.adaptive.profile.measurement import Measurement, ProfileMetadata
from sparseflow.core.artifact import Artifact, DictField
from sparseflow.core.config import StrictModel
from sparseflow.core.environment import collect_environment
from sparseflow.core.journal import Journal, read_journal
from sparseflow.errors import FileFormatError, InputError, OutputError, RunError

if TYPE_CHECKING:
    import torch


class ProfileHeader(Artifact):
    """Header of both files; the fields are those of `ProfileMetadata`, and `PlanProfile.environments`."""

    FORMAT: ClassVar[str] = "sparseflow.adaptive.plan-profile"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "make one with `sparseflow adaptive profile`"

    model_id: str
    device: dict[str, Any]
    space: Annotated[PlanSpace, DictField()]
    vision_tokens: dict[Tier, int]
    config: dict[str, Any]
    environments: tuple[dict[str, Any], ...] = ()

    @classmethod
    def from_metadata(
        cls, metadata: ProfileMetadata, environments: tuple[Mapping[str, Any], ...] = ()
    ) -> ProfileHeader:
        """Build the header of a profile."""
        return cls(**vars(metadata), environments=tuple(map(dict, environments)))

    @property
    def metadata(self) -> ProfileMetadata:
        """Model, device and settings."""
        return ProfileMetadata(**{name: getattr(self, name) for name in ProfileMetadata.__dataclass_fields__})

    @model_validator(mode="after")
    def _check_metadata(self) -> Self:
        _ = self.metadata
        return self


class _EnvironmentRow(StrictModel):
    """Environment of a session, written before its first measurement."""

    environment: dict[str, Any]
    session: int


class _MeasurementRow(StrictModel):
    measurement: Measurement


_ROWS: TypeAdapter[_EnvironmentRow | _MeasurementRow] = TypeAdapter(_EnvironmentRow | _MeasurementRow)


@dataclass(frozen=True, kw_only=True)
class PlanProfile:
    """Measured latencies of plans on a device.

    Attributes:
        metadata: Model, device and settings.
        environments: Environment of each session.
        measurements: All requests, in the order of measurement.
    """

    metadata: ProfileMetadata
    environments: tuple[Mapping[str, Any], ...] = ()
    measurements: tuple[Measurement, ...] = ()

    @property
    def space(self) -> PlanSpace:
        """Plans of the model."""
        return self.metadata.space

    @property
    def successful(self) -> tuple[Measurement, ...]:
        """Measurements of requests that did not fail."""
        return tuple(measurement for measurement in self.measurements if measurement.error is None)

    def check(self, model_id: str, device: torch.device | str) -> None:
        """Check that the profile is of this model on this device.

        Raises:
            InputError: It is of another model or device.
        """
        self.metadata.check(model_id, device)

    @classmethod
    def load(cls, path: Path | str) -> PlanProfile:
        """Read a profile, including the journal of a writer that was killed.

        Raises:
            InputError: The file does not exist.
            FileFormatError: The file is foreign, damaged, or of another version.
        """
        file = Path(path)
        stored = _load_table(file) if file.is_file() else None
        header, rows = read_journal(get_journal_path(file), _ROWS, header_type=ProfileHeader)
        if stored is None and header is None:
            raise InputError(f"{file} does not exist; {ProfileHeader.HINT}")
        if stored is None:
            assert header is not None
            stored = cls(metadata=header.metadata)
        environments = list(stored.environments)
        measurements = {measurement.key: measurement for measurement in stored.measurements}
        for row in rows:
            if isinstance(row, _EnvironmentRow):
                # If the writer was killed while it closed the profile, both files contain the session.
                environments[row.session :] = [row.environment]
                continue
            measurement = row.measurement
            # A repeated measurement replaces a failed one.
            failed = measurements.get((*measurement.case, 0))
            if measurement.error is None and failed is not None and failed.error:
                del measurements[failed.key]
            measurements[measurement.key] = measurement
        return cls(
            metadata=stored.metadata,
            environments=tuple(environments),
            measurements=tuple(measurements.values()),
        )

    def save(self, path: Path | str) -> None:
        """Write the profile as Parquet, atomically.

        Raises:
            OSError: The file cannot be written; the previous file is unchanged.
        """
        import pyarrow as pa

        rows = [{**vars(m), **m.plan.to_dict()} for m in self.measurements]
        types = {
            "tier": pa.string(), "insertion_position": pa.int32(), "top_k": pa.int32(),
            "blocks": pa.list_(pa.int32()), "text_tokens": pa.int32(), "batch": pa.int32(),
            "load": pa.float64(), "round": pa.int32(), "session": pa.int32(), "prefill_ms": pa.float64(),
            "steps_ms": pa.list_(pa.float64()), "error": pa.string(),
        }  # fmt: skip
        table = pa.table({name: pa.array([row[name] for row in rows], kind) for name, kind in types.items()})
        # Times are all different, but their high bytes are equal: split bytes compress, dictionaries do not.
        leaves = [f"{name}.list.element" if pa.types.is_list(kind) else name for name, kind in types.items()]
        ProfileHeader.from_metadata(self.metadata, self.environments).save_table(
            path, table,
            use_dictionary=[name for name in leaves if name not in _TIME_COLUMNS],
            column_encoding={name: "BYTE_STREAM_SPLIT" for name in _TIME_COLUMNS},
        )  # fmt: skip


_TIME_COLUMNS = ("prefill_ms", "steps_ms.list.element")


def get_journal_path(path: Path) -> Path:
    """Path of the journal of a profile."""
    return path.with_suffix(".jsonl")


def _load_table(file: Path) -> PlanProfile:
    header, table = ProfileHeader.load_table(file)
    try:
        measurements = []
        for row in table.to_pylist():
            plan = Plan.from_dict(row)
            values = {name: row[name] for name in Measurement.__dataclass_fields__ if name != "plan"}
            values["steps_ms"] = tuple(row["steps_ms"])
            measurements.append(Measurement(plan=plan, **values))
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{file}: invalid measurement: {error}; {ProfileHeader.HINT}") from error
    return PlanProfile(
        metadata=header.metadata,
        environments=header.environments,
        measurements=tuple(measurements),
    )


class ProfileWriter:
    """Appends measurements to a profile. A context manager.

    The profile's directory is locked until the exit. On an exit without an error, the journal becomes
    Parquet.

    Args:
        path: Parquet file. Its directory must exist.
        metadata: Model, device and settings.
        device: Device, as torch names it.
        seed: Random seed, recorded in the environment.

    Attributes:
        profile: Contents of the file when it was opened.
        session: Index of this session.

    Raises:
        InputError: The file is of another model, device, space or runner.
        FileFormatError: The file is foreign, damaged, or of another version.
        RunError: Another process writes into the directory.
    """

    def __init__(self, path: Path, metadata: ProfileMetadata, device: str, seed: int) -> None:
        self._path, self._device, self._seed = path, device, seed
        header = ProfileHeader.from_metadata(metadata)
        if path.exists():
            _check_same_metadata(path, ProfileHeader.load_table(path)[0], header)
        self._journal = Journal(get_journal_path(path), _ROWS, header=header)
        try:
            self.profile = PlanProfile.load(path)
        except BaseException:
            self._journal.close()
            raise
        self.session = len(self.profile.environments)
        self._has_environment = False

    def append(self, measurement: Measurement) -> None:
        """Append a measurement of this session; it survives the death of this process.

        Raises:
            RunError: The disk is full.
        """
        if not self._has_environment:
            environment = collect_environment(self._device, seed=self._seed)
            self._journal.append(_EnvironmentRow(environment=environment, session=self.session))
            self._has_environment = True
        self._journal.append(_MeasurementRow(measurement=measurement))

    def __enter__(self) -> ProfileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._journal.sync()
                self._save()
                # Last, so that one of the two files always contains the measurements.
                self._journal.close(delete=True)
        finally:
            self._journal.close()

    def _save(self) -> None:
        try:
            PlanProfile.load(self._path).save(self._path)
        except OutputError as error:
            raise RunError(
                f"{error}; the measurements are also in {get_journal_path(self._path).name}: free disk space "
                "and repeat the command"
            ) from error


def _check_same_metadata(path: Path, existing: ProfileHeader, requested: ProfileHeader) -> None:
    for name in ProfileMetadata.__dataclass_fields__:
        old, new = existing.to_dict()[name], requested.to_dict()[name]
        if old != new:
            raise InputError(
                f"{path} has another `{name}`: {old!s:.120}, requested: {new!s:.120}; use another file"
            )

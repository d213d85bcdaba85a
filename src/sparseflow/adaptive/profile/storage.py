"""Profiles on disk: Parquet, and a journal beside it while visits come in.

::

    profile.parquet    a row a visit; model, device, plans and circumstances in the metadata of its schema
    profile.jsonl      what came in since, a line each; gone once it is in the other file

A visit is one request: its prefill and its steps. Whatever kills the writer, the visits that it made are
there when the file is read or gone on with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from sparseflow.adaptive.plan.space import PlanSpace
from sparseflow.adaptive.profile.measurement import Measurement
from sparseflow.adaptive.profile.metadata import ProfileMetadata
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic
from sparseflow.core.journal import JsonLinesWriter, read_json_lines
from sparseflow.errors import FileFormatError, InputError, RunError

if TYPE_CHECKING:
    import torch

Phase = Literal["prefill", "decode"]

_FORMAT = "sparseflow-adaptive-profile-1"


@dataclass(frozen=True, kw_only=True)
class PlanProfile:
    """What plans take on a device.

    Attributes:
        about: Of which model, and on which device.
        environments: Circumstances of each session.
        visits: Every request that was run, in the order that they were.
    """

    about: ProfileMetadata
    environments: tuple[Mapping[str, Any], ...] = ()
    visits: tuple[Measurement, ...] = ()

    @property
    def space(self) -> PlanSpace:
        """The model's plans."""
        return self.about.space

    @property
    def timed(self) -> tuple[Measurement, ...]:
        """Visits that could be run."""
        return tuple(visit for visit in self.visits if visit.error is None)

    def check(self, model_id: str, device: torch.device | str) -> None:
        """That it is of this model and this device.

        Raises:
            InputError: It is not.
        """
        self.about.check(model_id, device)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Samples by phase: `phase`, `plan` (its id), `tokens` (of text), `batch`, `load`, `samples_ms`."""
        found: dict[tuple[Phase, str, int, int, float], list[float]] = {}
        for visit in self.timed:
            assert visit.prefill_ms is not None
            where = visit.key[:4]
            found.setdefault(("prefill", *where), []).append(visit.prefill_ms)
            if visit.steps_ms:
                found.setdefault(("decode", *where), []).extend(visit.steps_ms)
        for (phase, plan, tokens, batch, load), samples in found.items():
            yield {
                "phase": phase, "plan": plan, "tokens": tokens, "batch": batch, "load": load,
                "samples_ms": samples,
            }  # fmt: skip

    @classmethod
    def read(cls, path: Path | str) -> PlanProfile:
        """Read a profile, and what its journal holds if its writer died.

        Raises:
            InputError: There is no such file.
            FileFormatError: It holds something else.
        """
        file = Path(path)
        found = _read_parquet(file) if file.is_file() else None
        lines = read_json_lines(journal_path(file))
        if found is None and not lines:
            raise InputError(f"there is no profile {file}; make one with `sparseflow adaptive profile`")
        about, environments = (None, []) if found is None else (found.about, list(found.environments))
        visits = {} if found is None else {visit.key: visit for visit in found.visits}
        try:
            for line in lines:
                if "about" in line:
                    about = ProfileMetadata.from_dict(line["about"])
                elif "environment" in line:
                    # A kill between two steps of closing leaves it in both files.
                    environments[line["session"] :] = [line["environment"]]
                else:
                    visit = Measurement.from_dict(line["visit"])
                    # What could not be run before, and then could.
                    if visit.error is None and (failed := visits.get((*visit.turn, 0))) and failed.error:
                        del visits[failed.key]
                    visits[visit.key] = visit
            if about is None:
                raise KeyError("about")
        except (KeyError, TypeError) as error:
            raise FileFormatError(f"{journal_path(file)} is no profile's journal: {error!r}") from error
        return cls(about=about, environments=tuple(environments), visits=tuple(visits.values()))

    def write(self, path: Path | str) -> None:
        """Write it as Parquet, in place of what is there.

        Raises:
            OSError: The file cannot be written; the one before is still there.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = [visit.to_dict() | visit.plan.to_dict() for visit in self.visits]
        table = pa.table(
            {name: pa.array([row[name] for row in rows], type=kind) for name, kind in _columns(pa)}
        )
        told = {
            "format": _FORMAT,
            "about": self.about.to_dict(),
            "environments": [dict(e) for e in self.environments],
        }
        leaves = [f"{f.name}.list.element" if pa.types.is_list(f.type) else f.name for f in table.schema]
        # No two times are the same, but their highest bytes are.
        packed: dict[str, Any] = {
            "compression": "zstd",
            "column_encoding": {name: "BYTE_STREAM_SPLIT" for name in _TIMES},
            "use_dictionary": [name for name in leaves if name not in _TIMES],
        }
        sink = pa.BufferOutputStream()
        pq.write_table(table.replace_schema_metadata({"sparseflow": json.dumps(told)}), sink, **packed)
        write_atomic(Path(path), sink.getvalue().to_pybytes())


def journal_path(path: Path) -> Path:
    """The journal beside a profile."""
    return path.with_suffix(".jsonl")


_TIMES = ("prefill_ms", "steps_ms.list.element")


def _columns(pa: Any) -> Sequence[tuple[str, Any]]:
    return (
        ("tier", pa.string()), ("insertion_position", pa.int32()), ("top_k", pa.int32()),
        ("blocks", pa.list_(pa.int32())), ("text_tokens", pa.int32()), ("batch", pa.int32()),
        ("load", pa.float64()), ("round", pa.int32()), ("session", pa.int32()), ("prefill_ms", pa.float64()),
        ("steps_ms", pa.list_(pa.float64())), ("error", pa.string()),
    )  # fmt: skip


def _read_parquet(file: Path) -> PlanProfile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file)
        told = json.loads((table.schema.metadata or {}).get(b"sparseflow", b"null"))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FileFormatError(f"{file} is not a Parquet file that can be read: {error}") from error
    if not isinstance(told, dict) or told.get("format") != _FORMAT:
        raise FileFormatError(f"{file} holds no profile of this version of SparseFlow")
    try:
        return PlanProfile(
            about=ProfileMetadata.from_dict(told["about"]),
            environments=tuple(told["environments"]),
            visits=tuple(Measurement.from_dict({**row, "plan": row}) for row in table.to_pylist()),
        )
    except (KeyError, TypeError, ValueError, FileFormatError) as error:
        raise FileFormatError(f"{file} holds a damaged profile: {error}") from error


class ProfileAppender:
    """A profile's file, open for more. Use it as a context manager.

    Opening it takes up what an earlier writer left. Its folder is locked meanwhile: one writer at a time.
    Only when it is left without an error does the journal become Parquet.

    Args:
        path: The Parquet file. Its folder must exist.
        about: What is going to be measured.
        device: Where, as torch names it.
        seed: What randomness is drawn from, for the record.

    Raises:
        InputError: The file is of something else.
        FileFormatError: It holds no profile.
        RunError: Another process writes into its folder.
    """

    def __init__(self, path: Path, about: ProfileMetadata, device: str, seed: int) -> None:
        self._path, self._device, self._seed = path, device, seed
        self._lines = JsonLinesWriter(journal_path(path))
        self._begun = False
        try:
            if path.exists() or journal_path(path).stat().st_size:
                self.held = PlanProfile.read(path)
                _check_same(path, self.held.about, about)
            else:
                self._lines.write({"about": about.to_dict()})
                self.held = PlanProfile(about=about)
        except BaseException:
            self._lines.close()
            raise
        self.session = len(self.held.environments)

    def add(self, visit: Measurement) -> None:
        """Append a visit of this session; it survives the death of this process.

        Raises:
            RunError: The disk takes no more.
        """
        if not self._begun:
            here = collect_environment(self._device, seed=self._seed)
            self._lines.write({"environment": here, "session": self.session})
            self._begun = True
        self._lines.write({"visit": visit.to_dict()})

    def __enter__(self) -> ProfileAppender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._lines.sync()
                self._write()
                # Last, so that the visits are always in one of the two files.
                journal_path(self._path).unlink()
        finally:
            self._lines.close()

    def _write(self) -> None:
        try:
            PlanProfile.read(self._path).write(self._path)
        except OSError as error:
            raise RunError(
                f"{self._path} could not be written: {error.strerror}; what was measured is in "
                f"{journal_path(self._path).name}: free some space and give the same command again"
            ) from error


def _check_same(path: Path, held: ProfileMetadata, asked: ProfileMetadata) -> None:
    there, here = (json.loads(json.dumps(about.to_dict())) for about in (held, asked))
    for name in here:
        if here[name] != there[name]:
            raise InputError(
                f"{path} has another `{name}`: {_short(there[name])}, and yours is {_short(here[name])}; "
                "name another file"
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."

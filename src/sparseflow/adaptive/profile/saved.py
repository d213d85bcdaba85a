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
from typing import TYPE_CHECKING, Any, Literal

from sparseflow.adaptive.plan import PlanSpace
from sparseflow.adaptive.profile.about import About
from sparseflow.adaptive.profile.visits import Visit
from sparseflow.core.files import write_atomic
from sparseflow.core.journal import read_json_lines
from sparseflow.errors import FileFormatError, InputError

if TYPE_CHECKING:
    import torch

Phase = Literal["prefill", "decode"]

_FORMAT = "sparseflow-adaptive-profile-1"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What plans take on a device.

    Attributes:
        about: Of which model, and on which device.
        environments: Circumstances of each session.
        visits: Every request that was run, in the order that they were.
    """

    about: About
    environments: tuple[Mapping[str, Any], ...] = ()
    visits: tuple[Visit, ...] = ()

    @property
    def space(self) -> PlanSpace:
        """The model's plans."""
        return self.about.space

    @property
    def timed(self) -> tuple[Visit, ...]:
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
    def read(cls, path: Path | str) -> Profile:
        """Read a profile, and what its journal holds if its writer died.

        Raises:
            InputError: There is no such file.
            FileFormatError: It holds something else.
        """
        file = Path(path)
        found = _read_parquet(file) if file.is_file() else None
        lines = read_json_lines(journal(file))
        if found is None and not lines:
            raise InputError(f"there is no profile {file}; make one with `sparseflow adaptive profile`")
        about, environments = (None, []) if found is None else (found.about, list(found.environments))
        visits = {} if found is None else {visit.key: visit for visit in found.visits}
        try:
            for line in lines:
                if "about" in line:
                    about = About.from_dict(line["about"])
                elif "environment" in line:
                    # A kill between two steps of closing leaves it in both files.
                    environments[line["session"] :] = [line["environment"]]
                else:
                    visit = Visit.from_dict(line["visit"])
                    # What could not be run before, and then could.
                    if visit.error is None and (failed := visits.get((*visit.turn, 0))) and failed.error:
                        del visits[failed.key]
                    visits[visit.key] = visit
            if about is None:
                raise KeyError("about")
        except (KeyError, TypeError) as error:
            raise FileFormatError(f"{journal(file)} is no profile's journal: {error!r}") from error
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


def journal(path: Path) -> Path:
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


def _read_parquet(file: Path) -> Profile:
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
        return Profile(
            about=About.from_dict(told["about"]),
            environments=tuple(told["environments"]),
            visits=tuple(Visit.from_dict({**row, "plan": row}) for row in table.to_pylist()),
        )
    except (KeyError, TypeError, ValueError, FileFormatError) as error:
        raise FileFormatError(f"{file} holds a damaged profile: {error}") from error

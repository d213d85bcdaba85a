"""`results/<wing>/claims.json`: what a wing says it does, each statement with its value and its samples.

A claim that was not met is kept as one, with its honest value. A claim without samples cannot be written.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from sparseflow.core.config import describe_validation_error
from sparseflow.core.files import write_atomic
from sparseflow.errors import FileFormatError, InputError

MAX_SAMPLES_BYTES = 200_000
WINGS = ("spiking", "tuning", "latency", "adaptive", "pruning", "codesign")

Text = Annotated[str, Field(min_length=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]

_TARGET = re.compile(r"(>=|<=|==|>|<)\s*(-?[0-9.]+(?:e-?[0-9]+)?)", re.IGNORECASE)


class Claim(BaseModel):
    """One statement and what was measured for it.

    Attributes:
        id: `<wing>/<line under the issue's Shows>-<slug>`, such as `spiking/3-resnet18-b32-t4`.
        claim: One sentence.
        value: What was measured.
        unit: Its unit, such as `x`, `ms`, `%` or `images`.
        target: What was aimed at. `">= 1.4"` and the like are held against `value` and `met`; other text,
            or None where there was no target, is not.
        met: Whether the target was reached.
        baseline: What it was compared with, None where nothing was.
        device: Where it was measured.
        command: What was run.
        samples: File of samples, relative to `results/`: Parquet or JSON, at most 200 kB.
        git: Revision that was measured.
        date: Day of the measurement.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Annotated[str, Field(pattern=rf"^({'|'.join(WINGS)})/[1-9][0-9]*-[a-z0-9]+(-[a-z0-9]+)*$")]
    claim: Text
    value: bool | Number | Text
    unit: str
    target: Text | None
    met: bool
    baseline: Text | None
    device: Text
    command: Text
    samples: Text
    git: Text
    date: datetime.date

    @field_validator("samples")
    @classmethod
    def _inside_results(cls, value: str) -> str:
        path = PurePosixPath(value)
        if path.is_absolute() or ".." in path.parts or path.suffix not in (".parquet", ".json"):
            raise ValueError(f"must be a .parquet or .json file, relative to results/, not {value!r}")
        return value

    @model_validator(mode="after")
    def _honest(self) -> Claim:
        found = _TARGET.fullmatch(self.target or "")
        if found is None or isinstance(self.value, (bool, str)):
            return self
        relation, bound = found.group(1), float(found.group(2))
        reached = {
            ">=": self.value >= bound,
            "<=": self.value <= bound,
            "==": self.value == bound,
            ">": self.value > bound,
            "<": self.value < bound,
        }[relation]
        if reached != self.met:
            raise ValueError(
                f"`met` (={self.met}) contradicts value {self.value:g} and target {self.target!r}"
            )
        return self

    @property
    def wing(self) -> str:
        return self.id.partition("/")[0]

    @property
    def order(self) -> tuple[str, int, str]:
        """What claims are sorted by: the wing, the line under Shows as a number, the slug."""
        line, _, slug = self.id.partition("/")[2].partition("-")
        return self.wing, int(line), slug


_CLAIMS = TypeAdapter(list[Claim])


def load(path: Path) -> list[Claim]:
    """Read and check a `claims.json`; sorted, and empty where there is no such file.

    Raises:
        FileFormatError: It is not a list of claims, or two share an id.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    try:
        claims = _CLAIMS.validate_json(content)
    except ValidationError as error:
        raise FileFormatError(f"{path} is not a list of claims: {_first(error)}") from error
    ids = [claim.id for claim in claims]
    twice = sorted({one for one in ids if ids.count(one) > 1})
    if twice:
        raise FileFormatError(f"{path} holds more than one claim with the id {', '.join(twice)}")
    return sorted(claims, key=lambda claim: claim.order)


def check_samples(claim: Claim, results: Path) -> None:
    """See that a claim's samples are there and small enough to be kept with the source.

    Raises:
        FileFormatError: The file is missing, empty, or larger than 200 kB.
    """
    file = results / claim.samples
    if not file.is_file() or file.stat().st_size == 0:
        raise FileFormatError(f"claim {claim.id} names samples that are not there: {file}")
    if file.stat().st_size > MAX_SAMPLES_BYTES:
        raise FileFormatError(
            f"{file} (={file.stat().st_size} bytes) must not be larger than {MAX_SAMPLES_BYTES} bytes; "
            "keep fewer columns, or Parquet instead of JSON"
        )


def update(results: Path, fields: dict[str, Any]) -> Claim:
    """Add one claim to its wing's file, or replace the one with its id, in one step.

    Args:
        results: The folder `results/`.
        fields: The fields of `Claim`. Its samples must already be in place.

    Raises:
        InputError: A field is missing, unknown or of the wrong kind, or `met` contradicts `target`.
        FileFormatError: The samples are missing or too large, or the file as it was cannot be read.
    """
    try:
        claim = Claim.model_validate(fields)
    except ValidationError as error:
        raise InputError(f"this is not a claim: {_first(error)}") from error
    check_samples(claim, results)
    path = results / claim.wing / "claims.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [other for other in load(path) if other.id != claim.id]
    claims = sorted([*kept, claim], key=lambda one: one.order)
    content = [one.model_dump(mode="json") for one in claims]
    write_atomic(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return claim


def recorded(
    results: Path,
    record: Mapping[str, Any],
    kept: Path,
    claims: Callable[[Any], Iterable[dict[str, Any]]],
) -> None:
    """Add the claims that a benchmark's record supports, and print them.

    Args:
        results: The folder `results/`.
        record: What the benchmark wrote; `"environment"` tells its circumstances.
        kept: Its file, in `results`.
        claims: Gives the fields of each claim that differ from one to the next.

    Raises:
        InputError: The record is of a run that failed, or a field is of no use.
        FileFormatError: The samples are missing or too large.
    """
    if "failed" in record:
        raise InputError(f"{kept} is of a run that failed: {record['failed']}")
    common = {
        "baseline": None,
        "device": record["environment"]["device"]["name"],
        "samples": str(kept.resolve().relative_to(results)),
        "git": record["environment"]["git"],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    for fields in claims(record):
        claim = update(results, common | fields)
        met = "" if claim.target is None else "met  " if claim.met else "NOT MET  "
        print(f"{met}{claim.id}: {claim.value} {claim.unit} ({claim.target})")


def read_record(path: Path) -> tuple[dict[str, Any], Path]:
    """A benchmark's record, and the file that it is kept in."""
    return json.loads(path.read_text(encoding="utf-8")), path


def record_command(
    doc: str | None,
    results: Path,
    kinds: Mapping[str, Callable[[Any], Iterable[dict[str, Any]]]],
    *,
    read: Callable[[Path], tuple[Mapping[str, Any], Path]] = read_record,
) -> int:
    """What a wing's `benchmarks/<wing>/record.py` does: `record.py KIND FILE`.

    Args:
        doc: The script's docstring.
        results: The folder `results/`.
        kinds: What benchmarks there are -> the claims that a record of it supports, as for `recorded`.
        read: From the file to the record and the file that it is kept in.

    Returns:
        The status to end with.

    Raises:
        InputError: As of `recorded`.
        FileFormatError: As of `recorded`.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("file", type=Path)
    asked = parser.parse_args()
    record, kept = read(asked.file)
    recorded(results, record, kept, kinds[asked.kind])
    return 0


def _first(error: ValidationError) -> str:
    more = error.error_count() - 1
    return describe_validation_error(error) + (f" (and {more} more)" if more else "")

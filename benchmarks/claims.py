"""Claims: each number that README and docs state, with its target and the samples it comes from.

A benchmark script has a function `make_claims(record)` next to its measurement and passes its
result to `record_claims`, which merges it by id into `results/<wing>/claims.json`. ::

    python -m benchmarks.claims list [WING]           print all claims
    python -m benchmarks.claims check                 check every claim and its samples
    python -m benchmarks.claims record SCRIPT FILE    make the claims of a record that SCRIPT wrote earlier

A missed target stays in the file with its measured value.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from sparseflow.core.config import describe_validation_error
from sparseflow.core.environment import get_git_revision
from sparseflow.core.files import parse_json, write_atomic
from sparseflow.errors import FileFormatError, SparseFlowError

RESULTS = Path(__file__).resolve().parents[1] / "results"
WINGS = ("spiking", "tuning", "latency", "adaptive", "pruning", "codesign")
MAX_WORDS = 25
MAX_SAMPLES_BYTES = 200_000

Text = Annotated[str, Field(min_length=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]

_TARGET = re.compile(r"(>=|<=|==|>|<)\s*(-?[0-9.]+(?:e-?[0-9]+)?)", re.IGNORECASE)


class Claim(BaseModel):
    """One measured statement.

    A benchmark leaves out `device`, `samples`, `git` and `date`: `record_claims` fills them in.

    Attributes:
        id: `<wing>/<number>-<slug>`, such as `spiking/3-resnet18-b32-t4`.
        claim: One plain sentence of at most 25 words.
        value: Measured value.
        unit: Unit of the value, such as `x`, `ms`, `%` or `images`; empty if it has none.
        target: Target; None if there is none. A comparison such as `">= 1.4"` is evaluated on `value`.
        met: Whether the target is met. Derived from a comparison; pass it for a target in words.
        baseline: Compared implementation; None if nothing is compared.
        device: Device that was measured.
        command: Command that measures the value.
        samples: Path of the samples relative to `results/`: Parquet or JSON of at most 200 kB.
        git: Measured revision.
        date: Day of the measurement.
        details: Further values by name, such as interval ends, counts and settings.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Annotated[str, Field(pattern=rf"^({'|'.join(WINGS)})/[1-9][0-9]*-[a-z0-9]+(-[a-z0-9]+)*$")]
    claim: Text
    value: bool | Number | Text
    unit: str = ""
    target: Text | None = None
    met: bool = True
    baseline: Text | None = None
    device: str = ""
    command: Text
    samples: str = ""
    git: str = ""
    date: datetime.date = Field(default_factory=lambda: datetime.datetime.now(datetime.UTC).date())
    details: Mapping[str, bool | int | Number | str] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _derive_met(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and "met" not in fields:
            met = is_met(fields.get("value"), fields.get("target"))
            return fields if met is None else {**fields, "met": met}
        return fields

    @model_validator(mode="after")
    def _check_met(self) -> Claim:
        met = is_met(self.value, self.target)
        if met is not None and met != self.met:
            raise ValueError(
                f"`met` (={self.met}) contradicts value {self.value:g} and target {self.target!r}"
            )
        return self

    @field_validator("samples")
    @classmethod
    def _check_path(cls, value: str) -> str:
        path = PurePosixPath(value)
        if value and (path.is_absolute() or ".." in path.parts or path.suffix not in (".parquet", ".json")):
            raise ValueError(f"must be a .parquet or .json file, relative to results/, not {value!r}")
        return value

    @model_serializer(mode="wrap")
    def _drop_empty_details(self, handler: Any) -> dict[str, Any]:
        fields = handler(self)
        if not self.details:
            del fields["details"]
        return fields

    @property
    def wing(self) -> str:
        return self.id.partition("/")[0]

    @property
    def sort_key(self) -> tuple[str, int, str]:
        """Wing, number, slug."""
        number, _, slug = self.id.partition("/")[2].partition("-")
        return self.wing, int(number), slug


_CLAIMS = TypeAdapter(list[Claim])


def is_met(value: Any, target: str | None) -> bool | None:
    """Evaluate a target such as `">= 1.4"`; None if the target is not a comparison of numbers."""
    match = _TARGET.fullmatch(target or "")
    if match is None or isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    bound = float(match.group(2))
    return {
        ">=": value >= bound,
        "<=": value <= bound,
        "==": value == bound,
        ">": value > bound,
        "<": value < bound,
    }[match.group(1)]


def load_claims(path: Path) -> list[Claim]:
    """Read a `claims.json`, sorted by id; empty if the file does not exist.

    Raises:
        FileFormatError: The file is not a list of claims, or an id is used twice.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    try:
        claims = _CLAIMS.validate_json(content)
    except ValidationError as error:
        raise FileFormatError(f"{path} is not a list of claims: {_describe(error)}") from error
    ids = [claim.id for claim in claims]
    duplicates = sorted({id for id in ids if ids.count(id) > 1})
    if duplicates:
        raise FileFormatError(f"{path} contains duplicate ids: {', '.join(duplicates)}")
    return sorted(claims, key=lambda claim: claim.sort_key)


def check_claim(claim: Claim, results: Path = RESULTS) -> None:
    """Check that a claim is complete, readable and has samples of an allowed size.

    Raises:
        FileFormatError: A field is empty, the sentence is too long, or the samples are missing or too large.
    """
    for name in ("device", "samples", "git"):
        if not getattr(claim, name):
            raise FileFormatError(f"claim {claim.id} has no `{name}`")
    words = len(claim.claim.split())
    if words > MAX_WORDS:
        raise FileFormatError(
            f"claim {claim.id} has {words} words; write one sentence of at most {MAX_WORDS} and put the rest "
            "into `details`"
        )
    file = results / claim.samples
    if not file.is_file() or file.stat().st_size == 0:
        raise FileFormatError(f"claim {claim.id}: samples not found: {file}")
    if file.stat().st_size > MAX_SAMPLES_BYTES:
        raise FileFormatError(
            f"{file} (={file.stat().st_size} bytes) must not be larger than {MAX_SAMPLES_BYTES} bytes; "
            "keep fewer columns, or write Parquet instead of JSON"
        )


def merge_claims(claims: Iterable[Claim], results: Path = RESULTS) -> None:
    """Write claims into `results/<wing>/claims.json`; a claim replaces the one with the same id.

    Raises:
        FileFormatError: A claim is incomplete (see `check_claim`), or the file cannot be read.
    """
    for claim in claims:
        check_claim(claim, results)
        path = results / claim.wing / "claims.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        existing = [entry for entry in load_claims(path) if entry.id != claim.id]
        ordered = sorted([*existing, claim], key=lambda entry: entry.sort_key)
        content = [entry.model_dump(mode="json") for entry in ordered]
        write_atomic(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def record_claims(
    claims: Iterable[Claim], record: Mapping[str, Any], path: Path | None, results: Path = RESULTS
) -> None:
    """Print the claims of a record and merge them if their samples are in `results/`.

    Fields that a claim leaves out are filled in: device, revision and day from the record, and `path` as
    its samples if it is below `results`.

    Args:
        claims: Claims that the record supports.
        record: Record of the benchmark. A record of a failed run (`"failed"`) supports no claims.
        path: File of the record, if it is kept.
        results: Folder of all results.
    """
    if "failed" in record:
        print(f"no claims, because the run failed: {record['failed']}")
        return
    environment = record.get("environment", {})
    date = str(record.get("time") or environment.get("time", ""))[:10]
    inside = path is not None and path.resolve().is_relative_to(results.resolve())
    defaults = {
        "device": record.get("device") or environment.get("device", {}).get("name", ""),
        "samples": path.resolve().relative_to(results.resolve()).as_posix() if path and inside else "",
        "git": record.get("git") or environment.get("git") or get_git_revision() or "",
    }
    completed = []
    for claim in claims:
        missing = {name: value for name, value in defaults.items() if not getattr(claim, name)}
        if date:  # the day of the measurement, not that on which the claims are made
            missing["date"] = datetime.date.fromisoformat(date)
        completed.append(claim.model_copy(update=missing))
        print(format_claim(completed[-1]))
    if all(claim.samples for claim in completed):
        merge_claims(completed, results)
    else:
        print("not merged into claims.json, because the record is not below results/")


def write_samples(name: str, content: Any, results: Path = RESULTS) -> str:
    """Write samples as compact JSON with six significant digits and return `name`.

    Args:
        name: Path relative to `results/`.
        content: JSON content.
        results: Folder of all results.
    """
    rounded = json.loads(json.dumps(content), parse_float=lambda text: float(f"{float(text):.6g}"))
    (results / name).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(results / name, json.dumps(rounded))
    return name


def slugify(text: str) -> str:
    """Turn a text into the tail of a claim id."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def device_suffix(record: Mapping[str, Any]) -> str:
    """Suffix of a claim id that keeps results of a CPU apart from those of a GPU: `"-cpu"` or empty."""
    return "-cpu" if record["environment"]["device"]["kind"] == "cpu" else ""


def format_claim(claim: Claim) -> str:
    """Format a claim as one line of text."""
    status = "" if claim.target is None else "met  " if claim.met else "NOT MET  "
    return f"{status}{claim.id}: {claim.value} {claim.unit} ({claim.target})"


def load_record(path: Path) -> dict[str, Any]:
    """Read a record: a JSON object, or JSON lines whose first line is the header and the others `rows`.

    Raises:
        FileFormatError: The file is not JSON.
    """
    content = path.read_bytes()
    try:
        if path.suffix != ".jsonl":
            return parse_json(content)
        header, *rows = map(parse_json, content.splitlines())
    except ValueError as error:
        raise FileFormatError(f"{path} is not JSON: {error}") from error
    return header | {"rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    list_parser = commands.add_parser("list", help="print all claims")
    list_parser.add_argument("wing", nargs="?", choices=WINGS)
    commands.add_parser("check", help="check every claim and its samples")
    record_parser = commands.add_parser("record", help="make the claims of a record that a script wrote")
    record_parser.add_argument("script", type=Path, help="script with `make_claims`")
    record_parser.add_argument("file", type=Path, help="JSON or JSON lines")
    args = parser.parse_args(arguments)
    try:
        if args.command == "record":
            sys.path.insert(0, str(args.script.parent))
            record = load_record(args.file)
            module = importlib.import_module(args.script.stem)
            record_claims(module.make_claims(record), record, args.file)
            return 0
        wings = [args.wing] if args.command == "list" and args.wing else WINGS
        for claim in (claim for wing in wings for claim in load_claims(RESULTS / wing / "claims.json")):
            check_claim(claim)
            if args.command == "list":
                print(format_claim(claim))
    except SparseFlowError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _describe(error: ValidationError) -> str:
    more = error.error_count() - 1
    return describe_validation_error(error) + (f" (and {more} more)" if more else "")


if __name__ == "__main__":
    sys.exit(main())

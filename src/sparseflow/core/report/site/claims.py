"""Claims of a `results` directory, and their earlier values in the git history of its files."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sparseflow.core.config import describe_validation_error
from sparseflow.core.files import parse_json, read_json
from sparseflow.errors import FileFormatError, InputError

CLAIMS_FILE = "claims.json"
HEADLINES_FILE = "headlines.json"

_BOUND = re.compile(r"[<>]=?\s*(-?\d+(?:\.\d*)?(?:e-?\d+)?)", re.IGNORECASE)
_GIT_TIMEOUT_S = 60


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A measured statement with its target; see `results/README.md` of the repository.

    Attributes:
        id: `<wing>/<number>-<slug>`.
        claim: Sentence that states what the value is.
        value: Value.
        unit: Unit of the value; empty if it has none.
        target: Target; None if there is none.
        met: Whether the target is met.
        baseline: Compared implementation; None if nothing is compared.
        device: Device that was measured.
        command: Command that measures the value.
        samples: File of the samples relative to the directory of the claims.
        git: Measured revision.
        date: Day of the measurement in ISO 8601.
        low, high: Ends of the 95 % interval; None if there is no interval.
    """

    id: str
    claim: str
    value: bool | float | str
    unit: str = ""
    target: str | None = None
    met: bool = True
    baseline: str | None = None
    device: str = ""
    command: str = ""
    samples: str = ""
    git: str = ""
    date: str = ""
    low: float | None = None
    high: float | None = None

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Claim:
        """Build a claim from an object of `claims.json`; unknown fields are ignored.

        Raises:
            ValueError: A field is missing or has another type.
        """
        details = record.get("details") or {}
        if not isinstance(details, dict):
            raise ValueError("`details` must be an object")
        interval = {name: details[name] for name in ("low", "high") if name in details}
        return _ADAPTER.validate_python({**record, **interval})

    @property
    def wing(self) -> str:
        return self.id.partition("/")[0]

    @property
    def larger_is_better(self) -> bool | None:
        """Direction of the target; None if the target is not a bound."""
        return None if self.bound is None else (self.target or "").startswith(">")

    @property
    def bound(self) -> float | None:
        """Value that the target requires at least or at most; None if the target is not a bound."""
        match = _BOUND.fullmatch(self.target or "")
        return None if match is None else float(match[1])

    @property
    def formatted_value(self) -> str:
        """Value with its unit."""
        if isinstance(self.value, bool):
            return "yes" if self.value else "no"
        text = self.value if isinstance(self.value, str) else format_number(self.value)
        return text + (self.unit if self.unit in ("x", "×", "") else f" {self.unit}")

    @property
    def interval(self) -> str:
        """Interval as text; empty if there is none."""
        if self.low is None or self.high is None:
            return ""
        return f"{format_number(self.low)} to {format_number(self.high)}"


_ADAPTER = TypeAdapter(Claim)


def format_number(value: float) -> str:
    """Format a number with at most four significant digits; integers keep all digits."""
    return f"{int(value)}" if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def load_claims(directory: Path) -> list[Claim]:
    """Read the claims of `directory/*/claims.json`.

    Raises:
        InputError: The directory contains no such file.
        FileFormatError: A file is not a list of claims.
    """
    paths = sorted(directory.glob(f"*/{CLAIMS_FILE}"))
    if not paths:
        raise InputError(
            f"{directory} contains no */{CLAIMS_FILE}; pass the `results` directory of a checkout"
        )
    return [claim for path in paths for claim in read_claims(path)]


def read_claims(path: Path) -> list[Claim]:
    """Read one `claims.json`.

    Raises:
        InputError: The file cannot be read.
        FileFormatError: The file is not a list of claims.
    """
    content = read_json(path)
    try:
        return _parse_claims(content)
    except ValueError as error:
        raise FileFormatError(f"{path} is not a list of claims: {error}") from error


def select_headlines(directory: Path, claims: Sequence[Claim]) -> list[Claim]:
    """Select one claim per wing: those of `headlines.json`, else the first with a target and an interval.

    Raises:
        FileFormatError: `headlines.json` is not a list of ids.
    """
    ids: list[Any] = []
    if (directory / HEADLINES_FILE).exists():
        ids = read_json(directory / HEADLINES_FILE)
        if not isinstance(ids, list) or not all(isinstance(id, str) for id in ids):
            raise FileFormatError(f"{directory / HEADLINES_FILE} must be a list of ids of claims")
    selected: dict[str, Claim] = {claim.wing: claim for claim in claims if claim.id in ids}
    for claim in sorted(claims, key=lambda claim: (claim.target is None, not claim.interval)):
        selected.setdefault(claim.wing, claim)
    return [selected[wing] for wing in dict.fromkeys(claim.wing for claim in claims)]


def load_history(directory: Path) -> dict[str, list[Claim]]:
    """Read the values of each claim over the revisions of the files, oldest first.

    A measurement that several versions of a file repeat counts once. Versions that are no list of claims are
    skipped.

    Returns:
        Id -> claims; empty if the directory is not in a git checkout.
    """
    log = _run_git(directory, "log", "--reverse", "--format=%H", "--name-only", "--", f"*/{CLAIMS_FILE}")
    root = _run_git(directory, "rev-parse", "--show-toplevel")
    if log is None or root is None:
        return {}
    objects, revision = [], b""
    for line in log.split(b"\n"):
        if re.fullmatch(rb"[0-9a-f]{40,64}", line):
            revision = line
        elif line:
            objects.append(revision + b":" + line)
    content = _run_git(Path(root.decode().strip()), "cat-file", "--batch", stdin=b"\n".join(objects) + b"\n")
    history: dict[str, list[Claim]] = {}
    for text in _split_batch(content or b""):
        try:
            claims = _parse_claims(parse_json(text))
        except ValueError:
            continue
        for claim in claims:
            points = history.setdefault(claim.id, [])
            # A later version of a file can add the interval of a measurement, or correct its revision.
            if points and points[-1].value == claim.value:
                points[-1] = claim
            else:
                points.append(claim)
    return history


def _parse_claims(records: object) -> list[Claim]:
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError("expected a list of objects")
    try:
        return [Claim.from_dict(record) for record in records]
    except ValidationError as error:
        raise ValueError(describe_validation_error(error)) from error


def _split_batch(content: bytes) -> list[bytes]:
    """Split the output of `git cat-file --batch`; files that a revision deleted have no content."""
    blobs, position = [], 0
    while position < len(content):
        header, _, _ = content[position:].partition(b"\n")
        position += len(header) + 1
        if not header.endswith(b" missing"):
            size = int(header.rsplit(b" ", 1)[1])
            blobs.append(content[position : position + size])
            position += size + 1
    return blobs


def _run_git(directory: Path, *arguments: str, stdin: bytes = b"") -> bytes | None:
    command = ["git", "-C", str(directory), *arguments]
    try:
        process = subprocess.run(
            command, input=stdin, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout if process.returncode == 0 else None
